"""Batches: moves of small tensors that are carried by one task.

A tensor of a few kilobytes costs more in calls, locks and open files than in bytes. So the moves of small tensors whose
bytes are raw are collected, and the bytes that lie near each other in a file are read at once, into one buffer.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from wherry.mover.move import SMALL
from wherry.mover.regions import fill

if TYPE_CHECKING:
    from collections.abc import Generator

    from wherry.core.tensorspec import TensorSpec
    from wherry.formats.contents import Extent
    from wherry.mover.move import Move
    from wherry.mover.source import Source

_MOST_BYTES = (
    1 << 20
)  # of the tensors of a batch; the bytes between them are at most `_MOST_MOVES * _GAP` more
_MOST_MOVES = 1024
_MOST_BEHIND = (
    16 << 20
)  # bytes of larger moves that are carried before a batch: parts of an upload wait for it
_GAP = 4 << 10  # bytes between two tensors that are read too: as many as direct I/O reads anyway


class SmallMove(NamedTuple):
    """A move of a small tensor; such moves are ordered by their bytes in files.

    Attributes:
        file: the path of the file.
        start: the offset in the file of its first byte.
        stop: the offset in the file after its last byte.
        move: the move.
        spec: the source tensor.
        extent: the only extent of the tensor's bytes.
    """

    file: str
    start: int
    stop: int
    move: Move
    spec: TensorSpec
    extent: Extent


@dataclass(slots=True)
class Batch:
    """Moves of small tensors, in the order in which they are collected.

    Attributes:
        rows: the moves.
        nbytes: their bytes.
        behind: bytes of larger moves that came after the first of them.
    """

    rows: list[SmallMove] = field(default_factory=list[SmallMove])
    nbytes: int = 0
    behind: int = 0

    def add(self, move: Move, spec: TensorSpec, extent: Extent) -> bool:
        """Add one more move of a small tensor.

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
        self.rows.append(SmallMove(extent.location.path, offset + start, offset + stop, move, spec, extent))
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
    """Whether a move can be part of a batch: it is not large, and no box."""
    start, stop = move.span
    return stop - start <= SMALL and not move.box


@contextmanager
def batch_parts(source: Source, batch: Batch) -> Generator[list[tuple[Move, TensorSpec, memoryview]]]:
    """The moves of a batch with their bytes, in the order of the files, valid while the block runs.

    Raises:
        DamagedError: bytes are missing or corrupt.
        StorageError: the storage failed.
    """
    runs = list(_runs(sorted(batch.rows)))
    with source.pool.buffer(sum(run.nbytes for run in runs), place=runs[0].start) as buffer:
        parts: list[tuple[Move, TensorSpec, memoryview]] = []
        done = 0
        for run in runs:
            held = buffer[done : done + run.nbytes]
            first = run.rows[0]
            fill(first.extent.location, run.start, held, first.spec, straight=source.straight)
            for _file, start, stop, move, spec, extent in run.rows:
                part = held[start - run.start : stop - run.start]
                if extent.crc32 is not None or extent.within is not None:
                    source.recorded.update((extent,), move.span, part, spec)
                parts.append((move, spec, part))
            done += run.nbytes
        yield parts


class _Run(NamedTuple):
    """Moves whose bytes are read at once: those from `start` to `stop` of one file."""

    rows: list[SmallMove]
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


def _runs(rows: list[SmallMove]) -> Generator[_Run]:
    """The moves whose bytes lie near each other, together, with the bytes between them."""
    file, start, stop = rows[0][:3]
    run: list[SmallMove] = []
    for row in rows:
        if run and not (
            row.file == file and 0 <= row.start - stop <= _GAP and row.start - start <= _MOST_BYTES
        ):
            yield _Run(run, start, stop)
            run, file, start = [], row.file, row.start
        run.append(row)
        stop = row.stop
    yield _Run(run, start, stop)
