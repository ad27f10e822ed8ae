"""Reused buffers within one memory budget, for small memory and high speed.

The first touch of fresh memory costs 0.6 to 1 s per GB on a virtual machine, more than reading, hashing and
writing it. So the mover takes its buffers from here: anonymous memory that was touched once and is reused. The sum of
all buffers in use never exceeds the budget; a request waits until there is space. One request larger than the whole
budget is granted when it is the only one, so that work always continues; the plan reports this beforehand.
"""

from __future__ import annotations

import mmap
import threading
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Generator

_HUGE = 2 << 20  # I/O from huge pages takes a third less time, as it needs fewer descriptors
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
        """Count memory that other code allocates (a decoded region) against the budget."""
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
        """A writable buffer of exactly `nbytes` bytes, with undefined contents.

        Args:
            nbytes: size of the buffer.
            extra: bytes of other memory that filling it needs; they count while the buffer is in use.
            place: offset in a file of the bytes; the memory has the same offset within a page.
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
            self._free.clear()  # all too small: free them rather than exceed the budget
        return _mapped(size)

    def _give(self, memory: mmap.mmap) -> None:
        """Keep a buffer for reuse; the largest are kept, and never more than were in use at once."""
        with self._changed:
            self._free.append(memory)
            self._free.sort(key=len)
            while sum(map(_room, self._free)) + self._used - _room(memory) > self.peak:
                del self._free[0]


def _mapped(size: int) -> mmap.mmap:
    """Memory for `size` bytes, and one more page for the alignment; with huge pages if they are available."""
    length, huge = size + mmap.PAGESIZE, size // _HUGE * _HUGE
    if not huge or not hasattr(mmap, "MADV_HUGEPAGE"):
        return mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # The size is rounded up to whole huge pages, so that the kernel uses them.
    memory = mmap.mmap(-1, -(-length // _HUGE) * _HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE, 0, huge)
    return memory


def _room(memory: mmap.mmap) -> int:
    """The requested size of a buffer; the bytes added by rounding are not touched."""
    return len(memory) // _GRAIN * _GRAIN if len(memory) < _HUGE else (len(memory) - 1) // _HUGE * _HUGE
