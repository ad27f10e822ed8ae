"""Boxes: regions of a stored tensor as ranges of axes, and back. Pure index arithmetic.

A **box** gives each axis of a parameter a range [start, stop). A dimension that fuses several axes is a mixed-radix
number: a range of it is a few boxes (a partial first run, whole runs, a partial last one), and a box is a set of
elements with one stride per axis.
"""

from __future__ import annotations

import math
from itertools import product
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from wherry.core.tensorspec import Region
    from wherry.layout.layout import Sizes

Range: TypeAlias = tuple[int, int]
Box: TypeAlias = "dict[str, Range]"
Groups: TypeAlias = "tuple[tuple[str, ...], ...]"


def boxes_of(region: Region, groups: Groups, sizes: Sizes) -> Iterator[Box]:
    """A region of a tensor as disjoint boxes that cover it.

    Args:
        region: one step-1 slice per dimension, without padding.
        groups: the axes fused in each dimension.
        sizes: the extent of every axis.
    """
    choices = [
        list(_runs(part.start, part.stop, [sizes[name] for name in names]))
        for part, names in zip(region, groups, strict=True)
    ]
    for choice in product(*choices):
        yield {
            name: bounds
            for names, ranges in zip(groups, choice, strict=True)
            for name, bounds in zip(names, ranges, strict=True)
        }


def _runs(start: int, stop: int, extents: Sequence[int]) -> Iterator[tuple[Range, ...]]:
    """A range of a mixed-radix number as boxes of its digits."""
    if start >= stop:
        return
    if not extents:
        yield ()
        return
    inner = math.prod(extents[1:])
    (first, head), (last, tail) = divmod(start, inner), divmod(stop, inner)
    if first == last:
        yield from _within(first, head, tail, extents)
        return
    if head:
        yield from _within(first, head, inner, extents)
        first += 1
    if first < last:
        yield ((first, last), *((0, extent) for extent in extents[1:]))
    if tail:
        yield from _within(last, 0, tail, extents)


def _within(digit: int, start: int, stop: int, extents: Sequence[int]) -> Iterator[tuple[Range, ...]]:
    for rest in _runs(start, stop, extents[1:]):
        yield ((digit, digit + 1), *rest)


def bounding(box: Box, groups: Groups, sizes: Sizes) -> Region:
    """The smallest region of a tensor that holds a box."""
    parts: list[slice] = []
    for names in groups:
        strides = fused_strides(names, sizes)
        first = sum(box[name][0] * strides[name] for name in names)
        last = sum((box[name][1] - 1) * strides[name] for name in names)
        parts.append(slice(first, last + 1))
    return tuple(parts)


def fused_strides(names: Sequence[str], sizes: Sizes) -> dict[str, int]:
    """For each axis fused in a dimension, its stride along that dimension."""
    return {name: math.prod(sizes[inner] for inner in names[place + 1 :]) for place, name in enumerate(names)}


def elements(box: Mapping[str, Range]) -> int:
    """The number of elements of a box."""
    return math.prod(stop - start for start, stop in box.values())


def dense_boxes(box: Box, groups: Groups, sizes: Sizes, slack: int) -> Iterator[Box]:
    """Cut a box until the region that bounds each part is at most `slack` times as large as the part.

    A box that takes a part of an inner axis of a fused dimension is scattered over that dimension; the elements
    between its parts would be read in vain.
    """
    region = bounding(box, groups, sizes)
    spread = math.prod(part.stop - part.start for part in region)
    held = elements({name: box[name] for names in groups for name in names})
    outer = _scattered_axis(box, groups, region) if spread > slack * held else None
    if outer is None:
        yield box
        return
    for index in range(*box[outer]):
        yield from dense_boxes({**box, outer: (index, index + 1)}, groups, sizes, slack)


def _scattered_axis(box: Box, groups: Groups, region: Region) -> str | None:
    """The outermost axis of the dimension whose region is largest relative to the part that the box takes of it."""

    def waste(place: int) -> float:
        part, names = region[place], groups[place]
        return (part.stop - part.start) / elements({name: box[name] for name in names})

    worst = max(range(len(groups)), key=waste)
    if waste(worst) == 1:
        return None
    return next(name for name in groups[worst] if box[name][1] - box[name][0] > 1)
