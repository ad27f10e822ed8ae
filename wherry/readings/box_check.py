"""box_check: what a commit takes from the readings of boxes, so that it does not have to read these itself.

A leaf counts if two processes have read the same: one of them has not written it. What boxes were made of is compared
with the digests of the source by the commit. Where anything differs nobody is believed: the commit reads it itself, and
its verdict is that of a conversion in one process.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from wherry.core.digest import LEAF, leaf_count, tensor_digest
from wherry.formats.writer import extents_of
from wherry.mover.move import cells
from wherry.mover.readback import BoxesBefore
from wherry.records.box_record import used_receipts
from wherry.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from wherry.core.keypath import KeyPath
    from wherry.core.tensorspec import Region, TensorSpec
    from wherry.formats.checkpoint import Checkpoint
    from wherry.formats.reader import Extent
    from wherry.mover.readback import ReadBack
    from wherry.readings.box_readings import Boxes, BoxReading
    from wherry.records.box_record import BoxRecord
    from wherry.records.unit_receipt import UnitReceipt


def valid_records(
    boxes: Boxes, algorithm: str, receipts: Iterable[UnitReceipt], records: Iterable[BoxRecord]
) -> dict[int, list[BoxRecord]]:
    """Number of each reading → the records of it that count.

    Args:
        boxes: what workers read.
        algorithm: of the hashes.
        receipts: one of each unit, whose files are there.
        records: all that were found.
    """
    used, readings = used_receipts(receipt.name for receipt in receipts), boxes.readings
    found: dict[int, list[BoxRecord]] = defaultdict(list)
    for one in records:
        if not 0 <= one.reading < len(readings):
            continue
        reading = readings[one.reading]
        wanted = (reading.unit.digest, __version__, algorithm, used)
        if (one.digest, one.version, one.algorithm, one.receipts) != wanted:
            continue
        if [len(leaves) for leaves in one.hashes] == [len(leaves) for leaves in reading.parts.values()]:
            found[one.reading].append(one)
    return found


def boxes_before(
    boxes: Boxes, algorithm: str, found: Mapping[int, Sequence[BoxRecord]]
) -> Callable[[Checkpoint, ReadBack], BoxesBefore]:
    """A function that gives what the commit does not have to read of the finished target.

    Args:
        boxes: what workers read.
        algorithm: of the hashes.
        found: number of each reading → the records of it that count.
    """

    def before(written: Checkpoint, back: ReadBack) -> BoxesBefore:
        if not found or back.before.changed() or not _are_there(boxes, written, back):
            return BoxesBefore()
        leaves: dict[KeyPath, dict[int, bytes]] = defaultdict(dict)
        origin: dict[KeyPath, dict[int, bytes]] = defaultdict(dict)
        for reading in boxes.readings:
            record = _agreed(reading, found)
            if record is None:
                continue
            into = leaves if reading.of_target else origin
            for (path, numbers), hashes in zip(reading.parts.items(), record.hashes, strict=True):
                into[path] |= dict(zip(numbers, hashes, strict=True))
        return BoxesBefore(leaves, _digests(boxes, algorithm, origin), _nbytes(boxes, leaves))

    return before


def _agreed(reading: BoxReading, found: Mapping[int, Sequence[BoxRecord]]) -> BoxRecord | None:
    """The record of a reading that another process has confirmed."""
    for one in found.get(reading.number, ()):
        for other in found.get(reading.twin, ()):
            if one.worker != other.worker and one.hashes == other.hashes:
                return one
    return None


def _digests(
    boxes: Boxes, algorithm: str, leaves: Mapping[KeyPath, Mapping[int, bytes]]
) -> dict[KeyPath, str]:
    """The digests of the tensors of which every leaf was read."""
    specs = boxes.origin
    return {
        path: tensor_digest(specs[path], [rows[leaf] for leaf in range(len(rows))], algorithm)
        for path, rows in leaves.items()
        if len(rows) == leaf_count(specs[path].nbytes)
    }


def _nbytes(boxes: Boxes, leaves: Mapping[KeyPath, Iterable[int]]) -> int:
    return sum(
        min((leaf + 1) * LEAF, boxes.target[path].nbytes) - leaf * LEAF
        for path, rows in leaves.items()
        for leaf in rows
    )


def _are_there(boxes: Boxes, written: Checkpoint, back: ReadBack) -> bool:
    """Whether the reader of the finished target reads boxes from the places from which workers have read them."""
    places = extents_of(back.writer)
    place: Callable[[TensorSpec, Region], Extent | None] | None = getattr(written.reader, "chunk", None)
    if place is None:  # a reader of an older plug-in
        return False
    for path, spec in boxes.target.items():
        for cell in cells(spec.whole, spec.chunks or spec.shape):
            read, made = place(written.manifest.tensors[path], cell), places(path, cell)
            if read is None or not made or _range(read) != _range(made[0]):
                return False
    return True


def _range(extent: Extent) -> tuple[str, int, int]:
    return extent.location.path, extent.offset, extent.length
