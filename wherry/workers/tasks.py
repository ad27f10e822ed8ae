"""tasks: what a worker does at a time: it makes a unit, or reads back what another process has made of one.

Making: the moves of the unit go through the writer of the format, as those of a conversion in one process do. The
writer has the map of the whole target, and writes the slice of it that is the unit, so the bytes are the same.

On a file system an attempt has a folder of its own in the folder of the job. In a store the objects have their final
names, are create-only and carry the id of the attempt. Large files are shared: each unit makes its region of them, on a
file system in one preallocated file in the folder of the job, in a store of one upload. A record names that folder or
upload: where it is lost, the next commit removes the record, so that what receipts say of it is no longer believed.

Receipts say how each file was left, so that everybody sees whether it is still so (`receipt_of`). A file of a file
system that several units have made has no such state, as each of them has changed it: what counts is how it was when it
was read back.

Reading back: the map of the target has the byte ranges of each move. They are read from the files or objects of the
attempts whose receipts count, past the page cache, and hashed. A leaf that crosses the edge of a unit is read whole,
with the bytes in the files of the next unit. Left to the commit are tensors that only the reader of the finished target
can decode, small ones, and everything of which a file is no longer as it was made. Of a file on a file system that
several units have made, a region is read when all of them have receipts.
"""

from __future__ import annotations

import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import field, replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

from wherry.converter.job import Carriage, finish, inside, least_alone, move, targets_of
from wherry.converter.plan import joint_moves
from wherry.core import threads
from wherry.core.digest import LeafValues
from wherry.core.keypath import KeyPath
from wherry.core.lazy_dataclass import dataclass
from wherry.core.progress import logger
from wherry.core.tensorspec import Region, Span, TensorSpec
from wherry.core.threads import Crew
from wherry.cures import Command, Cure
from wherry.errors import (
    IncompleteError,
    InternalError,
    MismatchError,
    StorageError,
    TargetExistsError,
    WherryError,
    storage_errors,
)
from wherry.formats.format import Extent
from wherry.mover.carrier import ranged_workers
from wherry.mover.map_writer import MapWriter, writer_of
from wherry.mover.output import Output
from wherry.mover.pool import Pool
from wherry.mover.readback import FilesBeingWritten, ReadBack, StoredPart
from wherry.store.folders import PREFIX, SPILL_VARIABLE, make_folders, remove_leftover
from wherry.store.local_store import make_folder
from wherry.store.location import Location
from wherry.store.store import Part, StoredObject, Upload
from wherry.target.file_ranges import FileRange, lengths_of, ranges_of
from wherry.target.files import Slice
from wherry.target.janitor import temporary_folder
from wherry.target.journal import DurableMove
from wherry.target.parts import Sender, parts_share
from wherry.target.staged_objects import StagedObjects, run_of
from wherry.target.upload_run import UploadRun
from wherry.target.uploaded_file import SentBefore, UploadContext
from wherry.version import __version__
from wherry.workers.job import SplitJob
from wherry.workers.records import (
    BlockHash,
    Claim,
    Claims,
    MadeFile,
    SharedFile,
    Task,
    TaskKind,
    TaskRecord,
    records_by_unit,
)
from wherry.workers.unit import Unit

_MOST_VALUES = 32 << 20  # bytes of all values in a receipt, as the commit holds all receipts
_LOOK_SECONDS = 0.5  # between two looks whether somebody else has made the unit
_log = logger(__name__)


def run_task(split: SplitJob, claims: Claims, task: Task, claim: Claim) -> TaskRecord | None:
    """Do a task that was claimed, and record what was done; the claim is renewed meanwhile.

    Returns:
        The record; None if what is to be read back is not there as its receipt says, which the commit will find.
    """
    with claims.renewed(claim):
        if task.kind is TaskKind.MAKE:
            record = make_unit(split, task.unit, claim)
        else:
            try:
                record = prove_unit(split, task.unit, claim)
            except (IncompleteError, MismatchError) as error:
                _log.warning("unit %s was not read back: %s", task.unit.name, error)
                return None
        split.records.create(record.name, record, claim.token)
    return record


# ---- making ----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _AttemptLog:
    """What an attempt has made of a unit, in memory, since a unit that is interrupted is made again.

    See MoveLog and UploadLog; no move was done before.
    """

    unit: Unit
    moves: list[DurableMove] = field(default_factory=list[DurableMove])
    parts: list[tuple[str, Part]] = field(default_factory=list[tuple[str, Part]])
    done: tuple[DurableMove, ...] = ()

    def has(self, source: KeyPath, span: Span) -> bool:
        """Whether a move belongs to another unit."""
        return not self.unit.reads(source, span)

    def record(self, moves: Iterable[DurableMove]) -> None:
        """Note moves that were made; moves that were only read are not recorded."""
        self.moves += [move for move in moves if self.unit.has(move.source, move.span)]

    def part(self, upload: Upload, part: Part) -> None:
        """Note a part that the store has."""
        self.whole(upload.path, part)

    def whole(self, path: str, part: Part) -> None:
        """Note an object that was put at once."""
        self.parts.append((path, part))


def make_unit(split: SplitJob, unit: Unit, claim: Claim) -> TaskRecord:
    """Make one unit.

    Args:
        split: the job, opened.
        unit: one of its units.
        claim: on the unit.

    Raises:
        TargetExistsError: another attempt has made one of the objects.
        WherryError: the source cannot be read, or the storage failed.
    """
    clock, job, plan, log = time.monotonic(), split.job, split.job.plan, _AttemptLog(unit)
    with ExitStack() as stack:
        spill = stack.enter_context(temporary_folder(f"{PREFIX}spill-", os.environ.get(SPILL_VARIABLE)))
        local = split.records.store is None
        area = _local_area(split, unit, claim) if local else _object_area(split, log, claim)
        staged = stack.enter_context(area)
        part = Slice(frozenset(file.name for file in unit.files), unit.region)
        if local and unit.region:  # a worker that is slow writes no region that others have made
            part = replace(part, guard=late_guard(split, unit))
        companion = job.checkpoint.reader.companion
        writer = writer_of(job.row, staged, plan.manifest, plan.options, companion, part)
        stack.callback(writer.close)
        output = Output(writer, targets_of(plan), log, overflow=plan.overflow)
        whole = joint_moves([plan])
        sources = {part.source for part in unit.parts}
        moves = replace(whole, targets={path: one for path, one in whole.targets.items() if path in sources})
        carriage = Carriage(job, moves, staged, Path(spill), (output,))
        moved = move([carriage], split.algorithms, unit.hashed, shared=True)
        finish(writer) if unit.region is None else finish_region(writer, staged)
        files = tuple(_describe_file(split, unit, staged, file.name) for file in unit.files)
        # What the writer has noted about its objects; on a file system it leaves a log.
        notes = tuple(run_of(staged).new_notes()) if staged.store.capabilities.staged else ()
    moved_bytes, wanted = sum(row.span.nbytes for row in log.moves), sum(part.nbytes for part in unit.parts)
    if moved_bytes != wanted:
        raise InternalError(f"unit {unit.name}: {moved_bytes:,} of {wanted:,} bytes were moved")
    hashed = {
        algorithm: {path: b"".join(raw) for path, raw in hashes.leaves.items()}
        for algorithm, hashes in (moved.own or {}).items()
    }
    boxes = _within(moved.boxes, _MOST_VALUES)
    sources = _within(moved.sources, _MOST_VALUES - sum(values.nbytes for values in boxes.values()))
    keeps_parts = unit.region is not None or plan.verify == "store"
    return TaskRecord(
        kind=TaskKind.MAKE,
        unit=unit.number,
        digest=unit.digest,
        token=claim.token,
        version=__version__,
        files=files,
        moves=tuple(log.moves),
        hashed=hashed,
        notes=notes,
        parts=tuple(log.parts) if keeps_parts else (),
        boxes=boxes,
        sources=sources,
        worker=this_worker(),
        seconds=round(time.monotonic() - clock, 3),
    )


def _within(values: Mapping[KeyPath, LeafValues], most: int) -> dict[KeyPath, LeafValues]:
    """The values that take at most this many bytes; the commit reads every byte of the tensors that are left out."""
    found: dict[KeyPath, LeafValues] = {}
    for path in sorted(values, key=lambda path: (values[path].nbytes, path)):
        most -= values[path].nbytes
        if most < 0:
            break
        found[path] = values[path]
    return found


def finish_region(writer: MapWriter, staged: Location) -> None:
    """Make a region durable. Bytes that depend on other units are left to the commit, and so are their parts."""
    writer.sync()
    if staged.store.capabilities.staged:
        run_of(staged).using.sender.drain()
        run_of(staged).drop_overflow()
    writer.close()


def this_worker() -> str:
    """Names this process in receipts and proofs; two processes with one name count as one."""
    return f"process {os.getpid()} on {socket.gethostname()}"


@contextmanager
def _local_area(split: SplitJob, unit: Unit, claim: Claim) -> Generator[Location]:
    """Where an attempt writes files while the block runs; if it fails, its own are removed."""
    if unit.region is not None:
        staged = staged_in(split, _attempt_folder(split, _begun_file(split, unit, claim).token))
        with storage_errors(split.uri):
            make_folders(Path(staged.path).parent)
        yield staged
        return
    place = _attempt_folder(split, claim.token)
    staged, folder = staged_in(split, place), Path(place.path)
    with storage_errors(split.uri):
        folder.mkdir(mode=0o700)
    try:
        make_folder(staged.parent)
        yield staged
    except (Exception, KeyboardInterrupt, SystemExit):
        remove_leftover(folder)
        raise


@contextmanager
def _object_area(split: SplitJob, log: _AttemptLog, claim: Claim) -> Generator[Location]:
    """Where an attempt puts objects while the block runs; if it fails, what was sent is removed."""
    job, unit, sender = split.job, log.unit, Sender(parts_share(split.job.plan.memory))
    store = job.committed.store
    context = UploadContext(store, claim.token, sender, log)
    run = UploadRun(job.committed, staging_of(split).path, context, job.row.commit_members)
    staged = inside(job, job.committed)
    try:
        for path in (member(staged, file.name).path for file in unit.files):
            if unit.region is None:
                # What an attempt has put whose worker has ended before it wrote its receipt is removed.
                found = store.head(run.place(path))
                if found is not None and found.run in claim.before:
                    store.remove_object(run.place(path), found.mark)
            else:
                run.before = {run.place(path): SentBefore(_begun_file(split, unit, claim).upload)}
        yield Location(StagedObjects(store, run), staged.path)
    except (Exception, KeyboardInterrupt, SystemExit):
        sender.stop()
        with suppress(WherryError):  # `commit` and `clean` know what is left
            run.abort() if unit.region is None else run.drop_overflow()
        raise
    finally:
        sender.stop()


def _describe_file(split: SplitJob, unit: Unit, staged: Location, name: str) -> MadeFile:
    if unit.region is not None:
        shared = shared_file(split, unit)
        return MadeFile(name, unit.region.nbytes, "" if shared is None else shared.mark)
    place = member(staged, name)
    if staged.store.capabilities.staged and (found := run_of(staged).file_at(place.path).stored) is not None:
        return MadeFile(name, found.nbytes, found.mark)
    entry = place.stat()
    if entry is None:
        raise StorageError("the file was not made", uri=place.uri, cure=Cure("run {} again", Command("work")))
    return MadeFile(name, entry.size, entry.mark)


# ---- reading back ----------------------------------------------------------------------------------------------------


def prove_unit(split: SplitJob, unit: Unit, claim: Claim) -> TaskRecord:
    """Read back what was made of a unit.

    Args:
        split: the job, opened.
        unit: one of its units.
        claim: on reading it.

    Raises:
        IncompleteError: what a receipt names is not there as it was left.
        MismatchError: a receipt is wrong, or bytes that were written are missing.
        StorageError: the storage failed.
    """
    clock, job = time.monotonic(), split.job
    made = _MadeFiles(split)
    made.receipt(unit)  # of files that are not read too
    files = FilesBeingWritten(least=least_alone(objects=split.records.store is not None))
    back = ReadBack(made, targets_of(job.plan), job.target.uri, files, algorithms=split.algorithms)
    moves = joint_moves([job.plan])
    for source in dict.fromkeys(part.source for part in (*unit.parts, *unit.also_read)):
        back.add(move for move in moves.of(source) if unit.reads(source, move.span))
    parts = list(back.parts())
    back.with_checksums |= {
        move.source for receipt in made.receipts.values() for move in receipt.moves if move.checks
    }
    _read(split, back, parts)
    moved = [(move, values) for move, values in back.moves_read() if unit.has(move.source, move.span)]
    # The tensors in boxes that were read as far as the unit moves them, and its moves whose leaves were all read.
    read, boxes = Counter["KeyPath"](), dict["KeyPath", str]()
    for one, values in moved:
        read[one.source] += one.span.nbytes
        if values is not None and read[one.source] == unit.nbytes_of(one.source):
            boxes[one.source] = values.digest
    moves = tuple(move for move, _values in moved if move.leaves or move.source in boxes)
    return TaskRecord(
        kind=TaskKind.READ,
        unit=unit.number,
        digest=unit.digest,
        token=claim.token,
        version=__version__,
        algorithm=split.algorithms[0],
        of=tuple(receipt.name for _number, receipt in sorted(made.receipts.items())),
        moves=moves,
        blocks=tuple(
            BlockHash(source, made.names[at.location.path], at.offset, at.length, digest)
            for source, (at, digest) in back.shared()
        ),
        worker=this_worker(),
        seconds=round(time.monotonic() - clock, 3),
        files=tuple(made.shared.values()),
        boxes_read=boxes,
    )


class _MadeFiles:
    """Where the bytes of units are: in the files of the attempts whose receipts count; see WrittenBytes.

    Attributes:
        receipts: number of a unit → its receipt, of the requested files.
        names: path of each of these files → its name in the target.
        shared: name of each requested file of several units → its state before it is read.
    """

    def __init__(self, split: SplitJob) -> None:
        self._split, self._finished = split, records_by_unit(TaskKind.MAKE, split.records.names())
        self._map = split.file_map()
        self._units: dict[str, list[Unit]] = {}
        for unit in split.units:
            for file in unit.files:
                self._units.setdefault(file.name, []).append(unit)
        self.receipts: dict[int, TaskRecord] = {}
        self.names: dict[str, str] = {}
        self.shared: dict[str, MadeFile] = {}

    def receipt(self, unit: Unit) -> TaskRecord:
        """The receipt of a unit.

        Raises:
            IncompleteError: what it names is not there as it was left.
        """
        known = self.receipts.get(unit.number)
        if known is None:
            known = receipt_of(self._split, unit, self._finished.get(unit.number, []))
            if known is None:
                raise IncompleteError(
                    f"unit {unit.name} is no longer as it was written", uri=self._split.uri,
                    cure=Cure("run {}, which has it written again", Command("commit")),
                )  # fmt: skip
            if unit.region is not None:  # its state is compared when the target is committed
                name = known.files[0].name
                entry = made_place(self._split, known, name).stat()
                if name not in self.shared and entry is not None:
                    self.shared[name] = MadeFile(name, entry.size, entry.mark)
            self.receipts[unit.number] = known
        return known

    def extents(self, path: KeyPath, where: Region | Span) -> tuple[Extent, ...] | None:
        """See WrittenBytes."""
        found = ranges_of(self._map, path, where)
        return None if found is None else tuple(map(self._extent, found))

    def encoded(self, path: KeyPath, where: Region) -> None:
        """See WrittenBytes: encoded chunks have one process."""

    def lengths(self, spec: TensorSpec) -> Sequence[int]:
        """See WrittenBytes."""
        return lengths_of(self._map, spec)

    def _extent(self, found: FileRange) -> Extent:
        name = found.file
        receipts = [
            self.receipt(unit)
            for unit in self._units[name]
            if (at := unit.region) is None
            or (found.start < at.stop and max(found.stop, found.start + 1) > at.start)
        ]
        place = made_place(self._split, receipts[0], name)
        self.names[place.path] = name
        return Extent(place, found.start, found.stop - found.start)


def _read(split: SplitJob, back: ReadBack, parts: Sequence[StoredPart]) -> None:
    """Read and hash parts with several threads, within the memory of the plan."""
    pool, count = Pool(split.job.plan.memory), threads.worker_count()
    if split.records.store is not None:
        count = max(count, ranged_workers(pool.budget))

    def read(part: StoredPart) -> None:
        with pool.buffer(part.memory, part.extra, part.place) as memory:
            back.hash(part, back.read(part, memory))

    Crew().work((partial(read, part) for part in parts), count)


# ---- places ----------------------------------------------------------------------------------------------------------


def member(staged: Location, name: str) -> Location:
    """A file of a unit."""
    return staged if name == "." else staged.join(name)


def staged_in(split: SplitJob, folder: Location) -> Location:
    """The checkpoint in a folder of the job, on a file system."""
    return inside(split.job, folder.join(split.job.committed.name))


def _attempt_folder(split: SplitJob, token: str) -> Location:
    return split.records.folder.join(f"made-{token}")


def staging_of(split: SplitJob) -> Location:
    """The staging area of the conversion, as a run leaves it that can be resumed; in a store, of commit members."""
    committed = split.job.committed
    return committed.parent.join(f"{PREFIX}{committed.name}.{split.record.run}")


def object_path(split: SplitJob, name: str) -> str:
    """The path of an object of a unit until the commit."""
    job = split.job
    path = member(inside(job, job.committed), name).path
    inner = path[len(job.committed.path) :].strip("/")
    if inner and inner not in job.row.commit_members:
        return path
    return f"{staging_of(split).path}/{inner or job.committed.name}"


def made_place(split: SplitJob, receipt: TaskRecord, name: str) -> Location:
    """The location of a file that was made.

    Args:
        split: the job.
        receipt: of a unit that has made it, or a region of it.
        name: of the file.
    """
    if split.records.store is None:
        token = receipt.token if split.units[receipt.unit].region is None else receipt.files[0].mark
        return member(staged_in(split, _attempt_folder(split, token)), name)
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


def _begun_file(split: SplitJob, unit: Unit, claim: Claim) -> SharedFile:
    """The file of which a unit makes a region; this attempt begins it if no other has."""
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

    A commit needs a receipt of every unit, so after it has begun no worker goes on that comes back from the dead. The
    bytes that it may write before it looks are equal to those that are there.
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
        if shared is None or shared.upload is None or shared.mark != receipt.files[0].mark:
            return False
        self.uploads[shared.mark] = shared.upload
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
            if (found := present.get(noted.number))
            and noted.nbytes == found.nbytes
            # The bytes that were noted, by the mark of the part, or by the checksum that the store has computed.
            and (noted.mark == found.mark or (noted.checksum and noted.checksum == found.checksum))
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
    receipts = [row for name in names if (row := split.records.read(name, TaskRecord))]
    for receipt in receipts:
        if receipt.version != __version__:
            raise MismatchError(
                f"unit {receipt.unit} was made with wherry {receipt.version} by {receipt.worker}",
                uri=split.uri,
                cure=Cure(
                    "remove {} and run {} again with wherry {}", receipt.name, Command("work"), __version__
                ),
            )
        _require_whole(receipt, unit, split.uri)
        _require_equal(receipts[0], receipt, split.uri)
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
    state = (receipt.token, file.nbytes, file.mark)
    return found is not None and (found.run, found.nbytes, found.mark) == state


def _require_equal(first: TaskRecord, second: TaskRecord, uri: str) -> None:
    """Compare two attempts at one unit, which must have moved the same bytes."""
    # What both have hashed: a machine may have no kernels.
    pairs: list[tuple[Mapping[KeyPath, Any], Mapping[KeyPath, Any]]] = [
        (first.boxes, second.boxes),
        (first.sources, second.sources),
        *((rows, second.hashed.get(name, {})) for name, rows in first.hashed.items()),
    ]
    agree = all(left[path] == right[path] for left, right in pairs for path in left.keys() & right.keys())
    if _content(first) != _content(second) or not agree:
        raise MismatchError(
            f"two workers made different bytes of unit {first.unit}: {first.worker} and {second.worker}",
            uri=uri,
            cure=Cure(
                "check both machines, remove {} and {}, and run {} again",
                first.name,
                second.name,
                Command("work"),
            ),
        )


def _content(record: TaskRecord) -> tuple[Any, ...]:
    moves = sorted((move.source, move.span, sorted(move.leaves.items())) for move in record.moves)
    return moves, sorted((file.name, file.nbytes) for file in record.files)


def _require_whole(record: TaskRecord, unit: Unit, uri: str) -> None:
    """Refuse a record that is not of this unit, or that leaves something out of what is to be made."""
    moved = sum(move.span.nbytes for move in record.moves if unit.has(move.source, move.span))
    spans = {(move.source, move.span) for move in record.moves}
    whole = moved == sum(part.nbytes for part in unit.parts) and len(spans) == len(record.moves)
    files = {file.name: file.nbytes for file in record.files} == dict(unit.files)
    hashed = all(set(rows) <= set(unit.hashed) for rows in record.hashed.values())
    hashed = hashed and record.boxes.keys() <= {part.source for part in unit.parts}
    if record.digest != unit.digest or not (whole and files and hashed):
        raise MismatchError(
            f"the receipt of unit {unit.name} by {record.worker} does not cover the unit",
            uri=uri,
            cure=Cure("remove {} and run {} again", record.name, Command("work")),
        )
