"""make: makes one unit: its moves through the writer of the format, into files or objects of this attempt alone.

The writer is created for the whole target, in a store that keeps only the files of the unit (`Selection`), so the bytes
are those of a conversion in one process. On a file system, an attempt writes into a folder of its own in the folder of
the job. In a store of objects, the objects have their final names, are create-only and carry the id of the attempt.
A region of a file goes into the file, or the upload, that all its units share (`shared_files`).
"""

from __future__ import annotations

import os
import socket
import time
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from wherry.converter.job import finish, inside, targets_of
from wherry.converter.passes import Pass, move
from wherry.converter.plan import joint_moves
from wherry.errors import InternalError, StorageError, WherryError, storage_errors
from wherry.mover.output import Output
from wherry.mover.spill import FOLDER_VARIABLE
from wherry.objects.stores import object_store
from wherry.records.unit_receipt import MadeFile, UnitReceipt
from wherry.staging.janitor import temporary_folder
from wherry.staging.journal import DurableMove, Journal
from wherry.storage.folders import PREFIX, make_folders, remove_leftover
from wherry.storage.location import Location
from wherry.storage.stores import make_folder
from wherry.units.shared_files import late_guard, shared_token, shared_upload
from wherry.upload.run import UploadRun
from wherry.upload.selection import SelectedLocal, SelectedObjects
from wherry.upload.sender import Sender, parts_share
from wherry.upload.uploaded_file import SentBefore, UploadContext
from wherry.version import __version__

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Mapping

    from wherry.converter.job import Job
    from wherry.core.keypath import KeyPath
    from wherry.core.leaf_values import LeafValues
    from wherry.core.tensorspec import Span
    from wherry.formats.format import Writer
    from wherry.objects.uploads import ObjectStore, Part, Upload
    from wherry.records.claims import Claim
    from wherry.records.unit import Unit
    from wherry.units.split_job import SplitJob


_MOST_VALUES = 32 << 20  # bytes of all values in a receipt, as the commit holds all receipts


@dataclass(slots=True)
class UnitJournal(Journal):
    """The moves of one unit; those of other units count as done. It is kept in memory.

    Attributes:
        unit: the unit.
        rows: the moves that were made.
    """

    unit: Unit = None  # pyright: ignore[reportAssignmentType]  fields of the base class have defaults
    rows: list[DurableMove] = field(default_factory=list["DurableMove"])

    def has(self, source: KeyPath, span: Span) -> bool:
        """Whether a move is done, or belongs to another unit."""
        return not self.unit.reads(source, span)

    def record(self, rows: Iterable[DurableMove]) -> None:
        """Note moves that were made; those that were only read are nobody's work."""
        self.rows += [row for row in rows if self.unit.has(row.source, row.span)]


class _AttemptPlace(NamedTuple):
    """Where an attempt writes: the checkpoint's location, and a folder for decoded bytes."""

    staged: Location
    spill: Path


def make_unit(split: SplitJob, unit: Unit, claim: Claim) -> UnitReceipt:
    """Make one unit.

    Args:
        split: the job, opened.
        unit: one of its units.
        claim: on the unit.

    Raises:
        TargetExistsError: another attempt has made one of the objects.
        WherryError: the source cannot be read, or the storage failed.
    """
    clock, job = time.monotonic(), split.job
    with ExitStack() as stack:
        area = stack.enter_context(_area(split, unit, claim))
        assert job.row.create is not None, "the format is one that can be written"
        writer = job.row.create(area.staged, job.plan.manifest, job.plan.options)
        stack.callback(writer.close)
        journal = UnitJournal(path=Path(), unit=unit)
        output = Output(writer, targets_of(job.plan), journal, overflow=job.plan.overflow)
        whole = joint_moves([job.plan])
        sources = {part.source for part in unit.parts}
        moves = replace(whole, targets={path: one for path, one in whole.targets.items() if path in sources})
        where = Pass(area.staged, area.spill, (output,))
        moved = move(job, moves, where, split.algorithms, unit.hashed, shared=True)
        finish(writer) if unit.region is None else finish_region(writer, area.staged)
        files = tuple(_describe_file(split, unit, area.staged, file.name) for file in unit.files)
        notes, parts = _notes(area.staged), _parts(job, area.staged, unit)
    _require_moved(unit, journal.rows)
    hashed = {
        algorithm: {path: b"".join(raw) for path, raw in hashes.leaves.items()}
        for algorithm, hashes in (moved.own or {}).items()
    }
    boxes = _within(moved.boxes, _MOST_VALUES)
    sources = _within(moved.sources, _MOST_VALUES - sum(values.nbytes for values in boxes.values()))
    return UnitReceipt(
        unit=unit.number,
        digest=unit.digest,
        token=claim.token,
        version=__version__,
        files=files,
        moves=tuple(journal.rows),
        hashed=hashed,
        notes=notes,
        parts=parts,
        boxes=boxes,
        sources=sources,
        worker=this_worker(),
        seconds=round(time.monotonic() - clock, 3),
    )


def _within(values: Mapping[KeyPath, LeafValues], most: int) -> dict[KeyPath, LeafValues]:
    """What takes at most so many bytes; of tensors that are left out, the commit reads every byte."""
    found: dict[KeyPath, LeafValues] = {}
    for path in sorted(values, key=lambda path: (values[path].nbytes, path)):
        most -= values[path].nbytes
        if most < 0:
            break
        found[path] = values[path]
    return found


def finish_region(writer: Writer, staged: Location) -> None:
    """Make a region durable. What depends on bytes of other units is left to the commit, and so is a part with it."""
    writer.sync()
    if isinstance(staged.store, SelectedObjects):
        staged.store.run.using.sender.drain()
        staged.store.run.drop_overflow()
    writer.close()


def this_worker() -> str:
    """Names this process in receipts and proofs; two processes with one name count as one."""
    return f"process {os.getpid()} on {socket.gethostname()}"


def attempt_folder(split: SplitJob, token: str) -> Path:
    """The folder of an attempt, on a file system."""
    return Path(split.records.folder.join(f"made-{token}").path)


def staged_at(split: SplitJob, token: str) -> Location:
    """The checkpoint in the folder of an attempt, on a file system."""
    folder = Location(split.job.committed.store, str(attempt_folder(split, token)))
    return inside(split.job, folder.join(split.job.committed.name))


def member(staged: Location, name: str) -> Location:
    """A file of a unit."""
    return staged if name == "." else staged.join(name)


@contextmanager
def _area(split: SplitJob, unit: Unit, claim: Claim) -> Generator[_AttemptPlace]:
    """The place of an attempt while the block runs; if it fails, what was written is removed."""
    store = object_store(split.job.committed.store)
    with temporary_folder(f"{PREFIX}spill-", os.environ.get(FOLDER_VARIABLE)) as spill:
        area = _local_area if store is None else partial(_object_area, store)
        with area(split, unit, claim) as staged:
            yield _AttemptPlace(staged, Path(spill))


@contextmanager
def _local_area(split: SplitJob, unit: Unit, claim: Claim) -> Generator[Location]:
    if unit.region is not None:
        staged, guard = staged_at(split, shared_token(split, unit, claim)), late_guard(split, unit)
        with storage_errors(split.uri):
            make_folders(Path(staged.path).parent)
        store = SelectedLocal(paths=_paths(staged, unit), region=unit.region, guard=guard)
        yield Location(store, staged.path)
        return
    staged, folder = staged_at(split, claim.token), attempt_folder(split, claim.token)
    with storage_errors(split.uri):
        folder.mkdir(mode=0o700)
    try:
        make_folder(staged.parent)
        yield Location(SelectedLocal(paths=_paths(staged, unit)), staged.path)
    except (Exception, KeyboardInterrupt, SystemExit):
        remove_leftover(folder)
        raise


@contextmanager
def _object_area(store: ObjectStore, split: SplitJob, unit: Unit, claim: Claim) -> Generator[Location]:
    job, sender = split.job, Sender(parts_share(split.job.plan.memory))
    context = UploadContext(store, claim.token, sender, PartLog(), job.committed.store.protocol)
    run = UploadRun(job.committed, staging_of(split).path, context, job.row.commit_members)
    staged = inside(job, job.committed)
    paths = _paths(staged, unit)
    try:
        for path in paths:
            if unit.region is None:
                _remove_earlier(store, run.place(path), claim)
            else:
                run.before = {run.place(path): _shared_upload(split, unit, run.place(path), claim)}
        yield Location(SelectedObjects(job.committed.store, run, paths, unit.region), staged.path)
    except (Exception, KeyboardInterrupt, SystemExit):
        sender.stop()
        with suppress(WherryError):  # `commit` and `clean` know what is left
            run.abort() if unit.region is None else run.drop_overflow()
        raise
    finally:
        sender.stop()


def staging_of(split: SplitJob) -> Location:
    """The staging area of the conversion, as a run leaves it that can be resumed; in a store, of commit members."""
    committed = split.job.committed
    return committed.parent.join(f"{PREFIX}{committed.name}.{split.identity}")


def _paths(staged: Location, unit: Unit) -> frozenset[str]:
    return frozenset(member(staged, file.name).path for file in unit.files)


def _remove_earlier(store: ObjectStore, path: str, claim: Claim) -> None:
    """Remove what an attempt has put whose worker has ended before it wrote its receipt."""
    found = store.head(path)
    if found is not None and found.run in claim.before:
        store.remove_object(path, found.mark)


def _shared_upload(split: SplitJob, unit: Unit, path: str, claim: Claim) -> SentBefore:
    """The upload of a shared file, of which this attempt has sent nothing."""
    return SentBefore(shared_upload(split, unit, path, claim))


def _describe_file(split: SplitJob, unit: Unit, staged: Location, name: str) -> MadeFile:
    place = member(staged, name)
    if unit.region is not None and isinstance(staged.store, SelectedObjects):
        upload = shared_upload(split, unit, staged.store.run.place(place.path))
        return MadeFile(name, unit.region.nbytes, "" if upload is None else upload.key)
    if isinstance(staged.store, SelectedObjects):
        found = staged.store.run.file_at(place.path).stored
        if found is not None:
            return MadeFile(name, found.nbytes, found.mark)
    entry = place.stat()
    if entry is None:
        raise StorageError("the file was not made", uri=place.uri, cure="run `wherry work` again")
    if unit.region is not None:
        return MadeFile(name, unit.region.nbytes, shared_token(split, unit))
    return MadeFile(name, entry.size, entry.mark)


def _notes(staged: Location) -> tuple[list[Any], ...]:
    """What the writer has noted about its objects, for the commit; on a file system it leaves a log."""
    return tuple(staged.store.run.new_notes()) if isinstance(staged.store, SelectedObjects) else ()


def _parts(job: Job, staged: Location, unit: Unit) -> tuple[list[Any], ...]:
    """The parts of a region; those of objects where the checksums of the store are the proof of the target."""
    needed = job.plan.verify == "store" or unit.region is not None
    if not needed or not isinstance(staged.store, SelectedObjects):
        return ()
    log = staged.store.run.using.log
    assert isinstance(log, PartLog)
    return tuple(log.rows)


def _require_moved(unit: Unit, rows: list[DurableMove]) -> None:
    moved, wanted = sum(row.span.nbytes for row in rows), sum(part.nbytes for part in unit.parts)
    if moved != wanted:
        raise InternalError(f"unit {unit.name}: {moved:,} of {wanted:,} bytes were moved")


@dataclass(slots=True)
class PartLog:
    """Keeps what is sent for the receipt; a unit that is interrupted is made again from its beginning.

    Attributes:
        rows: path of an object and one of its parts.
    """

    rows: list[list[Any]] = field(default_factory=list["list[Any]"])

    def part(self, upload: Upload, part: Part) -> None:
        """See UploadLog."""
        self.rows.append([upload.path, asdict(part)])

    def whole(self, path: str, part: Part) -> None:
        """See UploadLog."""
        self.rows.append([path, asdict(part)])
