"""Direct I/O: bytes between memory and a device without the page cache, in whole blocks.

A read-back must come from storage, and filling the page cache costs more than the read itself: 2.2 GB took 0.5 s
longer through the page cache. Direct reads and writes need whole blocks, and memory with the same alignment as the file
(`Pool.buffer` with a place). Other requests, and file systems without direct I/O, use the page cache.

The module also opens temporary local files once for many reads or writes (`reading`, `writing`).
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from wherry.errors import storage_errors
from wherry.storage.open_file import Root, opened_regular

BLOCK = 4096  # accepted by every supported file system; devices require 512 or 4096
DIRECT = getattr(os, "O_DIRECT", 0)  # Linux
# Errors that mean that a file system has no direct I/O, and not that the storage failed.
NO_DIRECT = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS)
_LEAST = 64 << 10  # bytes; below this the page cache is as fast


class Cut(NamedTuple):
    """A byte range split at block boundaries: positions in the file, start ≤ body ≤ tail ≤ stop."""

    start: int
    body: int
    tail: int
    stop: int


def cut(offset: int, nbytes: int) -> Cut:
    """Split a byte range into the part before the first whole block, the whole blocks, and the part after the last.

    Args:
        offset: of the first byte in its file.
        nbytes: how many.
    """
    stop = offset + nbytes
    body = min(-(-offset // BLOCK) * BLOCK, stop)
    return Cut(offset, body, max(stop // BLOCK * BLOCK, body), stop)


def is_aligned(view: memoryview) -> bool:
    """Whether a buffer is aligned for direct I/O; False for read-only memory, whose address is not available."""
    return not view.readonly and ctypes.addressof(ctypes.c_char.from_buffer(view)) % BLOCK == 0


def readinto(path: str, offset: int, buffer: memoryview, *, root: Root | None = None) -> int:
    """Fill a buffer from a local file, with direct I/O for whole blocks where it is supported.

    Args:
        path: the file.
        offset: of the first byte.
        buffer: receives the bytes.
        root: what the user named, for a file of a checkpoint; see `open_regular`.

    Returns:
        Number of bytes read; fewer than the size of the buffer at the end of the file.

    Raises:
        HostileError, OSError: as `open_regular`.
    """
    parts = cut(offset, len(buffer))
    body = buffer[parts.body - offset : parts.tail - offset]
    with opened_regular(path, root=root) as plain:
        if not DIRECT or len(body) < _LEAST or not is_aligned(body):
            return _fill(plain, offset, buffer)
        os.posix_fadvise(plain, 0, 0, os.POSIX_FADV_RANDOM)  # no read-ahead into the page cache
        done = _fill(plain, offset, buffer[: parts.body - offset])
        if done < parts.body - offset:
            return done
        done += _straight(path, root, plain, parts.body, body)
        return done if done < parts.tail - offset else done + _fill(plain, parts.tail, buffer[done:])


def _straight(path: str, root: Root | None, plain: int, offset: int, body: memoryview) -> int:
    """Read whole blocks; through the cache if the file system refuses, or if the file ends within a block."""
    done = 0
    try:
        with opened_regular(path, root=root, flags=os.O_RDONLY | DIRECT) as direct:
            while done < len(body) and done % BLOCK == 0:
                count = os.preadv(direct, [body[done:]], offset + done)
                if not count:
                    break
                done += count
    except OSError as error:
        if error.errno not in NO_DIRECT:
            raise
    return done + _fill(plain, offset + done, body[done:])


def _fill(file: int, offset: int, buffer: memoryview) -> int:
    done = 0
    while done < len(buffer):
        count = os.preadv(file, [buffer[done:]], offset + done)
        if not count:
            break
        done += count
    return done


@contextmanager
def writing(path: Path) -> Generator[Callable[[memoryview, int], None]]:
    """A function that writes bytes at an offset of a file; a missing file is created, accessible to its user alone.

    Raises:
        StorageError: the storage failed.
    """
    flags = os.O_WRONLY | os.O_CREAT
    with storage_errors(str(path)), opened_regular(str(path), flags=flags, mode=0o600) as file:

        def write(data: memoryview, offset: int) -> None:
            while data:
                done = os.pwrite(file, data, offset)
                data, offset = data[done:], offset + done

        yield write


@contextmanager
def reading(path: Path) -> Generator[Callable[[int, memoryview], None]]:
    """A function that fills a buffer from an offset of a file that wherry wrote; the file must be long enough.

    Raises:
        StorageError: the storage failed.
    """
    with storage_errors(str(path)), opened_regular(str(path)) as file:

        def read(offset: int, buffer: memoryview) -> None:
            count = _fill(file, offset, buffer)
            if count < len(buffer):
                raise AssertionError(f"{path} is truncated: it ends at byte {offset + count}")

        yield read
