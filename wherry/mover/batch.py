"""Batches: moves of raw bytes that are read together and carried by one task.

- On a local disk a tensor of a few kilobytes costs more in calls, locks and open files than in bytes. So the moves of
  small tensors are collected, and the bytes that lie near each other in a file are read at once, into one buffer.
- On a store each request costs as much time as moving 1 to 4 MiB, whatever its size. So moves are collected over a
  window, put in the order of their files, and cut into batches of up to 8 MiB; `wherry.storage.ranges` merges the byte
  ranges of a batch into requests. One worker carries one batch: there are as many workers as requests fit the memory
  budget.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate, groupby
from typing import TYPE_CHECKING, NamedTuple

from wherry.core.tensorspec import TensorSpec
from wherry.formats.contents import Extent
from wherry.mover.move import SMALL, Move, Way
from wherry.mover.read import fill_range
from wherry.storage.location import Location
from wherry.storage.ranges import GAP, LARGEST, MOST_REQUESTS, RangeRequest, fill_together, requests_for

if TYPE_CHECKING:
    from wherry.mover.source import Source

# On a local disk:
_MOST_BYTES = 1 << 20  # of a batch; the bytes between its tensors are at most `_MOST_MOVES * _NEAR` more
_MOST_MOVES = 1024
_MOST_BEHIND = (
    16 << 20
)  # bytes of larger moves that are carried before a batch: parts of an upload wait for it
_NEAR = 4 << 10  # bytes between two tensors that are read too: as many as direct I/O reads anyway
# On a store:
WINDOW = 4 * LARGEST  # bytes of moves that are put in the order of their files
_MOST_IN_WINDOW = 4096
# Where a storage library does not fill the buffer itself, it holds this many times the bytes of a request besides.
_COPIES = 2


class _Piece(NamedTuple):
    """The part of a move that is in one extent: bytes [start, stop) of a file, at an offset of the move."""

    location: Location
    start: int
    stop: int
    offset: int


class RawMove(NamedTuple):
    """A move of raw bytes; such moves are ordered by their bytes in files.

    Attributes:
        file: the path of the file that has its first byte.
        start: the offset there of its first byte.
        stop: the offset after its last byte, in the file that has it.
        move: the move.
        spec: the source tensor.
        extents: of the tensor's bytes.
        pieces: where the bytes of the move are, on a store.
    """

    file: str
    start: int
    stop: int
    move: Move
    spec: TensorSpec
    extents: tuple[Extent, ...]
    pieces: tuple[_Piece, ...] = ()


@dataclass(slots=True)
class Batch:
    """Moves that are read together.

    Attributes:
        rows: the moves.
        nbytes: their bytes.
        behind: bytes of larger moves that came after the first of them.
    """

    rows: list[RawMove] = field(default_factory=list[RawMove])
    nbytes: int = 0
    behind: int = 0

    def add(self, move: Move, spec: TensorSpec, extent: Extent) -> bool:
        """Add one more move of a small tensor on a local disk.

        Args:
            move: the move.
            spec: the source tensor.
            extent: the only extent of its bytes.

        Returns:
            Whether there is room for it.
        """
        start, stop = move.span
        nbytes = self.nbytes + stop - start
        if len(self.rows) >= _MOST_MOVES or nbytes > _MOST_BYTES:
            return False
        offset = extent.offset
        self.rows.append(RawMove(extent.location.path, offset + start, offset + stop, move, spec, (extent,)))
        self.nbytes = nbytes
        return True

    def leave_behind(self, nbytes: int) -> None:
        """Count the bytes of a larger move that is carried first."""
        self.behind += nbytes if self.rows else 0

    @property
    def is_late(self) -> bool:
        """Whether the batch has waited for long enough."""
        return self.behind >= _MOST_BEHIND


def is_small(move: Move) -> bool:
    """Whether a move can be part of a batch on a local disk: it is not large, and no box."""
    start, stop = move.span
    return stop - start <= SMALL and not move.box


@contextmanager
def batch_parts(source: Source, batch: Batch) -> Generator[list[tuple[Move, TensorSpec, memoryview]]]:
    """The moves of a batch on a local disk with their bytes, in the order of the files, valid while the block runs.

    Raises:
        DamagedError: bytes are missing or corrupt.
        StorageError: the storage failed.
    """
    runs = list(_runs(sorted(batch.rows)))
    with source.pool.buffer(sum(stop - start for _rows, start, stop in runs), place=runs[0][1]) as buffer:
        parts: list[tuple[Move, TensorSpec, memoryview]] = []
        done = 0
        for rows, first, end in runs:
            held = buffer[done : done + end - first]
            fill_range(rows[0].extents[0].location, first, held, rows[0].spec, straight=source.straight)
            for _file, start, stop, move, spec, extents, _pieces in rows:
                part = held[start - first : stop - first]
                if extents[0].crc32 is not None or extents[0].within is not None:
                    source.recorded.update(extents, move.span, part, spec)
                parts.append((move, spec, part))
            done += end - first
        yield parts


def _runs(rows: list[RawMove]) -> Generator[tuple[list[RawMove], int, int]]:
    """The moves whose bytes lie near each other, together, with the bytes [start, stop) that are read at once."""
    file, start, stop = rows[0][:3]
    run: list[RawMove] = []
    for row in rows:
        if run and not (
            row.file == file and 0 <= row.start - stop <= _NEAR and row.start - start <= _MOST_BYTES
        ):
            yield run, start, stop
            run, file, start = [], row.file, row.start
        run.append(row)
        stop = row.stop
    yield run, start, stop


@dataclass(slots=True)
class RangeWindow:
    """Collects moves on a store until there are enough to be put in the order of their files."""

    rows: list[RawMove] = field(default_factory=list[RawMove])
    nbytes: int = 0

    def add(self, row: RawMove) -> Iterator[Batch]:
        """Add a move; yields batches once the window is full."""
        self.rows.append(row)
        self.nbytes += row.move.span.nbytes
        if self.nbytes >= WINDOW or len(self.rows) >= _MOST_IN_WINDOW:
            yield from self.batches()

    def batches(self) -> Iterator[Batch]:
        """The batches of all moves in the window, which is empty afterwards."""
        rows, self.rows, self.nbytes = sorted(self.rows, key=lambda row: row[:2]), [], 0
        batch, read = Batch(), 0
        for row in rows:
            nbytes = row.move.span.nbytes
            gap = _gap(batch.rows[-1], row) if batch.rows else 0
            if batch.rows and read + gap + nbytes > LARGEST:
                yield batch
                batch, read, gap = Batch(), 0, 0
            batch.rows.append(row)
            batch.nbytes += nbytes
            read += gap + nbytes
        if batch.rows:
            yield batch


def _gap(before: RawMove, row: RawMove) -> int:
    """Bytes between two moves that are read with them."""
    gap = row.start - before.stop
    return gap if row.file == before.pieces[-1].location.path and 0 <= gap < GAP else 0


def ranged_move(move: Move, spec: TensorSpec, way: Way) -> RawMove | None:
    """A small enough move whose bytes are raw in files of a remote store; None for any other."""
    extents = way.extents
    if extents is None or not is_remote(extents) or move.box or move.span.nbytes > LARGEST:
        return None
    pieces = tuple(_pieces(move, way))
    if not pieces:
        return None
    first, last = pieces[0], pieces[-1]
    return RawMove(first.location.path, first.start, last.stop, move, spec, extents, pieces)


def is_remote(extents: tuple[Extent, ...] | None) -> bool:
    """Whether bytes are as they are in files of a remote store."""
    return bool(extents) and not extents[0].location.store.capabilities.local


def worker_count(budget: int) -> int:
    """Number of workers that read batches of a store within a memory budget."""
    return min(max(budget // LARGEST, 1), MOST_REQUESTS)


def request_sizes(batch: Batch) -> Iterator[int]:
    """The bytes of each request that reads a batch."""
    return (request.stop - request.start for _location, request, _pieces in _requests(batch))


@contextmanager
def range_parts(source: Source, batch: Batch) -> Generator[list[tuple[Move, TensorSpec, memoryview]]]:
    """The moves of a batch on a store with their bytes, in the order of the files, valid while the block runs.

    Raises:
        DamagedError: bytes are missing or corrupt.
        StorageError: the storage failed.
    """
    requests = list(_requests(batch))
    sizes = [request.stop - request.start for _location, request, _pieces in requests]
    library_bytes = sum(
        _COPIES * size
        for (location, _request, _pieces), size in zip(requests, sizes, strict=True)
        if not location.store.capabilities.fills
    )
    scattered = sum(row.move.span.nbytes for row in batch.rows if len(row.pieces) > 1)
    with source.pool.buffer(sum(sizes), library_bytes + scattered) as buffer:
        views = [buffer[end - size : end] for end, size in zip(accumulate(sizes), sizes, strict=True)]
        fill_together([(*one[:2], view) for one, view in zip(requests, views, strict=True)])
        found: list[memoryview] = [memoryview(b"")] * len(batch.rows)
        for (_location, request, pieces), view in zip(requests, views, strict=True):
            for start, stop, index, begin in request.parts:
                number, piece = pieces[index]
                part = view[start - request.start : stop - request.start]
                nbytes = batch.rows[number].move.span.nbytes
                if len(part) == nbytes:
                    found[number] = part
                    continue
                if not found[number]:
                    found[number] = memoryview(bytearray(nbytes))
                offset = piece.offset + start - begin
                found[number][offset : offset + len(part)] = part
        for row, data in zip(batch.rows, found, strict=True):
            source.recorded.update(row.extents, row.move.span, data, row.spec)
        yield [(row.move, row.spec, data) for row, data in zip(batch.rows, found, strict=True)]


def _requests(batch: Batch) -> Iterator[tuple[Location, RangeRequest, list[tuple[int, _Piece]]]]:
    """The requests of a batch, each with the pieces of its file and the numbers of their moves."""
    pieces = [(number, piece) for number, row in enumerate(batch.rows) for piece in row.pieces]
    pieces.sort(key=lambda one: (one[1].location.path, one[1].start))
    for _path, group in groupby(pieces, key=lambda one: one[1].location.path):
        here = list(group)
        for request in requests_for([(piece.start, piece.stop) for _number, piece in here]):
            yield here[0][1].location, request, here


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
