"""PyTorch tensors from a checkpoint, filled in place: the local part of a DTensor, on any device.

A tensor is filled in parts, so that only one part at a time needs additional memory. A tensor on `meta` has no memory;
it is replaced by a new one on the CPU. Facts (torch 2.13, `DTensor`): each mesh axis in turn splits the rest of its
dimension into parts of ⌈n / ranks⌉; the last parts may be short or empty.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from wherry.core.tensorspec import Region, TensorSpec, row_bands
from wherry.errors import MismatchError, UnsupportedError
from wherry.integrations.live.leaves import region_bytes

if TYPE_CHECKING:
    import numpy as np

    from wherry.live.match import Leaf

_PART = 64 << 20


def fill(
    leaf: Leaf,
    read: Callable[[Region], np.ndarray],
    room: Callable[[int], AbstractContextManager[None]],
    memory: int,
) -> Any:
    """See `filling.fill`.

    Raises:
        UnsupportedError: the placement is neither Replicate nor Shard.
    """
    import torch

    tensor: Any = leaf.value
    if tensor.is_meta:
        if hasattr(tensor, "device_mesh"):
            raise UnsupportedError(
                "the DTensor has no memory (device meta)",
                path=leaf.name,
                cure="call model.to_empty(device=…) first",
            )
        tensor = torch.empty(leaf.shape, dtype=tensor.dtype, device="cpu")
    starts, extents = local_box(tensor, leaf.name)
    local: Any = tensor.to_local() if hasattr(tensor, "device_mesh") else tensor
    if tuple(local.shape) != extents:
        raise MismatchError(
            f"expected a local shard of shape {extents}, got {tuple(local.shape)}", path=leaf.name
        )
    part = TensorSpec(leaf.path, extents, leaf.dtype or "")
    with torch.no_grad():
        for box, _span in row_bands(part, min(memory, _PART)) if part.size else ():
            region = tuple(slice(at + one.start, at + one.stop) for at, one in zip(starts, box, strict=True))
            with room(region_bytes(part.dtype, box)):
                local[box].copy_(of_host(read(region), tensor.dtype))
    return tensor


def local_box(tensor: Any, name: str = "") -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Offset and extents of a rank's part of a tensor; the whole tensor if it is not a DTensor.

    Raises:
        UnsupportedError: the placement is neither Replicate nor Shard.
    """
    starts, extents = [0] * tensor.ndim, list(tensor.shape)
    mesh = getattr(tensor, "device_mesh", None)
    if mesh is None:
        return tuple(starts), tuple(extents)
    for number, placement in enumerate(tensor.placements):
        kind = type(placement).__name__
        if kind == "Replicate":
            continue
        if kind != "Shard":
            raise UnsupportedError(
                f"unsupported DTensor placement {placement}",
                path=name,
                cure="redistribute it to Shard or Replicate",
            )
        rank, ranks = mesh.get_local_rank(number), mesh.size(number)
        width = -(-extents[placement.dim] // ranks)
        begin = min(rank * width, extents[placement.dim])
        starts[placement.dim] += begin
        extents[placement.dim] = min(begin + width, extents[placement.dim]) - begin
    return tuple(starts), tuple(extents)


def of_host(array: np.ndarray, dtype: Any) -> Any:
    """A tensor over the memory of an array; element types that numpy lacks are viewed through their bytes."""
    import torch

    if not array.size:
        return torch.empty(array.shape, dtype=dtype)
    raw: Any = torch.from_numpy(array.reshape(-1).view("u1"))
    return raw.view(dtype).reshape(array.shape)


def host(tensor: Any) -> np.ndarray:
    """The elements of a rank's part of a tensor as bytes on the host."""
    import numpy as np
    import torch

    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    flat = local.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy() if flat.numel() else np.empty(0, "u1")
