"""Reads regions of tensors: by whatever access their contents have, and never more of a file than it takes.

- `read_region`, `read_array` and `read_bytes` read by any access; `fill` does so without comparing checksums.
- `fill_region` reads a region of raw bytes run by run, `fill_from_chunks` one of chunks that are stored as they are.
- `place` writes the elements of a box to their offsets in a tensor's canonical bytes.
- `band_at` finds a **band**: the fewest whole chunks of a grid that are contiguous in C order.
- `read_span` reads a span of canonical bytes from the files that hold it, `fill_range` a range of one file.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import product
from operator import mul
from typing import TYPE_CHECKING

from wherry import kernels
from wherry.core import dtypes
from wherry.core.lazy_dataclass import dataclass
from wherry.core.tensorspec import Region, Span, TensorSpec, c_strides, region_shape, region_within
from wherry.errors import CorruptError, storage_error
from wherry.formats.format import Access, Block, Chunked, Computed, Contents, Extent
from wherry.mover.checksums import ContainerChecksums
from wherry.mover.move import cells
from wherry.store.local_store import LocalStore
from wherry.store.location import Location
from wherry.store.open_file import readinto
from wherry.store.ranges import LARGEST, fill_together, requests_for

if TYPE_CHECKING:
    import numpy as np


# Fills memory from an offset in a tensor's canonical bytes.
Read = Callable[[int, memoryview], None]


_SHORT = 32 << 10  # bytes; a shorter run is read together with the gap before the next one
_WASTE = 16  # if the gap has at most this many times its bytes,
_GAP = 32 << 10  # or this many: reading them costs less than a call
_LONGEST = 4 << 20
_TOGETHER = 1 << 20
# bytes: the kernel copies these in the time of a call, and calls for a run alone where there are more
_SMALL_GAP = 4 << 10
_AT_A_TIME = 256 << 10  # bytes of runs and gaps that the kernel reads at a time: they stay in the cache
_held = threading.local()


def fill_region(
    spec: TensorSpec,
    region: Region,
    read: Read,
    out: memoryview,
    strides: tuple[int, ...] | None = None,
) -> None:
    """Read a region of a tensor whose canonical bytes are stored raw.

    Runs that are contiguous in the file are read directly into place; short runs are read together with the gaps
    between them, which costs less than a call for each.

    Args:
        spec: the tensor.
        region: step-1 slices with explicit bounds.
        read: fills a buffer from an offset in the tensor's canonical bytes.
        out: receives the region.
        strides: bytes from an element of each axis to the next in `out`; those of C order by default.

    Raises:
        CorruptError: a file is shorter than its metadata states.
        StorageError: the storage failed.
    """
    extents = region_shape(region)
    if 0 in extents:
        return
    size = dtypes.canonical_size(spec.dtype, 1)
    apart = strides or c_strides(extents, size)
    if isinstance(read, RawBytes) and _gather(spec, region, read, out, apart):
        return
    if strides is None:
        _fill_in_order(spec, region, read, out)
        return
    held = memoryview(bytearray(math.prod(extents) * size))
    _fill_in_order(spec, region, read, held)
    import numpy as np

    target = np.ndarray((*extents, size), "u1", out, strides=(*strides, 1))
    target[...] = np.frombuffer(held, "u1").reshape(target.shape)


def _gather(
    spec: TensorSpec, region: Region, read: RawBytes, out: memoryview, apart: tuple[int, ...]
) -> bool:
    """Read a region by the kernel. Returns whether that was possible: the tensor is in one local file."""
    extent = read.extent
    store = extent.location.store if extent is not None else None
    if extent is None or not isinstance(store, LocalStore) or kernels.load() is None:
        return False
    size = dtypes.canonical_size(spec.dtype, 1)
    strides = c_strides(spec.shape, size)
    first = extent.offset + sum(part.start * step for part, step in zip(region, strides, strict=True))
    axes = zip(region_shape(region), strides, apart, strict=True)
    # Axes that go on where the next one ends are one, in the file and in memory; the innermost are a run of bytes.
    grid: list[tuple[int, int, int]] = []
    for count, step, out_step in [*(axis for axis in axes if axis[0] > 1), (size, 1, 1)]:
        if grid and grid[-1][1:] == (count * step, count * out_step):
            grid[-1] = (grid[-1][0] * count, step, out_step)
        else:
            grid.append((count, step, out_step))
    length = grid.pop()[0]
    if not grid:
        return False  # one run
    needed = first + sum((count - 1) * step for count, step, _out_step in grid) + length
    if needed > extent.offset + extent.length:
        return False  # the tensor is truncated: reading it in order says so
    gap = grid[-1][1] - length
    near = length < _SHORT and gap <= max(_WASTE * length, _GAP)
    together = near and gap <= _SMALL_GAP
    location = extent.location
    try:
        with store.descriptor(location.path) as descriptor, _with_gaps(_AT_A_TIME if together else 0) as held:
            if near and not together and hasattr(os, "posix_fadvise"):
                # The system takes runs with gaps for reads at random, and would wait for each.
                os.posix_fadvise(descriptor, first, needed - first, os.POSIX_FADV_WILLNEED)
            if kernels.gather(descriptor, first, length, grid, out, held):
                return True
            nbytes = os.fstat(descriptor).st_size
    except OSError as error:
        raise storage_error(error, location.uri) from error
    raise CorruptError(
        f"the file is truncated: expected {needed} bytes or more, got {nbytes}",
        uri=location.uri,
        path=spec.name,
    )


def _fill_in_order(spec: TensorSpec, region: Region, read: Read, out: memoryview) -> None:
    size, done = dtypes.canonical_size(spec.dtype, 1), 0
    for block in _blocks(spec, region, size):
        wanted = math.prod(region_shape(block)) * size
        _fill_block(spec, block, read, out[done : done + wanted])
        done += wanted


def _blocks(spec: TensorSpec, region: Region, size: int) -> Iterator[Region]:
    """Split a region into contiguous parts whose short runs can be read together."""
    axis = _cut(spec.shape, region, size)
    run = math.prod(region_shape(region[axis:])) * size
    row = math.prod(spec.shape[axis:]) * size
    near = row - run <= max(_WASTE * run, _GAP)
    rows = _TOGETHER // row if axis and run < _SHORT and near else 1
    if rows <= 1:
        yield region
        return
    cut = region[axis - 1]
    for place in product(*(range(part.start, part.stop) for part in region[: axis - 1])):
        outer = tuple(slice(index, index + 1) for index in place)
        for start in range(cut.start, cut.stop, rows):
            yield (*outer, slice(start, min(start + rows, cut.stop)), *region[axis:])


def _fill_block(spec: TensorSpec, region: Region, read: Read, out: memoryview) -> None:
    import numpy as np

    size = dtypes.canonical_size(spec.dtype, 1)
    axis, extents = _cut(spec.shape, region, size), region_shape(region)
    strides = c_strides(spec.shape, size)
    first = sum(part.start * stride for part, stride in zip(region[axis:], strides[axis:], strict=True))
    last = sum((part.stop - 1) * stride for part, stride in zip(region[axis:], strides[axis:], strict=True))
    wanted, covered = math.prod(extents[axis:]) * size, last - first + size
    places = product(*(range(part.start, part.stop) for part in region[:axis]))
    starts = (
        first + sum(index * stride for index, stride in zip(one, strides[:axis], strict=True))
        for one in places
    )
    if covered == wanted:
        for turn, offset in enumerate(starts):
            read(offset, out[turn * wanted : (turn + 1) * wanted])
        return
    with _with_gaps(covered) as between:
        for turn, offset in enumerate(starts):
            read(offset, between)
            kept = np.ndarray((*extents[axis:], size), "u1", between, strides=(*strides[axis:], 1))
            target = out[turn * wanted : (turn + 1) * wanted]
            np.frombuffer(target, "u1").reshape(kept.shape)[...] = kept


@contextmanager
def _with_gaps(nbytes: int) -> Generator[memoryview]:
    """Memory of this thread for what is read together with gaps: fresh memory costs as much as the reading."""
    held: bytearray | None = getattr(_held, "buffer", None)
    _held.buffer = None
    if held is None or len(held) < nbytes:
        held = bytearray(nbytes)
    yield memoryview(held)[:nbytes]
    _held.buffer = held


def _cut(shape: tuple[int, ...], region: Region, size: int) -> int:
    """The axis from which a region is read in one call for each index of the axes before it."""
    axis = len(shape)
    wanted, covered = size, size
    while axis > 0:
        part = region[axis - 1]
        row = math.prod(shape[axis:]) * size
        wanted *= part.stop - part.start
        wider = (part.stop - part.start - 1) * row + covered
        if wider > wanted and (covered >= _SHORT or wider > _WASTE * wanted or wider > _LONGEST):
            return axis
        covered, axis = wider, axis - 1
    return axis


def band_at(spec: TensorSpec, cut: tuple[int, ...], at: int) -> tuple[Region, Span]:
    """The band (consecutive rows of a tensor) that holds the byte at an offset, as a region and as a span.

    Args:
        spec: the tensor.
        cut: extents of a band: ones, then one cut axis, then full extents.
        at: offset in its canonical bytes.
    """
    axis = next((axis for axis, step in enumerate(cut) if step > 1), len(cut) - 1)
    row = dtypes.canonical_size(spec.dtype, math.prod(spec.shape[axis + 1 :]))
    plane, inside = divmod(at // row, spec.shape[axis])
    first = inside - inside % cut[axis]
    stop = min(first + cut[axis], spec.shape[axis])
    leading: list[slice] = []
    rest = plane
    for extent in reversed(spec.shape[:axis]):
        rest, index = divmod(rest, extent)
        leading.append(slice(index, index + 1))
    base = plane * spec.shape[axis]
    region = (*reversed(leading), slice(first, stop), *spec.whole[axis + 1 :])
    return region, Span((base + first) * row, (base + stop) * row)


def place(
    spec: TensorSpec,
    region: Region,
    pieces: Iterable[memoryview],
    write: Callable[[memoryview, int], None],
) -> None:
    """Write the elements of a box to their places in the tensor, in runs as long as the shapes allow.

    Args:
        spec: the tensor.
        region: the box; elements beyond the tensor's edge are skipped.
        pieces: its elements in C order.
        write: takes bytes and their offset in the tensor's canonical bytes.
    """
    extents = region_shape(region)
    axis = len(extents) - 1
    while axis > 0 and extents[axis] == spec.shape[axis]:
        axis -= 1
    inner = dtypes.canonical_size(spec.dtype, math.prod(spec.shape[axis + 1 :]))
    valid = (min(region[axis].stop, spec.shape[axis]) - region[axis].start) * inner
    run, filled = extents[axis] * inner, 0
    starts = _run_starts(spec.shape, region, axis)
    at = next(starts)
    for piece in pieces:
        position = 0
        while position < len(piece):
            if filled == run:
                at, filled = next(starts), 0
            part = piece[position : position + run - filled]
            if at is not None and filled < valid:
                write(part[: valid - filled], dtypes.canonical_size(spec.dtype, at) + filled)
            filled += len(part)
            position += len(part)


def _run_starts(shape: tuple[int, ...], region: Region, axis: int) -> Iterator[int | None]:
    """First element of each run of a box, in C order; None if it is beyond the tensor's edge."""
    strides = c_strides(shape)[: axis + 1]
    first = region[axis].start * strides[axis]
    bounds = [
        (range(part.start, part.stop), extent)
        for part, extent in zip(region[:axis], shape[:axis], strict=True)
    ]
    for index in product(*(indices for indices, _extent in bounds)):
        outside = any(at >= extent for at, (_indices, extent) in zip(index, bounds, strict=True))
        yield None if outside else first + sum(map(mul, index, strides))


def file_offset(extents: tuple[Extent, ...], at: int) -> int:
    """The offset of a canonical byte in its file."""
    position = 0
    for extent in extents:
        if at < position + extent.length:
            return extent.offset + at - position
        position += extent.length
    return 0


@dataclass(frozen=True, slots=True)
class RawBytes:
    """Fills buffers with a tensor's canonical bytes, which are stored raw in files.

    Attributes:
        extents: the byte ranges of the tensor in files.
        spec: the tensor.
    """

    extents: tuple[Extent, ...]
    spec: TensorSpec

    def __call__(self, at: int, buffer: memoryview) -> None:
        """Fill a buffer from an offset in the tensor's canonical bytes; see `read_span`."""
        read_span(self.extents, Span(at, at + len(buffer)), buffer, self.spec)

    @property
    def extent(self) -> Extent | None:
        """The only byte range; None if there are several."""
        return self.extents[0] if len(self.extents) == 1 else None


def read_span(
    extents: tuple[Extent, ...], span: Span, buffer: memoryview, spec: TensorSpec, *, straight: bool = False
) -> None:
    """Fill a buffer with canonical bytes that are stored raw in files.

    Args:
        extents: the byte ranges of the tensor in files.
        span: the bytes to read.
        buffer: receives the bytes.
        spec: the tensor, for error messages.
        straight: use direct I/O, past the page cache, where it is supported.

    Raises:
        CorruptError: a file is shorter than its metadata states.
        StorageError: the storage failed.
    """
    position = 0
    for extent in extents:
        start, stop = max(span.start, position), min(span.stop, position + extent.length)
        if start < stop:
            part = buffer[start - span.start : stop - span.start]
            fill_range(extent.location, extent.offset + start - position, part, spec, straight=straight)
        position += extent.length
    if position < span.stop:
        raise CorruptError(
            f"the tensor is truncated: expected {spec.nbytes} bytes, got {position}", path=spec.name
        )


def fill_range(
    location: Location, offset: int, buffer: memoryview, spec: TensorSpec, *, straight: bool
) -> None:
    """Fill a buffer from an offset of a file; see `read_span`."""
    store = location.store
    if len(buffer) > LARGEST and not store.capabilities.local:
        requests = requests_for([(offset, offset + len(buffer))])
        fill_together([(location, one, buffer[one.start - offset : one.stop - offset]) for one in requests])
        return
    read = (
        partial(readinto, root=store.root) if straight and isinstance(store, LocalStore) else store.readinto
    )
    filled = 0
    while filled < len(buffer):
        try:
            count = read(location.path, offset + filled, buffer[filled:])
        except OSError as error:
            raise storage_error(error, location.uri) from error
        if count == 0:
            raise CorruptError(
                f"the file is truncated: expected {offset + len(buffer)} bytes or more, got {offset + filled}",
                uri=location.uri,
                path=spec.name,
            )
        filled += count


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
    """Fill memory with the canonical bytes of a region that is not empty; checksums are not compared."""
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
    """Fill memory as `fill` does, and compare the recorded checksums of a tensor that is read whole."""
    fill(access, spec, region, out)
    extents = access.extents if region == spec.whole else None
    if extents and any(extent.crc32 is not None for extent in extents):
        ContainerChecksums().update(extents, Span(0, len(out)), out, spec)


def _require(access: Access, region: Region) -> Access:
    """Return the access if no chunk of a region is missing, so that no memory is allocated for missing chunks."""
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
