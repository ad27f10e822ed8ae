"""Reads regions of raw zarr chunks: only the requested bytes are read, whatever the chunk grid.

tensorstore reads whole chunks, even for one row; a scanned tensor with one chunk per layer would be read once for every
band of rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from wherry.core import dtypes
from wherry.formats.reader import Extent
from wherry.mover.chunks import fill_from_chunks

if TYPE_CHECKING:
    from collections.abc import Iterator

    from wherry.core.tensorspec import Region, TensorSpec
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

    def place(cell: Region) -> Extent:
        (key,) = array.chunk_keys(cell)
        value = listing.values[key]
        assert value.file is not None
        return Extent(location.member(value.file), value.offset, value.length)

    fill_from_chunks(spec, array.zarr.chunks, place, region, buffer)
