"""prove: reads back what another process has made of a unit, and says what it read.

The writer of the format is created in a store that holds nothing, and asked for the byte ranges of each move. They are
read from the files or objects of the attempts whose receipts count, past the page cache, and hashed. A leaf that
crosses the edge of a unit is read whole, with the bytes in the files of the next unit. Left to the commit are tensors
that only the reader of the finished target can decode, small ones, and everything of which a file is no longer as it
was made. Of a file on a file system that several units have made, a region is read when all of them have receipts.
"""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from wherry.converter.job import least_alone, targets_of
from wherry.converter.plan import joint_moves
from wherry.core.digest import LeafHasher
from wherry.errors import IncompleteError
from wherry.mover.pool import Pool
from wherry.mover.range_batch import worker_count as ranged_workers
from wherry.mover.readback import FilesBeingWritten, ReadBack, crc_of
from wherry.records.unit_proof import BlockHash, UnitProof
from wherry.records.unit_receipt import MadeFile, receipts_by_unit
from wherry.runtime import threads
from wherry.runtime.threads import Crew
from wherry.staging.journal import DurableMove
from wherry.storage.location import Location
from wherry.units.commit import receipt_of
from wherry.units.made_files import folder_token, made_place
from wherry.units.make import member, staged_at, this_worker
from wherry.upload.selection import ROOT, FileSketch, name_at
from wherry.version import __version__

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from wherry.core.keypath import KeyPath
    from wherry.formats.reader import Extent
    from wherry.mover.checksums import PieceCrc
    from wherry.mover.move import Move
    from wherry.mover.readback import StoredPart
    from wherry.records.unit import Unit
    from wherry.records.unit_receipt import UnitReceipt
    from wherry.units.split_job import SplitJob


def prove_unit(split: SplitJob, unit: Unit, names: Sequence[str], token: str) -> UnitProof:
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
    clock, plan, algorithm = time.monotonic(), split.job.plan, split.algorithms[0]
    made = _MadeFiles(split, names)
    made.receipt(unit)  # of files that are not read too
    targets = targets_of(plan)
    least = least_alone(objects=split.records.store is not None)
    assert split.job.row.create is not None, "the format is one that can be written"
    with closing(split.job.row.create(Location(FileSketch(), ROOT), plan.manifest, plan.options)) as writer:
        back = ReadBack(
            writer, targets, split.job.target.uri, FilesBeingWritten(least=least), algorithms=split.algorithms
        )
        back.add(_moves_of(split, unit))
        parts = [made.located(part) for part in back.parts()]
        hashers = {part.move.source: LeafHasher(targets[part.move.source], (algorithm,)) for part in parts}
        crcs = {source: crc_of(writer.extents, targets[source]) for source in made.told() & hashers.keys()}
        _read(split, back, parts, hashers, crcs)
        boxes = _boxes(unit, parts, hashers)
    return UnitProof(
        unit=unit.number,
        digest=unit.digest,
        token=token,
        version=__version__,
        algorithm=algorithm,
        receipts=tuple(receipt.name for _number, receipt in sorted(made.receipts.items())),
        moves=tuple(_rows(unit, parts, hashers, crcs, boxes)),
        blocks=tuple(
            BlockHash(source, made.names[at.location.path], at.offset, at.length, digest)
            for source, (at, digest) in back.shared()
        ),
        worker=this_worker(),
        nbytes=sum(part.move.span.nbytes for part in parts),
        seconds=round(time.monotonic() - clock, 3),
        shared=tuple(made.shared.values()),
        boxes=boxes,
    )


class _MadeFiles:
    """Where the files of units lie: those of the attempts whose receipts count.

    Attributes:
        receipts: number of a unit → its receipt, of the files that were asked for.
        names: path of each of these files → its name in the target.
        shared: name of each file of several units that was asked for → its state before that.
    """

    def __init__(self, split: SplitJob, names: Sequence[str]) -> None:
        self._split, self._finished = split, receipts_by_unit(names)
        self._units: dict[str, list[Unit]] = {}
        for unit in split.units:
            for file in unit.files:
                self._units.setdefault(file.name, []).append(unit)
        self.receipts: dict[int, UnitReceipt] = {}
        self.names: dict[str, str] = {}
        self.shared: dict[str, MadeFile] = {}

    def receipt(self, unit: Unit) -> UnitReceipt:
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
            if unit.region is not None:
                self._note_state(known)
            self.receipts[unit.number] = known
        return known

    def told(self) -> set[KeyPath]:
        """The sources of which receipts have checksums."""
        return {move.source for receipt in self.receipts.values() for move in receipt.moves if move.checks}

    def _note_state(self, receipt: UnitReceipt) -> None:
        """Note the state of a file that several units have made; it is compared when the target is committed."""
        name = receipt.files[0].name
        entry = member(staged_at(self._split, folder_token(self._split, receipt)), name).stat()
        if name not in self.shared and entry is not None:
            self.shared[name] = MadeFile(name, entry.size, entry.mark)

    def located(self, part: StoredPart) -> StoredPart:
        """A part, in the files that were made."""
        chunks = tuple(replace(one, extent=self._extent(one.extent)) for one in part.chunks)
        return replace(part, extents=tuple(map(self._extent, part.extents)), chunks=chunks)

    def _extent(self, extent: Extent) -> Extent:
        name = name_at(extent.location.path)
        receipts = [self.receipt(unit) for unit in self._units[name] if has_bytes(unit, extent)]
        place = made_place(self._split, name, folder_token(self._split, receipts[0]))
        self.names[place.path] = name
        return extent._replace(location=place)


def has_bytes(unit: Unit, extent: Extent) -> bool:
    """Whether a unit has made bytes of a byte range of its file."""
    region = unit.region
    stop = extent.offset + max(extent.length, 1)
    return region is None or (extent.offset < region.stop and stop > region.start)


def _moves_of(split: SplitJob, unit: Unit) -> Iterator[Move]:
    """The moves of a unit, and those that share a leaf with them."""
    moves = joint_moves([split.job.plan])
    for source in dict.fromkeys(part.source for part in (*unit.parts, *unit.beside)):
        yield from (move for move in moves.of(source) if unit.reads(source, move.span))


def _read(
    split: SplitJob,
    back: ReadBack,
    parts: Sequence[StoredPart],
    hashers: Mapping[KeyPath, LeafHasher],
    crcs: Mapping[KeyPath, PieceCrc],
) -> None:
    """Read and hash parts with several threads, within the memory of the plan."""
    pool, algorithm = Pool(split.job.plan.memory), split.algorithms[0]
    count = threads.worker_count()
    if split.records.store is not None:
        count = max(count, ranged_workers(pool.budget))

    def read(part: StoredPart) -> None:
        with pool.buffer(part.memory, part.extra, part.place) as memory:
            data, source, start = back.read(part, memory, algorithm), part.move.source, part.move.span.start
            part.hash_into(hashers[source], data)
            if source in crcs:
                crcs[source].update(start, data)

    Crew().work((partial(read, part) for part in parts), count)


def _boxes(
    unit: Unit, parts: Sequence[StoredPart], hashers: Mapping[KeyPath, LeafHasher]
) -> dict[KeyPath, str]:
    """The tensors that the unit moves in boxes, and that were read as far as it does: digest of what was hashed."""
    read: dict[KeyPath, int] = {}
    for part in parts:
        if part.boxes:
            read[part.move.source] = read.get(part.move.source, 0) + part.move.span.nbytes
    found: dict[KeyPath, str] = {}
    for source, nbytes in read.items():
        values = hashers[source].values()
        moved = sum(part.nbytes for part in unit.parts if part.source == source)
        if values is not None and nbytes == moved:
            found[source] = values.digest
    return found


def _rows(
    unit: Unit,
    parts: Sequence[StoredPart],
    hashers: Mapping[KeyPath, LeafHasher],
    crcs: Mapping[KeyPath, PieceCrc],
    boxes: Collection[KeyPath],
) -> Iterator[DurableMove]:
    """The moves of the unit all of whose leaves were read; of tensors in boxes, those all of whose moves were."""
    for part in parts:
        source, span = part.move.source, part.move.span
        if part.boxes:
            if source in boxes:
                yield DurableMove(source, span, {})
            continue
        leaves = hashers[source].known(*span) if unit.has(source, span) else None
        if leaves is not None:
            checks = crcs[source].known(*span) if source in crcs else ()
            yield DurableMove(source, span, leaves, tuple(checks))
