"""The mover: reads, hashes and writes a checkpoint's tensors in one pass, in parallel, in bounded memory.

Each worker thread takes the next move, reads its bytes into a reused buffer (raw spans by `pread`, decoded
regions through the format's reader), hashes the leaves while the bytes are in the cache, and delivers them to every
output that needs them. Hashing, reading and writing release the interpreter lock, so threads overlap all three.
Written data is synced in groups: with one fsync at the end the same bytes took four to six times as long.

Without outputs it is the digest pass of `verify` and `inspect`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby, islice
from operator import attrgetter
from typing import TYPE_CHECKING

from wherry.core import dtypes
from wherry.core.account import NO_LOSSES, Losses
from wherry.core.blank_values import SeenValues
from wherry.core.digest import LeafHasher
from wherry.core.keypath import KeyPath
from wherry.core.tally import Tally, counting
from wherry.core.tensorspec import Span, TensorSpec, forms_of
from wherry.formats.contents import Computed, Stored
from wherry.mover.batch import Batch, RangeWindow, batch_parts, is_remote, is_small, range_parts, ranged_move
from wherry.mover.batch import worker_count as ranged_workers
from wherry.mover.checksums import LeafTable
from wherry.mover.move import SMALL, Move, Way, whole_span
from wherry.runtime import threads
from wherry.runtime.threads import Crew, Task

if TYPE_CHECKING:
    from wherry.core.progress import Meter
    from wherry.mover.output import Output
    from wherry.mover.readback import StoredPart
    from wherry.mover.source import Source


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
        elif raw and self._is_of_small():
            workers = min(workers, _BATCH_WORKERS)
        self.take_up()
        with self.settling():
            # No thread needs numpy where bytes are written without encoding, as they are read.
            numbers = self.look or not (
                raw
                and all(
                    target.chunks is None and not dtypes.is_paired(target.dtype)
                    for output in self.outputs
                    for target in output.targets.values()
                )
            )
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

    def _is_of_small(self) -> bool:
        """Whether most bytes are carried in batches."""
        forms = forms_of(self.specs.values()).items()
        sizes = [(dtypes.canonical_bytes(*form), number) for form, number in forms]
        large = sum(size * number for size, number in sizes if size > SMALL)
        return sum(size * number for size, number in sizes) > 2 * large

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
