"""Live training states as tensors with boxes: JAX pytrees and torch state dicts, sharded or not.

Nothing is copied here: a box records its position in the tensor and how to get its bytes. Of several replicas exactly
one provides the bytes: for JAX the shard whose `replica_id` is 0, for a DTensor the rank whose coordinate is 0 on every
mesh axis that replicates. torch and jax are never imported; they are used only when the state's own types have already
loaded them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from wherry.core import dtypes
from wherry.core.keypath import KeyPath
from wherry.core.lazy_dataclass import dataclass
from wherry.core.tensorspec import TensorSpec
from wherry.errors import UnrepresentableError, UnsupportedError, WherryError
from wherry.live.snapshot import Box, LiveTensor
from wherry.mover.output import as_bytes

if TYPE_CHECKING:
    import numpy as np

    from wherry.core.manifest import Value
    from wherry.integrations.live.trees import Leaf


@dataclass(frozen=True, slots=True)
class Survey:
    """Contents of a live state.

    Attributes:
        tensors: the tensors, with the boxes that this process provides.
        values: non-tensor leaves.
        empties: key path → kind of a node without children.
        lists: paths of the nodes that are sequences.
        framework: name and version of the framework, for the evidence.
        distributed: `torch` or `jax` if other processes hold parts of the state; empty if this process holds all of it.
        failure: why a tensor cannot be read. It is not raised here, because the other processes must learn of it first.
    """

    tensors: tuple[LiveTensor, ...]
    values: Mapping[KeyPath, Value]
    empties: Mapping[KeyPath, str]
    lists: frozenset[KeyPath]
    framework: str
    distributed: str
    failure: WherryError | None


def survey(state: object) -> Survey:
    """Survey a live state without copying any of its arrays.

    Args:
        state: a pytree of jax or numpy arrays (Flax boxes, NNX state, Penzai models, optimizer states), a torch module
            or a state dict; numbers, strings and None may be among the leaves.

    Returns:
        The survey; its `failure` names an array that has no bytes of its own (donated, sparse, on `meta`, partial
        sums) or has elements of a type that numpy cannot hold.

    Raises:
        UnsupportedError: a leaf is not an array, a number or text.
    """
    from wherry.integrations.live.trees import survey as laid_out

    tree = laid_out(state)
    arrays = [leaf for leaf in tree.leaves if leaf.dtype is not None]
    stored = {leaf.path: leaf.stored for leaf in arrays}
    tensors: tuple[LiveTensor, ...] = ()
    failure: WherryError | None = None
    try:
        tensors = tuple(_tensor(leaf, stored.get(leaf.alias) if leaf.alias else None) for leaf in arrays)
    except WherryError as error:
        failure = error
    kinds = {_kind(leaf.value) for leaf in arrays}
    framework = [f"{kind} {sys.modules[kind].__version__}" for kind in sorted(kinds)]
    if "jax" in kinds:
        framework.append(f"{sys.modules['jax'].device_count()} devices")
    return Survey(
        tensors,
        {leaf.stored: leaf.value for leaf in tree.leaves if leaf.dtype is None},
        tree.empties,
        frozenset(tree.lists),
        ", ".join(framework) or "plain values",
        next((kind for leaf in arrays if _is_shared(leaf.value, kind := _kind(leaf.value))), ""),
        failure,
    )


def _tensor(leaf: Leaf, alias: KeyPath | None) -> LiveTensor:
    spec = leaf.spec()
    if dtypes.opaque(spec.dtype):
        raise UnsupportedError(
            f"unsupported dtype {spec.dtype}",
            path=spec.name,
            cure="cast the array to another dtype, or remove it from the state",
        )
    kind = _kind(leaf.value)
    return LiveTensor(spec, _BOXES[kind](spec, leaf.value), _is_shared(leaf.value, kind), alias)


def _kind(value: object) -> str:
    """The library that an array belongs to, without importing any."""
    jax, torch = sys.modules.get("jax"), sys.modules.get("torch")
    if jax is not None and isinstance(value, jax.Array):
        return "jax"
    return "torch" if torch is not None and isinstance(value, torch.Tensor) else "numpy"


def _is_shared(value: Any, kind: str) -> bool:
    """Whether other processes hold a part of the array."""
    if kind == "jax":
        return not value.is_fully_addressable
    return kind == "torch" and hasattr(value, "device_mesh")


def _whole(spec: TensorSpec, load: Callable[[], memoryview]) -> tuple[Box, ...]:
    return (Box((0,) * len(spec.shape), spec.shape, load),)


def _numpy_bytes(data: np.ndarray) -> memoryview:
    import numpy as np

    if data.dtype.byteorder == ">":
        data = data.astype(data.dtype.newbyteorder("<"))
    return as_bytes(np.ascontiguousarray(data))


def _of_numpy(spec: TensorSpec, value: Any) -> tuple[Box, ...]:
    import numpy as np

    if isinstance(value, (np.ndarray, np.generic)):
        return _whole(spec, lambda: _numpy_bytes(np.asarray(value)))
    kind = type(value)
    raise UnrepresentableError(
        f"{kind.__module__}.{kind.__qualname__} is a placeholder without elements",
        path=spec.name,
        cure="export the state itself, not the shapes of its arrays",
    )


def _of_jax(spec: TensorSpec, value: Any) -> tuple[Box, ...]:
    jax = sys.modules["jax"]
    if value.is_deleted():
        raise UnrepresentableError(
            "the buffer of the array was donated or deleted",
            path=spec.name,
            cure="export before the step that donates the array",
        )
    if jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
        value = jax.random.key_data(value)
    return tuple(_jax_box(spec, shard) for shard in value.addressable_shards if shard.replica_id == 0)


def _jax_box(spec: TensorSpec, shard: Any) -> Box:
    bounds = [part.indices(extent)[:2] for part, extent in zip(shard.index, spec.shape, strict=True)]
    offsets, sizes = tuple(a for a, _ in bounds), tuple(b - a for a, b in bounds)
    return Box(offsets, sizes, lambda: _jax_bytes(shard.data))


def _jax_bytes(array: Any) -> memoryview:
    """The bytes of one device's array.

    JAX keeps the host copy of an array with the array. So another array over the same buffer is copied to the host:
    otherwise the host would hold the whole state until the next step.
    """
    import numpy as np

    view = sys.modules["jax"].make_array_from_single_device_arrays(array.shape, array.sharding, [array])
    return _numpy_bytes(np.asarray(view))


def _of_torch(spec: TensorSpec, value: Any) -> tuple[Box, ...]:
    if value.is_meta or value.layout is not sys.modules["torch"].strided:
        raise UnrepresentableError(
            "a tensor on the meta device has no data"
            if value.is_meta
            else f"unsupported layout {value.layout}",
            path=spec.name,
            cure="convert it to a dense tensor with data, or remove it from the state",
        )
    if hasattr(value, "placements"):
        return _dtensor_boxes(spec, value)
    return _whole(spec, lambda: _torch_bytes(value))


def _dtensor_boxes(spec: TensorSpec, leaf: Any) -> tuple[Box, ...]:
    """The local shard of a DTensor, if this rank is the one that provides it."""
    if any(one.is_partial() for one in leaf.placements):
        raise UnrepresentableError(
            "unsupported DTensor placement Partial",
            path=spec.name,
            cure="redistribute it to Replicate or Shard first",
        )
    coordinates = leaf.device_mesh.get_coordinate()
    if coordinates is None:
        return ()
    if any(at for at, one in zip(coordinates, leaf.placements, strict=True) if one.is_replicate()):
        return ()
    found: list[Box] = []
    for chunk in leaf.__create_chunk_list__():
        if 0 not in chunk.sizes:
            local = leaf.to_local()
            found.append(
                Box(tuple(chunk.offsets), tuple(chunk.sizes), lambda local=local: _torch_bytes(local))
            )
    return tuple(found)


def _torch_bytes(tensor: Any) -> memoryview:
    torch = sys.modules["torch"]
    flat = tensor.detach().to("cpu").resolve_conj().resolve_neg().contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy()).cast("B")


_BOXES = {"numpy": _of_numpy, "jax": _of_jax, "torch": _of_torch}
