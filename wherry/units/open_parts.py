"""open_parts: which moves of units a commit has to make again, because a part of a shared upload was not sent.

A part is sent whole. One with bytes that depend on other units (the checksum in the frame of a member whose tensor lies
in two regions, the directory of an archive) cannot be sent by a unit. So the commit, which is a resumed run, moves what
has bytes in such a part once more: one or two moves of 8 MiB for a region.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from wherry.converter.job import inside, targets_of
from wherry.storage.location import Location
from wherry.upload.selection import FileSketch
from wherry.upload.uploaded_file import part_size

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from wherry.formats.reader import Extent
    from wherry.staging.journal import DurableMove
    from wherry.units.shared_files import SharedUploads
    from wherry.units.split_job import SplitJob


def without_open(
    split: SplitJob, rows: list[DurableMove], parts: Iterable[Sequence[Any]], shared: SharedUploads
) -> list[DurableMove]:
    """The moves all of whose bytes are in parts that were sent.

    Args:
        split: the job.
        rows: moves that units have made.
        parts: path of an object and one of its parts, that were sent.
        shared: the shared uploads.
    """
    if not shared.uploads:
        return rows
    job, store, sketch = split.job, split.records.store, FileSketch()
    assert job.row.create is not None, "the format is one that can be written"
    assert store is not None, "uploads are in one"
    base, paths = inside(job, job.committed).path, {upload.path for upload in shared.uploads.values()}
    sent = {(path, row["number"]) for path, row in parts}
    writer = job.row.create(Location(sketch, base), job.plan.manifest, job.plan.options)
    extents_at, targets = writer.extents, targets_of(job.plan)

    def was_sent(extent: Extent) -> bool:
        path = extent.location.path
        place = shared.place(path[len(base) :].strip("/") or ".")
        if place not in paths or not extent.length:
            return True
        step = part_size(sketch.sizes[path], store.part_limits)
        numbers = range(extent.offset // step, -(-(extent.offset + extent.length) // step))
        return all((place, number) in sent for number in numbers)

    def is_done(row: DurableMove) -> bool:
        target = targets[row.source]
        if target.chunks is not None:  # files with chunks have no regions
            return True
        return all(map(was_sent, extents_at(target.path, row.span) or ()))

    try:
        return [row for row in rows if is_done(row)]
    finally:
        writer.close()
