"""Cutting a target tensor: into bands for files that take any span, into chunk grids for chunked formats."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from wherry.core import dtypes
from wherry.core.tensorspec import Region, row_bands

if TYPE_CHECKING:
    from collections.abc import Iterator

    from wherry.core.tensorspec import Span
    from wherry.layout.copies import Pieces, StoredTensor, TensorPiece
    from wherry.layout.layout import Sizes


def bands(target: StoredTensor, limit: int, sources: Pieces) -> Iterator[tuple[Region, Span]]:
    """Cut a target tensor into C-contiguous regions of at most `limit` bytes that consist of whole inner axes.

    A cut within a fused dimension is at a multiple of the largest run of inner axes that fits, so that a region
    of `(head half pair)` consists of whole heads and no source row is read twice.
    """
    yield from row_bands(target.spec, limit, cut_multiples(target, limit, sources.sizes))


def cut_multiples(target: StoredTensor, limit: int, sizes: Sizes) -> tuple[int, ...]:
    """For each dimension, the number at whose multiples it may be cut."""
    shape = target.spec.shape
    multiples = [1] * len(shape)
    for dimension in range(len(shape)):
        row = dtypes.canonical_size(target.spec.dtype, math.prod(shape[dimension + 1 :]))
        if row <= limit or dimension == len(shape) - 1:
            multiples[dimension] = _run(target.pieces, dimension, limit // max(row, 1), sizes)
            break
    return tuple(multiples)


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
        limit: maximum bytes of a chunk; larger chunks are halved along their longest dimension.
    """
    chunks = list(target.spec.shape)
    for piece in target.pieces:
        for name in sources.unrolled[piece.parameter]:
            for dimension, names in enumerate(piece.groups):
                if names and names[0] == name:
                    chunks[dimension] = math.prod(sources.sizes[inner] for inner in names[1:])
    while dtypes.canonical_size(target.spec.dtype, math.prod(chunks)) > limit and max(chunks) > 1:
        longest = chunks.index(max(chunks))
        chunks[longest] = -(-chunks[longest] // 2)
    return tuple(max(extent, 1) for extent in chunks)
