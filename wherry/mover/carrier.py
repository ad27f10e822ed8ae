"""The mover: reads, hashes and writes a checkpoint's tensors in one pass, in parallel, in bounded memory.

Each worker thread takes the next move, reads its bytes into a reused buffer (raw spans by `pread`, decoded
regions through the format's reader), hashes the leaves while the bytes are in the cache, and delivers them to every
output that needs them. Hashing, reading and writing release the interpreter lock, so threads overlap all three.
Written data is synced in groups: with one fsync at the end the same bytes took four to six times as long.

Without outputs it is the digest pass of `verify` and `inspect`.

A `Batch` has moves of raw bytes that are read together and carried by one task:

- On a local disk a tensor of a few kilobytes costs more in calls, locks and open files than in bytes. So the moves of
  small tensors are collected, and the bytes that lie near each other in a file are read at once, into one buffer.
- On a store each request costs as much time as moving 1 to 4 MiB, whatever its size. So moves are collected over a
  window, put in the order of their files, and cut into batches of up to 8 MiB; `wherry.store.ranges` merges the byte
  ranges of a batch into requests. One worker carries one batch: there are as many workers as requests fit the memory
  budget.
"""

from __future__ import annotations

import os
import threading
from bisect import bisect_right
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import field
from functools import partial
from itertools import accumulate, groupby, islice
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

from wherry.core import dtypes, threads
from wherry.core.account import NO_LOSSES, Losses, Tally, counting
from wherry.core.blank_values import SeenValues, counts_with_numpy
from wherry.core.digest import LeafHasher
from wherry.core.keypath import KeyPath
from wherry.core.lazy_dataclass import dataclass
from wherry.core.tensorspec import Span, TensorSpec, forms_of
from wherry.core.threads import Crew, Task
from wherry.formats.format import Computed, Extent, Stored
from wherry.mover.checksums import LeafTable
from wherry.mover.move import SMALL, Move, Way, whole_span
from wherry.mover.read import fill_range
from wherry.store.location import Location
from wherry.store.ranges import GAP, LARGEST, MOST_REQUESTS, RangeRequest, fill_together, requests_for

if TYPE_CHECKING:
    from wherry.core.progress import Meter
    from wherry.mover.output import Output
    from wherry.mover.readback import StoredPart
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
        """Add another move of a small tensor on a local disk.

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


def ranged_workers(budget: int) -> int:
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


_SAMPLES = 500  # tensors that stand for all
_BATCH_WORKERS = 2  # where most bytes are carried in batches, of which one is carried at a time


@dataclass(slots=True)
class Carrier:
    """One pass over a checkpoint's bytes.

    Attributes:
        source: provides the bytes.
        specs: the source tensors by key path.
        meter: counts the progress.
        algorithms: with which the leaves are hashed; see LeafHasher.
        outputs: receive the bytes; empty for a digest pass.
        leaves: of the source tensors, completed during the pass.
        seen: what the pass saw of the values, while it hashed them.
        look: whether values are looked at; not where only digests are compared.
        whole: whether it carries every move of its tensors; otherwise outputs choose.
        expected: the leaves of its tensors, if they are only compared; see LeafTable.
        crew: the worker threads; they stop with the source.
    """

    source: Source
    specs: dict[KeyPath, TensorSpec]
    meter: Meter
    algorithms: tuple[str, ...]
    outputs: tuple[Output, ...] = ()
    seen: SeenValues = field(default_factory=SeenValues)
    look: bool = True
    whole: bool = True
    expected: Mapping[KeyPath, tuple[bytes, ...]] | None = None
    crew: Crew = field(init=False)
    leaves: LeafTable = field(init=False)
    # If more threads than cores hashed at once, all would finish at once, and then wait for storage together.
    _hashing: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(os.cpu_count() or 2))
    # A batch is work of the interpreter, which has one lock. If several threads worked on batches, each of a thousand
    # calls that release it would have to wait to get it back, which takes longer than the calls. Who has the turn of
    # a batch may wait for a buffer; who has that of a range batch does not.
    _batch_turn: threading.Lock = field(default_factory=threading.Lock)
    _range_turn: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.crew = Crew(self.source.stopped)
        self.leaves = LeafTable(self.specs, self.algorithms, self.expected)

    def carry(self, moves: Iterable[Move]) -> None:
        """Carry out all moves.

        An output that fails keeps its error and is left out; the pass ends early once all have failed.

        Raises:
            WherryError: the first error of reading; the other workers stop after their present move.
            BaseException: an interruption that is not an Exception (Ctrl-C, a cancelled flow run, an exit); the
                workers have stopped too, and their finished moves are durable and in the journals.
        """
        raw, computes, remote = True, False, False
        few = islice(self.specs.values(), 0, None, max(len(self.specs) // _SAMPLES, 1))
        for access in map(self.source.access, few):
            raw = raw and isinstance(access, Stored)
            computes = computes or isinstance(access, Computed)
            remote = remote or is_remote(access.extents)
        # Whether the workers mostly wait for storage, at the source or at an output, rather than compute.
        waits = (
            (self.outputs or self.source.straight)
            and not any(output.encodes for output in self.outputs)
            and not computes
        )
        workers = threads.carrier_count() if waits else threads.worker_count()
        if remote:  # workers wait for the answers of a store
            workers = max(workers, ranged_workers(self.source.pool.budget))
        elif raw:
            sizes = [(dtypes.canonical_bytes(*form), n) for form, n in forms_of(self.specs.values()).items()]
            large = sum(size * number for size, number in sizes if size > SMALL)
            if sum(size * number for size, number in sizes) > 2 * large:  # most bytes are carried in batches
                workers = min(workers, _BATCH_WORKERS)
        self.take_up()
        with self.settling():
            # No thread needs numpy where bytes are written without encoding, as they are read. It takes as long to
            # import as a small conversion takes without it, and nothing next to one that has more tensors than samples.
            encodes = any(
                target.chunks is not None or dtypes.is_paired(target.dtype)
                for output in self.outputs
                for target in output.targets.values()
            )
            looks = self.look and any(map(counts_with_numpy, {spec.dtype for spec in self.specs.values()}))
            many = len(self.specs) > _SAMPLES
            numbers = many or not raw or encodes or looks
            self.crew.work(self.tasks(moves), workers, numbers=numbers)

    @contextmanager
    def settling(self) -> Generator[None]:
        """Around the work: finished moves are made durable and recorded, even after an interruption."""
        try:
            yield
        except BaseException as error:
            if not isinstance(error, Exception):
                self._settle()
            raise
        self.source.recorded.finish()
        self._settle()
        for output in self.outputs:
            output.make_readable()
        if any(output.back for output in self.outputs):
            self._settle()  # moves whose objects were still being sent
            self.crew.work(self._reads(), threads.worker_count(), numbers=False)

    def tasks(self, moves: Iterable[Move]) -> Iterator[Task]:
        """The tasks for the moves that some output still needs; other moves count as done."""
        batch, window = Batch(), RangeWindow()
        chooses = self._chooses()
        for path, rows in groupby(moves, key=attrgetter("source")):
            spec = self.specs[path]
            extent, way = self.source.take_extent(spec), None
            if extent is None or not extent.location.store.capabilities.local:
                way = self.source.way(spec)
                chooses = self._chooses()
                if way.flows:
                    yield from self._flow_tasks(list(self._chosen_moves(rows)))
                    continue
            for move in self._chosen_moves(rows) if chooses else rows:
                ranged = None if way is None else ranged_move(move, spec, way)
                if ranged is not None:
                    yield from self._range_tasks(window.add(ranged))
                    continue
                if extent is None or not is_small(move):
                    yield from self._reads()
                    yield partial(self._carry, move)
                    batch.leave_behind(move.span.nbytes)
                    if batch.is_late:
                        yield partial(self._carry_batch, batch)
                        batch = Batch()
                    continue
                if not batch.add(move, spec, extent):
                    yield partial(self._carry_batch, batch)
                    batch, chooses = Batch(), self._chooses()
                    batch.add(move, spec, extent)
        if batch.rows:
            yield partial(self._carry_batch, batch)
        yield from self._range_tasks(window.batches())

    def _range_tasks(self, batches: Iterator[Batch]) -> Iterator[Task]:
        for one in batches:
            yield from self._reads()
            yield partial(self._carry_ranges, one)

    def _reads(self) -> Iterator[Task]:
        """The tasks that read back what has become durable."""
        for output in self.outputs:
            if output.back is not None:
                for part in output.back.parts():
                    yield partial(self._read_back, output, part)

    def _chooses(self) -> bool:
        """Whether some moves may not be carried: an output failed, or needs fewer, or other runs have made some."""
        if not self.whole:
            return True
        for output in self.outputs:
            if output.error is not None or output.journal.done or len(output.targets) < len(self.specs):
                return True
        return False

    def _flow_tasks(self, moves: list[Move]) -> Iterator[Task]:
        if moves:
            yield partial(self._flow, moves)

    def _chosen_moves(self, moves: Iterable[Move]) -> Iterator[Move]:
        for move in moves:
            wanted = not self.outputs
            for output in self.outputs:
                output.resumed(move, self.leaves)
                wanted = output.wants(move) or wanted
            if wanted:
                yield move
            elif all(output.error for output in self.outputs):
                return
            else:
                self.meter.add(move.span.nbytes, self.specs[move.source].name)

    def take_up(self) -> None:
        """Take over from the journals the leaves that earlier runs hashed."""
        for output in self.outputs:
            for row in output.journal.done:
                self.leaves.preset(row.source, row.leaves)

    def _settle(self) -> None:
        for output in self.outputs:
            output.settle(self.leaves)

    def _carry(self, move: Move) -> None:
        spec, hasher = self.specs[move.source], self.leaves.hasher(move.source)
        # What happens to the values is counted if an output records it.
        tallying = counting() if self.outputs else nullcontext(Tally())
        with tallying as tally, self.source.part(spec, move, self._place(move)) as data:
            self._deliver(move, data, hasher, tally.losses)
        self.meter.add(move.span.nbytes, spec.name)

    def _read_back(self, output: Output, part: StoredPart) -> None:
        with self.source.pool.buffer(part.memory, part.extra, part.place) as memory:
            output.read_back(part, memory, self.leaves.hasher(part.move.source), self._hashing)

    def _carry_batch(self, batch: Batch) -> None:
        with self._batch_turn, batch_parts(self.source, batch) as parts:
            moves = self._deliver_all(parts)
        self._delivered(batch, moves)

    def _carry_ranges(self, batch: Batch) -> None:
        with range_parts(self.source, batch) as parts, self._range_turn:
            moves = self._deliver_all(parts)
        self._delivered(batch, moves)

    def _deliver_all(self, parts: list[tuple[Move, TensorSpec, memoryview]]) -> list[list[Move]]:
        """Hash and write the parts of a batch; the moves that each output has got."""
        losses = self._hash_all(parts)
        moves: list[list[Move]] = []
        for output in self.outputs:
            wanted = [part for part in parts if output.wants(part[0])] if self._chooses() else parts
            output.deliver_all(wanted, losses)
            moves.append([move for move, _spec, _data in wanted])
        return moves

    def _delivered(self, batch: Batch, moves: list[list[Move]]) -> None:
        for output, rows in zip(self.outputs, moves, strict=True):
            output.delivered(rows, self.leaves)
        self.meter.add(batch.nbytes, batch.rows[-1].spec.name)

    def _hash_all(
        self, parts: list[tuple[Move, TensorSpec, memoryview]]
    ) -> dict[tuple[KeyPath, Span], Losses]:
        """Hash the parts of a batch, nearly all of which are whole tensors; what was counted of their values."""
        whole: list[tuple[TensorSpec, memoryview]] = []
        found: dict[tuple[KeyPath, Span], Losses] = {}
        for move, spec, data in parts:
            span = move.span
            if span.stop - span.start == spec.nbytes <= SMALL:
                whole.append((spec, data))
                continue
            if self.look and (nans := self.seen.see(spec, span.start, data)):
                found[move.source, span] = Losses(nan=nans)
            self.leaves.hasher(move.source).update(span.start, data)
        self.leaves.take_whole(whole)
        for spec, nans in self.seen.see_whole(whole) if self.look else ():
            found[spec.path, Span(0, spec.nbytes)] = Losses(nan=nans)
        return found

    def _flow(self, moves: list[Move]) -> None:
        """Carry the parts of a tensor as they are decoded, one after another."""
        spec, hasher = self.specs[moves[0].source], self.leaves.hasher(moves[0].source)
        spans = [move.span for move in moves]
        with self.source.flow(spec, spans, self._place(moves[0])) as parts:
            for move, part in zip(moves, parts, strict=True):  # reads the parts to their end
                self._deliver(move, part, hasher)
                self.meter.add(move.span.nbytes, spec.name)

    def _place(self, move: Move) -> int:
        """The offset at which the first output will write a part; several outputs rarely agree."""
        return self.outputs[0].place(move) if self.outputs else 0

    def _deliver(self, move: Move, data: memoryview, hasher: LeafHasher, losses: Losses = NO_LOSSES) -> None:
        with self._hashing:
            start = 0 if move.box else move.span.start
            nans = self.seen.see(self.specs[move.source], start, data) if self.look else 0
            if not move.box:
                hasher.update(move.span.start, data)
            elif move.region is not None:
                hasher.update_box(move.region, data)  # if that is not possible, the target is read again
        if nans and not losses:
            losses = Losses(nan=nans)
        for output in self.outputs:
            if output.wants(move):
                output.deliver(move, data, losses)
                output.delivered([move], self.leaves)


def digest_moves(specs: Iterable[TensorSpec], source: Source) -> Iterator[Move]:
    """The moves of a pass that only hashes."""
    group: list[tuple[Way, TensorSpec]] = []
    count = threads.worker_count()
    for spec in specs:
        nbytes = spec.nbytes
        if 0 < nbytes <= SMALL:
            yield Move(spec.path, whole_span(nbytes), None)
            continue
        group.append((source.way(spec), spec))
        if len(group) == count:
            yield from _moves_of_group(group)
            group = []
    yield from _moves_of_group(group)


def _moves_of_group(group: list[tuple[Way, TensorSpec]]) -> Iterator[Move]:
    for way, spec in group:
        if way.flows:
            yield from way.moves(spec, ())
    # The others by turns, so that workers do not all wait for the same tensor to be decoded.
    rows = [way.moves(spec, ()) for way, spec in group if not way.flows]
    while rows:
        for row in list(rows):
            move = next(row, None)
            if move is None:
                rows.remove(row)
            else:
                yield move
