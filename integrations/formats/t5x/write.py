"""The layouts of T5X checkpoints: that of version 3, and the step folder that T5X saves through Orbax.

Both are made of containers: arrays are laid out like Orbax's, the msgpack file like flax's. The step in a target's name
must be that of the checkpoint: T5X trusts the name, so wherry checks it.

Checks what a legacy T5X checkpoint can represent, and distributes a tree over its msgpack file and its arrays.

Facts: T5X stores a leaf in the msgpack file if it has no partition spec (step, small optimizer slots), else as a zarr
array in a folder named after its path, with both `/` and `.` turned into `.`. Readers, T5X included, accept any split.
The spec of an array has the form that T5X writes with tensorstore from 0.1.14 on; `.zarray` repeats it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from wherry.core.keypath import KeyPath, joined_names, render
from wherry.core.manifest import Manifest
from wherry.core.tensorspec import TensorSpec
from wherry.cures import Argument, Cure
from wherry.errors import UnrepresentableError, UsageError
from wherry.formats.format import Options
from wherry.integrations.containers.msgpack.heads import pack_value
from wherry.integrations.containers.msgpack.layout import lay_out
from wherry.integrations.containers.orbax import layout as orbax
from wherry.integrations.containers.orbax.layout import is_reserved
from wherry.integrations.containers.orbax.write import (
    MARKER,
    arrays_of,
    checkpoint_file,
    chunks_of,
    refuse_unrepresentable,
    unfit,
)
from wherry.integrations.containers.orbax.write import (
    lay_out as lay_out_item,
)
from wherry.integrations.containers.zarr import metadata as zarr
from wherry.integrations.containers.zarr.layout import build_metadata
from wherry.integrations.formats.t5x import layout
from wherry.integrations.formats.t5x.item import HANDLER, ITEM
from wherry.target.file_map import File, FileMap, Scene, within

_MOST_INLINE = 64 << 10


def prepare_grids(manifest: Manifest, options: Options) -> Manifest:
    """The manifest with a chunk grid for every tensor that will be a separate array, and none for the others.

    Raises:
        UnrepresentableError: T5X cannot represent a part of the manifest.
    """
    specs = {
        path: replace(
            spec,
            chunks=None if _inline(spec, options["inline"]) else chunks_of(spec, options["chunks"]),
            sharding=None,
        )
        for path, spec in manifest.tensors.items()
    }
    whole = replace(manifest, tensors=specs)
    arrays = {(name,): specs[path] for path, name in array_names(whole).items()}
    refuse_unrepresentable(
        Manifest(tensors=arrays), {"ocdbt": False}, cure=Cure("pass {}", Argument("set", "inline=all"))
    )
    return whole


def array_names(manifest: Manifest) -> dict[KeyPath, str]:
    """The folder of each tensor that is a separate array.

    Raises:
        UnrepresentableError: two tensors would get the same folder, or a name is not a valid folder name.
    """
    stored = [path for path, spec in manifest.tensors.items() if spec.chunks is not None]
    names = joined_names(stored, folder_name, "")
    taken = {companion.name.split("/")[0] for companion in manifest.companions}
    for companion in sorted(taken & {layout.MSGPACK, layout.PINNED}):
        raise UnrepresentableError(
            f"companion name {companion!r} is reserved by T5X",
            cure="rename the file, or convert without companions",
        )
    for name, path in names.items():
        if name in taken or name == layout.PINNED or is_reserved(name) or unfit(name):
            raise UnrepresentableError(
                f"invalid or duplicate folder name {name[:60]!r}",
                path=render(path),
                cure=Cure("pass {}", Argument("set", "inline=all")),
            )
        if manifest.tensors[path].dtype not in zarr.STORABLE:
            raise UnrepresentableError(
                f"unsupported dtype {manifest.tensors[path].dtype} in zarr", path=render(path)
            )
    return {path: name for name, path in names.items()}


def folder_name(path: KeyPath) -> str:
    """The folder name of a tensor in T5X's form."""
    return "/".join(path).replace("/", ".")


def below_envelope(manifest: Manifest) -> Manifest:
    """The leaves of the msgpack file under their key paths below its envelope; specs keep those of the manifest."""
    head = (layout.OPTIMIZER,)
    inline = {(*head, *path): spec for path, spec in manifest.tensors.items() if spec.chunks is None}
    if manifest.tensors.keys() & manifest.values.keys():
        raise UnrepresentableError("conflicting key path: a leaf is both a tensor and a value")
    return Manifest(
        tensors=inline,
        values={(*head, *path): value for path, value in manifest.values.items()},
        empties={(*head, *path): kind for path, kind in manifest.empties.items()},
        lists=frozenset((*head, *path) for path in manifest.lists),
    )


def pointers(manifest: Manifest, names: dict[KeyPath, str], compression: Any) -> dict[KeyPath, bytes]:
    """The version, and the specs of the arrays, as msgpack."""
    return {
        (layout.VERSION,): pack_value(layout.NEWEST_VERSION),
        **{
            (layout.OPTIMIZER, *path): pack_value(_spec(manifest.tensors[path], name, compression))
            for path, name in names.items()
        },
    }


def _spec(spec: TensorSpec, name: str, compression: Any) -> zarr.JsonObject:
    metadata = build_metadata(spec.dtype, spec.shape, spec.chunks or (), version=2, compression=compression)
    return {
        "driver": "zarr",
        "dtype": spec.dtype,
        "kvstore": {"driver": "file", "path": f"{name}/"},
        "metadata": {key: metadata[key] for key in ("chunks", "compressor", "shape")},
    }


def _inline(spec: TensorSpec, option: str) -> bool:
    """Whether a tensor is stored in the msgpack file; a tensor without elements has no chunk for zarr."""
    if spec.size == 0 or option == "all":
        return True
    small = spec.path[:1] != (layout.TARGET,) and spec.nbytes <= _MOST_INLINE
    return option == "auto" and small


_TREE_HANDLER = "orbax.checkpoint._src.handlers.pytree_checkpoint_handler.PyTreeCheckpointHandler"


def lay_out_legacy(manifest: Manifest, options: Options, scene: Scene) -> FileMap:
    """The msgpack file `checkpoint`, and zarr arrays in folders.

    Raises:
        UsageError: the target's name has another step.
        UnrepresentableError: T5X cannot represent a part of the manifest.
    """
    require_step_of_name(scene.name, manifest)
    arrays = Manifest(
        tensors={path: spec for path, spec in manifest.tensors.items() if spec.chunks is not None}
    )
    encoded = pointers(manifest, array_names(manifest), options["compression"])
    return replace(
        lay_out({layout.MSGPACK: below_envelope(manifest)}, encoded=encoded),
        chunks=arrays_of(arrays, {**options, "zarr": "2", "ocdbt": False}, scene, folder_name),
    )


def lay_out_train_state(manifest: Manifest, options: Options, scene: Scene) -> FileMap:
    """A step folder with the Orbax item `state`: the item, the folder of the dataset iterator, the files of the step.

    Raises:
        UsageError: the target's name has another step.
    """
    require_step_of_name(scene.name, manifest)
    item = within(ITEM, lay_out_item(manifest, {**options, "zarr": "2"}, scene))
    around = (
        File(f"{layout.DATASET}/{orbax.COMMITTED}", MARKER.body),
        checkpoint_file({layout.DATASET: HANDLER, ITEM: _TREE_HANDLER}, scene.created_ns, manifest),
        MARKER,
    )
    return replace(item, files=(*item.files, *around))


def require_step_of_name(name: str, manifest: Manifest) -> None:
    """Refuse a target whose name has another step than the manifest.

    Raises:
        UsageError: the steps differ.
    """
    stated = layout.stated_step(name)
    if stated is not None and manifest.step is not None and stated != manifest.step:
        raise UsageError(
            f"step mismatch: {stated} in the target's name, {manifest.step} in the checkpoint",
            cure=Cure(
                "name the target {}, or pass the run with {}",
                layout.step_folder(manifest.step),
                Argument("into"),
            ),
        )
