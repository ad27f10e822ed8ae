"""The layout of an Orbax item: its arrays, then the small files of a save, the marker `commit_success.txt` last.

Systems with other files around their arrays take some of these files, and add their own.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from wherry.core.units import parse_size
from wherry.integrations.containers.orbax import layout, partitioning
from wherry.integrations.containers.orbax.small_files import HANDLER, MARKER, checkpoint_file, notes
from wherry.integrations.containers.orbax.tree import (
    array_metadatas_json,
    key_data,
    shardings_json,
    stored_name,
    tree_json,
)
from wherry.integrations.containers.zarr.layout import SCALARS, ArrayForm
from wherry.integrations.containers.zarr.layout import lay_out as lay_out_arrays
from wherry.target.file_map import Chunks, File, FileMap, Scene, map_of_chunks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from wherry.core.keypath import KeyPath
    from wherry.core.manifest import Manifest
    from wherry.formats.format import Options

_ZARR3 = 3


def lay_out(manifest: Manifest, options: Options, scene: Scene) -> FileMap:
    """An item of its own."""
    files = [*item_files(manifest, options), checkpoint_file(HANDLER, scene.created_ns, manifest), MARKER]
    return map_of_chunks(arrays_of(manifest, options, scene), files)


def arrays_of(
    manifest: Manifest,
    options: Options,
    scene: Scene,
    name: Callable[[KeyPath], str] = stored_name,
) -> Chunks | None:
    """The arrays of a tree.

    Args:
        manifest: the tree, with grids.
        options: of the format `orbax`; not all are needed.
        scene: what else decides bytes.
        name: the name of an array, from its key path.

    Returns:
        Their files; None if there are no arrays.
    """
    size = parse_size(options.get("data_file_size", layout.DATA_FILE_SIZE)) if options["ocdbt"] else None
    form = ArrayForm(int(options["zarr"]), options["compression"], size)
    return lay_out_arrays(manifest.tensors.values(), form, name, scalars_of(manifest), scene.created_ns)


def scalars_of(manifest: Manifest) -> dict[KeyPath, Any]:
    """The values that are stored as arrays, by their key paths."""
    return {path: value for path, value in manifest.values.items() if type(value) in SCALARS}


def strings_file(manifest: Manifest, name: Callable[[KeyPath], str] = stored_name) -> Iterator[File]:
    """The file with the texts of a tree, if it has some.

    Args:
        manifest: the tree.
        name: the name of a leaf, from its key path.
    """
    strings = {name(path): value for path, value in manifest.values.items() if isinstance(value, str)}
    if strings:
        yield File(layout.STRINGS, lambda: json.dumps(strings).encode())


def item_files(
    manifest: Manifest,
    options: Options,
    noted: Mapping[str, Any] | None = None,
    *,
    typed_keys: bool = True,
    described: Callable[[Manifest], Manifest] = lambda manifest: manifest,
) -> Iterator[File]:
    """The small files of an item that describe its tree.

    Args:
        manifest: the tree, with grids.
        options: of the format `orbax`.
        noted: further facts that Orbax cannot store.
        typed_keys: whether typed PRNG keys are written as such; a system may always restore their plain data.
        described: adds what a system states of the tree in the item's own metadata.
    """
    yield from strings_file(manifest)
    keys = key_data(manifest) if typed_keys else {}
    if keys:
        specs = {path: manifest.tensors[path] for path in keys}
        yield File(layout.SHARDING, lambda: json.dumps(shardings_json(keys)).encode())
        yield File(
            f"{layout.ARRAY_METADATAS}/process_0",
            lambda: json.dumps(array_metadatas_json(keys, specs)).encode(),
        )

    def tree() -> bytes:
        known = {**notes(manifest, scalars_of(manifest)), **(noted or {})}
        custom = {**partitioning.item_metadata(described(manifest)), "wherry": known}
        is_zarr3 = int(options["zarr"]) == _ZARR3
        return json.dumps(
            tree_json(manifest, zarr3=is_zarr3, ocdbt=options["ocdbt"], custom=custom, keys=keys)
        ).encode()

    yield File(layout.TREE, tree)
