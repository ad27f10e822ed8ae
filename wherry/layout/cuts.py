"""Cutting a target tensor: into bands for files that take any span, into chunk grids for chunked formats.

A copy is cut into parts that read a few megabytes each, so that a region is gathered in little memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from wherry.core import dtypes
from wherry.core.digest import SHORTEST_RUN
from wherry.core.tensorspec import Region, Span, TensorSpec, region_shape, row_bands

if TYPE_CHECKING:
    from wherry.layout.copies import Copy, Pieces, StoredTensor, TensorPiece
    from wherry.layout.layout import Sizes

_ROWS = 128  # parts end at multiples of it where they can: as many rows share a scale


def bands(target: StoredTensor, limit: int, sources: Pieces) -> Iterator[tuple[Region, Span]]:
    """Cut a target tensor into C-contiguous regions of at most `limit` bytes that consist of whole inner axes.

    A cut within a fused dimension is at a multiple of the largest run of inner axes that fits, so that a region
    of `(head half pair)` consists of whole heads and no source row is read twice.
    """
    yield from row_bands(target.spec, limit, cut_multiples(target, limit, sources.sizes))


def cut_multiples(target: StoredTensor, limit: int, sizes: Sizes) -> tuple[int, ...]:
    """For each dimension, the step at whose multiples it may be cut."""
    if not target.spec.shape:
        return ()
    multiples = [1] * len(target.spec.shape)
    dimension, row = dimension_to_cut(target.spec, limit)
    multiples[dimension] = _run(target.pieces, dimension, limit // max(row, 1), sizes)
    return tuple(multiples)


def dimension_to_cut(spec: TensorSpec, limit: int) -> tuple[int, int]:
    """The first dimension whose rows have at most `limit` bytes, or the last one; and the bytes of a row."""
    for dimension in range(len(spec.shape)):
        row = dtypes.canonical_size(spec.dtype, math.prod(spec.shape[dimension + 1 :]))
        if row <= limit or dimension == len(spec.shape) - 1:
            return dimension, row
    raise AssertionError("a scalar is not cut")


def rows_of_long_runs(target: StoredTensor, dimension: int, sources: Pieces) -> int:
    """The step at whose multiples a dimension is cut so that whole KiB of the source's rows are read for each part.

    Shorter runs are not hashed as they are read, and rows are read again for each part.

    Returns:
        The multiple; 1 where the dimension does not go along the rows of the source.
    """
    if len(target.pieces) != 1:
        return 1
    (piece,) = target.pieces
    names = piece.groups[dimension]
    spec, source = next(iter(sources.held[piece.parameter].values()))
    rows = next((group for group in reversed(source.groups) if group), ())
    if not names or not rows or names[-1] != rows[-1]:
        return 1
    return SHORTEST_RUN // max(dtypes.canonical_size(spec.dtype, 1), 1)


def _run(pieces: tuple[TensorPiece, ...], dimension: int, room: int, sizes: Sizes) -> int:
    """The largest run of inner axes of a dimension that fits; 1 if several pieces share the tensor."""
    if len(pieces) != 1:
        return 1
    run = 1
    for name in reversed(pieces[0].groups[dimension]):
        if run * sizes[name] > room:
            break
        run *= sizes[name]
    return run


def stacked_grid(target: StoredTensor, sources: Pieces, limit: int) -> tuple[int, ...]:
    """A chunk grid with which each source tensor fills whole chunks: extent 1 along the axes that it unrolls.

    Args:
        target: a tensor of a chunked format.
        sources: the location of its parameters.
        limit: maximum bytes of a chunk; larger chunks are halved along their longest dimension. Where runs of the
            tensor would become too short to be hashed, they are halved along the first one.
    """
    chunks = list(target.spec.shape)
    for piece in target.pieces:
        for name in sources.unrolled[piece.parameter]:
            for dimension, names in enumerate(piece.groups):
                if names and names[0] == name:
                    chunks[dimension] = math.prod(sources.sizes[inner] for inner in names[1:])
    while dtypes.canonical_size(target.spec.dtype, math.prod(chunks)) > limit and max(chunks) > 1:
        dimension, first = (
            chunks.index(max(chunks)),
            next(at for at, extent in enumerate(chunks) if extent > 1),
        )
        run = dtypes.canonical_size(target.spec.dtype, chunks[-1])
        if dimension == len(chunks) - 1 and SHORTEST_RUN <= run < 2 * SHORTEST_RUN:
            dimension = first
        chunks[dimension] = -(-chunks[dimension] // 2)
    return tuple(max(extent, 1) for extent in chunks)


def cut_copy(copy: Copy, most: int) -> Iterator[Copy]:
    """The parts of a copy, in the order of the source; the copy itself if it reads little, or cannot be cut.

    A part is a range of rows of the source region: a range of the loop with the largest stride in the source.

    Args:
        copy: the copy.
        most: bytes that a part should read at most; one row may be larger.
    """
    shape = region_shape(copy.region)
    axis = next((axis for axis, extent in enumerate(shape) if extent > 1), None)
    if copy.nbytes <= most or axis is None or not copy.extents:
        yield copy
        return
    row = math.prod(shape[axis + 1 :])
    loop = max(range(len(copy.extents)), key=lambda one: copy.source_strides[one])
    stride, extent = copy.source_strides[loop], copy.extents[loop]
    # One turn of the loop is several rows, or several turns are one row.
    rows, turns = (stride // row, 1) if stride >= row else (1, row // stride)
    if rows * row != turns * stride:
        yield copy
        return
    step = max(most // (copy.nbytes // shape[axis]) // rows, 1)
    step = step // _ROWS * _ROWS or step
    first, last = copy.region[axis].start, copy.region[axis].stop
    for start in range(0, -(-extent // turns), step):
        stop = min(start + step, -(-extent // turns))
        part = slice(first + start * rows, last if stop * turns >= extent else first + stop * rows)
        yield replace(
            copy,
            region=(*copy.region[:axis], part, *copy.region[axis + 1 :]),
            extents=(
                *copy.extents[:loop],
                min(stop * turns, extent) - start * turns,
                *copy.extents[loop + 1 :],
            ),
            offset=copy.offset + start * turns * copy.target_strides[loop],
        )
