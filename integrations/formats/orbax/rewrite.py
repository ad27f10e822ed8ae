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

OCDBT databases by reference: the same values under a new tree, without copying tensor bytes.

A database refers to its values by files relative to its own folder, so it can refer to the values of another database
in a folder below. Orbax merges the databases of its processes this way; this module does the same and renames keys.

Renames key paths in the small files of an Orbax item whose arrays already have their new names.
"""

from __future__ import annotations

import base64
import json
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wherry.core.detection import Detection
from wherry.core.keypath import KeyPath, joined_names, render
from wherry.cures import Argument, Command, Cure
from wherry.errors import (
    CorruptError,
    IncompleteError,
    NotFoundError,
    UnrepresentableError,
    UnsupportedError,
    UsageError,
    describe_exception,
    storage_errors,
)
from wherry.formats.format import Change, Glimpse, Opened, Rewrite
from wherry.integrations.containers.orbax import layout
from wherry.integrations.containers.orbax.commit import missing_commit
from wherry.integrations.containers.orbax.detection import other_items
from wherry.integrations.containers.orbax.item import open_item
from wherry.integrations.containers.orbax.tree import MAPPING, item_tree, read_tree, stored_name
from wherry.integrations.containers.zarr import kvstore
from wherry.layout.forms import BOX, OLD_VARIABLE, wrapped_leaves
from wherry.store.copy import list_files
from wherry.store.folders import sync_folder
from wherry.store.location import Location
from wherry.store.sidecar import FOLDER_NAME, SIGNATURE_NAME

if TYPE_CHECKING:
    import tensorstore as ts


_NO_KEY = "no such key"


def link(folder: Location, databases: Iterable[str], renamed: Mapping[str, str] | None = None) -> None:
    """Create the database of a folder from databases below it, in one transaction.

    Args:
        folder: the local folder that gets `manifest.ocdbt`.
        databases: names of the folders below.
        renamed: stored name of each array → its new name; None keeps every key unchanged.

    Raises:
        UnrepresentableError: the keys of one array are below those of another.
        UnsupportedError: the databases are configured differently.
        DamagedError, StorageError: a database cannot be read, or the storage failed.
    """
    import tensorstore

    using, names = kvstore.context(), list(databases)
    config = _config(folder, names, using)
    transaction = tensorstore.Transaction(atomic=True)
    pairs = [("", "")]  # key prefix of each array → its new key prefix
    if renamed is not None:
        require_apart(renamed, folder.uri)
        pairs = [(f"{old}/" if old else "", f"{new}/" if new else "") for old, new in renamed.items()]
    top = {**kvstore.store_spec(folder, ocdbt=True, writable=True), "config": config}
    try:
        for name in names:
            below = {**top, "base": kvstore.store_spec(folder.join(name), ocdbt=True, writable=True)["base"]}
            for old, new in pairs:
                source = kvstore.open_store({**below, "path": old}, using, folder.uri)
                target = kvstore.open_store({**top, "path": new}, using, folder.uri)
                source.experimental_copy_range_to(target.with_transaction(transaction)).result()
        transaction.commit_async().result()
    except (ValueError, OSError) as error:
        raise kvstore.translate_error(error, folder.uri) from error


def _config(folder: Location, databases: Iterable[str], using: ts.Context) -> dict[str, Any]:
    """The configuration of the databases (Orbax 0.4.4 differs); references require equal configurations."""
    found: list[dict[str, Any]] = []
    for name in databases:
        place = folder.join(name)
        store = kvstore.open_store(kvstore.store_spec(place, ocdbt=True), using, place.uri)
        kvstore.read_value(store, _NO_KEY, place.uri)  # the configuration is known after the first read
        config = store.spec().to_json()["config"]
        found.append({key: value for key, value in config.items() if key != "uuid"})
    if any(config != found[0] for config in found):
        raise UnsupportedError(
            "unsupported item: the databases of the processes have different configurations",
            uri=folder.uri,
            cure="use another step",
        )
    return found[0]


def require_apart(renamed: Mapping[str, str], uri: str) -> None:
    """Refuse arrays whose keys are below those of another: they cannot be renamed separately.

    Raises:
        UnrepresentableError: two arrays have such keys.
    """
    for name in renamed:
        parts = name.split("/")
        outer = next(
            ("/".join(parts[:n]) for n in range(1, len(parts)) if "/".join(parts[:n]) in renamed), None
        )
        if outer is not None or (not name and len(renamed) > 1):
            raise UnrepresentableError(
                f"the keys of array {name!r} are below those of array {outer or ''!r}",
                uri=uri,
                cure="convert the checkpoint instead",
            )


__all__ = ["add_commit_time", "rewrite", "stored_name"]
_NOTED_BY_NAME = ("prng", "axes")


def rewrite(folder: Location, paths: Mapping[KeyPath, KeyPath], names: Mapping[str, str]) -> None:
    """Rename in every small file of a folder.

    Args:
        folder: the item; it is modified.
        paths: key path → new key path, for paths that change; the new one is longer or shorter at its end.
        names: stored name → new stored name, for all leaves.

    Raises:
        CorruptError: a file has an unexpected form.
        StorageError: the storage failed.
    """
    try:
        _replace(folder.join(layout.TREE), partial(_tree, paths, names))
        _replace(folder.join(layout.SHARDING), partial(_shardings, names))
        _replace(folder.join(layout.STRINGS), partial(_keys, names))
        metadatas = folder.join(layout.ARRAY_METADATAS)
        for entry in metadatas.entries():
            _replace(metadatas.member(entry.name), partial(_array_metadatas, names))
    except (KeyError, TypeError, AttributeError) as error:
        raise CorruptError(f"invalid metadata file: {describe_exception(error)}", uri=folder.uri) from error


def add_commit_time(place: Location) -> bytes | None:
    """A `_CHECKPOINT_METADATA` with a commit time added; None if there is no such file, or if it has a commit time.

    Raises:
        DamagedError: the file has an unexpected form.
    """
    if not place.exists():
        return None
    data = layout.read_json(place)
    if data.get(layout.COMMIT_TIME):
        return None
    return json.dumps({**data, layout.COMMIT_TIME: time.time_ns()}).encode()


def _replace(place: Location, change: Callable[[layout.JsonObject], layout.JsonObject]) -> None:
    if place.exists():
        place.put(json.dumps(change(layout.read_json(place))).encode())


def _keys(names: Mapping[str, str], data: layout.JsonObject) -> layout.JsonObject:
    return {names.get(key, key): value for key, value in data.items()}


def _tree(
    paths: Mapping[KeyPath, KeyPath], names: Mapping[str, str], data: layout.JsonObject
) -> layout.JsonObject:
    rows: layout.JsonObject = {}
    for key, row in data["tree_metadata"].items():
        path = tuple(str(part["key"]) for part in row["key_metadata"])
        if path not in paths:
            rows[key] = row
            continue
        new = paths[path]
        parts = [
            *row["key_metadata"][: len(new)],
            *({"key": p, "key_type": MAPPING} for p in new[len(path) :]),
        ]
        rows[repr(new)] = {**row, "key_metadata": parts}
    custom = data.get("custom_metadata")
    own = custom.get("wherry") if isinstance(custom, dict) else None
    if isinstance(custom, dict) and isinstance(own, dict):
        renamed: layout.JsonObject = {
            field: {names.get(name, name): value for name, value in own[field].items()}
            for field in _NOTED_BY_NAME
            if field in own
        }
        if "scalars" in own:
            renamed["scalars"] = [names.get(name, name) for name in own["scalars"]]
        data = {**data, "custom_metadata": {**custom, "wherry": {**own, **renamed}}}
    # The description of rich types, node by node, no longer matches the new tree; it is optional.
    return {
        **{key: value for key, value in data.items() if key != "value_metadata_tree"},
        "tree_metadata": rows,
    }


def _shardings(names: Mapping[str, str], data: layout.JsonObject) -> layout.JsonObject:
    rows: layout.JsonObject = {}
    plain = all(key in names for key in data)
    for key, value in data.items():
        name = key if plain else base64.urlsafe_b64decode(key).decode()
        new = names.get(name, name)
        rows[new if plain else base64.urlsafe_b64encode(new.encode()).decode()] = value
    return rows


def _array_metadatas(names: Mapping[str, str], data: layout.JsonObject) -> layout.JsonObject:
    rows: list[Any] = []
    for row in data["array_metadatas"]:
        fields = row["array_metadata"]
        name = fields["param_name"]
        rows.append({**row, "array_metadata": {**fields, "param_name": names.get(name, name)}})
    return {**data, "array_metadatas": rows}


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
        raise UsageError(
            "the process databases were never merged",
            uri=location.uri,
            cure=Cure("pass {}", Argument("as", "merge")),
        )
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
    stamped = add_commit_time(location.join(layout.CHECKPOINT))
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
    boxed = wrapped_leaves(tensors, BOX) | wrapped_leaves(tensors, OLD_VARIABLE)
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
                cure=Cure("run {} to list all key paths", Command("inspect")),
            )
        chosen |= found
    return _renaming(location, opened, {path: (*path, BOX) for path in chosen})


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
    leaves = item_tree(location, item, read_tree(location))
    names = {**leaves.arrays, **leaves.strings}
    after = {path: paths.get(path, path) for path in names}
    joined_names(after.values(), stored_name, location.uri)
    renamed = {names[path]: stored_name(new) for path, new in after.items()}
    arrays = {name: renamed[name] for name in leaves.arrays.values()}
    if item.ocdbt:
        require_apart(arrays, location.uri)
    place = partial(_below, item.processes) if item.ocdbt else partial(_folder, arrays)
    files = [name for name in list_files(location) if name not in (FOLDER_NAME, SIGNATURE_NAME)]
    carried = {name: place(name) for name in files}
    if len(set(carried.values())) < len(carried):
        raise UnrepresentableError("two arrays would get the same folder name", uri=location.uri)

    def finish(folder: Location) -> None:
        if item.ocdbt:
            link(folder, [_OLD], arrays)
        rewrite(folder, paths, renamed)
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
    link(folder, databases)
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
            cure=Cure("pass the item: {} {}", location.join(below[0]).uri, Argument("format", "orbax"))
            if below
            else "convert it",
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
