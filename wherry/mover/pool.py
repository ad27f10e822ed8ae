"""Reused buffers under one budget: why memory stays small and the speed high.

The first touch of fresh memory costs 0.6 to 1 s per GB on a virtual machine, more than reading, hashing and
writing it. So the mover takes its buffers from here: anonymous memory that was touched once and is handed out
again. The sum of what is handed out never exceeds the budget; a request waits until there is room. One request
larger than the whole budget is admitted when it is alone, so that work always goes on; the plan says so before.
"""

from __future__ import annotations

import mmap
import threading
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Generator

_HUGE = 2 << 20  # devices take bytes from huge pages in a third less time: fewer pieces to tell them of
_GRAIN = 1 << 20  # buffers are rounded up to this, so that bands of nearly one size share them


class Pool:
    """Hands out buffers; safe from several threads."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.peak = 0
        self._used = 0
        self._free: list[mmap.mmap] = []
        self._changed = threading.Condition()

    @contextmanager
    def reserved(self, nbytes: int) -> Generator[None]:
        """Count memory that somebody else allocates (a decoded region) against the budget."""
        with self._changed:
            self._changed.wait_for(lambda: self._used == 0 or self._used + nbytes <= self.budget)
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
        """A writable buffer of exactly so many bytes, with whatever it held before.

        Args:
            nbytes: how many.
            extra: bytes that filling it will take elsewhere; they count as long as the buffer is out.
            place: where in a file the bytes will lie; the memory has the same offset within a page.
        """
        size = -(-max(nbytes, 1) // _GRAIN) * _GRAIN
        first = place % mmap.PAGESIZE
        with self.reserved(size + extra):
            memory = self._take(size)
            view = memoryview(memory)
            try:
                yield view[first : first + nbytes]
            finally:
                view.release()
                self._give(memory)

    def _take(self, size: int) -> mmap.mmap:
        with self._changed:
            fitting = [memory for memory in self._free if len(memory) >= size + mmap.PAGESIZE]
            if fitting:
                best = min(fitting, key=len)
                self._free.remove(best)
                return best
            self._free.clear()  # all too small: let them go rather than hold more than the budget
        return _mapped(size)

    def _give(self, memory: mmap.mmap) -> None:
        """Keep a buffer for later; all that is held never exceeds what was in use at once, the largest stay."""
        with self._changed:
            self._free.append(memory)
            self._free.sort(key=len)
            while sum(map(_room, self._free)) + self._used - _room(memory) > self.peak:
                del self._free[0]


def _mapped(size: int) -> mmap.mmap:
    """Memory for so many bytes, and a page more for laying them as a file is; of huge pages, where there are any."""
    length, huge = size + mmap.PAGESIZE, size // _HUGE * _HUGE
    if not huge or not hasattr(mmap, "MADV_HUGEPAGE"):
        return mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # Whole huge pages are asked for, so that the kernel lays the memory on them.
    memory = mmap.mmap(-1, -(-length // _HUGE) * _HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE, 0, huge)
    return memory


def _room(memory: mmap.mmap) -> int:
    """Bytes that a buffer was made for; what only rounds it up is not touched."""
    return len(memory) // _GRAIN * _GRAIN if len(memory) < _HUGE else (len(memory) - 1) // _HUGE * _HUGE
