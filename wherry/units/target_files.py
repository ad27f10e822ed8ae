"""TargetFiles: which files the writer of a format would create for a plan, and where each tensor lies in them.

Nothing is written: the writer is created in a store that holds nothing (`FileSketch`), and asked for the file of every
tensor, or of every chunk of it. So this follows the writer itself, and no second description of a format can disagree
with it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from wherry.converter.plan import joint_moves
from wherry.core.tensorspec import Span
from wherry.errors import UnsupportedError
from wherry.formats.registry import find_format
from wherry.formats.writer import home_of
from wherry.mover.move import cells
from wherry.storage.location import Location
from wherry.upload.selection import FileSketch

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from wherry.converter.plan import Plan
    from wherry.core.keypath import KeyPath
    from wherry.core.tensorspec import TensorSpec
    from wherry.formats.writer import HomeFunction
    from wherry.mover.move import Move

ROOT = "/target"  # of the target in a sketch


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


@dataclass(frozen=True, slots=True)
class TargetFiles:
    """The files of a target.

    Attributes:
        sizes: name relative to the target → bytes, in the writer's order; `.` for the target itself if it is one file;
            empty if the files cannot be known.
        homes: target key path → name of the file that holds the tensor; only of tensors with elements.
        spread: target key path → its moves, of a tensor whose chunks lie in several files.
        whole: why the target cannot be cut between its files; empty if it can.
    """

    sizes: Mapping[str, int]
    homes: Mapping[KeyPath, str]
    whole: str = ""
    spread: Mapping[KeyPath, Sequence[FilesOfMove]] = field(
        default_factory=dict["KeyPath", "Sequence[FilesOfMove]"]
    )


def target_files(plan: Plan) -> TargetFiles:
    """The files of a plan's target; none if one process has to make it.

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
        found = {path: list(rows) for path, rows in _rows(home_of(writer), plan)}
    finally:
        writer.close()
    sizes = {name_at(path): size for path, size in sketch.sizes.items()}
    lost = next((path for path, rows in found.items() if not all(row.files for row in rows)), None)
    if lost is not None:
        return TargetFiles(sizes, {}, f"the bytes of {'/'.join(lost)} are encoded before they are written")
    names = {path: frozenset[str]().union(*(row.files for row in rows)) for path, rows in found.items()}
    homes = {path: next(iter(files)) for path, files in names.items() if len(files) == 1}
    spread = {path: rows for path, rows in found.items() if path not in homes}
    single = f"{row.name} is one file" if row.single_file else "its tensors fit one file"
    return TargetFiles(sizes, homes, single if len(sizes) == 1 else "", spread)


def _rows(home: HomeFunction, plan: Plan) -> Iterator[tuple[KeyPath, Iterator[FilesOfMove]]]:
    """The files of each tensor with elements: of all of it, or of each of its moves."""
    moves = joint_moves([plan])
    for path, source in plan.pairs.items():
        spec = plan.manifest.tensors[path]
        if not spec.nbytes:
            continue
        whole = Span(0, spec.nbytes)
        if spec.chunks is None:
            yield path, iter([FilesOfMove(whole, False, _names(home(path, whole)))])
        elif spec.chunks == spec.shape:
            yield path, iter([FilesOfMove(whole, False, _names(home(path, spec.whole)))])
        else:
            yield path, (_of_move(home, spec, move) for move in moves.of(source))


def _of_move(home: HomeFunction, spec: TensorSpec, move: Move) -> FilesOfMove:
    region = move.region or spec.whole  # moves to chunks are regions
    places = [_names(home(spec.path, cell)) for cell in cells(region, spec.chunks or ())]
    return FilesOfMove(move.span, move.box, frozenset().union(*places) if all(places) else frozenset())


def _names(place: Location | None) -> frozenset[str]:
    return frozenset() if place is None else frozenset([name_at(place.path)])


def name_at(path: str) -> str:
    """The name of a file, from its path in a sketch of the target."""
    return path[len(ROOT) :].strip("/") or "."
