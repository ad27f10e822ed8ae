"""Stored boxes: a tensor in a file as the boxes in which it was decoded, one after another.

Chunks that are cut along inner axes hold short runs of the tensor's bytes. Writing each run to its place in the tensor
takes a call for a few kilobytes (17 µs each, 3.6 s of processor time for 1 GB). So a box is written as it is decoded,
and a region is read as parts of boxes, which are long if the region has many rows.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from wherry.core import dtypes
from wherry.core.tensorspec import Region, TensorSpec, region_shape, region_within, row_bands, shared_region
from wherry.mover.regions import fill_region

if TYPE_CHECKING:
    from collections.abc import Callable

    # Fills memory from an offset in the file.
    Read = Callable[[int, memoryview], None]

_SHORT = 256 << 10  # bytes; shorter runs are not written to their place in the tensor
_TOGETHER = 2 << 20  # bytes of a box that are in memory at a time


class StoredBox(NamedTuple):
    """A box of elements and its offset in the file; it may extend beyond the tensor's edge."""

    region: Region
    offset: int


def is_scattered(spec: TensorSpec) -> bool:
    """Whether the chunks of a tensor hold only short runs of its bytes."""
    if spec.chunks is None:
        return False
    axis = len(spec.shape) - 1
    while axis > 0 and spec.chunks[axis] >= spec.shape[axis]:
        axis -= 1
    run = dtypes.canonical_size(spec.dtype, math.prod(spec.chunks[axis:]))
    return axis > 0 and run < _SHORT


def fill(spec: TensorSpec, region: Region, boxes: tuple[StoredBox, ...], read: Read, out: memoryview) -> None:
    """Read a region out of boxes that cover it.

    Args:
        spec: the tensor.
        region: step-1 slices with explicit bounds.
        boxes: disjoint.
        read: fills a buffer from an offset in the file.
        out: receives the region in C order.
    """
    for box in boxes:
        shared = shared_region(region, box.region)
        if shared is None:
            continue
        inside = replace(spec, shape=region_shape(box.region), chunks=None)
        bands = row_bands(replace(spec, shape=region_shape(shared), chunks=None), _TOGETHER)
        for band, _span in bands:
            part = tuple(
                slice(bounds.start + start.start, bounds.stop + start.start)
                for bounds, start in zip(band, shared, strict=True)
            )
            _fill_part(inside, region, box, part, read, out)


def _fill_part(
    inside: TensorSpec, region: Region, box: StoredBox, part: Region, read: Read, out: memoryview
) -> None:
    import numpy as np

    def from_box(offset: int, buffer: memoryview) -> None:
        read(box.offset + offset, buffer)

    wanted = region_within(part, box.region)
    if part == region:
        fill_region(inside, wanted, from_box, out)
        return
    size = dtypes.canonical_size(inside.dtype, 1)
    shape = (*region_shape(part), size)
    held = memoryview(bytearray(math.prod(shape)))
    fill_region(inside, wanted, from_box, held)
    target = np.frombuffer(out, "u1").reshape(*region_shape(region), size)
    target[region_within(part, region)] = np.frombuffer(held, "u1").reshape(shape)
