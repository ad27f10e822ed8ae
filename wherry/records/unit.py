"""Unit: files of a target, and the moves that fill them: the piece of work that another machine can do.

Same plan, same unit, same bytes: a unit follows from the plan alone, so every process cuts a plan in the same way, and
only the number of a unit has to be told.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from wherry.core.digest import sha256_of
from wherry.core.keypath import KeyPath, render

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from wherry.core.tensorspec import Span
    from wherry.mover.move import Move


class UnitFile(NamedTuple):
    """A file of the target that a unit makes.

    Attributes:
        name: relative to the target; the target's own name if it is a single file.
        nbytes: its size, or that of the region that the unit makes.
    """

    name: str
    nbytes: int


class UnitPart(NamedTuple):
    """A part of a tensor that a unit moves.

    Attributes:
        source: key path of the tensor in the source, or in the view of it that is converted.
        start, stop: canonical bytes; a move belongs to the part in which it begins.
    """

    source: KeyPath
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        """Number of bytes."""
        return self.stop - self.start


@dataclass(frozen=True)
class Unit:
    """One unit of a plan.

    Attributes:
        number: its place among the units of the plan, from 0.
        plan: digest of the plan.
        files: the files of the target that it makes: whole, or a region of one.
        parts: the tensors, or parts of them, that it moves.
        beside: parts that it reads because they share a leaf of the digest with its own, and does not write.
        region: the bytes of its only file that it makes, where other units make others; None if it makes whole files.
        sources: the stored tensors of the source that these are made of.
        hashed: the stored tensors that it reads for their digests, where the source is seen through another layout and
            what units have of them cannot be hashed when it is moved.
        nbytes_in: bytes that are read from the source.
    """

    number: int
    plan: str
    files: tuple[UnitFile, ...]
    parts: tuple[UnitPart, ...]
    sources: tuple[KeyPath, ...]
    hashed: tuple[KeyPath, ...]
    nbytes_in: int
    beside: tuple[UnitPart, ...] = ()
    region: Span | None = None

    @cached_property
    def digest(self) -> str:
        """Identifies the unit; the same on every machine."""
        parts = [[list(part.source), part.start, part.stop] for part in self.parts]
        hashed = [list(path) for path in self.hashed]
        beside = [[list(part.source), part.start, part.stop] for part in self.beside]
        region = [] if self.region is None else [list(self.region)]
        return sha256_of(
            "unit", [self.plan, [list(file) for file in self.files], parts, hashed, beside, *region]
        )

    @property
    def name(self) -> str:
        """Its name in records and on dashboards."""
        return f"{self.number:05d}-{self.digest[:8]}"

    @property
    def nbytes(self) -> int:
        """Bytes of its files."""
        return sum(file.nbytes for file in self.files)

    @cached_property
    def _by_source(self) -> Mapping[KeyPath, list[UnitPart]]:
        return _by_source(self.parts)

    @cached_property
    def _beside_by_source(self) -> Mapping[KeyPath, list[UnitPart]]:
        return _by_source(self.beside)

    def has(self, source: KeyPath, span: Span) -> bool:
        """Whether a move belongs to the unit."""
        return _begins_in(self._by_source.get(source, ()), span)

    def reads(self, source: KeyPath, span: Span) -> bool:
        """Whether a move belongs to the unit, or is read beside it."""
        return self.has(source, span) or _begins_in(self._beside_by_source.get(source, ()), span)

    def takes(self, move: Move) -> bool:
        """Whether a move belongs to the unit."""
        return self.has(move.source, move.span)

    def to_json(self) -> dict[str, Any]:
        """The form of `wherry plan --workers N --json`."""
        return {
            "unit": self.name,
            "digest": self.digest,
            "files": [file._asdict() for file in self.files],
            "region": None if self.region is None else list(self.region),
            "bytes_in": self.nbytes_in,
            "bytes_out": self.nbytes,
            "tensors": len(self._by_source),
            "sources": [render(path) for path in self.sources],
        }


def _by_source(parts: Iterable[UnitPart]) -> dict[KeyPath, list[UnitPart]]:
    found: dict[KeyPath, list[UnitPart]] = {}
    for part in parts:
        found.setdefault(part.source, []).append(part)
    return found


def _begins_in(parts: Iterable[UnitPart], span: Span) -> bool:
    return any(part.start <= span.start < part.stop for part in parts)
