"""Reads regions of tensors, by whatever access their contents have."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from wherry.core import dtypes
from wherry.core.tensorspec import Span, region_shape
from wherry.formats.contents import Block, Chunked, Computed
from wherry.mover.checksums import ContainerChecksums
from wherry.mover.chunks import fill_from_chunks
from wherry.mover.regions import RawBytes, fill_region, read_span

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np

    from wherry.core.tensorspec import Region, TensorSpec
    from wherry.formats.contents import Access, Contents


def read_region(contents: Contents, spec: TensorSpec, region: Region, out: memoryview) -> None:
    """Fill memory with the canonical bytes of a region.

    Checksums that a container records of byte ranges are compared where the tensor is read whole.

    Args:
        contents: of the checkpoint.
        spec: the tensor.
        region: step-1 slices with explicit bounds; the whole tensor if numpy does not support its dtype.
        out: as many bytes as the region has.

    Raises:
        DamagedError: bytes are missing or corrupt.
        StorageError: the storage failed.
    """
    if len(out):
        _fill_and_compare(contents.access(spec), spec, region, out)


def fill(access: Access, spec: TensorSpec, region: Region, out: memoryview) -> None:
    """Fill memory with the canonical bytes of a region that is not empty, without a look at checksums."""
    if isinstance(access, Computed):
        access.fill(region, out)
    elif isinstance(access, Chunked):
        access.require(region)
        if access.decoder is None:
            fill_from_chunks(spec, access.grid, access.place, region, out)
        else:
            access.decoder.fill(region, out)
    elif region == spec.whole:
        read_span(access.extents, Span(0, len(out)), out, spec)
    else:
        fill_region(spec, region, RawBytes(access.extents, spec), out)


def _fill_and_compare(access: Access, spec: TensorSpec, region: Region, out: memoryview) -> None:
    """The same, and compare the recorded checksums of a tensor that is read whole."""
    fill(access, spec, region, out)
    extents = access.extents if region == spec.whole else None
    if extents and any(extent.crc32 is not None for extent in extents):
        ContainerChecksums().update(extents, Span(0, len(out)), out, spec)


def _require(access: Access, region: Region) -> Access:
    """The same access, if no chunk of a region is missing: no memory is taken for what is not there."""
    if isinstance(access, Chunked):
        access.require(region)
    return access


def read_array(contents: Contents, spec: TensorSpec, region: Region) -> np.ndarray:
    """The elements of a region: a new C-order little-endian array of a dtype that numpy supports; see `read_region`."""
    import numpy as np

    shape, dtype = region_shape(region), dtypes.numpy_dtype(spec.dtype)
    if 0 in shape:
        return np.empty(shape, dtype)
    access = _require(contents.access(spec), region)
    found = np.empty(shape, dtype)
    _fill_and_compare(access, spec, region, found.reshape(-1).view("u1").data)
    return found


def read_bytes(contents: Contents, spec: TensorSpec) -> bytes:
    """Canonical bytes of a whole tensor of any dtype; see `read_region`."""
    access = _require(contents.access(spec), spec.whole)
    found = bytearray(spec.nbytes)
    if found:
        _fill_and_compare(access, spec, spec.whole, memoryview(found))
    return bytes(found)


def blocks_of_cell(
    access: Access, spec: TensorSpec, cell: Region, *, in_pieces: bool | None = None
) -> Iterator[Block]:
    """The elements of one cell of a grid, decoded.

    Args:
        access: how the tensor is read.
        spec: the tensor.
        cell: the cell.
        in_pieces: whether they are decoded in pieces, which their decoder must allow; by default wherever it
            does.
    """
    decoder = access.decoder
    if decoder is not None and (in_pieces or (in_pieces is None and decoder.memory(cell))):
        return decoder.decode(cell)
    return iter([Block(cell, _in_one_piece(access, spec, cell))])


def _in_one_piece(access: Access, spec: TensorSpec, cell: Region) -> Iterator[memoryview]:
    held = memoryview(bytearray(region_bytes(spec, cell)))
    if held:
        fill(access, spec, cell, held)
    yield held


def memory_for(access: Access, spec: TensorSpec, region: Region) -> int:
    """Bytes of memory that filling a region takes, besides the region's own."""
    if isinstance(access, Computed):
        return access.memory(region)
    return 0 if access.decoder is None else region_bytes(spec, region)


def region_bytes(spec: TensorSpec, region: Region) -> int:
    """Canonical bytes of a region."""
    return dtypes.canonical_size(spec.dtype, math.prod(region_shape(region)))
