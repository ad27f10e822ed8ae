"""Reads regions of tensors whose chunks are stored as they are: only the requested bytes, whatever the chunk grid."""

from __future__ import annotations

from typing import TYPE_CHECKING

from wherry.core import dtypes
from wherry.core.tensorspec import TensorSpec, c_strides, region_shape, region_within
from wherry.mover.move import cells
from wherry.mover.regions import RawBytes, fill_region

if TYPE_CHECKING:
    from collections.abc import Callable

    from wherry.core.tensorspec import Region
    from wherry.formats.contents import Extent


def fill_from_chunks(
    spec: TensorSpec,
    chunks: tuple[int, ...],
    place: Callable[[Region], Extent | None],
    region: Region,
    buffer: memoryview,
) -> None:
    """Copy the elements of a region into a buffer.

    Args:
        spec: the tensor.
        chunks: extents of a chunk as it is stored, with padding at the edge of the tensor.
        place: gives the first byte of a chunk, which is cut at the edge of the tensor.
        region: the elements.
        buffer: receives them in C order.

    Raises:
        CorruptError: a file is truncated.
        StorageError: the storage failed.
    """
    chunk, extents = TensorSpec(spec.path, chunks, spec.dtype), region_shape(region)
    size = dtypes.canonical_size(spec.dtype, 1)
    strides = c_strides(extents, size)
    touched = tuple(
        slice(part.start // step * step, -(-part.stop // step) * step)
        for part, step in zip(region, chunk.shape, strict=True)
    )
    for cell in cells(touched, chunk.shape):
        common = tuple(
            slice(max(part.start, own.start), min(part.stop, own.stop))
            for part, own in zip(region, cell, strict=True)
        )
        known = tuple(
            slice(own.start, min(own.stop, extent)) for own, extent in zip(cell, spec.shape, strict=True)
        )
        extent = place(known)
        assert extent is not None
        read = RawBytes((extent._replace(length=chunk.nbytes),), chunk)
        inside = region_within(common, cell)
        if common == region:
            fill_region(chunk, inside, read, buffer)
            return
        at = region_within(common, region)
        first = sum(part.start * step for part, step in zip(at, strides, strict=True))
        fill_region(chunk, inside, read, buffer[first:], strides)
