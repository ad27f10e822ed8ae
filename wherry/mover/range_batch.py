"""Range batches: moves from a remote store that are read with few requests, several of them at a time.

On a store each request costs as much time as moving 1 to 4 MiB, whatever its size, so tensors are not read one by one.
Moves of raw bytes are collected over a window, put in the order of their files, and cut into batches of up to 8 MiB;
`wherry.storage.ranges` merges the byte ranges of a batch into requests. One worker carries one batch: there are as many
workers as requests fit the memory budget.
"""

from __future__ import annotations

from bisect import bisect_right
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate, groupby
from typing import TYPE_CHECKING, NamedTuple

from wherry.storage.ranges import GAP, LARGEST, MOST_REQUESTS, RangeRequest, fill_together, requests_for

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

    from wherry.core.tensorspec import TensorSpec
    from wherry.formats.contents import Extent
    from wherry.mover.move import Move, Way
    from wherry.mover.source import Source
    from wherry.storage.location import Location

WINDOW = 4 * LARGEST  # bytes of moves that are put in the order of their files
_MOST_MOVES = 4096
# Where a storage library does not fill the buffer itself, it holds this many times the bytes of a request besides.
_COPIES = 2


class _Piece(NamedTuple):
    """The part of a move that lies in one extent: bytes [start, stop) of a file, at an offset of the move."""

    location: Location
    start: int
    stop: int
    offset: int


class RangedMove(NamedTuple):
    """A move, the source tensor, and where its bytes lie."""

    move: Move
    spec: TensorSpec
    extents: tuple[Extent, ...]
    pieces: tuple[_Piece, ...]

    @property
    def place(self) -> tuple[str, int]:
        """File and offset of its first byte."""
        return self.pieces[0].location.path, self.pieces[0].start

    @property
    def stop(self) -> int:
        """The offset in its last file after its last byte."""
        return self.pieces[-1].stop


@dataclass(slots=True)
class RangeBatch:
    """Moves that are read together."""

    rows: list[RangedMove]

    @property
    def nbytes(self) -> int:
        """Bytes of the moves."""
        return sum(row.move.span.nbytes for row in self.rows)


@dataclass(slots=True)
class RangeWindow:
    """Collects moves until there are enough to be put in the order of their files."""

    rows: list[RangedMove] = field(default_factory=list[RangedMove])
    nbytes: int = 0

    def add(self, row: RangedMove) -> Iterator[RangeBatch]:
        """Add a move; yields batches once the window is full."""
        self.rows.append(row)
        self.nbytes += row.move.span.nbytes
        if self.nbytes >= WINDOW or len(self.rows) >= _MOST_MOVES:
            yield from self.batches()

    def batches(self) -> Iterator[RangeBatch]:
        """The batches of all moves in the window, which is empty afterwards."""
        rows, self.rows, self.nbytes = sorted(self.rows, key=lambda row: row.place), [], 0
        batch: list[RangedMove] = []
        nbytes = 0
        for row in rows:
            added = row.move.span.nbytes + (_gap(batch[-1], row) if batch else 0)
            if batch and nbytes + added > LARGEST:
                yield RangeBatch(batch)
                batch, nbytes, added = [], 0, row.move.span.nbytes
            batch.append(row)
            nbytes += added
        if batch:
            yield RangeBatch(batch)


def _gap(before: RangedMove, row: RangedMove) -> int:
    """Bytes between two moves that are read with them."""
    gap = row.place[1] - before.stop
    near = row.pieces[0].location.path == before.pieces[-1].location.path and 0 <= gap < GAP
    return gap if near else 0


def ranged_move(move: Move, spec: TensorSpec, way: Way) -> RangedMove | None:
    """A small enough move whose bytes are raw in files of a remote store; None for any other."""
    extents = way.extents
    if (
        extents is None
        or not is_remote(extents)
        or way.band is not None
        or move.box
        or move.span.nbytes > LARGEST
    ):
        return None
    pieces = tuple(_pieces(move, way))
    return RangedMove(move, spec, extents, pieces) if pieces else None


def is_remote(extents: tuple[Extent, ...] | None) -> bool:
    """Whether bytes are as they are in files of a remote store."""
    return bool(extents) and not extents[0].location.store.capabilities.local


def worker_count(budget: int) -> int:
    """Number of workers that read batches within a memory budget."""
    return min(max(budget // LARGEST, 1), MOST_REQUESTS)


def request_sizes(batch: RangeBatch) -> Iterator[int]:
    """The bytes of each request that reads a batch."""
    requests, _wanted = _requests(batch)
    return (request.stop - request.start for _place, request in requests)


@contextmanager
def range_parts(source: Source, batch: RangeBatch) -> Generator[list[tuple[Move, TensorSpec, memoryview]]]:
    """The moves of a batch with their bytes, in the order of the files, valid while the block runs.

    Raises:
        DamagedError: bytes are missing or corrupt.
        StorageError: the storage failed.
    """
    requests, wanted = _requests(batch)
    sizes = [request.stop - request.start for _place, request in requests]
    library_bytes = sum(
        _COPIES * size
        for (place, _request), size in zip(requests, sizes, strict=True)
        if not place.store.capabilities.fills
    )
    scattered = sum(row.move.span.nbytes for row in batch.rows if len(row.pieces) > 1)
    with source.pool.buffer(sum(sizes), library_bytes + scattered) as buffer:
        ends = list(accumulate(sizes))
        views = [buffer[end - size : end] for end, size in zip(ends, sizes, strict=True)]
        fill_together([(*request, view) for request, view in zip(requests, views, strict=True)])
        parts = _parts(batch, requests, wanted, views)
        for row, (_move, _spec, data) in zip(batch.rows, parts, strict=True):
            source.recorded.update(row.extents, row.move.span, data, row.spec)
        yield parts


def _requests(
    batch: RangeBatch,
) -> tuple[list[tuple[Location, RangeRequest]], list[list[tuple[int, _Piece]]]]:
    """The requests of a batch and, for each file of them, the pieces with the numbers of their moves."""
    pieces = [(number, piece) for number, row in enumerate(batch.rows) for piece in row.pieces]
    pieces.sort(key=lambda one: (one[1].location.path, one[1].start))
    requests: list[tuple[Location, RangeRequest]] = []
    wanted: list[list[tuple[int, _Piece]]] = []
    for _path, group in groupby(pieces, key=lambda one: one[1].location.path):
        here = list(group)
        for request in requests_for([(piece.start, piece.stop) for _number, piece in here]):
            requests.append((here[0][1].location, request))
            wanted.append(here)
    return requests, wanted


def _parts(
    batch: RangeBatch,
    requests: list[tuple[Location, RangeRequest]],
    wanted: list[list[tuple[int, _Piece]]],
    views: list[memoryview],
) -> list[tuple[Move, TensorSpec, memoryview]]:
    found: list[memoryview | None] = [None] * len(batch.rows)
    for (_place, request), here, view in zip(requests, wanted, views, strict=True):
        for start, stop, index, begin in request.parts:
            number, piece = here[index]
            part = view[start - request.start : stop - request.start]
            row = batch.rows[number]
            if len(part) == row.move.span.nbytes:
                found[number] = part
                continue
            whole = found[number]
            if whole is None:
                whole = found[number] = memoryview(bytearray(row.move.span.nbytes))
            offset = piece.offset + start - begin
            whole[offset : offset + len(part)] = part
    return [
        (row.move, row.spec, memoryview(b"") if data is None else data)
        for row, data in zip(batch.rows, found, strict=True)
    ]


def _pieces(move: Move, way: Way) -> Iterator[_Piece]:
    extents, stops = way.extents or (), way.stops
    start, number = move.span.start, bisect_right(stops, move.span.start)
    while start < move.span.stop and number < len(extents):
        extent, end = extents[number], stops[number]
        stop = min(move.span.stop, end)
        if start < stop:
            first = extent.offset + extent.length - (end - start)
            yield _Piece(extent.location, first, first + stop - start, start - move.span.start)
        start, number = stop, number + 1
