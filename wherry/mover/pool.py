"""Reused buffers within one memory budget, for small memory and high speed.

The first touch of fresh memory costs 0.6 to 1 s per GB on a virtual machine, more than reading, hashing and
writing it. So the mover takes its buffers from here: anonymous memory that was touched once and is reused. The sum of
all buffers in use never exceeds the budget; a request waits until there is space, and none overtakes it. One request
larger than the whole budget is granted when it is the only one, so that work always continues; the plan reports this
beforehand. A thread that holds a buffer must not request another one.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Generator
from contextlib import contextmanager, suppress
from typing import NamedTuple

from wherry.core.threads import Turns

_HUGE = 2 << 20  # I/O from huge pages takes a third less time, as it needs fewer descriptors
# Buffers are rounded up to this, or to huge pages, so that bands of nearly one size share them.
_GRAIN = 1 << 20  # bytes


class Pool:
    """Hands out buffers; safe from several threads."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.peak = 0
        self._used = 0
        self._free: list[_Memory] = []
        self._changed = threading.Condition()
        self._turns = Turns(self._changed)

    @contextmanager
    def reserved(self, nbytes: int) -> Generator[None]:
        """Count memory that other code allocates (a decoded region) against the budget."""
        with self._changed, self._turns.turn() as has_turn:
            self._changed.wait_for(
                lambda: has_turn() and (self._used == 0 or self._used + nbytes <= self.budget)
            )
            self._used += nbytes
            self.peak = max(self.peak, self._used)
        try:
            yield
        finally:
            with self._changed:
                self._used -= nbytes
                self._changed.notify_all()

    @contextmanager
    def buffer(self, nbytes: int, extra: int = 0, place: int = 0) -> Generator[memoryview]:
        """A writable buffer of exactly `nbytes` bytes, with undefined contents.

        Args:
            nbytes: size of the buffer.
            extra: bytes of other memory that filling it needs; they count while the buffer is in use.
            place: offset in a file of the bytes; the memory has the same offset within a page.
        """
        grain = _HUGE if nbytes > _HUGE else _GRAIN
        size = -(-max(nbytes, 1) // grain) * grain
        first = place % mmap.PAGESIZE
        with self.reserved(size + extra):
            memory = self._take(size)
            view = memoryview(memory.pages)
            try:
                yield view[first : first + nbytes]
            finally:
                view.release()
                # Kept for reuse are the buffers that were used last, and never more than were in use at once.
                with self._changed:
                    self._free.append(memory)
                    while self._free_bytes() + self._used - memory.size > self.peak:
                        del self._free[0]

    def clear(self) -> None:
        """Give back the memory that waits for reuse."""
        with self._changed:
            self._free.clear()

    def _take(self, size: int) -> _Memory:
        """Memory of exactly this size: a larger one, reused for a smaller buffer, would exceed what is counted."""
        with self._changed:
            best = next((one for one in self._free if one.size == size), None)
            if best is not None:
                self._free.remove(best)
                return best
            while self._free and self._free_bytes() + self._used > self.budget:
                del self._free[0]
        return _Memory(size, map_memory(size))

    def _free_bytes(self) -> int:
        return sum(one.size for one in self._free)


class _Memory(NamedTuple):
    """Memory for a buffer of `size` bytes, and one more page for its alignment."""

    size: int
    pages: mmap.mmap


def map_memory(size: int) -> mmap.mmap:
    """Memory for `size` bytes, and one more page for the alignment; with huge pages if they are available."""
    length, huge = size + mmap.PAGESIZE, size // _HUGE * _HUGE
    if not huge or not hasattr(mmap, "MADV_HUGEPAGE"):
        return mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # The size is rounded up to whole huge pages, so that the kernel uses them.
    memory = mmap.mmap(-1, -(-length // _HUGE) * _HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE, 0, huge)
    return memory
