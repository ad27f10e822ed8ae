"""The layout of a PaxML checkpoint folder: `state/` with arrays as Orbax has them, and the item `metadata`.

Version 1.1 is only one zarr folder for each array under PaxML's flat name: PaxML restores by the names of its own train
state, and would read a `_METADATA` there as another structure (orbax 0.5.9). Key paths that the names cannot represent
are noted in the item `metadata`, whose further keys PaxML ignores. Version 1.2 is OCDBT with Orbax's tree files,
including the msgpack tree with its placeholders.

The msgpack tree by which PaxML 1.2 finds its arrays: a placeholder for each array, and nil and empty nodes.

Facts (orbax 0.5.9, with which paxml 1.4.0 restores): `state/checkpoint` must name every leaf that `_METADATA` names;
an array is the text `PLACEHOLDER://<stored name>`. Lists are msgpack arrays.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from typing import Any

from wherry.core.keypath import KeyPath, joined_names, render
from wherry.core.manifest import Manifest
from wherry.cures import Argument, Cure
from wherry.errors import UnrepresentableError
from wherry.formats.format import Options
from wherry.integrations.containers.msgpack.heads import array_head, map_head, pack_value, text
from wherry.integrations.containers.orbax import layout as orbax
from wherry.integrations.containers.orbax.tree import stored_name
from wherry.integrations.containers.orbax.write import (
    MARKER,
    arrays_of,
    chunks_of,
    item_files,
    noted_facts,
    refuse_unrepresentable,
    strings_file,
)
from wherry.integrations.formats.paxml.layout import (
    METADATA_FILE,
    NOTES,
    STATE,
    flat_name,
    metadata_item,
    split_name,
)
from wherry.target.file_map import File, FileMap, Scene, map_of_chunks, within
from wherry.version import __version__

_EMPTY: dict[str, Any] = {"none": None, "dict": {}, "list": [], "tuple": []}
_SHORT_TEXT = 31  # bytes; longer ones have no head of two bytes here


def placeholder_file(manifest: Manifest) -> bytes:
    """Build the file for a manifest.

    Raises:
        UnrepresentableError: a leaf is below another leaf.
    """
    tree: dict[str, Any] = {}
    for path, value in manifest.values.items():
        _put(tree, path, None if value is None else _placeholder(path))
    for path in manifest.tensors:
        _put(tree, path, _placeholder(path))
    for path, kind in manifest.empties.items():
        _put(tree, path, _EMPTY[kind])
    return _pack(tree, (), manifest.lists)


def _placeholder(path: KeyPath) -> str:
    return f"PLACEHOLDER://{stored_name(path)}"


def _put(tree: dict[str, Any], path: KeyPath, leaf: Any) -> None:
    node = tree
    for part in path[:-1]:
        node = node.setdefault(part, {})
        if not isinstance(node, dict):
            raise UnrepresentableError("conflicting key path: it is below another leaf", path=render(path))
    if not path or path[-1] in node:
        raise UnrepresentableError(
            "conflicting key path: it is empty, or a node with other leaves", path=render(path)
        )
    node[path[-1]] = leaf


def _pack(node: Any, path: KeyPath, lists: frozenset[KeyPath]) -> bytes:
    if node is None:
        return pack_value(None)
    if isinstance(node, str):
        return text(node, 3 if len(node.encode()) > _SHORT_TEXT else 0)
    if isinstance(node, list):
        return array_head(0)
    rows: dict[str, Any] = node
    if path in lists and all(str(number) in rows for number in range(len(rows))):
        items = [_pack(rows[str(number)], (*path, str(number)), lists) for number in range(len(rows))]
        return array_head(len(items)) + b"".join(items)
    pairs = [_pack(key, (), lists) + _pack(child, (*path, key), lists) for key, child in rows.items()]
    return map_head(len(pairs)) + b"".join(pairs)


_OCDBT = "1.2"


def lay_out(manifest: Manifest, options: Options, scene: Scene) -> FileMap:
    """The files of a checkpoint; PaxML restores with its own state, whose PRNG keys are plain data."""
    version, state_options = options["version"], options_of_state(options)
    if version == _OCDBT:
        placeholders = File(orbax.MSGPACK, lambda: placeholder_file(manifest))
        files = [placeholders, *item_files(manifest, state_options, typed_keys=False)]
        arrays = arrays_of(manifest, state_options, scene)
    else:
        name = partial(flat_name, lists=manifest.lists)
        files, arrays = strings_file(manifest, name), arrays_of(manifest, state_options, scene, name)
    state = within(STATE, map_of_chunks(arrays, files))

    def item() -> bytes:
        notes = {"version": __version__, "kind": manifest.kind}
        if version != _OCDBT:
            notes |= flat_notes(manifest, flat_paths(manifest))
        return json.dumps(metadata_item(float(version), manifest.tensors, notes)).encode()

    return replace(state, files=(*state.files, File(METADATA_FILE, item), MARKER))


def options_of_state(options: Options) -> dict[str, Any]:
    """Translate PaxML's options to those of the Orbax writer."""
    return {
        "ocdbt": options["version"] == _OCDBT,
        "zarr": "2",
        "compression": options["compression"],
        "chunks": options["chunks"],
        "data_file_size": options["data_file_size"],
    }


def prepare_grids(manifest: Manifest, options: Options) -> Manifest:
    """The manifest with the chunk grid that the writer will use.

    Raises:
        UnrepresentableError: that version cannot represent a part of the manifest.
    """
    if options["version"] == _OCDBT:
        refuse_unrepresentable(manifest, options_of_state(options))
        placeholder_file(manifest)
    else:
        flat = flat_manifest(manifest, flat_paths(manifest))
        refuse_unrepresentable(
            flat,
            options_of_state(options),
            top=False,
            cure=Cure("pass {}", Argument("set", f"version={_OCDBT}")),
        )
    specs = {
        path: replace(spec, chunks=chunks_of(spec, options["chunks"]), sharding=None)
        for path, spec in manifest.tensors.items()
    }
    return replace(manifest, tensors=specs)


def flat_paths(manifest: Manifest) -> dict[KeyPath, KeyPath]:
    """Key path → its flat name as a path of one part, for every stored leaf.

    Raises:
        UnrepresentableError: two leaves have the same name, or a leaf has none.
    """
    leaves = [*manifest.tensors, *(path for path, value in manifest.values.items() if value is not None)]
    names = joined_names(leaves, lambda path: flat_name(path, manifest.lists), "")
    return {path: (name,) for name, path in names.items()}


def flat_manifest(manifest: Manifest, flat: dict[KeyPath, KeyPath]) -> Manifest:
    """The manifest in flat form: one folder for each name, without nodes and empties."""
    return replace(
        manifest,
        tensors={flat[path]: replace(spec, path=flat[path]) for path, spec in manifest.tensors.items()},
        values={flat[path]: value for path, value in manifest.values.items() if value is not None},
        empties={},
        lists=frozenset(),
    )


def flat_notes(manifest: Manifest, flat: dict[KeyPath, KeyPath]) -> dict[str, Any]:
    """Facts about the tree that flat names and arrays cannot represent."""
    texts = {flat[path][0] for path, value in manifest.values.items() if isinstance(value, str)}
    empties = dict(manifest.empties) | {
        path: "none" for path, value in manifest.values.items() if value is None
    }
    item = {key: value for key, value in (manifest.custom.get("item") or {}).items() if key != NOTES}
    notes: dict[str, Any] = {
        "stored": sorted(name for (name,) in flat.values() if name not in texts),
        "names": {name: render(path) for path, (name,) in flat.items() if split_name(name) != path},
        "lists": sorted(render(path) for path in manifest.lists),
        "empties": {render(path): kind for path, kind in sorted(empties.items())},
    }
    own = {key: value for key, value in notes.items() if value}
    noted = noted_facts(manifest, lambda path: flat[path][0])
    return {**own, **noted, "custom": {**manifest.custom, "item": item}}
