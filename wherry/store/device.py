"""Measures what the device under a folder can do, so that a conversion can state how far it was from that.

A temporary file without a name (`O_TMPFILE`) is written with direct I/O, synced, and read back, by two threads. It goes
with its descriptor, also if the process is killed. 64 MiB take a tenth of a second on a disk of 1 GB/s.
"""

from __future__ import annotations

import errno
import mmap
import os
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from wherry.core.lazy_dataclass import dataclass
from wherry.store.open_file import DIRECT, open_regular

_NBYTES = 64 << 20
_BLOCK = 4 << 20
_NAMELESS = getattr(os, "O_TMPFILE", 0)  # Linux


@dataclass(frozen=True)
class DeviceRates:
    """Bytes a second.

    Attributes:
        write: of new bytes, until they are durable.
        read: of bytes that are not in memory.
    """

    write: float
    read: float

    def seconds(self, written: int, read_back: int) -> float:
        """What a program needs at least that writes these bytes and then reads them back."""
        return written / self.write + read_back / self.read


def device_rates(folder: Path) -> DeviceRates | None:
    """Measure the device under a folder.

    Args:
        folder: a local folder in which files can be created; nothing is left in it.

    Returns:
        The rates; None where the file system has no direct I/O or no files without a name, or no space.
    """
    if not (DIRECT and _NAMELESS):
        return None
    try:
        file = open_regular(str(folder), flags=_NAMELESS | DIRECT | os.O_RDWR, mode=0o600)
    except OSError:
        return None
    # Random bytes, as some devices compress; the same in each block, as none looks for that in so short a time.
    with mmap.mmap(-1, _BLOCK) as block, os.fdopen(file, "r+b", buffering=0), ThreadPoolExecutor(2) as pool:
        block.write(os.urandom(_BLOCK))
        starts = range(0, _NBYTES, _BLOCK)

        def write_block(start: int) -> int:
            return os.pwrite(file, block, start)

        def read_block(start: int) -> int:
            return os.preadv(file, [block], start)

        def write() -> None:
            _require_whole(pool.map(write_block, starts))
            os.fdatasync(file)

        def read() -> None:
            _require_whole(pool.map(read_block, starts))

        try:
            return DeviceRates(_NBYTES / _seconds_of(write), _NBYTES / _seconds_of(read))
        except OSError:
            return None


def _require_whole(counts: Iterable[int]) -> None:
    if any(count != _BLOCK for count in counts):
        raise OSError(errno.ENOSPC, "a block was cut")


def _seconds_of(act: Callable[[], None]) -> float:
    """Wall time in seconds."""
    started = time.monotonic()
    act()
    return time.monotonic() - started
