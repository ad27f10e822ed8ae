"""The mover: reads, hashes and writes a checkpoint's tensors in one pass, in parallel, in bounded memory.

Each worker thread takes the next move, reads its bytes into a reused buffer (raw spans by `pread`, decoded
regions through the format's reader), hashes the leaves while the bytes are in the cache, and gives them to every
output that wants them. Hashing, reading and writing release the interpreter lock, so threads overlap all three.
What was written is made durable in groups: with one fsync at the end the same bytes took four to six times as long.

Without an output it is the digest pass of `verify` and `inspect`.
"""

from __future__ import annotations

import os
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby, islice
from operator import attrgetter
from typing import TYPE_CHECKING

from wherry.core import dtypes
from wherry.core.digest import LeafHasher
from wherry.formats.reader import FillingReader
from wherry.mover.checksums import Recorded
from wherry.mover.move import Move, moves_of
from wherry.mover.output import Output, as_bytes
from wherry.mover.regions import file_offset, read_span
from wherry.mover.source import spans_of
from wherry.runtime import threads
from wherry.runtime.threads import Crew

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Iterator

    from wherry.core.keypath import KeyPath
    from wherry.core.progress import Meter
    from wherry.core.tensorspec import TensorSpec
    from wherry.mover.pool import Pool
    from wherry.mover.source import Spill
    from wherry.runtime.threads import Task

_DECODE_FACTOR = 2  # a decoded region is held once by the codec and once as an array


@dataclass(slots=True)
class Carrier:
    """One pass over a checkpoint's bytes.

    Attributes:
        source: where they come from.
        specs: the source tensors by key path.
        pool: the buffers.
        meter: counts what is done.
        outputs: where they go; none for a digest pass.
        recorded: checks the CRCs that the source's containers state.
        hashers: one per source tensor, filled as the pass goes on.
        crew: who does it.
        straight: whether raw bytes are read past the page cache, as a read-back is.
    """

    source: Spill
    specs: dict[KeyPath, TensorSpec]
    pool: Pool
    meter: Meter
    outputs: tuple[Output, ...] = ()
    recorded: Recorded = field(default_factory=Recorded)
    hashers: dict[KeyPath, LeafHasher] = field(default_factory=dict["KeyPath", LeafHasher])
    crew: Crew = field(default_factory=Crew)
    straight: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)
    # More threads than cores that hash at once would all be done at once, and then wait for storage together.
    _hashing: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(os.cpu_count() or 2))

    def carry(self, moves: Iterable[Move]) -> None:
        """Do all moves.

        An output that fails keeps its error and is left out; the pass ends early once all have failed.

        Raises:
            WherryError: the first error of reading; the other workers stop after their present move.
            BaseException: what is no Exception stopped it from outside (Ctrl-C, a cancelled flow run, an exit);
                the workers have stopped too, and what they had finished is durable and in the journals.
        """
        gathers = isinstance(self.source.reader, FillingReader)  # and holds as much again as it gives
        waits = (
            (self.outputs or self.straight)
            and not gathers
            and not any(output.encodes for output in self.outputs)
        )
        workers = threads.carrier_count() if waits else threads.worker_count()
        self.take_up()
        with self.settling():
            self.crew.work(self.tasks(moves), workers, numbers=not self._plain())

    @contextmanager
    def settling(self) -> Generator[None]:
        """Around the work: what was finished is made durable and recorded, also where it is ended from outside."""
        try:
            yield
        except BaseException as error:
            if not isinstance(error, Exception):
                self._settle()
            raise
        self.recorded.finish()
        self._settle()

    def tasks(self, moves: Iterable[Move]) -> Iterator[Task]:
        """What a crew has to do for the moves that some output still wants; other ones count as done."""
        for path, rows in groupby(moves, key=attrgetter("source")):
            if self.source.flows(self.specs[path]):
                wanted = list(self._wanted(rows))
                if wanted:
                    yield partial(self._flow, wanted)
            else:
                yield from (partial(self._carry, move) for move in self._wanted(rows))

    def _wanted(self, moves: Iterable[Move]) -> Iterator[Move]:
        for move in moves:
            if not self.outputs or any(output.wants(move) for output in self.outputs):
                self._hasher(move.source)
                yield move
            elif all(output.error for output in self.outputs):
                return
            else:
                self._hasher(move.source)
                self.meter.add(move.span.nbytes, self.specs[move.source].name)

    def take_up(self) -> None:
        """Take the leaves that earlier runs hashed from the journals."""
        for output in self.outputs:
            for row in output.journal.done:
                for leaf, digest in row.leaves.items():
                    self._hasher(row.source).preset(leaf, digest)

    def _plain(self) -> bool:
        """Whether bytes are moved as they lie, so that no thread will need numpy."""
        kept = all(
            target.chunks is None and not dtypes.paired(target.dtype)
            for output in self.outputs
            for target in output.targets.values()
        )
        return kept and all(self.source.reader.extents(spec) is not None for spec in self.specs.values())

    def _settle(self) -> None:
        for output in self.outputs:
            output.settle(self.hashers)

    def _carry(self, move: Move) -> None:
        self._move(move, self._hasher(move.source))
        self.meter.add(move.span.nbytes, self.specs[move.source].name)

    def _flow(self, moves: list[Move]) -> None:
        """Carry the parts of a tensor as they are decoded, one after another."""
        spec, hasher = self.specs[moves[0].source], self._hasher(moves[0].source)
        largest, held = max(move.span.nbytes for move in moves), self.source.flow_held(spec)
        with self.pool.buffer(largest, held, self._place(moves[0])) as buffer:
            pieces = self.source.flow(spec, self.crew.stopped)
            parts = spans_of(pieces, [move.span for move in moves], buffer)
            for move, part in zip(moves, parts, strict=True):  # which takes the parts to their end
                self._deliver(move, part, hasher)
                self.meter.add(move.span.nbytes, spec.name)

    def _hasher(self, source: KeyPath) -> LeafHasher:
        with self._lock:
            if source not in self.hashers:
                self.hashers[source] = LeafHasher(self.specs[source])
            return self.hashers[source]

    def _move(self, move: Move, hasher: LeafHasher) -> None:
        spec = self.specs[move.source]
        if move.box:
            self._box(spec, move)
            return
        with self.source.at(spec, move.span, self.crew.stopped) as extents:
            if extents is not None:
                place = file_offset(extents, move.span.start) if self.straight else self._place(move)
                with self.pool.buffer(move.span.nbytes, place=place) as buffer:
                    read_span(extents, move.span, buffer, spec, straight=self.straight)
                    self.recorded.update(extents, move.span, buffer, spec)
                    self._deliver(move, buffer, hasher)
            elif not self._streamed(spec, move, hasher):
                with self.pool.reserved(move.span.nbytes * _DECODE_FACTOR):
                    self._deliver(move, self._decoded(spec, move), hasher)

    def _box(self, spec: TensorSpec, move: Move) -> None:
        """Carry what is no run of the tensor's bytes; its leaves are hashed when the target is read back."""
        assert move.region is not None
        extra = self.source.overhead(spec, move.region)
        with self.pool.buffer(move.span.nbytes, extra) as buffer:
            self.source.box(spec, move.region, buffer)
            for output in self.outputs:
                if output.wants(move):
                    output.deliver(move, buffer)
                    output.delivered(move, self.hashers)

    def _place(self, move: Move) -> int:
        """Where in its file the first output will put a part; several outputs seldom agree."""
        return self.outputs[0].place(move) if self.outputs else 0

    def _streamed(self, spec: TensorSpec, move: Move, hasher: LeafHasher) -> bool:
        """Decode into a reused buffer, where the chunks can be decoded piece by piece."""
        if move.region is None or dtypes.opaque(spec.dtype):
            return False
        extra = self.source.overhead(spec, move.region)
        with self.pool.buffer(move.span.nbytes, extra, self._place(move)) as buffer:
            filled = self.source.fill(spec, move.region, move.span, buffer)
            if filled:
                self._deliver(move, buffer, hasher)
        return filled

    def _decoded(self, spec: TensorSpec, move: Move) -> memoryview:
        """Decode as the reader does, into memory of its own."""
        if dtypes.opaque(spec.dtype):
            return memoryview(self.source.reader.read_bytes(spec))
        return as_bytes(self.source.reader.read(spec, spec.whole if move.region is None else move.region))

    def _deliver(self, move: Move, data: memoryview, hasher: LeafHasher) -> None:
        with self._hashing:
            hasher.update(move.span.start, data)
        for output in self.outputs:
            if output.wants(move):
                output.deliver(move, data)
                output.delivered(move, self.hashers)


def digest_moves(specs: Iterable[TensorSpec], source: Spill) -> Iterator[Move]:
    """The moves of a pass that only hashes."""
    waiting = iter(specs)
    while group := list(islice(waiting, threads.worker_count())):
        flowing = [spec for spec in group if source.flows(spec)]
        for spec in flowing:
            yield from _digest_moves(spec, source)
        yield from _in_turns([_digest_moves(spec, source) for spec in group if spec not in flowing])


def _digest_moves(spec: TensorSpec, source: Spill) -> Iterator[Move]:
    free = replace(spec, chunks=None) if source.free(spec) else spec
    return moves_of(free, (), raw=source.by_span(spec))


def _in_turns(rows: list[Iterator[Move]]) -> Iterator[Move]:
    """One of each, again and again: workers that must wait for a tensor to be decoded wait for different ones."""
    while rows:
        for row in list(rows):
            move = next(row, None)
            if move is None:
                rows.remove(row)
            else:
                yield move
