"""Batches: moves of small tensors that are carried by one task.

A tensor of a few kilobytes costs more in calls, locks and open files than in bytes. So the moves of small tensors whose
bytes are raw are collected, and the bytes that lie side by side in a file are read at once, into one buffer.
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
    from wherry.formats.reader import Extent
    from wherry.mover.move import Move, Way
    from wherry.mover.source import Source

_MOST_BYTES = 1 << 20  # the smallest buffer of a pool
_MOST_MOVES = 1024


class SmallMove(NamedTuple):
    """A move of a small tensor.

    Attributes:
        move: the move.
        spec: the source tensor.
        extent: the only extent of the tensor's bytes.
    """

    move: Move
    spec: TensorSpec
    extent: Extent

    @property
    def start(self) -> int:
        """The offset in the file of its first byte."""
        return self.extent.offset + self.move.span.start

    @property
    def stop(self) -> int:
        """The offset in the file after its last byte."""
        return self.extent.offset + self.move.span.stop


@dataclass(slots=True)
class Batch:
    """Moves of small tensors, in the order in which they are collected."""

    rows: list[SmallMove] = field(default_factory=list[SmallMove])
    nbytes: int = 0

    def add(self, row: SmallMove) -> None:
        """Add one more move."""
        self.rows.append(row)
        self.nbytes += row.move.span.nbytes

    def fits(self, move: Move) -> bool:
        """Whether there is room for one more move."""
        return len(self.rows) < _MOST_MOVES and self.nbytes + move.span.nbytes <= _MOST_BYTES


def small_move(move: Move, spec: TensorSpec, way: Way) -> SmallMove | None:
    """A move that can be part of a batch; None if it is large, or if its bytes are not raw in one file."""
    extents = way.access.raw
    if extents is None or len(extents) != 1 or way.band is not None or move.box:
        return None
    return SmallMove(move, spec, extents[0]) if move.span.nbytes <= SMALL else None


@contextmanager
def batch_parts(source: Source, batch: Batch) -> Generator[list[tuple[Move, memoryview]]]:
    """The moves of a batch with their bytes, in the order of the files, valid while the block runs.

    Raises:
        DamagedError: bytes are missing or corrupt.
        StorageError: the storage failed.
    """
    rows = sorted(batch.rows, key=lambda row: (row.extent.location.path, row.start))
    with source.pool.buffer(batch.nbytes, place=rows[0].start) as buffer:
        parts: list[tuple[Move, memoryview]] = []
        done = 0
        for run in _runs(rows):
            nbytes = run[-1].stop - run[0].start
            run_buffer = buffer[done : done + nbytes]
            fill(run[0].extent.location, run[0].start, run_buffer, run[0].spec, straight=source.straight)
            for row in run:
                part = buffer[done : done + row.move.span.nbytes]
                source.recorded.update((row.extent,), row.move.span, part, row.spec)
                parts.append((row.move, part))
                done += len(part)
        yield parts


def _runs(rows: list[SmallMove]) -> Generator[list[SmallMove]]:
    """The moves whose bytes lie side by side, together."""
    run = [rows[0]]
    for row in rows[1:]:
        if row.start == run[-1].stop and row.extent.location.path == run[-1].extent.location.path:
            run.append(row)
        else:
            yield run
            run = [row]
    yield run
