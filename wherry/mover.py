"""The mover: reads, hashes and writes a checkpoint's tensors in one pass, in parallel, in bounded memory.

Each worker thread takes the next move, reads its bytes into a reused buffer (raw spans by `pread`, decoded
regions through the format's reader), hashes the leaves while the bytes are in the cache, and writes them.
Hashing, reading and writing release the interpreter lock, so threads overlap all three. Every 64 MiB, or half a
second, one of them makes what was written durable (group commit): with one fsync at the end the same bytes took
four to six times as long.

Without a writer it is the digest pass of `verify` and `inspect`.
"""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

from wherry import dtypes
from wherry.digest import LeafHasher
from wherry.errors import CorruptError, storage_error
from wherry.journal import Done, Journal
from wherry.move import Move, cells, moves_of
from wherry.store import locate
from wherry.tensorspec import Region, Span, TensorSpec

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import numpy as np
    from typing_extensions import Buffer

    from wherry.format import Extent, Reader, Writer
    from wherry.keypath import KeyPath
    from wherry.pool import Pool
    from wherry.progress import Meter

_GROUP_BYTES = 64 << 20
_GROUP_SECONDS = 0.5
_DECODE_FACTOR = 2  # a decoded region is held once by the codec and once as an array


def worker_count() -> int:
    """Threads of the mover: one per core, two at least so that reading and writing overlap, eight at most."""
    return min(max(os.cpu_count() or 2, 2), 8)


@dataclass(slots=True)
class Carrier:
    """One pass over a checkpoint's bytes.

    Attributes:
        reader: where they come from.
        specs: the source tensors by key path.
        pool: the buffers.
        meter: counts what is done.
        writer: where they go; None for a digest pass.
        targets: the target tensors by key path; only with a writer.
        journal: what an earlier run finished, and where this one records what it finishes; only with a writer.
        hashers: one per target tensor (source tensor in a digest pass), filled as the pass goes on.
    """

    reader: Reader
    specs: dict[KeyPath, TensorSpec]
    pool: Pool
    meter: Meter
    writer: Writer | None = None
    targets: dict[KeyPath, TensorSpec] = field(default_factory=dict["KeyPath", TensorSpec])
    journal: Journal | None = None
    hashers: dict[KeyPath, LeafHasher] = field(default_factory=dict["KeyPath", LeafHasher])
    _extents: dict[KeyPath, tuple[Extent, ...] | None] = field(
        default_factory=dict["KeyPath", "tuple[Extent, ...] | None"]
    )
    _stopped: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _commit: threading.Lock = field(default_factory=threading.Lock)
    _finished: list[Move] = field(default_factory=list[Move])
    _unsynced: int = 0
    _synced_at: float = field(default_factory=time.monotonic)

    def carry(self, moves: Iterable[Move]) -> None:
        """Do all moves.

        Raises:
            WherryError: the first error of any worker; the others stop after their present move.
            KeyboardInterrupt: the user stopped it; the workers have stopped too, and what they had finished is
                durable and in the journal.
        """
        queue = self._remaining(moves)
        workers = worker_count()
        with ThreadPoolExecutor(workers, thread_name_prefix="wherry") as executor:
            running = [executor.submit(self._work, queue) for _ in range(workers)]
            try:
                self._wait(running)
            except KeyboardInterrupt:
                self._stopped.set()
                wait(running)
                self._commit_finished()
                raise
            finally:
                self._stopped.set()
        self._commit_finished()

    def _wait(self, running: list[Future[None]]) -> None:
        pending = set(running)
        while pending:  # short waits, so that a signal reaches the main thread at once
            done, pending = wait(pending, timeout=0.2, return_when=FIRST_EXCEPTION)
            for future in done:
                future.result()

    def _work(self, queue: Iterator[Move]) -> None:
        while not self._stopped.is_set():
            with self._lock:
                move = next(queue, None)
                if move is None:
                    return
                hasher = self._hasher(move)
            try:
                self._move(move, hasher)
            except BaseException:
                self._stopped.set()
                raise
            self.meter.add(move.span.nbytes, self.specs[move.source].name)
            self._group_commit(move)

    def _hasher(self, move: Move) -> LeafHasher:
        if move.target not in self.hashers:
            self.hashers[move.target] = LeafHasher(self.specs[move.source])
        return self.hashers[move.target]

    def _move(self, move: Move, hasher: LeafHasher) -> None:
        spec = self.specs[move.source]
        extents = self._raw(spec)
        if extents is not None:
            with self.pool.buffer(move.span.nbytes) as buffer:
                read_span(extents, move.span, buffer, spec)
                self._deliver(move, buffer, hasher)
        else:
            with self.pool.reserved(move.span.nbytes * _DECODE_FACTOR):
                self._deliver(move, self._decoded(spec, move), hasher)

    def _decoded(self, spec: TensorSpec, move: Move) -> memoryview:
        if dtypes.opaque(spec.dtype):
            return memoryview(self.reader.read_bytes(spec))
        return as_bytes(self.reader.read(spec, spec.whole if move.region is None else move.region))

    def _deliver(self, move: Move, data: memoryview, hasher: LeafHasher) -> None:
        hasher.update(move.span.start, data)
        if self.writer is None:
            return
        target = self.targets[move.target]
        if target.chunks is None:
            self.writer.write(target.path, move.span, data)
        else:
            self._deliver_chunks(target, cast("Region", move.region), data)

    def _deliver_chunks(self, target: TensorSpec, region: Region, data: memoryview) -> None:
        writer, chunks = cast("Writer", self.writer), cast("tuple[int, ...]", target.chunks)
        parts = list(cells(region, chunks))
        if len(parts) == 1:
            writer.write(target.path, region, data)
            return
        band = as_array(data, target.dtype, tuple(part.stop - part.start for part in region))
        for part in parts:
            inside = tuple(
                slice(p.start - r.start, p.stop - r.start) for p, r in zip(part, region, strict=True)
            )
            writer.write(target.path, part, as_bytes(band[inside].copy(order="C")))

    def _raw(self, spec: TensorSpec) -> tuple[Extent, ...] | None:
        with self._lock:
            if spec.path not in self._extents:
                self._extents[spec.path] = self.reader.extents(spec)
            return self._extents[spec.path]

    def _remaining(self, moves: Iterable[Move]) -> Iterator[Move]:
        """The moves that no earlier run has finished; what those found out is taken over."""
        journal = self.journal
        if journal is None or not journal.done:
            yield from moves
            return
        known: dict[KeyPath, list[Done]] = {}
        for row in journal.done:
            known.setdefault(row.target, []).append(row)
        for move in moves:
            for row in known.pop(move.target, ()):
                for leaf, digest in row.leaves.items():
                    self._hasher(move).preset(leaf, digest)
            if journal.has(move.target, move.span):
                self._hasher(move)
                self.meter.add(move.span.nbytes, self.specs[move.source].name)
            else:
                yield move

    def _group_commit(self, move: Move) -> None:
        if self.writer is None:
            return
        with self._lock:
            self._finished.append(move)
            self._unsynced += move.span.nbytes
            waited = time.monotonic() - self._synced_at
            due = self._unsynced >= _GROUP_BYTES or waited >= _GROUP_SECONDS
        if due and self._commit.acquire(blocking=False):
            try:
                self._commit_finished()
            finally:
                self._commit.release()

    def _commit_finished(self) -> None:
        """Make what is finished durable, then record it; a move whose leaves are not complete waits."""
        if self.writer is None:
            return
        with self._lock:
            finished, self._finished = self._finished, []
            self._unsynced, self._synced_at = 0, time.monotonic()
        self.writer.sync()
        if self.journal is None:
            return
        rows: list[Done] = []
        for move in finished:
            leaves = self.hashers[move.target].known(*move.span)
            if leaves is None:
                with self._lock:
                    self._finished.append(move)
            else:
                rows.append(Done(move.target, move.span, leaves))
        self.journal.record(rows)


def digest_moves(specs: Iterable[TensorSpec], reader: Reader) -> Iterator[Move]:
    """The moves of a pass that only hashes."""
    for spec in specs:
        yield from moves_of(
            spec, TensorSpec(spec.path, spec.shape, spec.dtype), raw=reader.extents(spec) is not None
        )


def read_span(extents: tuple[Extent, ...], span: Span, buffer: memoryview, spec: TensorSpec) -> None:
    """Fill a buffer with canonical bytes that lie raw in files.

    Raises:
        CorruptError: a file ends before the bytes that its metadata promises.
        StorageError: the storage failed.
    """
    position = 0
    for extent in extents:
        start, stop = max(span.start, position), min(span.stop, position + extent.length)
        if start < stop:
            part = buffer[start - span.start : stop - span.start]
            _fill(extent.file, extent.offset + start - position, part, spec)
        position += extent.length
    if position < span.stop:
        raise CorruptError(f"its bytes end at {position}, {spec.nbytes} were expected", path=spec.name)


def _fill(file: str, offset: int, buffer: memoryview, spec: TensorSpec) -> None:
    location = locate(file)
    filled = 0
    while filled < len(buffer):
        try:
            count = location.store.readinto(location.path, offset + filled, buffer[filled:])
        except OSError as error:
            raise storage_error(error, file) from error
        if count == 0:
            raise CorruptError("the file ends before this tensor does", uri=file, path=spec.name)
        filled += count


def as_array(data: memoryview, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """Canonical bytes as an array, without a copy."""
    import numpy as np

    return np.frombuffer(data, dtype=dtypes.numpy_dtype(dtype)).reshape(shape)


def as_bytes(array: np.ndarray) -> memoryview:
    """The bytes of a C-contiguous array, without a copy."""
    flat = array.reshape(-1).view("u1") if array.size else array.reshape(-1)[:0].view("u1")
    return memoryview(cast("Buffer", flat))
