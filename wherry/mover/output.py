"""Output: one target of a pass over a source.

A pass reads and hashes each part of the source once and delivers it to every output. An output has its own writer,
journal and result: if one fails, its error is kept and the others continue.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field
from threading import Semaphore
from typing import TYPE_CHECKING, cast

from wherry.core import dtypes
from wherry.core.account import NO_LOSSES, Losses
from wherry.core.digest import LeafHasher
from wherry.core.keypath import KeyPath
from wherry.core.lazy_dataclass import dataclass
from wherry.core.tensorspec import Region, Span, TensorSpec
from wherry.core.units import plural
from wherry.cures import Argument, Cure
from wherry.errors import UnrepresentableError, WherryError
from wherry.mover.move import Move, cells
from wherry.target.journal import DurableMove, MoveLog

if TYPE_CHECKING:
    import numpy as np
    from typing_extensions import Buffer

    from wherry.mover.checksums import LeafTable
    from wherry.mover.map_writer import MapWriter
    from wherry.mover.readback import ReadBack, StoredPart

_GROUP_BYTES = 32 << 20
_GROUP_SECONDS = 0.5


@dataclass(slots=True)
class Output:
    """The receiver of a pass.

    Attributes:
        writer: the target format's writer.
        targets: source key path → target tensor, for the tensors that this output writes.
        journal: the moves that earlier runs finished; this run appends its own.
        back: reads back what is durable; None if the target is not verified.
        overflow: whether finite values may become infinite; otherwise the first move of such values is an error.
        error: why it failed; None if it did not.
        losses: source key path → what was counted of its values, in this run and in those before it.
    """

    writer: MapWriter
    targets: Mapping[KeyPath, TensorSpec]
    journal: MoveLog
    back: ReadBack | None = None
    overflow: bool = False
    error: WherryError | None = None
    losses: dict[KeyPath, Losses] = field(default_factory=dict["KeyPath", Losses])
    _finished: list[Move] = field(default_factory=list[Move])
    _counted: dict[tuple[KeyPath, Span], Losses] = field(
        default_factory=dict["tuple[KeyPath, Span]", Losses]
    )  # of moves that are not recorded yet
    _unsynced: int = 0
    _synced_at: float = field(default_factory=time.monotonic)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _commit: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        for row in self.journal.done:
            target = self.targets.get(row.source)
            if target is not None:
                self.writer.restore(target.path, row.span, row.checks)
                self._count(target, row.source, row.losses)
                if row.checks and self.back is not None:
                    self.back.with_checksums.add(row.source)

    def wants(self, move: Move) -> bool:
        """Whether the output needs this part and no earlier run has delivered it."""
        return (
            self.error is None
            and move.source in self.targets
            and not self.journal.has(move.source, move.span)
        )

    @property
    def encodes(self) -> bool:
        """Whether delivering uses a core, as a codec does, rather than waiting for storage."""
        first = next(iter(self.targets.values()), None)
        return first is not None and self.writer.place(first.path, Span(0, 0)) is None

    def place(self, move: Move) -> int:
        """The offset in a file of the first byte of a part, for alignment; see MapWriter."""
        target = self.targets.get(move.source)
        if target is None:
            return 0
        where = move.span if target.chunks is None or move.region is None else move.region
        return self.writer.place(target.path, where) or 0

    def deliver(self, move: Move, data: memoryview, losses: Losses = NO_LOSSES) -> None:
        """Write one part; an error is stored, not raised.

        Args:
            move: the part.
            data: its bytes.
            losses: what was counted of its values when they were made.
        """
        try:
            target = self.targets[move.source]
            if losses:
                self._counted[move.source, move.span] = losses
                self._count(target, move.source, losses)
                if self.error is not None:
                    return
            if target.chunks is None:
                self.writer.write(target.path, move.span, data)
            else:
                self._write_chunks(target, cast("Region", move.region), data)
        except WherryError as error:
            self.error = self.error or error

    def deliver_all(
        self,
        parts: Sequence[tuple[Move, TensorSpec, memoryview]],
        losses: Mapping[tuple[KeyPath, Span], Losses],
    ) -> None:
        """Write the parts of a batch; an error is stored, not raised.

        Args:
            parts: the parts with their source tensors and their bytes.
            losses: what was counted of the values of some of them.
        """
        try:
            for move, _spec, _data in parts if losses else ():
                key = (move.source, move.span)
                if key in losses:
                    self._counted[key] = losses[key]
                    self._count(self.targets[move.source], move.source, losses[key])
            flat: list[tuple[KeyPath, Span, memoryview]] = []
            for move, _spec, data in parts:
                target = self.targets[move.source]
                if target.chunks is None:
                    flat.append((target.path, move.span, data))
                else:
                    self._write_chunks(target, cast("Region", move.region), data)
            if flat:
                self.writer.write_all(flat)
        except WherryError as error:
            self.error = self.error or error

    def _count(self, target: TensorSpec, source: KeyPath, losses: Losses) -> None:
        """Add the losses of a move; values that became infinite are an error unless that is allowed."""
        if not losses:
            return
        with self._lock:
            self.losses[source] = self.losses.get(source, NO_LOSSES) + losses
        if losses.infinite and not self.overflow:
            self.error = self.error or UnrepresentableError(
                f"{plural(losses.infinite, 'finite value')} would become infinite as {target.dtype}",
                path=target.name,
                cure=Cure(
                    "pass {} to write infinities, or choose a larger type, such as bfloat16",
                    Argument("allow-overflow"),
                ),
            )

    def _write_chunks(self, target: TensorSpec, region: Region, data: memoryview) -> None:
        chunks = cast("tuple[int, ...]", target.chunks)
        if chunks == target.shape:
            self.writer.write(target.path, region, data)  # the only chunk
            return
        parts = list(cells(region, chunks))
        if len(parts) == 1:
            self.writer.write(target.path, region, data)
            return
        band = as_array(data, target.dtype, tuple(part.stop - part.start for part in region))
        for part in parts:
            inside = tuple(
                slice(p.start - r.start, p.stop - r.start) for p, r in zip(part, region, strict=True)
            )
            self.writer.write(target.path, part, as_bytes(band[inside].copy(order="C")))

    def delivered(self, moves: Sequence[Move], leaves: LeafTable) -> None:
        """Count parts that were written and hashed; every 32 MiB or half a second, sync the written data."""
        with self._lock:
            self._finished += moves
            self._unsynced += sum([span.stop - span.start for _source, span, _region, _box in moves])
            waited = time.monotonic() - self._synced_at
            due = self._unsynced >= _GROUP_BYTES or waited >= _GROUP_SECONDS
        if due and self._commit.acquire(blocking=False):
            try:
                self.settle(leaves)
            finally:
                self._commit.release()

    def settle(self, leaves: LeafTable) -> None:
        """Group commit: sync, then record the durable moves; a part with incomplete leaves waits."""
        with self._lock:
            finished, self._finished = self._finished, []
            self._unsynced, self._synced_at = 0, time.monotonic()
        if self.error is not None:
            return
        try:
            self.writer.sync()
            moves: list[Move] = []
            self.journal.record(self._complete(finished, leaves, moves))
            if self.back is not None:
                self.back.add(moves)
        except WherryError as error:
            self.error = self.error or error

    def make_readable(self) -> None:
        """Wait until what was written can be read back; an error is stored, not raised."""
        try:
            if self.back is not None and self.error is None:
                self.back.files.settle()
        except WherryError as error:
            self.error = self.error or error

    def resumed(self, move: Move, leaves: LeafTable) -> None:
        """Take a part that an earlier run finished: it is durable, and must be read back too.

        Args:
            move: the part.
            leaves: of the source, as far as they are hashed.
        """
        if not self.journal.done:
            return
        if self.back is not None and move.source in self.targets and self.journal.has(move.source, move.span):
            self.back.take_up(move, leaves)

    def read_back(self, part: StoredPart, memory: memoryview, hasher: LeafHasher, turn: Semaphore) -> None:
        """Read a durable part from storage and compare it; an error is stored, not raised.

        Args:
            part: the part.
            memory: as much as the part asks for.
            hasher: the hashed leaves of the source.
            turn: limits how many threads hash at once.
        """
        try:
            if self.back is not None and self.error is None:
                data = self.back.read(part, memory)
                with turn:
                    self.back.compare(part, data, hasher)
        except WherryError as error:
            self.error = self.error or error

    def _complete(self, finished: list[Move], leaves: LeafTable, moves: list[Move]) -> Iterator[DurableMove]:
        """The journal's rows of moves that are durable and hashed, which are added to `moves`; others wait."""
        by_parts = not self.writer.is_durable_by_sync()
        for move in finished:
            source, span = move.source, move.span
            known = {} if move.box else leaves.known(source, span)
            if known is None or (by_parts and not self._is_stored(move)):
                with self._lock:
                    self._finished.append(move)
                continue
            checks = tuple(self.writer.checks(self.targets[source].path, span)) if by_parts else ()
            losses = self._counted.pop((source, span), NO_LOSSES) if self._counted else NO_LOSSES
            moves.append(move)
            yield DurableMove(source, span, known, checks, losses)

    def _is_stored(self, move: Move) -> bool:
        target = self.targets[move.source]
        if target.chunks is None or move.region is None:
            return self.writer.stored(target.path, move.span)
        return all(self.writer.stored(target.path, part) for part in cells(move.region, target.chunks))


def as_array(data: memoryview, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """Canonical bytes as an array, without a copy; those of blocks as bytes, a row of them for each row of elements."""
    import numpy as np

    if dtypes.block_elements(dtype) > 1:
        shape, dtype = (*shape[:-1], dtypes.canonical_size(dtype, shape[-1])), "uint8"
    return np.frombuffer(data, dtype=dtypes.numpy_dtype(dtype)).reshape(shape)


def as_bytes(array: np.ndarray) -> memoryview:
    """The bytes of a C-contiguous array, without a copy."""
    return memoryview(cast("Buffer", array.reshape(-1).view("u1")))
