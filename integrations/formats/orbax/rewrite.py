"""Rewrites of an Orbax item that change only metadata: merge, commit, box and unbox.

    merge     the databases of a killed save become one committed item
    commit    an item that lacks only its final name or commit member gets it
    unbox     …/kernel/value  →  …/kernel      (linen boxes, NNX variables)
    box       …/kernel        →  …/kernel/value

Facts about OCDBT: keys of a database cannot be renamed, but a new database can refer to the values of an old one under
other keys, so no tensor bytes are decoded or moved. The old database stays as `ocdbt.process_0/` below the new one and
must be kept. Without OCDBT a name is a folder, and renaming means renaming folders. In both cases the small files
change (`_METADATA`, `_sharding`, `array_metadatas`, `_strings.json`). An aggregate cannot be renamed, since its key
paths are between its tensors in one file; it must be converted.

A save that was killed may lack any chunk. An item is only merged or committed if every chunk of every array in the tree
exists, including chunks that are all zeros; if its writer omitted those, it is refused.
"""

from __future__ import annotations

import os
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from wherry.core.keypath import KeyPath, joined_names, render
from wherry.errors import (
    IncompleteError,
    NotFoundError,
    UnrepresentableError,
    UnsupportedError,
    UsageError,
    storage_errors,
)
from wherry.formats.format import Change, Glimpse, Rewrite
from wherry.integrations.containers.orbax import aggregate, layout, marks
from wherry.integrations.containers.orbax.commit import missing_commit
from wherry.integrations.containers.orbax.item import open_item
from wherry.integrations.containers.orbax.other_items import other_items
from wherry.integrations.containers.orbax.tree import read_tree
from wherry.integrations.formats.orbax import relink, renames
from wherry.storage.copy import list_files
from wherry.storage.folders import sync_folder
from wherry.storage.sidecar import FOLDER_NAME, SIGNATURE_NAME

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from wherry.core.detection import Detection
    from wherry.formats.format import Opened
    from wherry.storage.location import Location

_OLD = f"{layout.PROCESS_PREFIX}0"
_DATA = "d"
_NAMED = "the folder has the name of an uncommitted save"
_LINKED = "the database of an item is linked anew only on a local file system"
_TOO_EARLY = "the save was killed too early; use another step"


def _merge(location: Location, detection: Detection, _value: str | None) -> Change:
    """Merge the per-process databases of an item that Orbax did not merge."""
    item = _item(location)
    if item.merged or not item.processes:
        raise UsageError("no unmerged process databases to merge", uri=location.uri)
    change = _committing(
        location, detection, partial(_link, databases=item.processes), (layout.MANIFEST, _DATA)
    )
    return replace(change, local_only=_LINKED)


def _commit(location: Location, detection: Detection, _value: str | None) -> Change:
    """Mark an item as committed that is complete except for the commit."""
    item = _item(location)
    if item.processes and not item.merged:
        raise UsageError("the process databases were never merged", uri=location.uri, cure="pass --as merge")
    if layout.COMMITTED in Glimpse(location).entries and missing_commit(location) is None:
        raise UsageError("the item is already committed", uri=location.uri, cure="read it without a rewrite")
    return _committing(location, detection, _sync_everything, ())


def _committing(
    location: Location, detection: Detection, finish: Callable[[Location], None], made: tuple[str, ...]
) -> Change:
    """An item with commit members in place of the files of a killed save."""
    try:
        opened = _open_item(location, detection, uncommitted=True)
    except IncompleteError as error:
        error.cure = _TOO_EARLY
        raise
    names = [name for name in list_files(location) if name not in (FOLDER_NAME, SIGNATURE_NAME)]
    stamped = renames.add_commit_time(location.join(layout.CHECKPOINT))
    files = {layout.CHECKPOINT: stamped} if stamped else {}
    if layout.COMMITTED not in names:
        files[layout.COMMITTED] = b"Completed by wherry.\n"
    unfinished = any(layout.is_uncommitted(name) for name in (location.name, location.parent.name))
    return Change(
        opened=opened,
        carried={name: name for name in names if name not in files},
        files=files,
        finish=finish,
        made=made,
        staged_only=_NAMED if unfinished else "",
    )


def _unbox(location: Location, detection: Detection, _value: str | None) -> Change:
    """Drop the trailing `value` (or `raw_value`) of every leaf that is the only child of its node."""
    _item(location)
    opened = _open_item(location, detection)
    tensors = opened.manifest.tensors
    boxed = marks.wrapped_leaves(tensors, marks.BOX) | marks.wrapped_leaves(tensors, marks.OLD_VARIABLE)
    if not boxed:
        opened.reader.close()
        raise UsageError("the item has no boxed arrays", uri=location.uri)
    return _renaming(location, opened, {path: path[:-1] for path in boxed})


def _box(location: Location, detection: Detection, value: str | None) -> Change:
    """Append `value` to the key paths of arrays."""
    _item(location)
    opened = _open_item(location, detection)
    known = {path: render(path) for path in opened.manifest.tensors}
    chosen: set[KeyPath] = set()
    for pattern in (value or "*").split(","):
        found = {path for path, name in known.items() if fnmatchcase(name, pattern)}
        if not found:
            opened.reader.close()
            raise NotFoundError(
                "array not found",
                uri=location.uri,
                path=pattern,
                cure="run `wherry inspect` to list all key paths",
            )
        chosen |= found
    return _renaming(location, opened, {path: (*path, marks.BOX) for path in chosen})


def _renaming(location: Location, opened: Opened, paths: Mapping[KeyPath, KeyPath]) -> Change:
    try:
        return _rename(location, opened, paths)
    except BaseException:
        opened.reader.close()
        raise


def _rename(location: Location, opened: Opened, paths: Mapping[KeyPath, KeyPath]) -> Change:
    item = _item(location)
    if item.msgpack:
        raise UnsupportedError(
            f"cannot rename key paths: {layout.MSGPACK} has them between the tensors",
            uri=location.uri,
            cure="convert the checkpoint",
        )
    leaves = aggregate.read_tree(location, item, read_tree(location))
    names = {**leaves.arrays, **leaves.strings}
    after = {path: paths.get(path, path) for path in names}
    joined_names(after.values(), renames.stored_name, location.uri)
    renamed = {names[path]: renames.stored_name(new) for path, new in after.items()}
    arrays = {name: renamed[name] for name in leaves.arrays.values()}
    if item.ocdbt:
        relink.require_apart(arrays, location.uri)
    place = partial(_below, item.processes) if item.ocdbt else partial(_folder, arrays)
    files = [name for name in list_files(location) if name not in (FOLDER_NAME, SIGNATURE_NAME)]
    carried = {name: place(name) for name in files}
    if len(set(carried.values())) < len(carried):
        raise UnrepresentableError("two arrays would get the same folder name", uri=location.uri)

    def finish(folder: Location) -> None:
        if item.ocdbt:
            relink.link(folder, [_OLD], arrays)
        renames.rewrite(folder, paths, renamed)
        _sync_everything(folder)

    return Change(
        opened=opened,
        carried=carried,
        finish=finish,
        renamed=paths,
        staged_only="keys cannot be renamed in place, since all files would have to move at once",
        local_only=_LINKED,
    )


def _below(processes: Iterable[str], name: str) -> str:
    """Path of a database's file after the database has moved below another."""
    top = name.split("/", maxsplit=1)[0]
    return f"{_OLD}/{name}" if top in (layout.MANIFEST, _DATA, *processes) else name


def _folder(arrays: Mapping[str, str], name: str) -> str:
    """Path of an array's file after its folder has been renamed."""
    parts = name.split("/")
    for length in range(len(parts) - 1, 0, -1):
        old = "/".join(parts[:length])
        if old in arrays:
            return "/".join([arrays[old], *parts[length:]])
    return name


def _link(folder: Location, databases: Iterable[str]) -> None:
    relink.link(folder, databases)
    _sync_everything(folder)


def _sync_everything(folder: Location) -> None:
    """Sync every file and folder below a local folder; what a store of objects has confirmed is durable.

    Raises:
        StorageError: the storage failed.
    """
    if not folder.store.capabilities.local:
        return
    with storage_errors(folder.uri):
        for home, _folders, files in os.walk(folder.path):
            for name in files:
                descriptor = os.open(Path(home) / name, os.O_RDONLY)
                try:
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)
            sync_folder(Path(home))


def _open_item(location: Location, detection: Detection, *, uncommitted: bool = False) -> Opened:
    """The item; what else its step holds becomes the ignored entries."""
    opened = open_item(location, detection, uncommitted=uncommitted)
    return replace(opened, ignored=other_items(location, location))


def _item(location: Location) -> layout.OrbaxItem:
    glimpse = Glimpse(location)
    item = layout.look_at_item(glimpse)
    if item is None:
        below = sorted(layout.items_of_step(glimpse))
        raise UsageError(
            "Orbax item not found",
            uri=location.uri,
            cure=f"pass the item: {location.join(below[0]).uri} --format orbax" if below else "convert it",
        )
    return item


REWRITES: dict[str, Rewrite] = {
    "merge": Rewrite("merge the databases of a killed save into one committed item", _merge),
    "commit": Rewrite("commit an item whose save was killed just before its commit", _commit),
    "unbox": Rewrite(
        "remove the last part `value` or `raw_value` of key paths (linen boxes, NNX variables)", _unbox
    ),
    "box": Rewrite(
        "append `value` to key paths",
        _box,
        "comma-separated patterns of printed key paths, such as params/*/kernel; all arrays by default",
    ),
}
