"""Relayout: the elements of a target tensor as strided copies out of source tensors.

A **piece** states that a stored tensor, or a range of one of its dimensions, holds a parameter (all of it, or the part
at one unrolled index). From the pieces of two systems follows, for every region of a target tensor, a list of
**copies**: which region of which source tensor to read, and the strides with which its elements go into the target
region. This depends on metadata alone, so it is planned before any byte moves. The inverse is the same with source and
target exchanged.

A **box** gives each axis of a parameter a range [start, stop). A dimension that fuses several axes is a mixed-radix
number: a range of it is a few boxes (a partial first run, whole runs, a partial last one), and a box is a set of
elements with one stride per axis.

Elements are copied at memory speed by `permute`. A plain `copyto(out, a.transpose(order))` of two-byte elements runs at
0.3 GB/s if the innermost axis changes, since every element touches another cache line. If the innermost axis remains
innermost, rows are copied. Otherwise the plane of the two innermost axes (of source and target) is cut into tiles that
fit in the cache; each is gathered row by row into a padded buffer and written out row by row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from itertools import product
from typing import TYPE_CHECKING, Any, TypeAlias

from wherry import kernels
from wherry.core import dtypes
from wherry.core.keypath import KeyPath
from wherry.core.lazy_dataclass import dataclass
from wherry.core.tensorspec import Region, TensorSpec, c_strides, region_shape
from wherry.layout.losses import is_counting, note
from wherry.layout.words import Elementwise, WordStep, apply_steps, chain

if TYPE_CHECKING:
    import numpy as np

    from wherry.layout.layout import Sizes


Read: TypeAlias = "Callable[[KeyPath, Region], np.ndarray]"
Cut: TypeAlias = "Callable[[Copy], Iterable[Copy]]"
Compute: TypeAlias = "Callable[[KeyPath, Region, np.ndarray], bool]"

Parameter: TypeAlias = tuple[str, str]
Range: TypeAlias = tuple[int, int]
Box: TypeAlias = "dict[str, Range]"
Groups: TypeAlias = "tuple[tuple[str, ...], ...]"
_SLACK = 4  # a copy may read this many times what it needs before it is cut into several
_TILE = 128  # elements on a side; with the padding a tile of 8-byte elements fits in the second-level cache
_PADDING = 8  # elements between rows of a tile: powers of two would all fall into the same cache sets


@dataclass(frozen=True, slots=True)
class TensorPiece:
    """The part of a parameter that a stored tensor holds.

    Attributes:
        parameter: slot (`params`, `mu`, …) and name of the parameter.
        at: index of each unrolled axis.
        groups: the axes fused in each dimension.
        start: its offset in each dimension.
        words: value words of the system.
    """

    parameter: Parameter
    at: tuple[tuple[str, int], ...]
    groups: Groups
    start: tuple[int, ...]
    words: tuple[Elementwise, ...] = ()


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One stored tensor and its pieces; elements that no piece covers are padding.

    Attributes:
        spec: its key path, shape and dtype.
        pieces: disjoint.
    """

    spec: TensorSpec
    pieces: tuple[TensorPiece, ...]


@dataclass(frozen=True, slots=True)
class Copy:
    """Elements of one source region that go into one target region.

    Attributes:
        source: the tensor to read.
        region: of it.
        extents: of the elements, one per loop, merged as far as both strides allow.
        source_strides: in elements of the C-order source region.
        target_strides: in elements of the C-order target region.
        offset: first element in the target region; in the source region it is always 0.
        steps: the value words that are applied.
    """

    source: TensorSpec
    region: Region
    extents: tuple[int, ...]
    source_strides: tuple[int, ...]
    target_strides: tuple[int, ...]
    offset: int
    steps: tuple[WordStep, ...]

    @property
    def nbytes(self) -> int:
        """Bytes that are read."""
        return dtypes.canonical_size(self.source.dtype, math.prod(region_shape(self.region)))


@dataclass(slots=True)
class Pieces:
    """The location of every parameter in a source.

    Attributes:
        sizes: the extent of every axis.
        unrolled: for each parameter, the axes that are stored as one tensor per index.
        held: for each parameter, the tensor and piece at each index of these axes.
    """

    sizes: Sizes
    unrolled: dict[Parameter, tuple[str, ...]] = field(default_factory=dict[Parameter, tuple[str, ...]])
    held: dict[Parameter, dict[tuple[int, ...], tuple[TensorSpec, TensorPiece]]] = field(
        default_factory=dict[Parameter, dict[tuple[int, ...], tuple[TensorSpec, TensorPiece]]]
    )

    def add(self, stored: StoredTensor) -> None:
        """Add the pieces of a tensor."""
        for piece in stored.pieces:
            self.unrolled[piece.parameter] = tuple(name for name, _index in piece.at)
            place = tuple(index for _name, index in piece.at)
            self.held.setdefault(piece.parameter, {})[place] = (stored.spec, piece)

    def holding(self, parameter: Parameter, box: Box) -> Iterator[tuple[TensorSpec, TensorPiece, Box]]:
        """The tensors that hold parts of a box, each with its part."""
        names = self.unrolled[parameter]
        for place in _indices([box[name] for name in names]):
            spec, piece = self.held[parameter][place]
            at = {name: (index, index + 1) for name, index in zip(names, place, strict=True)}
            yield spec, piece, {**box, **at}


def _indices(ranges: list[tuple[int, int]]) -> Iterator[tuple[int, ...]]:
    if not ranges:
        yield ()
        return
    for index in range(*ranges[0]):
        for rest in _indices(ranges[1:]):
            yield (index, *rest)


def copies(target: StoredTensor, region: Region, sources: Pieces) -> Iterator[Copy]:
    """The copies that fill a region of a target tensor; elements that no copy covers are zero.

    Args:
        target: the tensor.
        region: step-1 slices with explicit bounds.
        sources: the location of its parameters.
    """
    for piece in target.pieces:
        inner = _inside(region, piece, sources.sizes)
        if inner is None:
            continue
        for box in boxes_of(inner, piece.groups, sources.sizes):
            whole = {**box, **{name: (index, index + 1) for name, index in piece.at}}
            for spec, held, part in sources.holding(piece.parameter, whole):
                for dense in dense_boxes(part, held.groups, sources.sizes, _SLACK):
                    yield _copy(spec, held, piece, dense, region, sources.sizes)


def taken_by(target: StoredTensor, sources: Pieces) -> Iterator[KeyPath]:
    """The source tensors that a target tensor is made of."""
    for piece in target.pieces:
        box = {name: (0, sources.sizes[name]) for names in piece.groups for name in names}
        box |= {name: (index, index + 1) for name, index in piece.at}
        yield from (spec.path for spec, _piece, _box in sources.holding(piece.parameter, box))


def _inside(region: Region, piece: TensorPiece, sizes: Sizes) -> Region | None:
    """The part of a target region that a piece covers, counted from the piece's start."""
    parts: list[slice] = []
    for bounds, start, names in zip(region, piece.start, piece.groups, strict=True):
        extent = math.prod(sizes[name] for name in names)
        low, high = max(bounds.start - start, 0), min(bounds.stop - start, extent)
        if low >= high:
            return None
        parts.append(slice(low, high))
    return tuple(parts)


def _copy(
    spec: TensorSpec, held: TensorPiece, piece: TensorPiece, box: Box, region: Region, sizes: Sizes
) -> Copy:
    inner = bounding(box, held.groups, sizes)
    read = tuple(
        slice(part.start + start, part.stop + start) for part, start in zip(inner, held.start, strict=True)
    )
    source = _strides(held.groups, region_shape(read), sizes)
    target = _strides(piece.groups, region_shape(region), sizes)
    loops = [
        (stop - start, source.get(name, 0), target.get(name, 0))
        for name, (start, stop) in box.items()
        if stop - start > 1
    ]
    # in the target's order, with neighbours merged where both sides are contiguous
    merged: list[tuple[int, int, int]] = []
    for extent, taken, placed in sorted(loops, key=lambda loop: -loop[2]):
        if merged and merged[-1][1] == extent * taken and merged[-1][2] == extent * placed:
            merged[-1] = (merged[-1][0] * extent, taken, placed)
        else:
            merged.append((extent, taken, placed))
    base = c_strides(region_shape(region))
    offset = sum(box[name][0] * target[name] for names in piece.groups for name in names) + sum(
        (start - part.start) * stride for start, part, stride in zip(piece.start, region, base, strict=True)
    )
    return Copy(
        spec,
        read,
        tuple(loop[0] for loop in merged),
        tuple(loop[1] for loop in merged),
        tuple(loop[2] for loop in merged),
        offset,
        chain(held.words, piece.words),
    )


def _strides(groups: Groups, shape: tuple[int, ...], sizes: Sizes) -> dict[str, int]:
    """The strides, in elements, of a C-order array of this shape."""
    return {
        name: stride * step
        for names, stride in zip(groups, c_strides(shape), strict=True)
        for name, step in fused_strides(names, sizes).items()
    }


def part_bytes(copy: Copy, dtype: str) -> int:
    """Bytes in memory while a copy is made: what is read for it, and its cast.

    Args:
        copy: the copy.
        dtype: the element type of the target.
    """
    converted = bool(copy.steps) or copy.source.dtype != dtype
    return copy.nbytes + (8 * math.prod(region_shape(copy.region)) if converted else 0)


def gather(
    target: StoredTensor,
    region: Region,
    sources: Pieces,
    read: Read,
    out: np.ndarray | None = None,
    *,
    cut: Cut | None = None,
    compute: Compute | None = None,
) -> np.ndarray:
    """The elements of a region of a target tensor.

    Args:
        target: the tensor.
        region: step-1 slices with explicit bounds.
        sources: the location of its parameters.
        read: reads a region of a source tensor as a C-order array.
        out: a C-order array of the region's shape and the target's dtype to fill; a new one by default.
        cut: the parts in which a copy is made; as a whole by default.
        compute: writes a region of a source tensor into an array with any strides, or returns False; without it, and
            for elements that have no place of their own there, regions are read and copied.

    Returns:
        `out`.
    """
    import numpy as np

    if out is None:
        out = np.empty(region_shape(region), dtypes.numpy_dtype(target.spec.dtype))
    parts = (_inside(region, piece, sources.sizes) for piece in target.pieces)
    covered = sum(math.prod(region_shape(part)) for part in parts if part is not None)
    if covered != math.prod(region_shape(region)):
        out[...] = np.zeros((), out.dtype)
    for copy in copies(target, region, sources):
        for part in (copy,) if cut is None else cut(copy):
            into = None if compute is None else _places(part, out)
            if compute is None or into is None or not compute(part.source.path, part.region, into):
                scatter(part, read(part.source.path, part.region), out)
    return out


def _places(copy: Copy, out: np.ndarray) -> np.ndarray | None:
    """The places in the target region of the elements that a copy reads, as an array of the source region's shape.

    None if they are changed on the way, if not all go to one place each, or if an axis has no single stride.
    """
    from numpy.lib.stride_tricks import as_strided

    shape = region_shape(copy.region)
    if (
        copy.steps
        or dtypes.numpy_dtype(copy.source.dtype) != out.dtype
        or math.prod(copy.extents) != math.prod(shape)
    ):
        return None
    loops = [*zip(copy.extents, copy.source_strides, copy.target_strides, strict=True)]
    strides: list[int] = []
    for extent, step in zip(shape, c_strides(shape), strict=True):
        around = (
            loop for loop in loops if loop[1] and not step % loop[1] and extent * step <= loop[0] * loop[1]
        )
        found = (0, 1, 0) if extent == 1 else next(around, None)
        if found is None:
            return None
        strides.append(step // found[1] * found[2] * out.itemsize)
    return as_strided(out.reshape(-1)[copy.offset :], shape, strides)


def scatter(copy: Copy, part: np.ndarray, out: np.ndarray) -> None:
    """Write the elements that a copy has read to their positions in the target region."""
    import numpy as np
    from numpy.lib.stride_tricks import as_strided

    if copy.steps or part.dtype != out.dtype:
        made = apply_steps(copy.steps, part, out.dtype.name)
        if is_counting(copy.steps, part.dtype.name, out.dtype.name):
            note(_used(copy, part), _used(copy, made), copy.steps)
        part = made
    source = _word(np.ascontiguousarray(part).reshape(-1))
    target = _word(out.reshape(-1))[copy.offset :]
    size = source.itemsize
    permute(
        as_strided(source, copy.extents, [stride * size for stride in copy.source_strides], writeable=False),
        as_strided(target, copy.extents, [stride * size for stride in copy.target_strides]),
    )


def _used(copy: Copy, part: np.ndarray) -> np.ndarray:
    """The elements that a copy takes of what it has read, each as often as it is written."""
    import numpy as np
    from numpy.lib.stride_tricks import as_strided

    if math.prod(copy.extents) == part.size and all(copy.source_strides):
        return part
    flat = np.ascontiguousarray(part).reshape(-1)
    strides = [stride * flat.itemsize for stride in copy.source_strides]
    return as_strided(flat, copy.extents, strides, writeable=False)


def _word(flat: np.ndarray) -> np.ndarray:
    """The same elements as plain words: numpy copies elements of ml_dtypes types one by one, which is slow."""
    words: dict[int, Any] = {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "c16"}
    return flat.view(words[flat.itemsize])


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
    """The stride of each axis that is fused in a dimension, along that dimension."""
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
