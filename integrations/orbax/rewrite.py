"""Rewrites of an Orbax item that touch metadata alone: merging what was never merged, boxing and unboxing keys.

    merge(source, target)             the databases of a killed save become one committed item
    merge(source, in_place=True)      the same in the folder itself; replaced files are kept with the suffix `.before`
    unbox(source, target)             …/kernel/value  →  …/kernel      (linen boxes, NNX variables)
    box(source, target, paths)        …/kernel        →  …/kernel/value

What holds, tried on OCDBT: keys of a database cannot be renamed, but a new database can refer to the values of an old
one under other keys, so no tensor byte is decoded or moved. The old database stays as `ocdbt.process_0/` below the
new one and must be kept. Without OCDBT a name is a folder, and renaming is renaming folders. In both cases the small
files change (`_METADATA`, `_sharding`, `array_metadatas`, `_strings.json`). An aggregate cannot be renamed: its key
paths stand between its tensors in one file; it has to be converted.

The source is never changed but by `in_place`, which only adds. A target appears whole or not at all.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from wherry.detect import absence
from wherry.detection import Detection
from wherry.digest import sha256_of
from wherry.errors import (
    IncompleteError,
    NotFoundError,
    UnrepresentableError,
    UnsupportedError,
    UsageError,
    storage_error,
)
from wherry.format import Glimpse
from wherry.integrations.containers.chunk_store import sync_everything
from wherry.integrations.orbax import aggregate, layout, marks, relink, renaming
from wherry.integrations.orbax.arrays import array_metadata
from wherry.integrations.orbax.opening import open_item
from wherry.integrations.orbax.reader import OrbaxReader, StoredArray
from wherry.keypath import KeyPath, joined_names, render
from wherry.staging import Staging
from wherry.store import locate

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable, Mapping

    from wherry.location import Location

BEFORE = ".before"
_OLD = f"{layout.PROCESS_PREFIX}0"
_DATABASE = (layout.MANIFEST, "d")


class Rewritten(NamedTuple):
    """What a rewrite did.

    Attributes:
        uri: the item that was made.
        arrays: how many arrays it has.
        renamed: key path → new key path, of those that changed.
    """

    uri: str
    arrays: int
    renamed: Mapping[KeyPath, KeyPath]


def merge(
    source: str | os.PathLike[str], target: str | os.PathLike[str] | None = None, *, in_place: bool = False
) -> Rewritten:
    """Merge the per-process databases of an item that Orbax did not get to merge.

    Args:
        source: the item folder; its name may have the suffix of an uncommitted save.
        target: the item folder to be made.
        in_place: complete the source itself instead.

    Raises:
        UsageError: neither or both of target and in_place, nothing to merge, or a name that says uncommitted.
        IncompleteError: a chunk or the tree is missing: the save was killed too early.
        TargetExistsError, StorageError: the target cannot be made.
    """
    location, item = _item(source)
    if (target is None) != in_place:
        raise UsageError("merge needs a target, or in_place, and not both")
    if item.merged or not item.processes:
        raise UsageError("there are no unmerged databases of processes here", uri=location.uri)
    arrays = _require_complete(location, item)
    if target is None:
        _merge_in_place(location, item)
        return Rewritten(location.uri, arrays, {})

    def fill(staged: Location) -> None:
        _clone_all(location, staged, ())
        relink.link(staged, item.processes)
        _commit_files(staged)

    return _made(target, location, fill, {})


def unbox(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> Rewritten:
    """Drop the trailing `value` (or `raw_value`) of every leaf that is the one child of its node.

    Raises:
        UsageError: no leaf is boxed.
        UnsupportedError, UnrepresentableError: the item is an aggregate, or names would meet.
        DamagedError: the source is not whole.
    """
    location, item = _item(source)
    tensors = _tensors(location)
    boxed = marks.wrapped(tensors, marks.BOX) | marks.wrapped(tensors, marks.OLD_VARIABLE)
    if not boxed:
        raise UsageError("no array here is boxed", uri=location.uri)
    return _rename(location, item, target, {path: path[:-1] for path in boxed})


def box(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    paths: Iterable[KeyPath],
    word: str = marks.BOX,
) -> Rewritten:
    """Append `value` (or another word) to the key paths of arrays.

    Raises:
        NotFoundError: there is no such array.
        UsageError: no path is given.
        UnsupportedError, UnrepresentableError: the item is an aggregate, or names would meet.
        DamagedError: the source is not whole.
    """
    location, item = _item(source)
    known, chosen = set(_tensors(location)), list(paths)
    lost = next((path for path in chosen if path not in known), None)
    if lost is not None:
        raise NotFoundError("no such array", uri=location.uri, path=render(lost))
    if not chosen:
        raise UsageError("no array was named", uri=location.uri)
    return _rename(location, item, target, {path: (*path, word) for path in chosen})


def _rename(
    location: Location, item: layout.Item, target: str | os.PathLike[str], paths: Mapping[KeyPath, KeyPath]
) -> Rewritten:
    if item.msgpack:
        raise UnsupportedError(
            f"key paths also stand in {layout.MSGPACK}, among the tensors",
            uri=location.uri,
            cure="convert it",
        )
    leaves = aggregate.read_tree(location, item, layout.read_json(location.join(layout.TREE)))
    names = {**leaves.arrays, **leaves.strings}
    after = {path: paths.get(path, path) for path in names}
    joined_names(after.values(), renaming.stored_name, location.uri)
    renamed = {names[path]: renaming.stored_name(new) for path, new in after.items()}
    arrays = {name: renamed[name] for name in leaves.arrays.values()}

    def fill(staged: Location) -> None:
        if item.ocdbt:
            databases = (*_DATABASE, *item.processes)
            _clone_all(location, staged, databases)
            old = Path(staged.join(_OLD).path)
            old.mkdir()
            for name in databases:
                if location.join(name).exists():
                    relink.clone(Path(location.join(name).path), old / name)
            relink.link(staged, [_OLD], arrays)
        else:
            _clone_folders(location, staged, arrays)
        renaming.rewrite(staged, paths, renamed)

    return _made(target, location, fill, paths)


def _made(
    target: str | os.PathLike[str],
    source: Location,
    fill: Callable[[Location], None],
    renamed: Mapping[KeyPath, KeyPath],
) -> Rewritten:
    """Fill a staging area, read its metadata back, and commit it."""
    home = locate(target)
    if not home.store.capabilities.local:
        raise UnsupportedError("rewrites are made on local file systems", uri=home.uri, cure="copy it first")
    identity = sha256_of("rewrite", [source.uri, sorted(map(render, renamed))])[:8]
    with Staging(home, identity) as staging:
        staging.clear()
        try:
            Path(staging.location.path).mkdir()
            fill(staging.location)
            arrays = _require_readable(staging.location)
            sync_everything(Path(staging.location.path))
        except OSError as error:
            raise storage_error(error, home.uri) from error
        staging.commit((layout.COMMITTED,))
    return Rewritten(home.uri, arrays, renamed)


def _item(source: str | os.PathLike[str]) -> tuple[Location, layout.Item]:
    location = locate(source)
    if not location.exists():
        raise NotFoundError("nothing is there", uri=location.uri)
    if not location.store.capabilities.local:
        raise UnsupportedError(
            "rewrites are made on local file systems", uri=location.uri, cure="copy it first"
        )
    item = layout.look_at_item(Glimpse(location))
    if item is None:
        raise UsageError("no Orbax item is here", uri=location.uri, cure="name the folder with _METADATA")
    return location, item


def _tensors(location: Location) -> list[KeyPath]:
    opened = open_item(location, Detection(location.uri, "orbax"))
    opened.reader.close()
    return list(opened.manifest.tensors)


def _require_readable(location: Location) -> int:
    opened = open_item(location, Detection(location.uri, "orbax"))
    try:
        reason = absence(opened.reader)
    finally:
        opened.reader.close()
    if reason is not None:
        raise IncompleteError(reason, uri=location.uri)
    return len(opened.manifest.tensors)


def _require_complete(location: Location, item: layout.Item) -> int:
    """Look for every chunk in the databases of the processes before anything is written."""
    if not item.tree and not item.msgpack:
        raise IncompleteError(
            f"no {layout.TREE}: the save was killed before it wrote the tree",
            uri=location.uri,
            cure="use another step",
        )
    metadata = layout.read_json(location.join(layout.TREE)) if item.tree else {}
    leaves = aggregate.read_tree(location, item, metadata)
    listing = relink.list_processes(location, item.processes)
    arrays: dict[KeyPath, StoredArray] = {}
    for path, name in leaves.arrays.items():
        found = array_metadata(listing, name, f"{location.uri}/{name}")
        if found is None:
            raise IncompleteError("no process wrote this array", uri=location.uri, path=render(path))
        arrays[path] = StoredArray(name, found)
    reason = absence(OrbaxReader(location, arrays, listing, None, ocdbt=True, zeros_stored=True))
    if reason is not None:
        raise IncompleteError(
            reason, uri=location.uri, cure="the save was killed too early; use another step"
        )
    return len(arrays) + len(leaves.inline)


def _merge_in_place(location: Location, item: layout.Item) -> None:
    if any(layout.uncommitted(name) for name in (location.name, location.parent.name)):
        raise UsageError(
            "the folder's name says that it was never committed", uri=location.uri, cure="merge into a target"
        )
    relink.link(location, item.processes)
    _commit_files(location)
    try:
        sync_everything(Path(location.path))
    except OSError as error:
        raise storage_error(error, location.uri) from error


def _commit_files(folder: Location) -> None:
    """What a committed item has besides the merged database; a file that changes is kept beside it."""
    renaming.commit_timestamp(folder, BEFORE)
    if not folder.join(layout.COMMITTED).exists():
        folder.join(layout.COMMITTED).put(b"Merged by wherry.\n")


def _clone_all(source: Location, staged: Location, without: Iterable[str]) -> None:
    left = {*without, layout.SIDECAR}
    for entry in source.entries():
        if entry.name not in left:
            relink.clone(Path(source.join(entry.name).path), Path(staged.join(entry.name).path))


def _clone_folders(source: Location, staged: Location, arrays: Mapping[str, str]) -> None:
    """Arrays as folders under their new names; everything else as it is."""
    tops = {name.split("/")[0] for name in arrays}
    _clone_all(source, staged, tops)
    for old, new in arrays.items():
        place = Path(staged.member(new).path)
        place.parent.mkdir(parents=True, exist_ok=True)
        if place.exists():
            raise UnrepresentableError("two arrays would share a folder", uri=source.uri, path=new)
        relink.clone(Path(source.member(old).path), place)
