"""The units of work of a relayout, what each holds in memory, and regions of tensors whose bytes lie raw in a file."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

from wherry import dtypes
from wherry.layout_bands import bands
from wherry.move import cells
from wherry.relayout import Pieces, Stored, copies
from wherry.tensorspec import Region, Span, TensorSpec, region_shape

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from wherry.keypath import KeyPath

_SHORT = 32 << 10  # a run below this is read together with what lies between it and the next
_WASTE = 16  # but at most so many times the bytes that are wanted
_LONGEST = 4 << 20
_TOGETHER = 1 << 20


@dataclass(frozen=True, slots=True)
class RelayoutMove:
    """A region of one target tensor that is gathered and written as a whole.

    Attributes:
        target: key path of the tensor.
        region: of it.
        span: its canonical bytes, where it is contiguous in C order; None for a chunk that is not.
    """

    target: KeyPath
    region: Region
    span: Span | None


def relayout_moves(target: Stored, sources: Pieces, limit: int) -> Iterator[RelayoutMove]:
    """Cut a target tensor into moves: its chunks where it has a grid, else bands of at most `limit` bytes."""
    spec = target.spec
    if spec.chunks is None:
        for region, span in bands(target, limit, sources):
            yield RelayoutMove(spec.path, region, span)
        return
    for region in cells(spec.whole, spec.chunks):
        yield RelayoutMove(spec.path, region, None)


def held_bytes(target: Stored, region: Region, sources: Pieces) -> int:
    """Bytes in memory while a region is gathered: the region, the largest part that is read for it, and its cast."""
    own = dtypes.canonical_size(target.spec.dtype, math.prod(region_shape(region)))
    largest = 0
    for copy in copies(target, region, sources):
        converted = bool(copy.steps) or copy.source.dtype != target.spec.dtype
        elements = math.prod(region_shape(copy.region))
        largest = max(largest, copy.nbytes + (8 * elements if converted else 0))
    return own + largest


def read_bytes(target: Stored, region: Region, sources: Pieces) -> int:
    """Bytes that are read for a region."""
    return sum(copy.nbytes for copy in copies(target, region, sources))


def fill_region(
    spec: TensorSpec, region: Region, read: Callable[[int, memoryview], None], out: memoryview
) -> None:
    """Read a region of a tensor whose canonical bytes lie raw.

    Runs that are contiguous in the file are read where they belong; short ones are read together with what lies
    between them, which costs less than a call for each.

    Args:
        spec: the tensor.
        region: step-1 slices with explicit bounds.
        read: fills a buffer from an offset in the tensor's canonical bytes.
        out: receives the region in C order.
    """
    size = dtypes.canonical_size(spec.dtype, 1)
    if 0 in region_shape(region):
        return
    done = 0
    for block in _blocks(spec, region, size):
        wanted = math.prod(region_shape(block)) * size
        _fill_block(spec, block, read, out[done : done + wanted])
        done += wanted


def _blocks(spec: TensorSpec, region: Region, size: int) -> Iterator[Region]:
    """A region as parts, contiguous in it, whose short runs can be read together."""
    axis = _cut(spec.shape, region, size)
    run = math.prod(region_shape(region[axis:])) * size
    row = math.prod(spec.shape[axis:]) * size
    rows = _TOGETHER // row if axis and run < _SHORT and row <= _WASTE * run else 1
    if rows <= 1:
        yield region
        return
    cut = region[axis - 1]
    for place in product(*(range(part.start, part.stop) for part in region[: axis - 1])):
        outer = tuple(slice(index, index + 1) for index in place)
        for start in range(cut.start, cut.stop, rows):
            yield (*outer, slice(start, min(start + rows, cut.stop)), *region[axis:])


def _fill_block(
    spec: TensorSpec, region: Region, read: Callable[[int, memoryview], None], out: memoryview
) -> None:
    import numpy as np

    size = dtypes.canonical_size(spec.dtype, 1)
    axis, extents = _cut(spec.shape, region, size), region_shape(region)
    strides = [math.prod(spec.shape[place + 1 :]) * size for place in range(len(extents))]
    first = sum(part.start * stride for part, stride in zip(region[axis:], strides[axis:], strict=True))
    last = sum((part.stop - 1) * stride for part, stride in zip(region[axis:], strides[axis:], strict=True))
    wanted, covered = math.prod(extents[axis:]) * size, last - first + size
    between = memoryview(bytearray(covered)) if covered > wanted else None
    for turn, place in enumerate(product(*(range(part.start, part.stop) for part in region[:axis]))):
        offset = first + sum(index * stride for index, stride in zip(place, strides[:axis], strict=True))
        target = out[turn * wanted : (turn + 1) * wanted]
        if between is None:
            read(offset, target)
            continue
        read(offset, between)
        kept = np.ndarray((*extents[axis:], size), "u1", between, strides=(*strides[axis:], 1))
        np.frombuffer(target, "u1").reshape(kept.shape)[...] = kept


def _cut(shape: tuple[int, ...], region: Region, size: int) -> int:
    """The axis from which on a region is read at one go for each index of the axes before it."""
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
