"""Reads regions of tensors whose chunks are stored as they are: only the requested bytes, whatever the chunk grid."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from wherry.core import dtypes
from wherry.core.tensorspec import TensorSpec, region_shape, region_within
from wherry.mover.move import cells
from wherry.mover.regions import fill_region, raw_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from wherry.core.tensorspec import Region
    from wherry.formats.reader import Extent


def fill_from_chunks(
    spec: TensorSpec,
    chunks: tuple[int, ...],
    place: Callable[[Region], Extent],
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
    import numpy as np

    chunk = TensorSpec(spec.path, chunks, spec.dtype)
    whole = np.frombuffer(buffer, dtypes.numpy_dtype(spec.dtype)).reshape(region_shape(region))
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
            slice(own.start, min(own.stop, size)) for own, size in zip(cell, spec.shape, strict=True)
        )
        extent = replace(place(known), length=chunk.nbytes)
        inside = region_within(common, cell)
        if common == region:
            _read(chunk, extent, inside, buffer)
            return
        part = np.empty(region_shape(inside), whole.dtype)
        _read(chunk, extent, inside, part.reshape(-1).view("u1").data)
        whole[region_within(common, region)] = part


def _read(chunk: TensorSpec, extent: Extent, region: Region, out: memoryview) -> None:
    fill_region(chunk, region, raw_bytes((extent,), chunk), out)
