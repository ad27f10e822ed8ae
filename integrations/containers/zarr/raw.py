"""Reads regions of raw zarr chunks: only the requested bytes are read, whatever the chunk grid.

tensorstore reads whole chunks, even for one row; a scanned tensor with one chunk per layer would be read once for every
band of rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from wherry.core import dtypes
from wherry.core.tensorspec import TensorSpec, region_shape, region_within
from wherry.formats.reader import Extent
from wherry.mover.move import cells
from wherry.mover.regions import fill_region, raw_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from wherry.core.tensorspec import Region
    from wherry.integrations.containers.zarr.listing import Listing
    from wherry.integrations.containers.zarr.metadata import ZarrArray
    from wherry.storage.location import Location


class ChunkedArray(Protocol):
    """The part of an array's interface that is used here."""

    @property
    def zarr(self) -> ZarrArray:
        """Its metadata."""
        ...

    def chunk_keys(self, region: Region | None = None) -> Iterator[str]:
        """Keys of the chunks that a region touches."""
        ...


def readable(array: ChunkedArray, listing: Listing | None) -> bool:
    """Whether an array's chunks are stored raw in files."""
    if not array.zarr.raw or listing is None or dtypes.opaque(array.zarr.dtype):
        return False
    first = listing.values.get(next(array.chunk_keys(), ""))
    return first is not None and first.file is not None


def fill(
    array: ChunkedArray,
    listing: Listing,
    location: Location,
    spec: TensorSpec,
    region: Region,
    buffer: memoryview,
) -> None:
    """Copy the elements of a region into a buffer; the caller has checked that all its chunks exist.

    Raises:
        CorruptError: a file is truncated.
        StorageError: the storage failed.
    """
    import numpy as np

    chunk = TensorSpec(spec.path, array.zarr.chunks, array.zarr.dtype)
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
        (key,) = array.chunk_keys(common)
        value = listing.values[key]
        assert value.file is not None
        extents = (Extent(location.member(value.file), value.offset, chunk.nbytes),)
        inside = region_within(common, cell)
        if common == region:
            _read(chunk, extents, inside, buffer)
            return
        part = np.empty(region_shape(inside), whole.dtype)
        _read(chunk, extents, inside, part.reshape(-1).view("u1").data)
        whole[region_within(common, region)] = part


def _read(chunk: TensorSpec, extents: tuple[Extent, ...], region: Region, out: memoryview) -> None:
    fill_region(chunk, region, raw_bytes(extents, chunk), out)
