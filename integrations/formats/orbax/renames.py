"""Renames key paths in the small files of an Orbax item whose arrays already have their new names."""

from __future__ import annotations

import base64
import json
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from wherry.errors import CorruptError, describe_exception
from wherry.integrations.containers.orbax import layout
from wherry.integrations.containers.orbax.tree import MAPPING, stored_name

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from wherry.core.keypath import KeyPath
    from wherry.storage.location import Location

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
