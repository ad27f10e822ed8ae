"""Cuts a copy into parts that read a few megabytes each, so that a region is gathered in little memory.

A part is a range of rows of the source region: a range of the loop with the largest stride in the source.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from wherry.core.tensorspec import region_shape

if TYPE_CHECKING:
    from collections.abc import Iterator

    from wherry.layout.copies import Copy

_ROWS = 128  # parts end at multiples of it where they can: as many rows share a scale


def cut_copy(copy: Copy, most: int) -> Iterator[Copy]:
    """The parts of a copy, in the order of the source; the copy itself if it reads little, or cannot be cut.

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
