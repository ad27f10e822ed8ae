"""make: makes one unit: its moves through the writer of the format, into files or objects of this attempt alone.

The writer has the map of the whole target, and writes the slice of it that is the unit, so the bytes are those of a
conversion in one process.

On a file system an attempt has a folder of its own in the folder of the job. In a store the objects have their final
names, are create-only and carry the id of the attempt. Large files are shared: each unit makes its region of them, on a
file system in one preallocated file in the folder of the job, in a store of one upload. A record names that folder or
upload: where it is lost, the next commit removes the record, so that what receipts say of it is no longer believed.

Receipts say how each file was left, so that everybody sees whether it is still so (`receipt_of`). A file of a file
system that several units have made has no such state, as each of them has changed it: what counts is how it was when it
was read back.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wherry.converter.job import Pass, finish, inside, move, targets_of
from wherry.converter.plan import joint_moves
from wherry.core.keypath import KeyPath
from wherry.core.leaf_values import LeafValues
from wherry.core.tensorspec import Span
from wherry.errors import (
    InternalError,
    MismatchError,
    StorageError,
    TargetExistsError,
    WherryError,
    storage_errors,
)
from wherry.mover.map_writer import MapWriter, writer_of
from wherry.mover.output import Output
from wherry.storage.folders import PREFIX, SPILL_VARIABLE, make_folders, remove_leftover
from wherry.storage.location import Location
from wherry.storage.stores import make_folder
from wherry.store.store import Part, Store, StoredObject, Upload
from wherry.target.durable_move import DurableMove
from wherry.target.files import Slice
from wherry.target.janitor import temporary_folder
from wherry.target.parts import Sender, parts_share
from wherry.target.staged_objects import StagedObjects, is_staged, run_of
from wherry.target.upload_run import UploadRun
from wherry.target.uploaded_file import SentBefore, UploadContext
from wherry.version import __version__
from wherry.workers.records import Claim, MadeFile, SharedFile, TaskKind, TaskRecord, records_by_unit

if TYPE_CHECKING:
    from wherry.workers.job import SplitJob
    from wherry.workers.unit import Unit


_MOST_VALUES = 32 << 20  # bytes of all values in a receipt, as the commit holds all receipts
_LOOK_SECONDS = 0.5  # between two looks whether somebody else has made the unit


@dataclass(slots=True)
class AttemptLog:
    """What an attempt has made of a unit, in memory, since a unit that is interrupted is made again; see MoveLog.

    Attributes:
        unit: the unit.
        moves: the moves that were made.
        parts: path of an object and one of its parts, that were sent; see UploadLog.
        done: no move was made before.
    """

    unit: Unit
    moves: list[DurableMove] = field(default_factory=list["DurableMove"])
    parts: list[tuple[str, Part]] = field(default_factory=list["tuple[str, Part]"])
    done: tuple[DurableMove, ...] = ()

    def has(self, source: KeyPath, span: Span) -> bool:
        """Whether a move belongs to another unit."""
        return not self.unit.reads(source, span)

    def record(self, moves: Iterable[DurableMove]) -> None:
        """Note moves that were made; moves that were only read are not recorded."""
        self.moves += [move for move in moves if self.unit.has(move.source, move.span)]

    def part(self, upload: Upload, part: Part) -> None:
        """Note a part that the store has."""
        self.parts.append((upload.path, part))

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
    clock, job, plan, log = time.monotonic(), split.job, split.job.plan, AttemptLog(unit)
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
        where = Pass(staged, Path(spill), (output,))
        moved = move(job, moves, where, split.algorithms, unit.hashed, shared=True)
        finish(writer) if unit.region is None else finish_region(writer, staged)
        files = tuple(_describe_file(split, unit, staged, file.name) for file in unit.files)
        # What the writer has noted about its objects; on a file system it leaves a log.
        notes = tuple(run_of(staged).new_notes()) if is_staged(staged) else ()
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
    """What takes at most so many bytes; of tensors that are left out, the commit reads every byte."""
    found: dict[KeyPath, LeafValues] = {}
    for path in sorted(values, key=lambda path: (values[path].nbytes, path)):
        most -= values[path].nbytes
        if most < 0:
            break
        found[path] = values[path]
    return found


def finish_region(writer: MapWriter, staged: Location) -> None:
    """Make a region durable. What depends on bytes of other units is left to the commit, and so is a part with it."""
    writer.sync()
    if is_staged(staged):
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
        staged = _staged_at(split, _begun_file(split, unit, claim).token)
        with storage_errors(split.uri):
            make_folders(Path(staged.path).parent)
        yield staged
        return
    staged, folder = _staged_at(split, claim.token), Path(_attempt_folder(split, claim.token).path)
    with storage_errors(split.uri):
        folder.mkdir(mode=0o700)
    try:
        make_folder(staged.parent)
        yield staged
    except (Exception, KeyboardInterrupt, SystemExit):
        remove_leftover(folder)
        raise


@contextmanager
def _object_area(split: SplitJob, log: AttemptLog, claim: Claim) -> Generator[Location]:
    """Where an attempt puts objects while the block runs; if it fails, what was sent is removed."""
    job, unit, sender = split.job, log.unit, Sender(parts_share(split.job.plan.memory))
    store = job.committed.store
    context = UploadContext(store, claim.token, sender, log)
    run = UploadRun(job.committed, staging_of(split).path, context, job.row.commit_members)
    staged = inside(job, job.committed)
    try:
        for path in (member(staged, file.name).path for file in unit.files):
            if unit.region is None:
                _remove_earlier(store, run.place(path), claim)
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


def _remove_earlier(store: Store, path: str, claim: Claim) -> None:
    """Remove what an attempt has put whose worker has ended before it wrote its receipt."""
    found = store.head(path)
    if found is not None and found.run in claim.before:
        store.remove_object(path, found.mark)


def _describe_file(split: SplitJob, unit: Unit, staged: Location, name: str) -> MadeFile:
    if unit.region is not None:
        shared = shared_file(split, unit)
        return MadeFile(name, unit.region.nbytes, "" if shared is None else shared.mark)
    place = member(staged, name)
    if is_staged(staged):
        found = run_of(staged).file_at(place.path).stored
        if found is not None:
            return MadeFile(name, found.nbytes, found.mark)
    entry = place.stat()
    if entry is None:
        raise StorageError("the file was not made", uri=place.uri, cure="run `wherry work` again")
    return MadeFile(name, entry.size, entry.mark)


# ---- places ----------------------------------------------------------------------------------------------------------


def member(staged: Location, name: str) -> Location:
    """A file of a unit."""
    return staged if name == "." else staged.join(name)


def _attempt_folder(split: SplitJob, token: str) -> Location:
    """The folder of an attempt, on a file system."""
    return split.records.folder.join(f"made-{token}")


def _staged_at(split: SplitJob, token: str) -> Location:
    """The checkpoint in the folder of an attempt, on a file system."""
    return inside(split.job, _attempt_folder(split, token).join(split.job.committed.name))


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


def made_folder(split: SplitJob, receipt: TaskRecord) -> Path:
    """The folder in which the files of a receipt lie, on a file system."""
    return Path(_attempt_folder(split, _folder_token(split, receipt)).path)


def _folder_token(split: SplitJob, receipt: TaskRecord) -> str:
    return receipt.token if split.units[receipt.unit].region is None else receipt.files[0].mark


def made_place(split: SplitJob, receipt: TaskRecord, name: str) -> Location:
    """The location of a file that was made.

    Args:
        split: the job.
        receipt: of a unit that has made it, or a region of it.
        name: of the file.
    """
    if split.records.store is None:
        return member(_staged_at(split, _folder_token(split, receipt)), name)
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
    """The same; an attempt begins it if nobody has."""
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
                cure=f"remove {receipt.name} and run `wherry work` again with wherry {__version__}",
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
            cure=f"check both machines, remove {first.name} and {second.name}, and run `wherry work` again",
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
            cure=f"remove {record.name} and run `wherry work` again",
        )
