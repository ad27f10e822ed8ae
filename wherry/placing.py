"""Placing: where the elements of a box lie in a tensor's canonical bytes.

A **band** is the fewest whole chunks of a grid that are contiguous in C order.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from wherry import dtypes
from wherry.tensorspec import Span, region_shape

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from wherry.tensorspec import Region, TensorSpec


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
    run, position = extents[axis] * inner, 0
    for piece in pieces:
        begun = position
        while position - begun < len(piece):
            row, within = divmod(position, run)
            part = piece[position - begun : position - begun + run - within]
            element = _row_start(spec.shape, region, axis, row)
            if element is not None and within < valid:
                offset = dtypes.canonical_size(spec.dtype, element) + within
                write(part[: valid - within], offset)
            position += len(part)


def _row_start(shape: tuple[int, ...], region: Region, axis: int, row: int) -> int | None:
    """First element of a run; None where it lies beyond the tensor's edge."""
    stride = math.prod(shape[axis + 1 :])
    element = region[axis].start * stride
    stride *= shape[axis]
    for part, extent in zip(reversed(region[:axis]), reversed(shape[:axis]), strict=True):
        row, index = divmod(row, part.stop - part.start)
        if part.start + index >= extent:
            return None
        element += (part.start + index) * stride
        stride *= extent
    return element
