"""Transposition: permute the axes of an array at memory speed.

A plain `copyto(out, a.transpose(order))` of two-byte elements runs at 0.3 GB/s if the innermost axis changes, since
every element touches another cache line. Here axes that remain adjacent are fused first, so most permutations of a
checkpoint involve only two or three axes. If the innermost axis remains innermost, rows are copied. Otherwise the plane
of the two innermost axes (of source and target) is cut into tiles that fit in the cache; each is gathered row by row
into a padded buffer and written out row by row.
"""

from __future__ import annotations

import math
from itertools import product
from typing import TYPE_CHECKING, Any, TypeAlias

from wherry import kernels

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy as np

Order: TypeAlias = tuple[int, ...]

_TILE = (
    128  # elements on a side; with the padding below a tile of 8-byte elements fits in the second-level cache
)
_PADDING = 8  # elements between rows of a tile: powers of two would all fall into the same cache sets
_WORDS = {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "c16"}


def transposed_into(
    source: memoryview, shape: Sequence[int], itemsize: int, order: Sequence[int], out: memoryview
) -> None:
    """Write an array with its axes in another order.

    Args:
        source: C-order bytes of the array.
        shape: its extents.
        itemsize: bytes of one element: 1, 2, 4, 8 or 16.
        order: for each axis of the result, the axis of the source that it is.
        out: as many bytes; receives the result in C order.

    Raises:
        ValueError: `order` is not a permutation of the axes, or the sizes disagree.
    """
    import numpy as np

    if sorted(order) != list(range(len(shape))):
        raise ValueError(f"{tuple(order)} is not a permutation of {len(shape)} axes")
    if not len(source) == len(out) == math.prod(shape) * itemsize:
        raise ValueError(
            f"expected {math.prod(shape) * itemsize} bytes for shape {tuple(shape)} and item size {itemsize}, "
            f"got {len(source)} and {len(out)}"
        )
    fused_shape, fused_order = fuse_axes(shape, order)
    array = np.frombuffer(source, _WORDS[itemsize]).reshape(fused_shape)
    target = np.frombuffer(out, _WORDS[itemsize]).reshape([fused_shape[axis] for axis in fused_order])
    permute(array.transpose(fused_order), target)


def fuse_axes(shape: Sequence[int], order: Sequence[int]) -> tuple[tuple[int, ...], Order]:
    """The same permutation with as few axes as possible: extents of 1 dropped, axes that remain adjacent fused."""
    kept = [axis for axis in order if shape[axis] != 1]
    groups: list[list[int]] = []
    rank = {axis: place for place, axis in enumerate(sorted(kept))}
    for axis in kept:
        if groups and rank[groups[-1][-1]] + 1 == rank[axis]:
            groups[-1].append(axis)
        else:
            groups.append([axis])
    by_source = sorted(groups)
    extents = tuple(math.prod(shape[axis] for axis in group) for group in by_source)
    return extents, tuple(by_source.index(group) for group in groups)


def permute(view: np.ndarray, out: np.ndarray) -> None:
    """Copy a transposed view into an array of the same shape; the last axis of `out` should be contiguous."""
    import numpy as np

    if kernels.permute(view, out):
        return
    inner = min(range(view.ndim), key=lambda axis: view.strides[axis], default=-1)
    if inner == view.ndim - 1:
        out[...] = view
        return
    others = [range(extent) if axis not in (inner, view.ndim - 1) else [slice(None)]
              for axis, extent in enumerate(view.shape)]  # fmt: skip
    small = min(view.shape[inner], view.shape[-1]) <= _TILE // 4
    if small and math.prod(view.shape) > view.shape[inner] * view.shape[-1]:
        _blocks(view, out, inner)
        return
    tile = np.empty((_TILE, _TILE + _PADDING), view.dtype)
    for place in product(*others):
        _plane(view[place], out[place], tile)


def _plane(view: np.ndarray, out: np.ndarray, tile: np.ndarray) -> None:
    """One plane: columns of the view are contiguous, rows of `out` are."""
    rows, columns = view.shape
    for row in range(0, rows, _TILE):
        for column in range(0, columns, _TILE):
            part = view[row : row + _TILE, column : column + _TILE]
            height, width = part.shape
            block = tile[:width, :height]
            block[...] = part.T
            out[row : row + height, column : column + width] = block.T


def _blocks(view: np.ndarray, out: np.ndarray, inner: int) -> None:
    """Permute planes that are too small to cut: gather blocks of many planes in the source's order, then scatter them.

    A block takes whole extents of both innermost axes and as much of the others as fits in the cache.
    """
    import numpy as np

    source_order = sorted(range(view.ndim), key=lambda axis: -view.strides[axis])
    gathered: dict[Any, np.ndarray] = {}
    for place in _cuts(view.shape, {inner, view.ndim - 1}, _TILE * _TILE):
        part = view[place].transpose(source_order)
        buffer = gathered.get(part.shape)
        if buffer is None:
            buffer = gathered[part.shape] = np.empty(part.shape, view.dtype)
        buffer[...] = part
        back = np.argsort(source_order)
        out[place] = buffer.transpose(back)


def _cuts(shape: tuple[int, ...], whole: set[int], elements: int) -> Iterator[tuple[slice, ...]]:
    """Regions of at most `elements` elements that keep the axes in `whole` uncut as far as they fit."""
    extents = [1] * len(shape)
    room = elements
    for axis in [*sorted(whole, reverse=True), *(a for a in reversed(range(len(shape))) if a not in whole)]:
        extents[axis] = max(min(shape[axis], room), 1)
        room //= extents[axis]
    starts = [range(0, extent, cut) for extent, cut in zip(shape, extents, strict=True)]
    for place in product(*starts):
        yield tuple(slice(start, start + cut) for start, cut in zip(place, extents, strict=True))
