"""Placing: where the elements of a box lie in a tensor's canonical bytes.

A **band** is the fewest whole chunks of a grid that are contiguous in C order.
"""

from __future__ import annotations

import math
from itertools import product
from operator import mul
from typing import TYPE_CHECKING

from wherry.core import dtypes
from wherry.core.tensorspec import Span, region_shape

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from wherry.core.tensorspec import Region, TensorSpec


def band_at(spec: TensorSpec, cut: tuple[int, ...], at: int) -> tuple[Region, Span]:
    """The band that holds the byte at an offset, as a region and as a span.

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
    """Write a box of elements where they lie in the tensor, in runs as long as the shapes allow.

    Args:
        spec: the tensor.
        region: the box; what lies beyond the tensor's edge is left out.
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
    """First element of each run of a box, in C order; None where it lies beyond the tensor's edge."""
    strides = [math.prod(shape[number + 1 :]) for number in range(axis + 1)]
    first = region[axis].start * strides[axis]
    bounds = [
        (range(part.start, part.stop), extent)
        for part, extent in zip(region[:axis], shape[:axis], strict=True)
    ]
    for index in product(*(indices for indices, _extent in bounds)):
        outside = any(at >= extent for at, (_indices, extent) in zip(index, bounds, strict=True))
        yield None if outside else first + sum(map(mul, index, strides))
