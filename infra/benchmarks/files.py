"""Makes files durable, reads them, drops them from the page cache, and opens them past it: what several rows need."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

PAGE = 4096  # direct I/O needs memory, offsets and lengths in multiples of it
_BLOCK = 8 << 20
_HUGE = 2 << 20


def files_of(folder: Path) -> Iterator[Path]:
    """Every file below a folder."""
    return (path for path in folder.rglob("*") if path.is_file())


def size_of(folder: Path) -> int:
    """Bytes of the files below a folder, holes included."""
    return sum(path.stat().st_size for path in files_of(folder))


def read_all(folder: Path) -> None:
    """Read every file once, so that it lies in the page cache."""
    buffer = bytearray(_BLOCK)
    for path in files_of(folder):
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def drop_from_cache(folder: Path) -> None:
    """Drop every file from the page cache, so that the next read of it comes from storage."""
    os.sync()  # dirty pages cannot be dropped
    for path in files_of(folder):
        file = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(file)


def open_direct(path: Path, flags: int) -> tuple[int, bool]:
    """Open a file past the page cache, and say whether the file system allows it; through the cache if not."""
    try:
        return os.open(path, flags | os.O_DIRECT, 0o644), True
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        # A file that O_CREAT has created before the refusal exists now.
        return os.open(path, flags & ~os.O_EXCL, 0o644), False


def aligned_buffer(nbytes: int) -> memoryview:
    """Memory for direct I/O, of huge pages where the kernel has them, each of which was touched."""
    memory = mmap.mmap(-1, -(-nbytes // _HUGE) * _HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    for start in range(0, len(memory), PAGE):
        memory[start] = 0
    return memoryview(memory)[:nbytes]


def make_durable(path: Path) -> None:
    """Sync a file, or a folder with everything in it, and the folder above."""
    below = [*path.rglob("*")] if path.is_dir() else []
    for one in (*below, path, path.parent):
        sync(one)


def sync(path: Path) -> None:
    """Sync one file or folder."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
