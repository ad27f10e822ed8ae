"""read_back: reads back what another process has made of a unit, and says what a commit can take from that.

The map of the target has the byte ranges of each move. They are read from the files or objects of the attempts whose
receipts count, past the page cache, and hashed. A leaf that crosses the edge of a unit is read whole, with the bytes in
the files of the next unit. Left to the commit are tensors that only the reader of the finished target can decode, small
ones, and everything of which a file is no longer as it was made. Of a file on a file system that several units have
made, a region is read when all of them have receipts.

A proof counts if another process than the maker of the unit made it, with the same wherry, of the files that the
receipts name, and if it has read the same leaves that the maker has hashed. A move that two units have made counts if
the proofs of both have it, a leaf that is in several moves if all of them count. Of a tensor in boxes, a unit and its
proof must have hashed the same bytes, and a leaf counts if every unit that has bytes of it was read back. A file that
several units have made must be as it was before it was read, and its receipts do not say how: so proofs do. So of every
byte that the commit does not read, a process that has not written it says what storage gave, and the commit has
compared that.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from wherry.converter.job import least_alone, targets_of
from wherry.converter.plan import joint_moves
from wherry.core.algorithms import HASH_BYTES
from wherry.core.digest import LEAF
from wherry.core.keypath import KeyPath
from wherry.core.tensorspec import Region, Span, TensorSpec
from wherry.errors import IncompleteError
from wherry.formats.contents import Extent
from wherry.mover.batch import worker_count as ranged_workers
from wherry.mover.pool import Pool
from wherry.mover.readback import FilesBeingWritten, ReadBack, ReadEvidence, SharedBlock, StoredPart
from wherry.runtime import threads
from wherry.runtime.threads import Crew
from wherry.storage.location import Location
from wherry.target.durable_move import Checks, DurableMove
from wherry.target.file_ranges import FileRange, lengths_of, ranges_of
from wherry.version import __version__
from wherry.workers.make import made_place, member, receipt_of, this_worker
from wherry.workers.records import BlockHash, MadeFile, TaskKind, TaskRecord, records_by_unit

if TYPE_CHECKING:
    from wherry.workers.job import SplitJob
    from wherry.workers.unit import Unit


def prove_unit(split: SplitJob, unit: Unit, names: Sequence[str], token: str) -> TaskRecord:
    """Read back what was made of a unit.

    Args:
        split: the job, opened.
        unit: one of its units.
        names: of the records of the job.
        token: id of the attempt.

    Raises:
        IncompleteError: what a receipt names is not there as it was left.
        MismatchError: a receipt is wrong, or bytes that were written are missing.
        StorageError: the storage failed.
    """
    clock, job = time.monotonic(), split.job
    made = _MadeFiles(split, names)
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
    for move, values in moved:
        read[move.source] += move.span.nbytes
        if values is not None and read[move.source] == unit.nbytes_of(move.source):
            boxes[move.source] = values.digest
    moves = tuple(move for move, _values in moved if move.leaves or move.source in boxes)
    return TaskRecord(
        kind=TaskKind.READ,
        unit=unit.number,
        digest=unit.digest,
        token=token,
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

    def __init__(self, split: SplitJob, names: Sequence[str]) -> None:
        self._split, self._finished = split, records_by_unit(TaskKind.MAKE, names)
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
                    cure="run `wherry commit`, which has it written again",
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


# ---- what a commit takes from it -------------------------------------------------------------------------------------


class Difference(NamedTuple):
    """Bytes that were read back otherwise than their receipt says.

    Attributes:
        proof: which says so.
        source: key path of the tensor in the source.
        leaf: its number; None of boxes, of which no process has whole leaves.
    """

    proof: TaskRecord
    source: KeyPath
    leaf: int | None

    def blames(self, unit: Unit) -> bool:
        """Whether a unit has written these bytes."""
        if self.leaf is None:
            return unit.number == self.proof.unit
        start, stop = self.leaf * LEAF, (self.leaf + 1) * LEAF
        return any(
            part.source == self.source and part.start < stop and part.stop > start for part in unit.parts
        )


def valid_proofs(
    split: SplitJob, receipts: Sequence[TaskRecord], proofs: Iterable[TaskRecord], present: Mapping[str, str]
) -> list[TaskRecord]:
    """The proofs that count.

    Args:
        split: the job.
        receipts: one of each unit, whose files are there.
        proofs: all that were found.
        present: name of each file that several units have made → its state.
    """
    names = {receipt.name: receipt.unit for receipt in receipts}

    def counts(proof: TaskRecord) -> bool:
        if proof.unit >= len(split.units):
            return False
        unit, maker = split.units[proof.unit], receipts[proof.unit]
        marks = {file.name: file.mark for file in proof.files}
        return (
            (proof.digest, proof.version, proof.algorithm) == (unit.digest, __version__, split.algorithms[0])
            and proof.worker != maker.worker
            and maker.name in proof.of
            and names.keys() >= set(proof.of)
            and all(unit.has(move.source, move.span) for move in proof.moves)
            and proof.boxes_read.keys() <= {part.source for part in unit.parts}
            and marks.items() <= present.items()
            and (unit.region is None or unit.files[0].name in marks)
        )

    return [proof for proof in proofs if counts(proof)]


def differences(
    proofs: Iterable[TaskRecord], receipts: Sequence[TaskRecord], moves: Iterable[DurableMove]
) -> Iterator[Difference]:
    """The bytes of which proofs and receipts say different things.

    Args:
        proofs: those that count.
        receipts: one of each unit.
        moves: of all receipts.
    """
    made = {(move.source, move.span): move.leaves for move in moves}
    for proof in proofs:
        for source, digest in proof.boxes_read.items():
            values = receipts[proof.unit].boxes.get(source)
            if values is not None and values.digest != digest:
                yield Difference(proof, source, None)
        for read in proof.moves:
            wrote = made.get((read.source, read.span), {})
            for leaf in sorted(wrote.keys() | read.leaves.keys()):
                if read.leaves.get(leaf) != wrote.get(leaf, b"")[:HASH_BYTES]:
                    yield Difference(proof, read.source, leaf)


def evidence_of(
    proofs: Sequence[TaskRecord],
    receipts: Sequence[TaskRecord],
    boxes: Mapping[KeyPath, Sequence[bytes]],
    staged: Location,
) -> ReadEvidence:
    """What the commit does not have to read.

    Args:
        proofs: those that count, in which nothing differs.
        receipts: one of each unit.
        boxes: the leaves of tensors in boxes that units together have hashed.
        staged: where the target is staged.
    """
    read = {(proof.unit, move.source, move.span): move.checks for proof in proofs for move in proof.moves}
    made = [(receipt.unit, move) for receipt in receipts for move in receipt.moves]
    lost = [move for unit, move in made if (unit, move.source, move.span) not in read]
    # A move with chunks of two units must be in the proofs of both.
    gone = {(move.source, move.span) for move in lost}
    unread = {(move.source, leaf) for move in lost for leaf in move.leaves}
    spans: dict[tuple[KeyPath, Span], Checks] = {}
    leaves: defaultdict[KeyPath, dict[int, bytes]] = defaultdict(dict)
    for unit, move in made:
        key = (move.source, move.span)
        if key not in gone and not any((move.source, leaf) in unread for leaf in move.leaves):
            spans[key] = read[unit, *key]
            leaves[move.source] |= {leaf: raw[:HASH_BYTES] for leaf, raw in move.leaves.items()}
    values: dict[KeyPath, list[tuple[int, bytes]]] = {}
    for source, wanted in boxes.items():
        proved = {proof.unit for proof in proofs if source in proof.boxes_read}
        proved -= {unit for unit, move in made if move.source == source and (source, move.span) in gone}
        leaves[source], values[source] = _read_of_boxes(source, wanted, proved, receipts)
    blocks: defaultdict[KeyPath, list[SharedBlock]] = defaultdict(list)
    for one in (block for proof in proofs for block in proof.blocks):
        extent = Extent(member(staged, one.name), one.start, one.length)
        blocks[one.source].append(SharedBlock(extent, one.digest))
    return ReadEvidence(spans, dict(leaves), values, dict(blocks))


def _read_of_boxes(
    source: KeyPath, wanted: Sequence[bytes], proved: Collection[int], receipts: Iterable[TaskRecord]
) -> tuple[dict[int, bytes], list[tuple[int, bytes]]]:
    """The leaves of a tensor in boxes that were read back whole, and what some units' proofs have of the others."""
    held = {one.unit: one.boxes[source] for one in receipts if source in one.boxes}
    read = [values for unit, values in held.items() if unit in proved]
    unread = {
        leaf
        for unit, values in held.items()
        if unit not in proved
        for leaf in (*values.leaves, *values.parts)
    }
    whole = {leaf for values in read for leaf in values.leaves}
    leaves = {leaf: digest for leaf, digest in enumerate(wanted) if leaf in whole or leaf not in unread}
    parts = (part for values in read for part in values.parts.items())
    return leaves, [(leaf, part) for leaf, part in parts if leaf not in leaves]
