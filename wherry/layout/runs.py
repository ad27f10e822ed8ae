"""Runs: target tensors that are concatenated spans of source tensors, so that bytes can be copied directly."""

from __future__ import annotations

import math
from collections.abc import Iterator

from wherry.core import dtypes
from wherry.core.tensorspec import Region, Span, TensorSpec, c_strides, region_shape
from wherry.formats.format import Extent
from wherry.layout.copies import Copy, Pieces, StoredTensor, copies


def runs(stored: StoredTensor, pieces: Pieces) -> list[tuple[TensorSpec, Span]] | None:
    """A target tensor as spans of source tensors, in order; None if elements change their order or values."""
    found: list[tuple[int, Copy]] = []
    for copy in copies(stored, stored.spec.whole, pieces):
        plain = not copy.steps and copy.source.dtype == stored.spec.dtype
        if (
            not plain
            or copy.extents[1:]
            or copy.source_strides not in ((), (1,))
            or copy.target_strides not in ((), (1,))
        ):
            return None
        found.append((copy.offset, copy))
    found.sort(key=lambda pair: pair[0])
    rows: list[tuple[TensorSpec, Span]] = []
    position = 0
    for offset, copy in found:
        elements = math.prod(region_shape(copy.region))
        span = contiguous_span(copy.source, copy.region)
        if offset != position or elements != math.prod(copy.extents) or span is None:
            return None
        rows.append((copy.source, span))
        position += elements
    return rows if position == stored.spec.size else None


def contiguous_span(spec: TensorSpec, region: Region) -> Span | None:
    """The span of a region's canonical bytes; None if they are not contiguous."""
    shape = region_shape(region)
    cut = next((axis for axis, extent in enumerate(shape) if extent != 1), len(shape))
    if shape[cut + 1 :] != spec.shape[cut + 1 :]:
        return None
    strides = c_strides(spec.shape)
    first = sum(part.start * stride for part, stride in zip(region, strides, strict=True))
    start = dtypes.canonical_size(spec.dtype, first)
    return Span(start, start + dtypes.canonical_size(spec.dtype, math.prod(region_shape(region))))


def cut(extents: tuple[Extent, ...], span: Span) -> Iterator[Extent]:
    """The part of a tensor's extents that holds a span; only a whole extent keeps its CRC."""
    position = 0
    for extent in extents:
        start, stop = max(span.start - position, 0), min(span.stop - position, extent.length)
        if start < stop:
            whole = stop - start == extent.length
            yield extent if whole else Extent(extent.location, extent.offset + start, stop - start)
        position += extent.length
