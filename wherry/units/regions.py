"""regions: cuts a large file of a target at places that its bytes do not decide, so that several units make it.

A region begins at a multiple of a step: on a disk of 64 KiB, so that no two workers write the same block or page; in a
store of objects of the size of the parts, so that a unit makes whole parts. A move with bytes in two regions belongs to
both units, as one with chunks in two files does.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING, NamedTuple

from wherry.core.tensorspec import Span
from wherry.objects.stores import object_store
from wherry.upload.uploaded_file import part_size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from wherry.formats.reader import Extent
    from wherry.storage.location import Location

    # Bytes of a file → the step between its regions; 0 if it is not cut.
    StepFunction = Callable[[int], int]

DISK_STEP = 64 << 10  # at least a page, and a block, of any system


class FileRegion(NamedTuple):
    """A region of a file.

    Attributes:
        file: name of the file.
        span: its bytes in the file.
    """

    file: str
    span: Span

    @property
    def name(self) -> str:
        """Its name among the files of a target."""
        return f"{self.file}[{self.span.start}:{self.span.stop}]"


def regions_of(file: str, size: int, unit_bytes: int, step: int) -> list[FileRegion]:
    """Cut a file into regions of nearly the same size.

    Args:
        file: its name.
        size: its bytes.
        unit_bytes: most bytes of a region, unless a step has more.
        step: a region begins at a multiple of it; 0 if the file is not cut.

    Returns:
        The regions, in order; none if the file is one unit.
    """
    if not step or size <= unit_bytes:
        return []
    most = max(unit_bytes // step, 1)
    steps = -(-size // step)
    count = -(-steps // most)
    each = -(-steps // count) * step
    found = [FileRegion(file, Span(at, min(at + each, size))) for at in range(0, size, each)]
    return found if len(found) > 1 else []


def regions_at(extents: Iterable[Extent], regions: Sequence[FileRegion]) -> list[FileRegion]:
    """The regions of one file in which byte ranges of it lie.

    Args:
        extents: the byte ranges.
        regions: all regions of the file.
    """
    starts = [region.span.start for region in regions]
    found = set[int]()
    for extent in extents:
        if extent.length:
            first = bisect_right(starts, extent.offset) - 1
            last = bisect_right(starts, extent.offset + extent.length - 1) - 1
            found.update(range(first, last + 1))
    return [regions[number] for number in sorted(found)]


def step_in(target: Location) -> StepFunction:
    """The step between regions of the files of a target.

    Args:
        target: where the files will be.
    """
    if target.store.capabilities.local:
        return lambda _size: DISK_STEP
    store = object_store(target.store)
    return lambda size: part_size(size, store.part_limits) if store is not None else 0
