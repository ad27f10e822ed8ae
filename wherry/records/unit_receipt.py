"""UnitReceipt: what an attempt at a unit has made: its files or objects, and the hashes of the leaves that it moved.

Hashes of leaves merge in any order, so the digests of the result are those of a conversion in one process. Of leaves
of which other units have the rest (of tensors in boxes, and of the stored tensors of a view) a receipt has values that
are joined with those of the other receipts (`joined_leaves`).
"""

from __future__ import annotations

import base64
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from wherry.core.keypath import KeyPath, parse, render
from wherry.core.leaf_values import LeafValues
from wherry.errors import CorruptError, MismatchError, describe_exception
from wherry.staging.journal import DurableMove, decode, encode

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from wherry.core.tensorspec import Span
    from wherry.records.unit import Unit

_RECEIPT = re.compile(r"receipt-(?P<unit>\d+)-(?P<token>[0-9a-f]{8})")


class MadeFile(NamedTuple):
    """A file that was made.

    Attributes:
        name: relative to the target; `.` for the target itself.
        nbytes: its size.
        mark: its state: the time of the last change, an ETag or a generation.
    """

    name: str
    nbytes: int
    mark: str


@dataclass(frozen=True, slots=True)
class UnitReceipt:
    """What an attempt at a unit has made.

    Attributes:
        unit: number of the unit.
        digest: of the unit.
        token: id of the attempt.
        version: of wherry.
        files: what it has made.
        moves: the moves, with the hashes of their leaves.
        hashed: algorithm → stored tensor of the source → raw hashes of its leaves, of a view.
        boxes: tensor that the unit moves in boxes → what it has hashed of it; of those that it has hashed.
        sources: stored tensor of the source of a view → what the unit has hashed of it.
        notes: what the writer has noted about objects, for the commit.
        parts: path of an object and one of its parts, with the checksum of the store; only with `--verify store`.
        worker: host and process.
        seconds: how long it took.
    """

    unit: int
    digest: str
    token: str
    version: str
    files: tuple[MadeFile, ...]
    moves: tuple[DurableMove, ...]
    hashed: Mapping[str, Mapping[KeyPath, bytes]]
    worker: str
    seconds: float
    notes: tuple[list[Any], ...] = ()
    parts: tuple[list[Any], ...] = ()
    boxes: Mapping[KeyPath, LeafValues] = field(default_factory=dict["KeyPath", "LeafValues"])
    sources: Mapping[KeyPath, LeafValues] = field(default_factory=dict["KeyPath", "LeafValues"])

    @property
    def name(self) -> str:
        """Name of the record."""
        return f"receipt-{self.unit:05d}-{self.token}"

    def to_json(self) -> dict[str, Any]:
        """The record; the inverse of `receipt_from`."""
        hashed = {
            algorithm: {render(path): base64.b64encode(raw).decode() for path, raw in rows.items()}
            for algorithm, rows in self.hashed.items()
        }
        return {
            "unit": self.unit,
            "digest": self.digest,
            "token": self.token,
            "run": self.token,
            "version": self.version,
            "files": [list(file) for file in self.files],
            "moves": [encode(move) for move in self.moves],
            "hashed": hashed,
            "notes": list(self.notes),
            "parts": list(self.parts),
            "boxes": {render(path): values.to_json() for path, values in self.boxes.items()},
            "sources": {render(path): values.to_json() for path, values in self.sources.items()},
            "worker": self.worker,
            "seconds": self.seconds,
        }


def receipt_from(row: Mapping[str, Any], uri: str) -> UnitReceipt:
    """A receipt from its record.

    Raises:
        CorruptError: the record has another form.
    """
    try:
        hashed = {
            algorithm: {parse(path): base64.b64decode(raw, validate=True) for path, raw in rows.items()}
            for algorithm, rows in row["hashed"].items()
        }
        return UnitReceipt(
            unit=row["unit"],
            digest=row["digest"],
            token=row["token"],
            version=row["version"],
            files=tuple(MadeFile(*file) for file in row["files"]),
            moves=tuple(decode(move) for move in row["moves"]),
            hashed=hashed,
            worker=row["worker"],
            seconds=row["seconds"],
            notes=tuple(row["notes"]),
            parts=tuple(row["parts"]),
            boxes={parse(path): LeafValues.from_json(values) for path, values in row["boxes"].items()},
            sources={parse(path): LeafValues.from_json(values) for path, values in row["sources"].items()},
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CorruptError(
            f"invalid receipt of a unit: {describe_exception(error)}", uri=uri, cure="remove it"
        ) from error


def receipts_by_unit(names: Iterable[str]) -> dict[int, list[str]]:
    """Number of each unit that has receipts → the names of their records."""
    found: dict[int, list[str]] = {}
    for name in names:
        if one := _RECEIPT.fullmatch(name):
            found.setdefault(int(one["unit"]), []).append(name)
    return found


def unit_of(name: str) -> int:
    """The number of the unit of a receipt's record."""
    return next(iter(receipts_by_unit([name])))


def require_equal(one: UnitReceipt, other: UnitReceipt, uri: str) -> None:
    """Compare two attempts at one unit, which must have moved the same bytes.

    Raises:
        MismatchError: they differ.
    """
    if _content(one) != _content(other) or not _agree(one, other):
        raise MismatchError(
            f"two workers made different bytes of unit {one.unit}: {one.worker} and {other.worker}",
            uri=uri,
            cure=f"check both machines, remove {one.name} and {other.name}, and run `wherry work` again",
        )


def _content(receipt: UnitReceipt) -> tuple[Any, ...]:
    moves = sorted((move.source, move.span, sorted(move.leaves.items())) for move in receipt.moves)
    return moves, sorted((file.name, file.nbytes) for file in receipt.files)


def _agree(one: UnitReceipt, other: UnitReceipt) -> bool:
    """Whether two attempts have hashed the same, as far as both have: a machine may have no kernels."""
    pairs: list[tuple[Mapping[KeyPath, Any], Mapping[KeyPath, Any]]] = [
        (one.boxes, other.boxes),
        (one.sources, other.sources),
        *((rows, other.hashed.get(name, {})) for name, rows in one.hashed.items()),
    ]
    return all(mine[path] == theirs[path] for mine, theirs in pairs for path in mine.keys() & theirs.keys())


def require_whole(receipt: UnitReceipt, unit: Unit, uri: str) -> None:
    """Refuse a receipt that is not of this unit, or that leaves something out.

    Raises:
        MismatchError: it says something else than the unit asks for.
    """
    moved = sum(move.span.nbytes for move in receipt.moves if unit.has(move.source, move.span))
    spans = {(move.source, move.span) for move in receipt.moves}
    whole = moved == sum(part.nbytes for part in unit.parts) and len(spans) == len(receipt.moves)
    files = {file.name: file.nbytes for file in receipt.files} == dict(unit.files)
    hashed = all(set(rows) <= set(unit.hashed) for rows in receipt.hashed.values())
    hashed = hashed and receipt.boxes.keys() <= {part.source for part in unit.parts}
    if receipt.digest != unit.digest or not (whole and files and hashed):
        raise MismatchError(
            f"the receipt of unit {unit.name} by {receipt.worker} does not cover the unit",
            uri=uri,
            cure=f"remove {receipt.name} and run `wherry work` again",
        )


def merged_moves(receipts: Iterable[UnitReceipt], uri: str) -> list[DurableMove]:
    """The moves of all units, each once: one with chunks of two units was made by both.

    Raises:
        MismatchError: two workers have read different bytes.
    """
    found: dict[tuple[KeyPath, Span], tuple[DurableMove, UnitReceipt]] = {}
    for receipt in receipts:
        for move in receipt.moves:
            other, maker = found.setdefault((move.source, move.span), (move, receipt))
            if other != move:
                raise MismatchError(
                    f"two workers have read different bytes: {maker.worker} and {receipt.worker}",
                    uri=uri,
                    path=render(move.source),
                    cure=f"check both machines, remove {maker.name} and {receipt.name}, and run `wherry work` again",
                )
    return [move for move, _receipt in found.values()]
