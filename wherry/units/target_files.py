"""TargetFiles: which files the writer of a format would create for a plan, and where each tensor lies in them.

Nothing is written: the writer is created in a store that holds nothing (`FileSketch`), and asked for the file of every
tensor, or of every chunk of it. So this follows the writer itself, and no second description of a format can disagree
with it. A large file of which the writer knows the place of every byte of its tensors has regions (`regions`).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import TYPE_CHECKING, NamedTuple, overload

from wherry.converter.plan import joint_moves
from wherry.core.tensorspec import Span
from wherry.errors import UnsupportedError
from wherry.formats.registry import find_format
from wherry.mover.move import cells
from wherry.storage.location import Location
from wherry.units.regions import regions_at, regions_of
from wherry.upload.selection import ROOT, FileSketch, name_at

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from wherry.converter.plan import Plan
    from wherry.core.keypath import KeyPath
    from wherry.core.tensorspec import TensorSpec
    from wherry.formats.writer import ExtentsFunction, Writer
    from wherry.mover.move import JointMoves, Move
    from wherry.units.regions import FileRegion, StepFunction


class FilesOfMove(NamedTuple):
    """The files that get bytes of a move.

    Attributes:
        span: of the move.
        box: as that of the move.
        files: their names.
    """

    span: Span
    box: bool
    files: frozenset[str]


class FilesOfMoves(Sequence[FilesOfMove]):
    """The files of the moves of one tensor, in order, in 25 bytes each: a giant has several 100,000 moves."""

    __slots__ = ("_boxes", "_files", "_starts", "_stops", "known", "names")

    def __init__(self, rows: Iterable[FilesOfMove]) -> None:
        self._starts, self._stops, self._boxes = array("q"), array("q"), bytearray()
        self._files: list[frozenset[str]] = []
        shared: dict[frozenset[str], frozenset[str]] = {}
        for row in rows:
            self._starts.append(row.span.start)
            self._stops.append(row.span.stop)
            self._boxes.append(row.box)
            self._files.append(shared.setdefault(row.files, row.files))
        # Of all moves; most of a giant's tensors lie in one file, and share its set.
        self.names = next(iter(shared)) if len(shared) == 1 else frozenset[str]().union(*shared)
        self.known = all(shared)  # whether each move has files

    @overload
    def __getitem__(self, index: int) -> FilesOfMove: ...
    @overload
    def __getitem__(self, index: slice) -> list[FilesOfMove]: ...
    def __getitem__(self, index: int | slice) -> FilesOfMove | list[FilesOfMove]:
        """One move, or several."""
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        span = Span(self._starts[index], self._stops[index])
        return FilesOfMove(span, bool(self._boxes[index]), self._files[index])

    def __len__(self) -> int:
        """Number of moves."""
        return len(self._files)


@dataclass(frozen=True, slots=True)
class TargetFiles:
    """The files of a target.

    Attributes:
        sizes: name relative to the target → bytes, in the writer's order; `.` for the target itself if it is one file;
            empty if the files cannot be known. A file that is cut has its regions here, by their names.
        homes: target key path → name of the file that holds the tensor; only of tensors with elements.
        spread: target key path → its moves, of a tensor whose chunks or bytes lie in several files.
        whole: why the target cannot be cut; empty if it can.
        regions: name in `sizes` → the region of a file.
    """

    sizes: Mapping[str, int]
    homes: Mapping[KeyPath, str]
    whole: str = ""
    spread: Mapping[KeyPath, Sequence[FilesOfMove]] = field(
        default_factory=dict["KeyPath", "Sequence[FilesOfMove]"]
    )
    regions: Mapping[str, FileRegion] = field(default_factory=dict[str, "FileRegion"])


def target_files(plan: Plan, unit_bytes: int = 0, step: StepFunction = lambda _size: 0) -> TargetFiles:
    """The files of a plan's target; none if one process has to make it.

    Args:
        plan: the plan.
        unit_bytes: larger files are cut into regions.
        step: between these regions.

    Raises:
        UnrepresentableError: the format cannot hold one of the tensors.
    """
    row = find_format(plan.to)
    if not row.streams or row.create is None:
        return TargetFiles({}, {}, f"{plan.to} is written through a file system, by one process")
    sketch = FileSketch()
    try:
        writer = row.create(Location(sketch, ROOT), plan.manifest, plan.options)
    except UnsupportedError as error:  # it needs a file system, or sizes that are not known
        return TargetFiles({}, {}, error.what)
    try:
        moves = joint_moves([plan])
        found = dict(_rows(writer, plan, moves))
        sizes = {name_at(path): size for path, size in sketch.sizes.items()}
        lost = next((path for path, rows in found.items() if not rows.known), None)
        if lost is not None:
            return TargetFiles(
                sizes, {}, f"the bytes of {'/'.join(lost)} are encoded before they are written"
            )
        regions = {name: regions_of(name, size, unit_bytes, step(size)) for name, size in sizes.items()}
        cut = {name: rows for name, rows in regions.items() if rows}
        _among_regions(writer.extents, plan, moves, found, cut)
    finally:
        writer.close()
    homes = {path: next(iter(rows.names)) for path, rows in found.items() if len(rows.names) == 1}
    spread = {path: rows for path, rows in found.items() if path not in homes}
    single = f"{row.name} is one file" if row.single_file else "its tensors fit one file"
    pieces: dict[str, int] = {}
    for name, size in sizes.items():
        pieces |= {one.name: one.span.nbytes for one in cut.get(name, ())} or {name: size}
    by_name = {one.name: one for rows in cut.values() for one in rows}
    return TargetFiles(pieces, homes, single if len(pieces) == 1 else "", spread, by_name)


def _among_regions(
    extents_at: ExtentsFunction,
    plan: Plan,
    moves: JointMoves,
    found: dict[KeyPath, FilesOfMoves],
    regions: dict[str, list[FileRegion]],
) -> None:
    """Name the regions of files instead of the files, where the place of every byte of a file's tensors is known.

    Args:
        extents_at: gives the byte ranges of a tensor, or of a span of it.
        plan: the plan.
        moves: its moves.
        found: the files of each tensor; changed.
        regions: name of each file that is large enough → its regions; the files that are not cut are removed.
    """
    specs = plan.manifest.tensors
    for path, rows in found.items():
        whole = Span(0, specs[path].nbytes)
        if rows.names & regions.keys() and (
            specs[path].chunks is not None or extents_at(path, whole) is None
        ):
            for name in rows.names & regions.keys():  # a chunk is written whole, or encoded
                del regions[name]
    for path, rows in found.items():
        if rows.names & regions.keys():
            place = partial(_names_of, extents_at, path, regions)
            found[path] = _of_moves(place, specs[path], moves.of(plan.pairs[path]))


def _names_of(
    extents_at: ExtentsFunction, path: KeyPath, regions: Mapping[str, Sequence[FileRegion]], span: Span
) -> frozenset[str]:
    """The names of the files that get bytes of a span, and of the regions of those that are cut."""
    names = set[str]()
    for extent in extents_at(path, span) or ():
        file = name_at(extent.location.path)
        names |= {one.name for one in regions_at([extent], regions[file])} if file in regions else {file}
    return frozenset(names)


def _of_moves(
    place: Callable[[Span], frozenset[str]], spec: TensorSpec, moves: Iterable[Move]
) -> FilesOfMoves:
    """The files, or regions of files, of a tensor that can be written by spans: of all of it, or of each move."""
    whole = Span(0, spec.nbytes)
    if len(place(whole)) < 2:  # noqa: PLR2004  one, or none
        return _of_whole(whole, place(whole))
    return FilesOfMoves(FilesOfMove(move.span, move.box, place(move.span)) for move in moves)


def _rows(writer: Writer, plan: Plan, moves: JointMoves) -> Iterator[tuple[KeyPath, FilesOfMoves]]:
    """The files of each tensor with elements: of all of it, or of each of its moves."""
    for path, source in plan.pairs.items():
        spec = plan.manifest.tensors[path]
        if not spec.nbytes:
            continue
        whole = Span(0, spec.nbytes)
        if spec.chunks is None and (only := writer.home(path, whole)) is not None:
            yield path, _of_whole(whole, _names(only))
        elif spec.chunks is None:
            yield path, _of_moves(partial(_names_of, writer.extents, path, {}), spec, moves.of(source))
        elif spec.chunks == spec.shape:
            yield path, _of_whole(whole, _names(writer.home(path, spec.whole)))
        else:
            yield path, FilesOfMoves(_of_move(writer, spec, move) for move in moves.of(source))


@lru_cache(1 << 12)
def _of_whole(whole: Span, files: frozenset[str]) -> FilesOfMoves:
    """The files of all of a tensor; tensors of one size in one file share it."""
    return FilesOfMoves([FilesOfMove(whole, False, files)])


def _of_move(writer: Writer, spec: TensorSpec, move: Move) -> FilesOfMove:
    region = move.region or spec.whole  # moves to chunks are regions
    places = [_names(writer.home(spec.path, cell)) for cell in cells(region, spec.chunks or ())]
    if len(places) == 1:
        return FilesOfMove(move.span, move.box, places[0])
    return FilesOfMove(move.span, move.box, frozenset().union(*places) if all(places) else frozenset())


def _names(place: Location | None) -> frozenset[str]:
    return frozenset() if place is None else _name_set(place.path)


@lru_cache(1 << 16)
def _name_set(path: str) -> frozenset[str]:
    return frozenset([name_at(path)])
