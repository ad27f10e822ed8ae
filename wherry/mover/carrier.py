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
from wherry.core.tally import Tally, counting
from wherry.mover.batch import Batch, batch_parts, small_move
from wherry.mover.range_batch import RangeWindow, is_remote, range_parts, ranged_move
from wherry.mover.range_batch import worker_count as ranged_workers
from wherry.runtime import threads
from wherry.runtime.threads import Crew

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Iterator
    from contextlib import AbstractContextManager

    from wherry.core.keypath import KeyPath
    from wherry.core.progress import Meter
    from wherry.core.tensorspec import TensorSpec
    from wherry.formats.reader import Access
    from wherry.mover.move import Move
    from wherry.mover.output import Output
    from wherry.mover.range_batch import RangeBatch
    from wherry.mover.readback import StoredPart
    from wherry.mover.source import Source
    from wherry.runtime.threads import Task


@dataclass(slots=True)
class Carrier:
    """One pass over a checkpoint's bytes.

    Attributes:
        source: provides the bytes.
        specs: the source tensors by key path.
        meter: counts the progress.
        algorithms: with which the leaves are hashed; see LeafHasher.
        outputs: receive the bytes; empty for a digest pass.
        hashers: one per source tensor, updated during the pass.
        seen: what the pass saw of the values, while it hashed them.
        crew: the worker threads; they stop with the source.
    """

    source: Source
    specs: dict[KeyPath, TensorSpec]
    meter: Meter
    algorithms: tuple[str, ...]
    outputs: tuple[Output, ...] = ()
    hashers: dict[KeyPath, LeafHasher] = field(default_factory=dict["KeyPath", LeafHasher])
    seen: SeenValues = field(default_factory=SeenValues)
    crew: Crew = field(init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    # If more threads than cores hashed at once, all would finish at once, and then wait for storage together.
    _hashing: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(os.cpu_count() or 2))

    def __post_init__(self) -> None:
        self.crew = Crew(self.source.stopped)

    def carry(self, moves: Iterable[Move]) -> None:
        """Carry out all moves.

        An output that fails keeps its error and is left out; the pass ends early once all have failed.

        Raises:
            WherryError: the first error of reading; the other workers stop after their present move.
            BaseException: an interruption that is not an Exception (Ctrl-C, a cancelled flow run, an exit); the
                workers have stopped too, and their finished moves are durable and in the journals.
        """
        accesses = [self.source.access(spec) for spec in self.specs.values()]
        workers = threads.carrier_count() if self._waits(accesses) else threads.worker_count()
        if any(map(is_remote, accesses)):  # workers wait for the answers of a store
            workers = max(workers, ranged_workers(self.source.pool.budget))
        self.take_up()
        with self.settling():
            self.crew.work(self.tasks(moves), workers, numbers=not self._plain())

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
        for path, rows in groupby(moves, key=attrgetter("source")):
            spec = self.specs[path]
            way = self.source.way(spec)
            if way.flows:
                wanted = list(self._wanted_moves(rows))
                if wanted:
                    yield partial(self._flow, wanted)
                continue
            for move in self._wanted_moves(rows):
                ranged = ranged_move(move, spec, way)
                if ranged is not None:
                    yield from self._range_tasks(window.add(ranged))
                    continue
                small = small_move(move, spec, way)
                if small is None:
                    yield from self._reads()
                    yield partial(self._carry, move)
                    batch.leave_behind(move.span.nbytes)
                    if batch.is_late:
                        yield partial(self._carry_batch, batch)
                        batch = Batch()
                    continue
                if not batch.fits(move):
                    yield partial(self._carry_batch, batch)
                    batch = Batch()
                batch.add(small)
        if batch.rows:
            yield partial(self._carry_batch, batch)
        yield from self._range_tasks(window.batches())

    def _range_tasks(self, batches: Iterator[RangeBatch]) -> Iterator[Task]:
        for one in batches:
            yield from self._reads()
            yield partial(self._carry_ranges, one)

    def _reads(self) -> Iterator[Task]:
        """The tasks that read back what has become durable."""
        for output in self.outputs:
            if output.back is not None:
                for part in output.back.parts():
                    yield partial(self._read_back, output, part)

    def _wanted_moves(self, moves: Iterable[Move]) -> Iterator[Move]:
        for move in moves:
            wanted, hasher = not self.outputs, self._hasher(move.source)
            for output in self.outputs:
                output.resumed(move, hasher)
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
                for leaf, digest in row.leaves.items():
                    self._hasher(row.source).preset(leaf, digest)

    def _waits(self, accesses: Iterable[Access]) -> bool:
        """Whether the workers mostly wait for storage, at the source or at an output, rather than compute."""
        if not (self.outputs or self.source.straight) or any(output.encodes for output in self.outputs):
            return False
        return not any(access.computes for access in accesses)

    def _plain(self) -> bool:
        """Whether bytes are copied without decoding or encoding, so that no thread needs numpy."""
        kept = all(
            target.chunks is None and not dtypes.is_paired(target.dtype)
            for output in self.outputs
            for target in output.targets.values()
        )
        return kept and all(self.source.access(spec).kind == "raw" for spec in self.specs.values())

    def _settle(self) -> None:
        for output in self.outputs:
            output.settle(self.hashers)

    def _carry(self, move: Move) -> None:
        spec, hasher = self.specs[move.source], self._hasher(move.source)
        with self._counting() as tally, self.source.part(spec, move, self._place(move)) as data:
            self._deliver(move, data, hasher, tally.losses)
        self.meter.add(move.span.nbytes, spec.name)

    def _read_back(self, output: Output, part: StoredPart) -> None:
        with self.source.pool.buffer(part.memory, part.extra, part.place) as memory:
            output.read_back(part, memory, self._hasher(part.move.source), self._hashing)

    def _carry_batch(self, batch: Batch) -> None:
        with batch_parts(self.source, batch) as parts:
            self._deliver_all(parts)
        self.meter.add(batch.nbytes, batch.rows[-1].spec.name)

    def _carry_ranges(self, batch: RangeBatch) -> None:
        with range_parts(self.source, batch) as parts:
            self._deliver_all(parts)
        self.meter.add(batch.nbytes, batch.rows[-1].spec.name)

    def _deliver_all(self, parts: list[tuple[Move, memoryview]]) -> None:
        found: list[Losses] = []
        with self._hashing:
            for move, data in parts:
                nans = self.seen.see(self.specs[move.source], move.span.start, data)
                found.append(Losses(nan=nans) if nans else NO_LOSSES)
                self._hasher(move.source).update(move.span.start, data)
        for output in self.outputs:
            wanted = [
                (*part, losses) for part, losses in zip(parts, found, strict=True) if output.wants(part[0])
            ]
            for move, data, losses in wanted:
                output.deliver(move, data, losses)
            output.delivered([move for move, _data, _losses in wanted], self.hashers)

    def _flow(self, moves: list[Move]) -> None:
        """Carry the parts of a tensor as they are decoded, one after another."""
        spec, hasher = self.specs[moves[0].source], self._hasher(moves[0].source)
        spans = [move.span for move in moves]
        with self.source.flow(spec, spans, self._place(moves[0])) as parts:
            for move, part in zip(moves, parts, strict=True):  # reads the parts to their end
                self._deliver(move, part, hasher)
                self.meter.add(move.span.nbytes, spec.name)

    def _hasher(self, source: KeyPath) -> LeafHasher:
        known = self.hashers.get(source)
        if known is None:
            with self._lock:
                known = self.hashers.setdefault(source, LeafHasher(self.specs[source], self.algorithms))
        return known

    def _place(self, move: Move) -> int:
        """The offset at which the first output will write a part; several outputs rarely agree."""
        return self.outputs[0].place(move) if self.outputs else 0

    def _counting(self) -> AbstractContextManager[Tally]:
        """Around the making of a move: counts what happens to its values, if an output records it."""
        return counting() if self.outputs else nullcontext(Tally())

    def _deliver(self, move: Move, data: memoryview, hasher: LeafHasher, losses: Losses = NO_LOSSES) -> None:
        with self._hashing:
            nans = self.seen.see(self.specs[move.source], 0 if move.box else move.span.start, data)
            if not move.box:
                hasher.update(move.span.start, data)
            elif move.region is not None:
                hasher.update_box(move.region, data)  # if that is not possible, the target is read again
        if nans and not losses:
            losses = Losses(nan=nans)
        for output in self.outputs:
            if output.wants(move):
                output.deliver(move, data, losses)
                output.delivered([move], self.hashers)


def digest_moves(specs: Iterable[TensorSpec], source: Source) -> Iterator[Move]:
    """The moves of a pass that only hashes."""
    waiting = iter(specs)
    while group := list(islice(waiting, threads.worker_count())):
        ways = [(source.way(spec), spec) for spec in group]
        for way, spec in ways:
            if way.flows:
                yield from way.moves(spec, ())
        yield from _in_turns([way.moves(spec, ()) for way, spec in ways if not way.flows])


def _in_turns(rows: list[Iterator[Move]]) -> Iterator[Move]:
    """Interleave moves of several tensors, so that workers do not all wait for the same tensor to be decoded."""
    while rows:
        for row in list(rows):
            move = next(row, None)
            if move is None:
                rows.remove(row)
            else:
                yield move
