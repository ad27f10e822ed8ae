"""Loaders for the formats of JAX programs: every array is sharded over all available devices.

The recorded partition spec is used if its mesh has the same number of devices; otherwise each array is split along its
longest axis that is divisible by the number of devices, so that shards are really read one by one. Facts: Orbax 0.12.8
restores the tree that `metadata` describes, with a sharding for each array; Flax and NumPy return host arrays.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from wherry.core.tensorspec import TensorSpec
from wherry.errors import NotFoundError
from wherry.integrations.containers.zarr.kvstore import name_emulator

_TREE, _OLD_TREE = "_METADATA", "checkpoint"  # the second is the only one before Orbax 0.3


def prepare() -> None:
    """Make the devices ready, before the process gives up the network and the execution of programs."""
    import jax

    jax.devices()


def orbax(folder: Path | str, specs: Mapping[str, TensorSpec]) -> Any:
    """Load an item, in a folder or in gs://, with Orbax's own tree handler."""
    import jax
    import orbax.checkpoint as ocp
    from etils import epath

    name_emulator()
    item = _item(epath.Path(folder))
    recorded = {(spec.shape, spec.dtype): spec for spec in specs.values() if spec.sharding}
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        metadata: Any = checkpointer.metadata(item)
        metadata = getattr(metadata, "item_metadata", metadata)
        tree = getattr(metadata, "tree", metadata)
        if tree is None:
            return _on_devices(checkpointer.restore(item))

        def argument(leaf: Any) -> Any:
            if getattr(leaf, "shape", None) is None:
                return ocp.RestoreArgs()
            spec = recorded.get((tuple(leaf.shape), str(leaf.dtype)))
            return ocp.ArrayRestoreArgs(restore_type=jax.Array, sharding=sharding(tuple(leaf.shape), spec))

        def is_leaf(node: Any) -> bool:
            return hasattr(node, "shape") or type(node).__name__.endswith("Metadata")

        arguments = jax.tree.map(argument, tree, is_leaf=is_leaf)
        return checkpointer.restore(item, args=ocp.args.PyTreeRestore(restore_args=arguments))


def msgpack(file: Path, specs: Mapping[str, TensorSpec]) -> Any:
    """Load a Flax file with `flax.serialization`."""
    del specs
    from flax import serialization

    return _on_devices(serialization.msgpack_restore(file.read_bytes()))


def npz(file: Path, specs: Mapping[str, TensorSpec]) -> Any:
    """Load a NumPy archive with `numpy.load` without pickles."""
    del specs
    import numpy as np

    with np.load(file, allow_pickle=False) as archive:
        return {name: archive[name] for name in archive.files}


def sharding(shape: tuple[int, ...], spec: TensorSpec | None = None) -> Any:
    """The sharding for an array of this shape."""
    import jax

    count = jax.device_count()
    recorded = spec.sharding if spec else None
    if recorded and recorded.mesh and math.prod(extent for _, extent in recorded.mesh) == count:
        mesh = _mesh(tuple(recorded.mesh))
        found = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*recorded.spec))
        if _divides(found, shape):
            return found
    mesh = _mesh((("devices", count),))
    axes = [axis for axis, extent in enumerate(shape) if extent and extent % count == 0]
    longest = max(axes, key=lambda axis: shape[axis], default=None)
    entries = ["devices" if axis == longest else None for axis in range(len(shape))]
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*entries))


def _mesh(axes: tuple[tuple[str, int], ...]) -> Any:
    import jax
    import numpy as np

    devices = np.array(jax.devices()).reshape([extent for _, extent in axes])
    return jax.sharding.Mesh(devices, [name for name, _ in axes])


def _divides(found: Any, shape: tuple[int, ...]) -> bool:
    try:
        found.shard_shape(shape)
    except ValueError:
        return False
    return True


def _on_devices(tree: Any) -> Any:
    """Put a tree of host arrays on the devices; numbers become zero-dimensional arrays."""
    import jax
    import numpy as np

    def put(leaf: Any) -> Any:
        if isinstance(leaf, str):
            return leaf
        array = leaf if hasattr(leaf, "shape") else np.asarray(leaf)
        return jax.device_put(array, sharding(tuple(array.shape)))

    return jax.tree.map(put, tree)


def _item(folder: Any) -> Any:
    """The folder with the tree: the folder itself, or the one item of a step folder."""
    if (folder / _TREE).exists() or (folder / _OLD_TREE).exists():
        return folder
    found = sorted({path.parent for name in (_TREE, _OLD_TREE) for path in folder.glob(f"*/{name}")})
    if len(found) != 1:
        raise NotFoundError(f"expected one item with a tree in {folder}, got {len(found)}")
    return found[0]
