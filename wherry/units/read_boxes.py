"""read_boxes: reads boxes of a target before the commit, as one worker of several.

The files of all units are there, but no metadata, so the places of chunks are those that the writer names. A reader is
kept open between readings, as it needs to know the receipts of all units.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from wherry.core.progress import logger
from wherry.errors import DamagedError, IncompleteError, MismatchError
from wherry.mover.hashing import hash_leaves
from wherry.readings.box_readings import origin_of
from wherry.readings.made_checkpoint import made_checkpoint
from wherry.records.box_record import BoxRecord, receipts_state, used_receipts
from wherry.records.unit_receipt import receipts_by_unit
from wherry.runtime import threads
from wherry.units.commit import receipt_of
from wherry.units.made_files import folder_token, made_place
from wherry.units.make import this_worker
from wherry.upload.selection import name_at
from wherry.version import __version__

if TYPE_CHECKING:
    from collections.abc import Sequence

    from wherry.formats.checkpoint import Checkpoint
    from wherry.formats.reader import Extent
    from wherry.readings.box_readings import BoxReading
    from wherry.records.claims import Claim, Claims
    from wherry.records.unit import Unit
    from wherry.storage.location import Location
    from wherry.units.split_job import SplitJob

_AT_ONCE = 16  # requests
_log = logger(__name__)


class BoxReader:
    """Reads boxes of the target of one job, as certain receipts have left it; close it when done.

    Attributes:
        state: of these receipts.
    """

    def __init__(self, split: SplitJob, names: Sequence[str]) -> None:
        """Look for the files of all units.

        Args:
            split: the job, opened.
            names: of its records.

        Raises:
            IncompleteError: what a receipt names is not there as it was left.
        """
        self.state, self._split = receipts_state(names), split
        self._finished = receipts_by_unit(names)
        with threads.executor(_AT_ONCE, "wherry-receipts", numbers=False) as pool:
            rows = list(pool.map(self._made, split.units))
        self._receipts = used_receipts(name for name, _token in rows)
        self._tokens = {
            file.name: token
            for unit, (_name, token) in zip(split.units, rows, strict=True)
            for file in unit.files
        }
        self._places: dict[str, Location] = {}
        self._stack = ExitStack()
        job = split.job
        self._target = self._stack.enter_context(made_checkpoint(job.row, job.plan, self._located))
        self._origin = origin_of(job.checkpoint, self._target, split.boxes.pairs)
        if self._origin is not job.checkpoint:
            self._stack.callback(self._origin.close)

    def read(self, reading: BoxReading, token: str) -> BoxRecord:
        """Read and hash some leaves.

        Args:
            reading: which.
            token: id of the attempt.

        Raises:
            DamagedError: bytes that were written are missing, or the source is damaged.
            StorageError: the storage failed.
        """
        clock, split = time.monotonic(), self._split
        checkpoint: Checkpoint = self._target if reading.of_target else self._origin
        found = hash_leaves(checkpoint, split.algorithms[0], reading.parts, memory=split.job.plan.memory)
        return BoxRecord(
            reading=reading.number,
            state=self.state,
            digest=reading.unit.digest,
            token=token,
            version=__version__,
            algorithm=split.algorithms[0],
            receipts=self._receipts,
            hashes=tuple(found[path] for path in reading.parts),
            worker=this_worker(),
            seconds=round(time.monotonic() - clock, 3),
        )

    def close(self) -> None:
        """Close what is open of the target."""
        self._stack.close()

    def _made(self, unit: Unit) -> tuple[str, str]:
        """The name of the receipt of a unit, and the token of its folder."""
        receipt = receipt_of(self._split, unit, self._finished.get(unit.number, []))
        if receipt is None:
            raise IncompleteError(
                f"unit {unit.name} is no longer as it was written",
                uri=self._split.uri,
                cure="run `wherry commit`, which has it written again",
            )
        return receipt.name, folder_token(self._split, receipt)

    def _located(self, extent: Extent) -> Extent:
        name = name_at(extent.location.path)
        if name not in self._places:
            self._places[name] = made_place(self._split, name, self._tokens[name])
        return replace(extent, location=self._places[name])


@dataclass(slots=True)
class BoxReaders:
    """The reader of a job, which is opened again when there are other receipts.

    Attributes:
        split: the job, opened.
    """

    split: SplitJob
    _reader: BoxReader | None = field(default=None)

    def of(self, names: Sequence[str]) -> BoxReader:
        """The reader for the receipts among the records of the job.

        Args:
            names: of the records.

        Raises:
            IncompleteError: what a receipt names is not there as it was left.
        """
        if self._reader is None or self._reader.state != receipts_state(names):
            self.close()
            self._reader = BoxReader(self.split, names)
        return self._reader

    def close(self) -> None:
        """Close the reader."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None


def read_claimed(readers: BoxReaders, claims: Claims, reading: BoxReading, claim: Claim) -> BoxRecord | None:
    """Read boxes that were claimed, and record what was read; the claim is renewed meanwhile.

    Args:
        readers: of the job.
        claims: its claims.
        reading: what is read.
        claim: on it.

    Returns:
        The record; None if something is not there as receipts say, which the commit will find.

    Raises:
        WherryError: the storage failed.
    """
    records = readers.split.records
    with claims.renewed(claim, reading.unit):
        try:
            record = readers.of(records.names()).read(reading, claim.token)
        except (IncompleteError, MismatchError, DamagedError) as error:
            _log.warning("the boxes of reading %d were not read: %s", reading.number, error)
            return None
        records.create(record.name, record.to_json(), claim.token)
    return record
