"""make: makes one unit: its moves through the writer of the format, into files or objects of this attempt alone.

The writer has the map of the whole target, and writes the slice of it that is the unit, so the bytes are those of a
conversion in one process. Where they are put: `attempts`.
"""

from __future__ import annotations

import os
import socket
import time
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from wherry.converter.job import Pass, finish, inside, move, targets_of
from wherry.converter.plan import joint_moves
from wherry.errors import InternalError, StorageError, WherryError, storage_errors
from wherry.mover.decode import FOLDER_VARIABLE
from wherry.mover.map_writer import writer_of
from wherry.mover.output import Output
from wherry.storage.folders import PREFIX, make_folders, remove_leftover
from wherry.storage.location import Location
from wherry.storage.stores import make_folder
from wherry.target.files import Slice
from wherry.target.janitor import temporary_folder
from wherry.target.parts import Sender, parts_share
from wherry.target.staged_objects import StagedObjects, is_staged, run_of
from wherry.target.upload_run import UploadRun
from wherry.target.uploaded_file import SentBefore, UploadContext
from wherry.version import __version__
from wherry.workers.attempts import (
    attempt_folder,
    begun_file,
    late_guard,
    member,
    shared_file,
    staged_at,
    staging_of,
)
from wherry.workers.record import MadeFile, TaskKind, TaskRecord

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Mapping

    from wherry.core.keypath import KeyPath
    from wherry.core.leaf_values import LeafValues
    from wherry.core.tensorspec import Span
    from wherry.mover.map_writer import MapWriter
    from wherry.store.store import Part, Store, Upload
    from wherry.target.durable_move import DurableMove
    from wherry.workers.claims import Claim
    from wherry.workers.job import SplitJob
    from wherry.workers.unit import Unit


_MOST_VALUES = 32 << 20  # bytes of all values in a receipt, as the commit holds all receipts


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
    clock, job, log = time.monotonic(), split.job, AttemptLog(unit)
    with ExitStack() as stack:
        spill = stack.enter_context(temporary_folder(f"{PREFIX}spill-", os.environ.get(FOLDER_VARIABLE)))
        local = job.committed.store.capabilities.local
        area = _local_area(split, unit, claim) if local else _object_area(split, log, claim)
        staged = stack.enter_context(area)
        plan, companion = job.plan, job.checkpoint.reader.companion
        part = Slice(frozenset(file.name for file in unit.files), unit.region)
        if local and unit.region:  # a worker that is slow writes no region that others have made
            part = replace(part, guard=late_guard(split, unit))
        writer = writer_of(job.row, staged, plan.manifest, plan.options, companion, part)
        stack.callback(writer.close)
        output = Output(writer, targets_of(job.plan), log, overflow=job.plan.overflow)
        whole = joint_moves([job.plan])
        sources = {part.source for part in unit.parts}
        moves = replace(whole, targets={path: one for path, one in whole.targets.items() if path in sources})
        where = Pass(staged, Path(spill), (output,))
        moved = move(job, moves, where, split.algorithms, unit.hashed, shared=True)
        finish(writer) if unit.region is None else finish_region(writer, staged)
        files = tuple(_describe_file(split, unit, staged, file.name) for file in unit.files)
        # What the writer has noted about its objects; on a file system it leaves a log.
        notes = tuple(run_of(staged).new_notes()) if is_staged(staged) else ()
    _require_moved(unit, log.moves)
    hashed = {
        algorithm: {path: b"".join(raw) for path, raw in hashes.leaves.items()}
        for algorithm, hashes in (moved.own or {}).items()
    }
    boxes = _within(moved.boxes, _MOST_VALUES)
    sources = _within(moved.sources, _MOST_VALUES - sum(values.nbytes for values in boxes.values()))
    keeps_parts = unit.region is not None or job.plan.verify == "store"
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
        staged = staged_at(split, begun_file(split, unit, claim).token)
        with storage_errors(split.uri):
            make_folders(Path(staged.path).parent)
        yield staged
        return
    staged, folder = staged_at(split, claim.token), attempt_folder(split, claim.token)
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
                run.before = {run.place(path): SentBefore(begun_file(split, unit, claim).upload)}
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
        mark = "" if shared is None else shared.token or (shared.upload.key if shared.upload else "")
        return MadeFile(name, unit.region.nbytes, mark)
    place = member(staged, name)
    if is_staged(staged):
        found = run_of(staged).file_at(place.path).stored
        if found is not None:
            return MadeFile(name, found.nbytes, found.mark)
    entry = place.stat()
    if entry is None:
        raise StorageError("the file was not made", uri=place.uri, cure="run `wherry work` again")
    return MadeFile(name, entry.size, entry.mark)


def _require_moved(unit: Unit, rows: list[DurableMove]) -> None:
    moved, wanted = sum(row.span.nbytes for row in rows), sum(part.nbytes for part in unit.parts)
    if moved != wanted:
        raise InternalError(f"unit {unit.name}: {moved:,} of {wanted:,} bytes were moved")
