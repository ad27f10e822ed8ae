"""made_files: where the files of units lie before the commit, and whether they are still as they were made.

Receipts say how each file was left. A file of a file system that several units have made has no such state, as each of
them has changed it: what counts is how it was when it was read back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from wherry.converter.job import inside
from wherry.objects.stores import heads
from wherry.storage.location import Location
from wherry.units.make import member, staged_at, staging_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from wherry.records.unit_receipt import UnitReceipt
    from wherry.units.split_job import SplitJob


def folder_token(split: SplitJob, receipt: UnitReceipt) -> str:
    """The token of the folder in which the files of a receipt lie, on a file system.

    Args:
        split: the job.
        receipt: of one of its units.
    """
    return receipt.token if split.units[receipt.unit].region is None else receipt.files[0].mark


def object_path(split: SplitJob, name: str) -> str:
    """The path of an object of a unit until the commit."""
    job = split.job
    path = member(inside(job, job.committed), name).path
    inner = path[len(job.committed.path) :].strip("/")
    if inner and inner not in job.row.commit_members:
        return path
    return f"{staging_of(split).path}/{inner or job.committed.name}"


def made_place(split: SplitJob, name: str, token: str) -> Location:
    """Where a file lies that was made.

    Args:
        split: the job.
        name: of the file.
        token: of the folder in which it lies, on a file system.
    """
    if split.records.store is None:
        return member(staged_at(split, token), name)
    return Location(split.job.committed.store, object_path(split, name))


def shared_marks(split: SplitJob, receipts: Sequence[UnitReceipt]) -> dict[str, str]:
    """Name of each file of a file system that several units have made → its present state.

    Args:
        split: the job.
        receipts: one of each unit.
    """
    if split.records.store is not None:
        return {}
    marks: dict[str, str] = {}
    for receipt in receipts:
        name = receipt.files[0].name
        if split.units[receipt.unit].region is not None and name not in marks:
            entry = member(staged_at(split, folder_token(split, receipt)), name).stat()
            marks[name] = entry.mark if entry else ""
    return marks


def watch_files(
    split: SplitJob, receipts: Sequence[UnitReceipt], staged: Location, shared: Mapping[str, str]
) -> Callable[[], frozenset[str]]:
    """A function that tells which files of a staged target are no longer as they were read, by their paths.

    That is as their receipts say, or, of files that several units have made on a file system, as `shared` does. Objects
    that several units make were not read by workers.

    Args:
        split: the job.
        receipts: one of each unit.
        staged: where the target is staged.
        shared: name of each file of several units → its state.
    """
    store = split.records.store
    rows = [(member(staged, file.name), one, file) for one in receipts for file in one.files]
    if store is not None:
        rows = [row for row in rows if split.units[row[1].unit].region is None]
        heads_of = {object_path(split, file.name): (place.path, one, file) for place, one, file in rows}

        def replaced() -> frozenset[str]:
            return frozenset(
                path
                for key, found in heads(store, heads_of)
                for path, one, file in [heads_of[key]]
                if found is None
                or (found.run, found.nbytes, found.mark) != (one.token, file.nbytes, file.mark)
            )

        return replaced

    def state(place: Location) -> str:
        entry = place.stat()
        return entry.inode if entry else ""

    # The writer of the format may write headers again, which changes the time of the last change.
    first = {
        place: state(place)
        if (entry := place.stat()) and entry.mark == shared.get(file.name, file.mark)
        else None
        for place, _one, file in rows
    }
    return lambda: frozenset(place.path for place, inode in first.items() if state(place) != inode)
