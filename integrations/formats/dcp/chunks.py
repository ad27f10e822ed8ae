"""Checks on the chunks of a tensor: whether they cover it, and whether they follow each other in C order.

Row sharding (FSDP) is the common case and takes one sorted walk. Any other division is checked on the grid of all chunk
boundaries, which is small for real shardings; a division with too large a grid is refused. Tensors that are written are
cut into rows, too.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from wherry.errors import CorruptError, UnsupportedError
from wherry.integrations.formats.dcp.metadata import Chunk

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from wherry.core.tensorspec import Region

_MOST_CELLS = 1_000_000


def cut_rows(shape: tuple[int, ...], width: int, most: int) -> Iterator[Chunk]:
    """Cut a tensor into chunks which, one after the other, are its bytes: ranks that shard its rows save such chunks.

    Args:
        shape: shape of the tensor.
        width: bytes of an element.
        most: bytes of a chunk; a row that is larger is cut along the next axis.

    Returns:
        The chunks; those of one axis have the same number of rows, except for the last one.
    """
    if math.prod(shape) * width <= most or not shape:
        yield Chunk((0,) * len(shape), shape)
        return
    rows = most // (math.prod(shape[1:]) * width)
    if not rows:
        for index in range(shape[0]):
            for inner in cut_rows(shape[1:], width, most):
                yield Chunk((index, *inner.offsets), (1, *inner.sizes))
        return
    each = -(-shape[0] // -(-shape[0] // rows))  # the fewest chunks, of nearly the same size
    for start in range(0, shape[0], each):
        rest = (0,) * (len(shape) - 1)
        yield Chunk((start, *rest), (min(each, shape[0] - start), *shape[1:]))


def with_elements(chunks: Sequence[Chunk]) -> list[Chunk]:
    """The chunks that have elements, in the order of their offsets."""
    return sorted(chunk for chunk in chunks if 0 not in chunk.sizes)


def region_of(chunk: Chunk) -> Region:
    """A chunk as a region of its tensor."""
    return tuple(
        slice(start, start + extent) for start, extent in zip(chunk.offsets, chunk.sizes, strict=True)
    )


def grid_of(shape: tuple[int, ...], chunks: Sequence[Chunk]) -> tuple[int, ...] | None:
    """Extents of a cell if the chunks are the cells of a regular grid; else None."""
    if not chunks or not shape:
        return None
    cell = chunks[0].sizes
    for chunk in chunks:
        whole = tuple(
            min(step, extent - start) for step, extent, start in zip(cell, shape, chunk.offsets, strict=True)
        )
        if whole != chunk.sizes or any(start % step for start, step in zip(chunk.offsets, cell, strict=True)):
            return None
    return cell


def in_order(shape: tuple[int, ...], chunks: Sequence[Chunk]) -> bool:
    """Whether sorted chunks, one after the other, are the tensor in C order."""
    position = 0
    for chunk in chunks:
        lead = next((axis for axis, extent in enumerate(chunk.sizes) if extent != 1), len(shape))
        if chunk.sizes[lead + 1 :] != shape[lead + 1 :]:
            return False  # not contiguous
        first = 0
        for extent, start in zip(shape, chunk.offsets, strict=True):
            first = first * extent + start
        if first != position:
            return False
        position += math.prod(chunk.sizes)
    return position == math.prod(shape)


def uncovered_regions(shape: tuple[int, ...], chunks: Sequence[Chunk]) -> Iterator[Region]:
    """Regions of a tensor that no chunk covers.

    Args:
        shape: shape of the tensor.
        chunks: its chunks with elements, sorted.

    Raises:
        CorruptError: two chunks overlap.
        UnsupportedError: the division is too irregular.
    """
    if 0 in shape or in_order(shape, chunks):
        return
    import numpy as np

    bounds = [
        sorted(
            {0, extent}
            | {chunk.offsets[axis] for chunk in chunks}
            | {chunk.offsets[axis] + chunk.sizes[axis] for chunk in chunks}
        )
        for axis, extent in enumerate(shape)
    ]
    cells = math.prod(len(marks) - 1 for marks in bounds)
    if cells > _MOST_CELLS:
        raise UnsupportedError(
            f"unsupported sharding: {len(chunks)} irregular chunks with {cells} grid cells"
        )
    seen = np.zeros([len(marks) - 1 for marks in bounds], dtype=bool)
    at = [{mark: index for index, mark in enumerate(marks)} for marks in bounds]
    for chunk in chunks:
        cell = tuple(
            slice(marks[part.start], marks[part.stop])
            for marks, part in zip(at, region_of(chunk), strict=True)
        )
        if seen[cell].any():
            raise CorruptError(
                f"two chunks overlap at {chunk.offsets}", cure="restore .metadata from a backup"
            )
        seen[cell] = True
    for index in np.argwhere(~seen):
        yield tuple(slice(marks[place], marks[place + 1]) for marks, place in zip(bounds, index, strict=True))
