"""The layouts of T5X checkpoints: that of version 3, and the step folder that T5X saves through Orbax.

Both are made of containers: arrays are laid out like Orbax's, the msgpack file like flax's. The step in a target's name
must be that of the checkpoint: T5X trusts the name, so wherry checks it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from wherry.core.manifest import Manifest
from wherry.errors import UsageError
from wherry.integrations.containers.msgpack.layout import lay_out
from wherry.integrations.containers.orbax import item_map
from wherry.integrations.containers.orbax import layout as orbax
from wherry.integrations.containers.orbax.small_files import MARKER, checkpoint_file
from wherry.integrations.formats.t5x import layout
from wherry.integrations.formats.t5x.item import HANDLER, ITEM
from wherry.integrations.formats.t5x.placement import array_names, below_envelope, folder_name, pointers
from wherry.target.file_map import File, FileMap, Scene, within

if TYPE_CHECKING:
    from wherry.formats.format import Options

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
        chunks=item_map.arrays_of(arrays, {**options, "zarr": "2", "ocdbt": False}, scene, folder_name),
    )


def lay_out_train_state(manifest: Manifest, options: Options, scene: Scene) -> FileMap:
    """A step folder with the Orbax item `state`: the item, the folder of the dataset iterator, the files of the step.

    Raises:
        UsageError: the target's name has another step.
    """
    require_step_of_name(scene.name, manifest)
    item = within(ITEM, item_map.lay_out(manifest, {**options, "zarr": "2"}, scene))
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
            cure=f"name the target {layout.step_folder(manifest.step)}, or pass the run with --into",
        )
