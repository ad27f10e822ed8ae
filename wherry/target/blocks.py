"""Collects small writes in memory until whole blocks of a file can be written.

Direct I/O writes whole blocks only. Where a tensor begins or ends within a block, its first and last bytes are held
here together with the neighbouring bytes; so are small tensors. Adjacent blocks are written together. A block is read
from its file when a part of it is first written, so that the bytes of an earlier run are kept.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from wherry.storage.direct import BLOCK

# Name of a file, offset of a block, memory of one block or several; raises OSError.
Transfer = Callable[[str, int, memoryview], None]

_MOST = 256  # blocks that are held in memory


@dataclass(slots=True)
class Blocks:
    """The blocks that wait to be written; thread-safe.

    Attributes:
        read: fills a block from its file; bytes beyond the end of the file are left unchanged.
        write: writes adjacent blocks.
    """

    read: Transfer
    write: Transfer
    _memory: mmap.mmap | None = None  # of the blocks, and then of a run of adjacent ones
    _held: dict[tuple[str, int], memoryview] = field(default_factory=dict["tuple[str, int]", memoryview])
    _dirty: set[tuple[str, int]] = field(default_factory=set["tuple[str, int]"])
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def put(self, name: str, offset: int, data: memoryview) -> None:
        """Add bytes of a file.

        Raises:
            OSError: the storage failed.
        """
        with self._lock:
            while data:
                start = offset // BLOCK * BLOCK
                part = data[: start + BLOCK - offset]
                block = self._block(name, start, whole=len(part) == BLOCK)
                block[offset - start : offset - start + len(part)] = part
                self._dirty.add((name, start))
                data, offset = data[len(part) :], offset + len(part)

    def forget(self, name: str, start: int, stop: int) -> None:
        """Write and drop the blocks of a range, because the range is about to be written directly.

        Raises:
            OSError: the storage failed.
        """
        with self._lock:
            if any(key[0] == name and start <= key[1] < stop for key in self._held):
                self._clear()

    def flush(self) -> None:
        """Write every block that changed.

        Raises:
            OSError: the storage failed.
        """
        with self._lock:
            self._flush()

    def close(self) -> None:
        """Drop the blocks with their memory, which would stay until garbage is collected; nothing is written."""
        with self._lock:
            self._held.clear()
            self._dirty.clear()
            self._memory = None

    def _view(self) -> memoryview:
        if self._memory is None:
            self._memory = mmap.mmap(-1, 2 * _MOST * BLOCK)
        return memoryview(self._memory)

    def _clear(self) -> None:
        self._flush()
        self._held.clear()

    def _flush(self) -> None:
        waiting = sorted(self._dirty)
        while waiting:
            name, start = waiting[0]
            count = 1
            while count < len(waiting) and waiting[count] == (name, start + count * BLOCK):
                count += 1
            run = self._view()[_MOST * BLOCK :][: count * BLOCK]
            for number, key in enumerate(waiting[:count]):
                run[number * BLOCK : (number + 1) * BLOCK] = self._held[key]
            self.write(name, start, run)
            waiting = waiting[count:]
        self._dirty.clear()

    def _block(self, name: str, start: int, *, whole: bool) -> memoryview:
        block = self._held.get((name, start))
        if block is None:
            if len(self._held) == _MOST:
                self._clear()
            place = len(self._held) * BLOCK
            block = self._view()[place : place + BLOCK]
            if not whole:
                block[:] = bytes(BLOCK)
                self.read(name, start, block)
            self._held[name, start] = block
        return block
