"""attempts: where attempts at units leave what they make, and whether it is still there as they left it.

On a file system an attempt has a folder of its own in the folder of the job. In a store the objects have their final
names, are create-only and carry the id of the attempt. Large files are shared: each unit makes its region of them, on a
file system in one preallocated file in the folder of the job, in a store of one upload. A record names that folder or
upload: where it is lost, the next commit removes the record, so that what receipts say of it is no longer believed.

Receipts say how each file was left. A file of a file system that several units have made has no such state, as each of
them has changed it: what counts is how it was when it was read back.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

from wherry.converter.job import inside
from wherry.errors import MismatchError, StorageError, TargetExistsError
from wherry.mover.map_writer import map_of
from wherry.storage.folders import PREFIX
from wherry.storage.location import Location
from wherry.store.remote_store import heads
from wherry.version import __version__
from wherry.workers.record import (
    SharedFile,
    TaskKind,
    TaskRecord,
    records_by_unit,
    require_equal,
    require_whole,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from wherry.converter.job import Job
    from wherry.store.store import Part, StoredObject, Upload
    from wherry.target.file_map import FileMap
    from wherry.workers.claims import Claim
    from wherry.workers.job import SplitJob
    from wherry.workers.record import MadeFile
    from wherry.workers.unit import Unit


_LOOK_SECONDS = 0.5  # between two looks whether somebody else has made the unit


# ---- places ----------------------------------------------------------------------------------------------------------


def member(staged: Location, name: str) -> Location:
    """A file of a unit."""
    return staged if name == "." else staged.join(name)


def attempt_folder(split: SplitJob, token: str) -> Path:
    """The folder of an attempt, on a file system."""
    return Path(split.records.folder.join(f"made-{token}").path)


def staged_at(split: SplitJob, token: str) -> Location:
    """The checkpoint in the folder of an attempt, on a file system."""
    folder = Location(split.job.committed.store, str(attempt_folder(split, token)))
    return inside(split.job, folder.join(split.job.committed.name))


def staging_of(split: SplitJob) -> Location:
    """The staging area of the conversion, as a run leaves it that can be resumed; in a store, of commit members."""
    committed = split.job.committed
    return committed.parent.join(f"{PREFIX}{committed.name}.{split.record.run}")


def map_of_job(job: Job) -> FileMap:
    """The map of the target; its files state another time than those that were written.

    Raises:
        WherryError: a companion that decides bytes cannot be read.
    """
    plan = job.plan
    return map_of(
        job.row, inside(job, job.committed), plan.manifest, plan.options, job.checkpoint.reader.companion
    )


def object_path(split: SplitJob, name: str) -> str:
    """The path of an object of a unit until the commit."""
    job = split.job
    path = member(inside(job, job.committed), name).path
    inner = path[len(job.committed.path) :].strip("/")
    if inner and inner not in job.row.commit_members:
        return path
    return f"{staging_of(split).path}/{inner or job.committed.name}"


def folder_token(split: SplitJob, receipt: TaskRecord) -> str:
    """The token of the folder in which the files of a receipt lie, on a file system."""
    return receipt.token if split.units[receipt.unit].region is None else receipt.files[0].mark


def made_place(split: SplitJob, receipt: TaskRecord, name: str) -> Location:
    """Where a file lies that was made.

    Args:
        split: the job.
        receipt: of a unit that has made it, or a region of it.
        name: of the file.
    """
    if split.records.store is None:
        return member(staged_at(split, folder_token(split, receipt)), name)
    return Location(split.job.committed.store, object_path(split, name))


# ---- shared files ----------------------------------------------------------------------------------------------------


def shared_record(unit: Unit) -> str:
    """The name of the record of the file of which a unit makes a region."""
    return f"shared-{sha256(unit.files[0].name.encode()).hexdigest()[:16]}"


def shared_file(split: SplitJob, unit: Unit) -> SharedFile | None:
    """The file of which a unit makes a region; None if it is not begun.

    Raises:
        StorageError: the storage failed.
    """
    return split.records.read(shared_record(unit), SharedFile)


def begun_file(split: SplitJob, unit: Unit, claim: Claim) -> SharedFile:
    """The same; an attempt begins it if nobody has.

    Raises:
        StorageError: the job has ended, or the storage failed.
    """
    if (found := shared_file(split, unit)) is not None:
        return found
    store = split.records.store
    if store is None:
        own = SharedFile(claim.token)
    else:
        own = SharedFile(upload=store.begin(object_path(split, unit.files[0].name), claim.token))
    split.records.create(shared_record(unit), own, claim.token)
    found = shared_file(split, unit)
    if found is None:
        raise StorageError("the job has ended", uri=split.uri, cure="run the same command again")
    # Another worker may have been faster. On Azure, what has begun is left, and goes when the object is there: an abort
    # removes what all workers have sent.
    if store is not None and own.upload and found != own and store.aborts_apart:
        store.abort(own.upload)
    return found


def late_guard(split: SplitJob, unit: Unit) -> Callable[[], None]:
    """A function that ends an attempt when another one has made the unit.

    A commit needs a receipt of every unit, so after it has begun no worker goes on that comes back from the dead. What
    it may write before it looks are the bytes that are there.
    """
    last = -_LOOK_SECONDS

    def guard() -> None:
        nonlocal last
        now = time.monotonic()
        if now - last < _LOOK_SECONDS:
            return
        last = now
        if unit.number in records_by_unit(TaskKind.MAKE, split.records.names()):
            raise TargetExistsError(
                f"unit {unit.name} was made by another worker", uri=split.uri, cure="there is nothing to do"
            )

    return guard


@dataclass(slots=True)
class SharedUploads:
    """The uploads of a job, as one commit sees them; the parts of each are listed once.

    Attributes:
        split: the job.
        uploads: by their key.
    """

    split: SplitJob
    uploads: dict[str, Upload] = field(default_factory=dict[str, "Upload"])
    _present: dict[str, dict[int, Part] | None] = field(default_factory=dict[str, "dict[int, Part] | None"])

    def has(self, receipt: TaskRecord) -> bool:
        """Whether the store has the parts of a region as its worker has sent them, or the object that they became."""
        shared = shared_file(self.split, self.split.units[receipt.unit])
        if shared is None or shared.upload is None or shared.upload.key != receipt.files[0].mark:
            return False
        self.uploads[shared.upload.key] = shared.upload
        return self._parts(shared.upload) is None or len(self.current(receipt)) == len(receipt.parts)

    def current(self, receipt: TaskRecord) -> list[tuple[str, Part]]:
        """The parts of a receipt that the store has; one that a late worker has sent again has another mark."""
        upload = self.uploads.get(receipt.files[0].mark) if receipt.files else None
        present = self._parts(upload) if upload is not None else None
        if present is None:
            return list(receipt.parts)
        return [
            (path, replace(noted, mark=found.mark))
            for path, noted in receipt.parts
            if (found := present.get(noted.number)) and _is_same(noted, found)
        ]

    def _parts(self, upload: Upload) -> dict[int, Part] | None:
        """The parts of an upload; None if it has become its object, and no parts if it is gone."""
        if upload.key not in self._present:
            store = self.split.records.store
            assert store is not None, "uploads are in one"
            found = store.head(upload.path)
            try:
                known = {part.number: part for part in store.parts(upload)}
            except FileNotFoundError:
                known = dict[int, "Part"]()
            self._present[upload.key] = None if found is not None and found.run == upload.run else known
        return self._present[upload.key]


def _is_same(noted: Part, found: Part) -> bool:
    """Whether a part holds the bytes that were noted, by its mark or by the checksum that the store has computed."""
    same = noted.mark == found.mark or bool(noted.checksum and noted.checksum == found.checksum)
    return same and noted.nbytes == found.nbytes


# ---- whether it is there ---------------------------------------------------------------------------------------------


def receipt_of(
    split: SplitJob, unit: Unit, names: Sequence[str], shared: SharedUploads | None = None
) -> TaskRecord | None:
    """The receipt of a unit whose files are there; None if there is none.

    Args:
        split: the job.
        unit: one of its units.
        names: of its receipts.
        shared: the uploads that several units share, for a unit that is a region of one.

    Raises:
        MismatchError: a receipt does not cover the unit, or two receipts differ.
        StorageError: the storage failed.
    """
    rows = (split.records.read(name, TaskRecord) for name in names)
    receipts = [row for row in rows if row]
    for receipt in receipts:
        if receipt.version != __version__:
            raise MismatchError(
                f"unit {receipt.unit} was made with wherry {receipt.version} by {receipt.worker}",
                uri=split.uri,
                cure=f"remove {receipt.name} and run `wherry work` again with wherry {__version__}",
            )
        require_whole(receipt, unit, split.uri)
        require_equal(receipts[0], receipt, split.uri)
    return next((receipt for receipt in receipts if _is_present(split, receipt, shared)), None)


def _is_present(split: SplitJob, receipt: TaskRecord, shared: SharedUploads | None) -> bool:
    """Whether what a receipt names is there, in the state that its worker has left."""
    unit, store = split.units[receipt.unit], split.records.store
    if store is None:
        entries = [made_place(split, receipt, file.name).stat() for file in receipt.files]
        if unit.region is not None:
            begun = shared_file(split, unit)
            return begun is not None and begun.token == receipt.files[0].mark and all(entries)
        states = [None if entry is None else (entry.size, entry.mark) for entry in entries]
        return states == [(file.nbytes, file.mark) for file in receipt.files]
    if unit.region is not None:
        return shared is not None and shared.has(receipt)
    return all(is_as_made(store.head(object_path(split, file.name)), receipt, file) for file in receipt.files)


def is_as_made(found: StoredObject | None, receipt: TaskRecord, file: MadeFile) -> bool:
    """Whether an object is as a receipt says."""
    return found is not None and (found.run, found.nbytes, found.mark) == (
        receipt.token,
        file.nbytes,
        file.mark,
    )


def shared_marks(split: SplitJob, receipts: Sequence[TaskRecord]) -> dict[str, str]:
    """Name of each file of a file system that several units have made → its present state.

    Args:
        split: the job.
        receipts: one of each unit.
    """
    marks: dict[str, str] = {}
    for receipt in receipts if split.records.store is None else ():
        name = receipt.files[0].name
        if split.units[receipt.unit].region is not None and name not in marks:
            entry = made_place(split, receipt, name).stat()
            marks[name] = entry.mark if entry else ""
    return marks


def watch_files(
    split: SplitJob, receipts: Sequence[TaskRecord], staged: Location, shared: Mapping[str, str]
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
        whole = [row for row in rows if split.units[row[1].unit].region is None]
        made = {object_path(split, file.name): (place.path, one, file) for place, one, file in whole}

        def replaced() -> frozenset[str]:
            found = ((made[path], state) for path, state in heads(store, made))
            return frozenset(path for (path, one, file), state in found if not is_as_made(state, one, file))

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
