"""Regions of tensors whose canonical bytes lie raw, read run by run and never as the whole tensor."""

from __future__ import annotations

import math
from itertools import product
from typing import TYPE_CHECKING

from wherry.core import dtypes
from wherry.core.tensorspec import Region, TensorSpec, region_shape

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


_SHORT = 32 << 10  # a run below this is read together with what lies between it and the next
_WASTE = 16  # but at most so many times the bytes that are wanted
_LONGEST = 4 << 20
_TOGETHER = 1 << 20


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
