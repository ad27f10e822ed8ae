"""TensorSpec: metadata of one tensor; Region and Span: parts of it.

A **region** is a tuple of step-1 slices, one per dimension. A **span** is a byte range of a tensor's canonical
bytes (C order, little endian). A region whose elements are contiguous in C order is also a span; the mover
prefers spans wherever both sides store raw bytes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import NamedTuple, TypeAlias

from wherry.core import dtypes
from wherry.core.keypath import KeyPath, render
from wherry.core.lazy_dataclass import dataclass
from wherry.errors import UsageError

Region: TypeAlias = tuple[slice, ...]
AxisName: TypeAlias = str | tuple[str, ...] | None


class Span(NamedTuple):
    """Bytes [start, stop) of a tensor's canonical form."""

    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        """Number of bytes."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Sharding:
    """How the writer had sharded a tensor over devices.

    Attributes:
        mesh: name and extent of each mesh axis, in order.
        spec: for each dimension the mesh axis or axes that it was split over (a partition spec).
        rules: logical axis name → mesh axes, where the writer recorded such rules.
    """

    mesh: tuple[tuple[str, int], ...] = ()
    spec: tuple[AxisName, ...] = ()
    rules: tuple[tuple[str, AxisName], ...] = ()


GRID = "grid"  # in a spec's tags: the preferred chunk shape of a tensor, for example 4096x1x128


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a checkpoint.

    Attributes:
        path: its key path.
        shape: its extents.
        dtype: numpy, ml_dtypes or ggml name.
        chunks: the stored chunk grid (extents of one chunk), where the container has one.
        axes: logical names of the axes, where known.
        sharding: the writer's mesh and partition spec, where known.
        tags: further metadata of the container, for example `{"prng": "threefry2x32"}`.
    """

    path: KeyPath
    shape: tuple[int, ...]
    dtype: str
    chunks: tuple[int, ...] | None = None
    axes: tuple[AxisName, ...] | None = None
    sharding: Sharding | None = None
    tags: Mapping[str, str] | None = None

    @property
    def name(self) -> str:
        """The printed key path."""
        return render(self.path)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of its canonical form."""
        return dtypes.canonical_bytes(self.dtype, self.shape)

    @property
    def whole(self) -> Region:
        """The region that covers all of it."""
        return tuple(slice(0, extent) for extent in self.shape)


_FORM = attrgetter("dtype", "shape")


def forms_of(specs: Iterable[TensorSpec]) -> Counter[tuple[str, tuple[int, ...]]]:
    """How many tensors have each dtype and shape: a large model has a hundred thousand tensors, and few of these."""
    return Counter(map(_FORM, specs))


def bytes_of(specs: Iterable[TensorSpec]) -> int:
    """Bytes of the canonical form of all of some tensors."""
    return sum(number * dtypes.canonical_bytes(*form) for form, number in forms_of(specs).items())


def checked_region(spec: TensorSpec, region: Region | None) -> Region:
    """The region with all bounds explicit.

    Raises:
        UsageError: a slice has a step or is out of range, or the number of slices is not the tensor's rank.
    """
    if region is None:
        return spec.whole
    if len(region) != len(spec.shape):
        raise UsageError(f"expected {len(spec.shape)} slices, got {len(region)}", path=spec.name)
    bounds: list[slice] = []
    for part, extent in zip(region, spec.shape, strict=True):
        start = 0 if part.start is None else part.start
        stop = extent if part.stop is None else part.stop
        if part.step not in (None, 1) or not 0 <= start <= stop <= extent:
            raise UsageError(
                f"{part} is out of range for an extent of {extent}, or has a step", path=spec.name
            )
        bounds.append(slice(start, stop))
    return tuple(bounds)


def region_shape(region: Region) -> tuple[int, ...]:
    """Extents of a region whose bounds are explicit."""
    return tuple(part.stop - part.start for part in region)


def c_strides(shape: Sequence[int], size: int = 1) -> tuple[int, ...]:
    """The strides of an array in C order.

    Args:
        shape: its extents.
        size: of an element; strides are in elements by default, and in bytes where it is a number of bytes.
    """
    return tuple(size * math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def shared_region(one: Region, other: Region) -> Region | None:
    """Intersection of two regions with explicit bounds; None where it is empty."""
    shared = tuple(slice(max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(one, other, strict=True))
    return None if any(part.start >= part.stop for part in shared) else shared


def region_within(region: Region, outer: Region) -> Region:
    """A region relative to the start of an outer region that contains it."""
    return tuple(
        slice(part.start - start.start, part.stop - start.start)
        for part, start in zip(region, outer, strict=True)
    )


def row_bands(
    spec: TensorSpec, limit: int, multiple: tuple[int, ...] | None = None
) -> Iterator[tuple[Region, Span]]:
    """Split a tensor into C-contiguous regions of at most `limit` bytes where that is possible.

    The tensor is split along the first axis; where one row exceeds the limit, along the next axis within that row, and
    so on. A region may exceed the limit where `multiple` requires it, or where a smaller one would split a byte that
    holds two elements.

    Args:
        spec: the tensor; opaque dtypes are not split, but for blocks, of which rows are split.
        limit: maximum bytes of one region.
        multiple: extents of a chunk; regions begin at multiples of these, so that no chunk is read or written twice.

    Yields:
        Each region with the span of canonical bytes that it covers, in C order.
    """
    is_whole = dtypes.opaque(spec.dtype) and (dtypes.block_elements(spec.dtype) == 1 or len(spec.shape) == 1)
    if spec.size == 0 or is_whole or not spec.shape:
        yield spec.whole, Span(0, spec.nbytes)
        return
    yield from _bands(spec, (), limit, multiple or (1,) * len(spec.shape))


def _bands(
    spec: TensorSpec, fixed: Region, limit: int, multiple: tuple[int, ...]
) -> Iterator[tuple[Region, Span]]:
    axis = len(fixed)
    rest = spec.shape[axis + 1 :]
    row = dtypes.canonical_size(spec.dtype, math.prod(rest))
    step = multiple[axis]
    if dtypes.is_paired(spec.dtype) and row * step % 2:
        step *= 2
    apart = len(rest) > 1 if dtypes.block_elements(spec.dtype) > 1 else bool(rest)
    if row * step > limit and step == 1 and apart:
        for index in range(spec.shape[axis]):
            yield from _bands(spec, (*fixed, slice(index, index + 1)), limit, multiple)
        return
    rows = max(limit // (row * step), 1) * step
    elements = sum(part.start * math.prod(spec.shape[at + 1 :]) for at, part in enumerate(fixed))
    base = dtypes.canonical_size(spec.dtype, elements)
    for start in range(0, spec.shape[axis], rows):
        stop = min(start + rows, spec.shape[axis])
        region = (*fixed, slice(start, stop), *(slice(0, extent) for extent in rest))
        yield region, Span(base + start * row, base + stop * row)
