"""Unit: files of a target, and the moves that fill them: the piece of work that another machine can do.

A unit is one file of the target, several small ones that together stay below the size that was chosen, or a region of
a larger one. Same plan, same unit, same bytes: `cut` is a pure function of the plan, so every process cuts a plan in
the same way, and only the number of a unit has to be stated.

A tensor may lie in the files or regions of several units; `shares` shares it out. A move with chunks in the files of
two units belongs to both: each writes the chunks that are its own. The digest of a tensor has leaves of 4 MiB, which
chunks do not respect: a unit whose moves end within a leaf also reads the moves that hold the rest of that leaf, so
that it can hash it. So units are independent, and read little twice.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from wherry.core.digest import LEAF, sha256_of
from wherry.core.keypath import KeyPath, render
from wherry.core.tensorspec import Span
from wherry.core.units import DEFAULT_UNIT, parse_size

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from wherry.core.keypath import KeyPath
    from wherry.workers.target_files import FilesOfMoves, TargetFiles


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
        also_read: parts that it reads because they share a leaf of the digest with its own, and does not write.
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
    also_read: tuple[UnitPart, ...] = ()
    region: Span | None = None

    @cached_property
    def digest(self) -> str:
        """Identifies the unit; the same on every machine."""
        parts = [[list(part.source), part.start, part.stop] for part in self.parts]
        hashed = [list(path) for path in self.hashed]
        also_read = [[list(part.source), part.start, part.stop] for part in self.also_read]
        region = [] if self.region is None else [list(self.region)]
        return sha256_of(
            "unit", [self.plan, [list(file) for file in self.files], parts, hashed, also_read, *region]
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
    def _also_by_source(self) -> Mapping[KeyPath, list[UnitPart]]:
        return _by_source(self.also_read)

    def nbytes_of(self, source: KeyPath) -> int:
        """Bytes of a tensor that it moves."""
        return sum(part.nbytes for part in self._by_source.get(source, ()))

    def has(self, source: KeyPath, span: Span) -> bool:
        """Whether a move belongs to the unit."""
        return _begins_in(self._by_source.get(source, ()), span)

    def reads(self, source: KeyPath, span: Span) -> bool:
        """Whether a move belongs to the unit, or is read for the sake of a leaf."""
        return self.has(source, span) or _begins_in(self._also_by_source.get(source, ()), span)

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


# ---- a plan, cut into units ------------------------------------------------------------------------------------------


UNIT_BYTES = parse_size(DEFAULT_UNIT)
LARGEST_UNIT = 4 << 30


@dataclass(frozen=True, slots=True)
class PlanContents:
    """What a plan moves, as far as its units depend on it.

    Attributes:
        plan: digest of the plan.
        pairs: target key path → key path in the source, or in the view of it.
        nbytes: target key path → canonical bytes.
        stored: key path of every stored tensor of the source → bytes.
        made_of: the stored tensors that a tensor of the view is made of.
        is_view: whether the source is seen through another layout, so that its own digests need reads of their own.
    """

    plan: str
    pairs: Mapping[KeyPath, KeyPath]
    nbytes: Mapping[KeyPath, int]
    stored: Mapping[KeyPath, int]
    made_of: Callable[[KeyPath], Collection[KeyPath]]
    is_view: bool = False


def most_of_file(unit_bytes: int, *, local: bool) -> int:
    """Bytes of a file above which it is cut into regions: the size of a unit.

    Another worker can read back a whole object, but not a part of an upload: so in a store of objects, files stay
    whole by default up to the largest unit there is.

    Args:
        unit_bytes: size of a unit.
        local: whether the target is on a file system.
    """
    return LARGEST_UNIT if unit_bytes == UNIT_BYTES and not local else unit_bytes


def cut(contents: PlanContents, files: TargetFiles, unit_bytes: int = UNIT_BYTES) -> tuple[Unit, ...]:
    """Cut a plan into units.

    Args:
        contents: what the plan moves.
        files: the files of its target.
        unit_bytes: size of a unit; a larger file that has no regions is one unit.

    Returns:
        The units, in the order of the target's files. Every file or region of one is in exactly one, and so is every
        tensor with elements whose files are.
    """
    groups = [list(files.sizes)] if files.whole else list(_groups(files, unit_bytes))
    parts, also_read = _parts(contents, files, groups)
    sources = [
        tuple(dict.fromkeys(one for part in row for one in contents.made_of(part.source))) for row in parts
    ]
    moved = [sum(part.nbytes for part in (*own, *more)) for own, more in zip(parts, also_read, strict=True)]
    hashed = _assign_hashing(contents, sources, moved) if contents.is_view else [[] for _ in groups]
    return tuple(
        Unit(
            number=number,
            plan=contents.plan,
            files=tuple(
                UnitFile(files.regions[name].file if name in files.regions else name, files.sizes[name])
                for name in names
            ),
            parts=tuple(parts[number]),
            sources=sources[number],
            hashed=tuple(hashed[number]),
            nbytes_in=moved[number] + sum(contents.stored[path] for path in hashed[number]),
            also_read=tuple(also_read[number]),
            region=files.regions[names[0]].span if names[0] in files.regions else None,
        )
        for number, names in enumerate(groups)
    )


def _assign_hashing(
    contents: PlanContents, sources: list[tuple[KeyPath, ...]], moved: list[int]
) -> list[list[KeyPath]]:
    """The stored tensors that each unit hashes: each by the unit that reads least, of those that need it or of all."""
    needing: dict[KeyPath, list[int]] = {}
    for number, paths in enumerate(sources):
        for path in paths:
            needing.setdefault(path, []).append(number)
    loads, hashed = list(moved), [list["KeyPath"]() for _ in sources]
    for path, nbytes in sorted(contents.stored.items(), key=lambda row: (-row[1], row[0])):
        number = min(needing.get(path, range(len(sources))), key=loads.__getitem__)
        hashed[number].append(path)
        loads[number] += nbytes
    return hashed


def _parts(
    contents: PlanContents, files: TargetFiles, groups: Sequence[Sequence[str]]
) -> tuple[list[list[UnitPart]], list[list[UnitPart]]]:
    """What each unit writes, in the order of the target, and what else it reads."""
    unit_of = {name: number for number, names in enumerate(groups) for name in names}
    parts, also_read = [list[UnitPart]() for _ in groups], [list[UnitPart]() for _ in groups]
    for target, source in contents.pairs.items():
        nbytes = contents.nbytes[target]
        if not nbytes:
            continue
        if target not in files.spread or len(groups) == 1:
            parts[unit_of.get(files.homes.get(target, ""), 0)].append(UnitPart(source, 0, nbytes))
            continue
        for share in shares(files.spread[target], unit_of):
            parts[share.unit] += [UnitPart(source, *span) for span in share.own]
            also_read[share.unit] += [UnitPart(source, *span) for span in share.also_read]
    return parts, also_read


def _groups(files: TargetFiles, most: int) -> Iterator[list[str]]:
    """The names of files, in groups of at most so many bytes; a larger file, or a region, is a group of its own."""
    held: list[str] = []
    filled = 0
    for name, size in files.sizes.items():
        if held and (filled + size > most or name in files.regions):
            yield held
            held, filled = [], 0
        held.append(name)
        filled += most if name in files.regions else size
    if held:
        yield held


# ---- a tensor that lies in several units -----------------------------------------------------------------------------


class Share(NamedTuple):
    """The share of one unit in a tensor.

    Attributes:
        unit: its number.
        own: ranges of moves with chunks of its own.
        also_read: ranges of moves that it reads for the sake of leaves.
    """

    unit: int
    own: list[Span]
    also_read: list[Span]


def shares(rows: FilesOfMoves, unit_of: Mapping[str, int]) -> Iterator[Share]:
    """Share out a tensor; its moves, in their order, and the number of the unit that makes each file.

    Args:
        rows: the moves.
        unit_of: name of a file → number of its unit.
    """
    moves_of: dict[int, list[int]] = {}
    for number, names in enumerate(rows.files):
        for unit in {unit_of[name] for name in names}:
            moves_of.setdefault(unit, []).append(number)
    starts = array("q", [0, *rows.stops])
    for unit, own in sorted(moves_of.items()):
        more: set[int] = set()
        for span in (
            () if rows.box else _join_spans(starts, own)
        ):  # of boxes, units exchange what they have of a leaf
            first = bisect_right(rows.stops, span.start // LEAF * LEAF)
            last = bisect_left(starts, -(-span.stop // LEAF) * LEAF, hi=len(rows.stops))
            more.update(range(first, last))
        yield Share(unit, _join_spans(starts, own), _join_spans(starts, sorted(more.difference(own))))


def _join_spans(starts: Sequence[int], numbers: Sequence[int]) -> list[Span]:
    """The ranges of some moves, adjacent ones joined."""
    found: list[Span] = []
    for number in numbers:
        start, stop = starts[number], starts[number + 1]
        if found and found[-1].stop == start:
            start = found.pop().start
        found.append(Span(start, stop))
    return found
