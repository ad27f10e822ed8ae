"""TargetFiles: the files of a plan's target, and which of them each move fills, as the map of the target says.

A large file of which the map knows the place of every byte of its tensors has regions, cut at places that its bytes
do not decide. A region begins at a multiple of a step: on a disk of 64 KiB, so that no two workers write the same block
or page; in a store of objects of the size of the parts, so that a unit makes whole parts. A move with bytes in two
regions belongs to both units, as one with chunks in two files does.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING

from wherry.converter.plan import joint_moves
from wherry.core.tensorspec import Span
from wherry.formats.registry import find_format
from wherry.mover.map_writer import map_of
from wherry.mover.move import cells
from wherry.target.file_ranges import FileRange, file_of, file_sizes, ranges_of
from wherry.target.uploaded_file import part_size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from wherry.converter.plan import Plan
    from wherry.core.keypath import KeyPath
    from wherry.core.tensorspec import TensorSpec
    from wherry.mover.move import JointMoves, Move
    from wherry.storage.location import Location
    from wherry.target.file_map import FileMap

DISK_STEP = 64 << 10  # at least a page, and a block, of any system


@dataclass(frozen=True, slots=True)
class FilesOfMoves:
    """The files that get bytes of each move of a tensor, in order, in 16 bytes each: a giant has several 100,000 moves.

    Attributes:
        stops: where each move ends; the next one begins there.
        files: the names of its files.
        box: whether the moves are boxes.
    """

    stops: array[int] = field(default_factory=lambda: array("q"))
    files: list[frozenset[str]] = field(default_factory=list[frozenset[str]])
    box: bool = False


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
    spread: Mapping[KeyPath, FilesOfMoves] = field(default_factory=dict["KeyPath", FilesOfMoves])
    regions: Mapping[str, FileRange] = field(default_factory=dict[str, FileRange])


def target_files(
    plan: Plan, companion: Callable[[str], Location], target: Location, unit_bytes: int
) -> TargetFiles:
    """The files of a plan's target; none if one process has to make it.

    Args:
        plan: the plan.
        companion: where the source has a companion file.
        target: where the files will be.
        unit_bytes: larger files are cut into regions.

    Raises:
        UnrepresentableError: the format cannot hold one of the tensors.
    """
    row, moves = find_format(plan.to), joint_moves([plan])
    file_map = map_of(row, target, plan.manifest, plan.options, companion)
    sizes = file_sizes(file_map)
    if sizes is None:
        return TargetFiles({}, {}, "the sizes of compressed chunks are not known before they are written")
    specs = {path: spec for path in plan.pairs if (spec := plan.manifest.tensors[path]).nbytes}
    homes, spread = dict["KeyPath", str](), dict["KeyPath", FilesOfMoves]()
    regions, pieces = dict[str, list[FileRange]](), dict[str, int]()
    flat = {  # of which the place of every byte is known
        path
        for path, spec in specs.items()
        if spec.chunks is None and ranges_of(file_map, spec.path, Span(0, spec.nbytes)) is not None
    }
    for path in (path for path in specs if path not in flat):
        files = _of_chunks(file_map, specs[path], moves, plan.pairs[path])
        if not all(files.files):
            return TargetFiles(
                sizes, {}, f"the bytes of {'/'.join(path)} are encoded before they are written"
            )
        _put(path, files, homes, spread)
    whole = {
        *homes.values(),
        *(name for rows in spread.values() for names in rows.files for name in names),
    }
    store, disk_step = target.store, DISK_STEP * target.store.capabilities.local
    for name, size in sizes.items():  # a chunk is written whole, or encoded
        step = part_size(size, store.part_limits) if store.capabilities.parts else disk_step
        if name not in whole and (rows := regions_of(name, size, unit_bytes, step)):
            regions[name] = rows
        pieces |= {one.name: one.stop - one.start for one in regions.get(name, ())} or {name: size}
    for path in flat:
        names = _names_at(file_map, path, Span(0, specs[path].nbytes), regions)
        if len(names) == 1:
            homes[path] = next(iter(names))
            continue
        source = plan.pairs[path]
        rows = ((move.span, _names_at(file_map, path, move.span, regions)) for move in moves.of(source))
        _put(path, _of_moves(rows), homes, spread)
    single = f"{row.name} is one file" if row.single_file else "its tensors fit one file"
    by_name = {one.name: one for rows in regions.values() for one in rows}
    return TargetFiles(pieces, homes, single if len(pieces) == 1 else "", spread, by_name)


def _put(
    path: KeyPath, files: FilesOfMoves, homes: dict[KeyPath, str], spread: dict[KeyPath, FilesOfMoves]
) -> None:
    """Note the files of a tensor."""
    first = files.files[0]
    if len(first) == 1 and all(names == first for names in files.files):
        homes[path] = next(iter(first))
    else:
        spread[path] = files


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
    return FilesOfMoves(stops, files, box)


def _names(files: Sequence[str | None]) -> frozenset[str]:
    """The names of files; none if one of them is not known."""
    found = {_name_set(file) for file in files if file is not None}
    if None in files:
        return frozenset()
    return next(iter(found)) if len(found) == 1 else frozenset[str]().union(*found)


@lru_cache(1 << 16)
def _name_set(file: str) -> frozenset[str]:
    return frozenset([file])


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
    return frozenset(found)


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
