"""Unit: files of a target, and the moves that fill them: the piece of work that another machine can do.

A unit is one file of the target, several small ones that together stay below the size that was chosen, or a region of
a larger one. Same plan, same unit, same bytes: units are a pure function of the plan, so every process cuts a plan in
the same way, and only the number of a unit has to be stated. Which files there are, how large they are, and which of
them each move fills, the map of the target says.

A large file of which the map knows the place of every byte of its tensors has regions, cut at places that its bytes
do not decide. A region begins at a multiple of a step: on a disk of 64 KiB, so that no two workers write the same block
or page; in a store of objects of the size of the parts, so that a unit makes whole parts.

A tensor may lie in the files or regions of several units; `shares` shares it out. A move with chunks in the files of
two units, or bytes in two regions, belongs to both: each writes what is its own. The digest of a tensor has leaves of
4 MiB, which chunks do not respect: a unit whose moves end within a leaf also reads the moves that hold the rest of that
leaf, so that it can hash it. So units are independent, and read little twice.

The work of the units (bytes, requests, memory, and hours at given rates) follows from metadata alone. Time is that of
the busiest worker if each moves bytes at the given rate, and takes the next unit when it has finished one; latency,
retries and workers that die are left out. Workers also share the read-back. The commit alone reads back tensors that
only the reader of the finished target can read in order, those in boxes that are not hashed when they are moved, and
parts of uploads, which cannot be read before they are complete.
"""

from __future__ import annotations

import heapq
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

from wherry.converter.plan import (
    ONE_PROCESS,
    Plan,
    SharedTraffic,
    hashes_on_the_way,
    joint_moves,
    plan_target,
    require_used,
    traffic_of,
)
from wherry.converter.source_digests import read_for_digests
from wherry.core.digest import BLAKE3, LEAF, hashes_boxes, sha256_of
from wherry.core.keypath import KeyPath, render
from wherry.core.lazy_dataclass import dataclass
from wherry.core.request import ConvertRequest
from wherry.core.tensorspec import Span, TensorSpec
from wherry.core.units import DEFAULT_UNIT, parse_size, plural, show_seconds, show_size
from wherry.errors import UsageError
from wherry.formats.checkpoint import Checkpoint, open_source
from wherry.formats.registry import find_format, find_target_format
from wherry.ledger.resolve import resolve_named
from wherry.mover.map_writer import map_of
from wherry.mover.move import JointMoves, Move, cells
from wherry.mover.readback import is_run
from wherry.store.local_store import locate
from wherry.store.location import Location
from wherry.target.file_map import FileMap
from wherry.target.file_ranges import FileRange, file_of, file_sizes, ranges_of
from wherry.target.uploaded_file import part_size

UNIT_BYTES = parse_size(DEFAULT_UNIT)
LARGEST_UNIT = 4 << 30
CLIENT_BYTES = 32 << 20  # of the library of a store, in the memory of a worker
DISK_STEP = 64 << 10  # at least a page, and a block, of any system
DEFAULT_RATE = 400_000_000  # bytes a second that one worker reads, and writes meanwhile


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
        """The unit's name in records and on dashboards."""
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


def most_of_file(unit_bytes: int, *, local: bool) -> int:
    """Bytes of a file above which it is cut into regions: the size of a unit.

    Another worker can read back a whole object, but not a part of an upload: so in a store of objects, files stay
    whole by default up to the largest unit there is.

    Args:
        unit_bytes: size of a unit.
        local: whether the target is on a file system.
    """
    return LARGEST_UNIT if unit_bytes == UNIT_BYTES and not local else unit_bytes


def units_of(
    source: Checkpoint, plan: Plan, target: Location, unit_bytes: int = UNIT_BYTES
) -> tuple[tuple[Unit, ...], str]:
    """The units of a plan, and why they are not several; no units if one process has to make the target.

    Args:
        source: the opened source, or its view in the layout of the target's system.
        plan: the plan.
        target: where its files will be.
        unit_bytes: size of a unit.
    """
    files = _target_files(plan, source.reader.companion, target, unit_bytes)
    return cut(source, plan, files, unit_bytes) if files.sizes else (), files.whole


def cut(source: Checkpoint, plan: Plan, files: TargetFiles, unit_bytes: int) -> tuple[Unit, ...]:
    """Cut a plan into units.

    Args:
        source: the opened source, or its view.
        plan: the plan.
        files: the files of its target.
        unit_bytes: size of a unit; a larger file that has no regions is one unit.

    Returns:
        The units, in the order of the target's files. Every file or region of one is in exactly one, and so is every
        tensor with elements whose files are.
    """
    groups = [list(files.sizes)] if files.whole else list(_groups(files, unit_bytes))
    unit_of = {name: number for number, names in enumerate(groups) for name in names}
    parts, also_read = [list[UnitPart]() for _ in groups], [list[UnitPart]() for _ in groups]
    for target, path in plan.pairs.items():
        if not (nbytes := plan.manifest.tensors[target].nbytes):
            continue
        rows = files.moves.get(target)
        for share in [Share(0, [Span(0, nbytes)], [])] if rows is None else shares(rows, unit_of):
            parts[share.unit] += [UnitPart(path, *span) for span in share.own]
            also_read[share.unit] += [UnitPart(path, *span) for span in share.also_read]
    sources = [
        tuple(dict.fromkeys(one for part in row for one in source.made_of(part.source))) for row in parts
    ]
    moved = [sum(part.nbytes for part in (*own, *more)) for own, more in zip(parts, also_read, strict=True)]
    stored = {path: spec.nbytes for path, spec in source.original.manifest.tensors.items()}
    hashed = _assign_hashing(stored, sources, moved) if source.is_view else [[] for _ in groups]
    regions = files.regions
    return tuple(
        Unit(
            number=number,
            plan=plan.digest,
            files=tuple(
                UnitFile(regions[name].file if name in regions else name, files.sizes[name]) for name in names
            ),
            parts=tuple(parts[number]),
            sources=sources[number],
            hashed=tuple(hashed[number]),
            nbytes_in=moved[number] + sum(stored[path] for path in hashed[number]),
            also_read=tuple(also_read[number]),
            region=regions[names[0]].span if names[0] in regions else None,
        )
        for number, names in enumerate(groups)
    )


def _assign_hashing(
    stored: Mapping[KeyPath, int], sources: list[tuple[KeyPath, ...]], moved: list[int]
) -> list[list[KeyPath]]:
    """The stored tensors that each unit hashes: each by the unit that reads least, of those that need it or of all."""
    needing: dict[KeyPath, list[int]] = {}
    for number, paths in enumerate(sources):
        for path in paths:
            needing.setdefault(path, []).append(number)
    loads, hashed = list(moved), [list["KeyPath"]() for _ in sources]
    for path, nbytes in sorted(stored.items(), key=lambda row: (-row[1], row[0])):
        number = min(needing.get(path, range(len(sources))), key=loads.__getitem__)
        hashed[number].append(path)
        loads[number] += nbytes
    return hashed


def _groups(files: TargetFiles, most: int) -> Iterator[list[str]]:
    """The names of files, in groups of at most this many bytes; a larger file, or a region, is a separate group."""
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


# ---- a tensor that is in several units -----------------------------------------------------------------------------


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
    for unit, numbers in sorted(moves_of.items()):
        own, more = _join_spans(starts, numbers), set[int]()
        for span in () if rows.box else own:  # of boxes, units exchange what they have of a leaf
            first = bisect_right(rows.stops, span.start // LEAF * LEAF)
            last = bisect_left(starts, -(-span.stop // LEAF) * LEAF, hi=len(rows.stops))
            more.update(range(first, last))
        yield Share(unit, own, _join_spans(starts, sorted(more.difference(numbers))))


def _join_spans(starts: Sequence[int], numbers: Sequence[int]) -> list[Span]:
    """The ranges of some moves, adjacent ones joined."""
    found: list[Span] = []
    for number in numbers:
        start, stop = starts[number], starts[number + 1]
        if found and found[-1].stop == start:
            start = found.pop().start
        found.append(Span(start, stop))
    return found


# ---- the files of a target -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FilesOfMoves:
    """The files that get bytes of each move of a tensor, in order, in 16 bytes each: a giant has several 100,000 moves.

    Attributes:
        stops: where each move ends; the next one begins there. Of a tensor in one file, all are one.
        files: the names of its files.
        box: whether the moves are boxes.
    """

    stops: array[int]
    files: Sequence[frozenset[str]]
    box: bool = False


@dataclass(frozen=True, slots=True)
class TargetFiles:
    """The files of a target.

    Attributes:
        sizes: name relative to the target → bytes, in the writer's order; `.` for the target itself if it is one file;
            empty if the files cannot be known. A file that is cut has its regions here, by their names.
        moves: target key path → the files of its moves; only of tensors with elements.
        whole: why the target cannot be cut; empty if it can.
        regions: name in `sizes` → the region of a file.
    """

    sizes: Mapping[str, int]
    moves: Mapping[KeyPath, FilesOfMoves]
    whole: str = ""
    regions: Mapping[str, FileRange] = field(default_factory=dict[str, FileRange])


def _target_files(
    plan: Plan, companion: Callable[[str], Location], target: Location, unit_bytes: int
) -> TargetFiles:
    """The files of a plan's target; none if one process has to make it."""
    row, moves = find_format(plan.to), joint_moves([plan])
    file_map = map_of(row, target, plan.manifest, plan.options, companion)
    sizes = file_sizes(file_map)
    if sizes is None:
        return TargetFiles({}, {}, "the sizes of compressed chunks are not known before they are written")
    specs = {path: spec for path in plan.pairs if (spec := plan.manifest.tensors[path]).nbytes}
    flat = {  # of which the place of every byte is known
        path
        for path, spec in specs.items()
        if spec.chunks is None and ranges_of(file_map, spec.path, Span(0, spec.nbytes)) is not None
    }
    found = dict["KeyPath", FilesOfMoves]()
    for path in (path for path in specs if path not in flat):
        found[path] = _of_chunks(file_map, specs[path], moves, plan.pairs[path])
        if not all(found[path].files):
            return TargetFiles(
                sizes, {}, f"the bytes of {'/'.join(path)} are encoded before they are written"
            )
    whole = {name for rows in found.values() for names in rows.files for name in names}
    store, local = target.store, target.store.capabilities.local
    most = most_of_file(unit_bytes, local=local)
    pieces, regions = dict[str, int](), dict[str, list[FileRange]]()
    for name, size in sizes.items():  # a chunk is written whole, or encoded
        step = part_size(size, store.part_limits) if store.capabilities.parts else DISK_STEP * local
        if name not in whole and (cuts := regions_of(name, size, most, step)):
            regions[name] = cuts
        pieces |= {one.name: one.stop - one.start for one in regions.get(name, ())} or {name: size}
    for path in flat:
        span = Span(0, specs[path].nbytes)
        rows = [(span, _names_at(file_map, path, span, regions))]
        if len(rows[0][1]) > 1:
            spans = (move.span for move in moves.of(plan.pairs[path]))
            rows = ((span, _names_at(file_map, path, span, regions)) for span in spans)
        found[path] = _of_moves(rows)
    single = f"{row.name} is one file" if row.single_file else "its tensors fit one file"
    by_name = {one.name: one for cuts in regions.values() for one in cuts}
    return TargetFiles(pieces, found, single if len(pieces) == 1 else "", by_name)


def _of_chunks(file_map: FileMap, spec: TensorSpec, moves: JointMoves, source: KeyPath) -> FilesOfMoves:
    """The files of each move of a tensor that is written in chunks, or encoded; none of a move if one is not known."""
    if spec.chunks in (None, spec.shape):
        whole = Span(0, spec.nbytes)
        file = file_of(file_map, spec.path, whole if spec.chunks is None else spec.whole)
        return _of_moves([(whole, _names([file]))])

    def names(move: Move) -> frozenset[str]:
        regions = cells(move.region or spec.whole, spec.chunks or ())  # moves to chunks are regions
        return _names([file_of(file_map, spec.path, cell) for cell in regions])

    rows = ((move.span, names(move)) for move in moves.of(source))
    return _of_moves(rows, box=moves.are_boxes(source))


def _of_moves(rows: Iterable[tuple[Span, frozenset[str]]], *, box: bool = False) -> FilesOfMoves:
    stops, files = array("q"), list[frozenset[str]]()
    for span, names in rows:
        assert span.start == (stops[-1] if stops else 0), "the moves of a tensor follow one another"
        stops.append(span.stop)
        files.append(names)
    if len(files[0]) == 1 and all(names == files[0] for names in files):
        stops, files = stops[-1:], files[:1]
    return FilesOfMoves(stops, files, box)


def _names(files: Iterable[str | None]) -> frozenset[str]:
    """The names of files; none if one of them is not known."""
    found = set(files)
    return _kept_once(frozenset(file for file in found if file is not None and None not in found))


@lru_cache(1 << 12)
def _kept_once(names: frozenset[str]) -> frozenset[str]:
    """The set that equals this one and was seen first: many moves have the same files."""
    return names


def _names_at(
    file_map: FileMap, path: KeyPath, span: Span, regions: Mapping[str, Sequence[FileRange]]
) -> frozenset[str]:
    """The names of the files that get bytes of a span, and of the regions of those that are cut."""
    found = set[str]()
    for file, start, stop in ranges_of(file_map, path, span) or ():
        rows = regions.get(file, ())
        first = bisect_right(rows, start, key=lambda one: one.start) - 1
        last = bisect_left(rows, stop, key=lambda one: one.start)
        found.update(one.name for one in rows[first:last]) if rows else found.add(file)
    return _kept_once(frozenset(found))


def regions_of(file: str, size: int, unit_bytes: int, step: int) -> list[FileRange]:
    """Cut a file into regions of nearly the same size.

    Args:
        file: its name.
        size: its bytes.
        unit_bytes: most bytes of a region, unless a step has more.
        step: a region begins at a multiple of it; 0 if the file is not cut.

    Returns:
        The regions, in order; none if the file is one unit.
    """
    if not step or size <= unit_bytes:
        return []
    most = max(unit_bytes // step, 1)
    steps = -(-size // step)
    count = -(-steps // most)
    each = -(-steps // count) * step
    found = [FileRange(file, at, min(at + each, size)) for at in range(0, size, each)]
    return found if len(found) > 1 else []


# ---- what they ask of several workers --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WorkerPlan:
    """The units of a plan, shared out to workers.

    Attributes:
        units: the units; empty if one process has to make the target.
        workers: number of workers that have something to do.
        rate: bytes a second that a worker reads, and writes meanwhile.
        seconds: how long the busiest worker takes, with its share of the read-back, and then the commit.
        commit_bytes: bytes that the commit reads back alone.
        peak_memory: bytes of memory of a worker.
        requests: number of requests to stores, of all workers.
        whole: why there is only one unit, or none; empty if there are several.
        large: what several workers make of a file that is larger than a unit; empty if there is none.
    """

    units: tuple[Unit, ...]
    workers: int
    rate: int
    seconds: float
    peak_memory: int
    requests: int
    whole: str = ""
    large: str = ""
    commit_bytes: int = 0

    @property
    def rows(self) -> list[tuple[str, str]]:
        """The rows that `wherry plan --workers N` prints: name and value of each row."""
        sizes = [unit.nbytes for unit in self.units]
        least, most = show_size(min(sizes, default=0)), show_size(max(sizes, default=0))
        return [
            ("units", f"{plural(len(sizes), 'unit')} of {least} to {most}" if sizes else ""),
            ("one worker", self.whole),
            ("large files", self.large),
            ("workers", f"{self.workers}, {show_size(self.rate)}/s each: {show_seconds(self.seconds)}"),
            ("worker memory", show_size(self.peak_memory)),
            ("commit alone", f"{show_size(self.commit_bytes)} read back" if self.commit_bytes else ""),
        ]

    def to_json(self) -> dict[str, Any]:
        """The form of `wherry plan --workers N --json`."""
        return {
            "workers": self.workers,
            "rate": self.rate,
            "seconds": round(self.seconds, 1),
            "peak_memory": self.peak_memory,
            "requests": self.requests,
            "commit_bytes": self.commit_bytes,
            "one_worker": self.whole,
            "large_files": self.large,
            "units": [unit.to_json() for unit in self.units],
        }


def parse_rate(text: str) -> int:
    """Bytes a second of a rate such as `400MB/s`; `/s` may be left out.

    Raises:
        UsageError: it is not a rate.
    """
    try:
        return parse_size(text.strip().removesuffix("/s"))
    except UsageError as error:
        raise UsageError(f"invalid rate {text!r}", cure="write for example 400MB/s") from error


def plan_for_workers(
    request: ConvertRequest, workers: int, unit_bytes: int = UNIT_BYTES, rate: int = DEFAULT_RATE
) -> tuple[Plan, WorkerPlan]:
    """The plan of a request with one target, and its units; nothing is written.

    Args:
        request: the request.
        workers: number of workers.
        unit_bytes: size of a unit.
        rate: bytes a second that one worker reads, and writes meanwhile.

    Raises: what `plan_targets` does.
    """
    (target,) = request.targets
    with open_source(resolve_named(request.source)) as checkpoint:
        source, plan = plan_target(checkpoint, find_target_format(target.to), target, request)
        require_used(checkpoint.uri, request.targets, [plan.unused])
        place = locate(target.uri)
        units, whole = units_of(source, plan, place, unit_bytes)
        back = _read_back(source, plan, units, place)
        shared = _shared_traffic(source, plan, units, back, workers) if units else ONE_PROCESS
        plan = replace(plan, traffic=traffic_of(source, plan, shared))
    rows = zip(units, back.bytes_in, back.by_unit, strict=True)
    loads = [max(read, unit.nbytes) + proved for unit, read, proved in rows]
    if not units:
        loads = [max(plan.nbytes_in, plan.nbytes_out) + plan.nbytes_out * (plan.verify == "digest")]
    stores = plan.traffic.stores
    return plan, WorkerPlan(
        units=units,
        workers=min(workers, len(loads)),
        rate=rate,
        seconds=(longest(loads, workers) + back.alone) / rate,
        peak_memory=plan.peak_memory + CLIENT_BYTES * bool(stores),
        requests=sum(one.reads + one.writes + one.lists for one in stores),
        whole=whole,
        large=large_files(units, place),
        commit_bytes=back.alone,
    )


def large_files(units: Sequence[Unit], target: Location) -> str:
    """How several workers make one file of a target; empty if none is so large."""
    if all(unit.region is None for unit in units):
        return ""
    local = target.store.capabilities.local
    return "regions of one preallocated file" if local else "parts of one multipart upload"


class _Reads(NamedTuple):
    """What is read of a source, and read back of a target."""

    bytes_in: list[int]  # bytes of the source that each unit reads
    by_unit: list[int]  # bytes of each unit that another worker reads
    alone: int  # bytes that the commit reads alone


def _read_back(source: Checkpoint, plan: Plan, units: Sequence[Unit], target: Location) -> _Reads:
    back, local = plan.verify == "digest", target.store.capabilities.local
    rows = list(_read_in_order(plan)) if back and units else []
    decoded = sum(spec.nbytes for spec, _box in rows)
    open_uploads = [unit.nbytes for unit in units if back and unit.region is not None and not local]
    alone = sum(spec.nbytes * (1 + box) for spec, box in rows)
    share = back * (1 - min(1, decoded / max(plan.nbytes_out, 1)))  # of the bytes of a unit that workers read
    by_unit = [round(unit.nbytes * share * (local or unit.region is None)) for unit in units]
    again, stored = read_for_digests(source, plan), source.original.manifest.tensors
    bytes_in = [  # with those that a unit reads for digests alone
        sum(part.nbytes for part in (*unit.parts, *unit.also_read))
        + sum(stored[path].nbytes for path in unit.hashed if path in again)
        for unit in units
    ]
    return _Reads(bytes_in, by_unit, alone + sum(open_uploads))


def _shared_traffic(
    source: Checkpoint, plan: Plan, units: Sequence[Unit], back: _Reads, workers: int
) -> SharedTraffic:
    twice = source.is_view and not hashes_on_the_way()  # as the traffic of one process does
    stored = sum(spec.nbytes for spec in source.original.manifest.tensors.values()) if twice else 0
    return SharedTraffic(
        workers=min(workers, len(units)),
        times=sum(back.bytes_in) / max(plan.nbytes_in + stored, 1),
        read_back=sum(back.by_unit) + back.alone,
        # A claim and a receipt of each unit; a claim and a proof of what workers read back.
        records=2 * (len(units) + sum(map(bool, back.by_unit))),
    )


def _read_in_order(plan: Plan) -> Iterator[tuple[TensorSpec, bool]]:
    """Each tensor that the commit reads in order, and whether it is in boxes: these are read a second time."""
    moves = joint_moves([plan])
    for target, source in plan.pairs.items():
        spec, first = plan.manifest.tensors[target], next(moves.of(source), None)
        if first is None or is_run(spec, first):
            continue
        if not (first.box and first.region and hashes_boxes(spec, first.region, (BLAKE3,))):
            yield spec, first.box


def longest(loads: Sequence[int], workers: int) -> int:
    """The load of the busiest of some workers, where each takes the next load when it has finished one.

    Args:
        loads: in the order in which they are taken.
        workers: at least one.
    """
    busy = [0] * workers
    for load in loads:
        heapq.heapreplace(busy, busy[0] + load)
    return max(busy)
