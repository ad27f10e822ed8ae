"""Straight: bytes between memory and a device without the page cache, in whole blocks.

A read-back has to come from storage, and pages that are made for it alone cost more than reading: 2.2 GB took 0.5 s
longer through the page cache. Direct reads and writes go in whole blocks, into memory that lies as the file does
(`Pool.buffer` with a place); what does not lie so, or lies on a file system that knows no such thing, takes the cache.

Scratch: local files that hold bytes on their way, opened once for many parts.
"""

from __future__ import annotations

import ctypes
import errno
import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from wherry.errors import storage_errors
from wherry.storage.open_file import opened_regular

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from pathlib import Path

    from wherry.storage.links import Root


BLOCK = 4096  # what every file system here takes; devices ask for 512 or 4096
DIRECT = getattr(os, "O_DIRECT", 0)  # Linux
# What says that a file system has no way past its page cache, and not that the storage failed.
NO_DIRECT = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS)
_LEAST = 64 << 10  # below this the cache is as good


class Cut(NamedTuple):
    """Bytes of a file by blocks: positions in the file, start ≤ body ≤ tail ≤ stop."""

    start: int
    body: int
    tail: int
    stop: int


def cut(offset: int, nbytes: int) -> Cut:
    """Cut bytes into those before the first whole block, the whole blocks, and those after the last.

    Args:
        offset: of the first byte in its file.
        nbytes: how many.
    """
    stop = offset + nbytes
    body = min(-(-offset // BLOCK) * BLOCK, stop)
    return Cut(offset, body, max(stop // BLOCK * BLOCK, body), stop)


def lies_on_block(view: memoryview) -> bool:
    """Whether a device can take bytes from where they lie in memory; of read-only memory nobody tells the address."""
    return not view.readonly and ctypes.addressof(ctypes.c_char.from_buffer(view)) % BLOCK == 0


def readinto(path: str, offset: int, buffer: memoryview, *, root: Root | None = None) -> int:
    """Fill a buffer from a local file, whole blocks past the page cache where that goes.

    Args:
        path: the file.
        offset: of the first byte.
        buffer: takes them.
        root: what the user named, for a file of a checkpoint; see `open_regular`.

    Returns:
        How many bytes there were; fewer than the buffer holds at the end of the file.

    Raises:
        HostileError, OSError: as `open_regular`.
    """
    parts = cut(offset, len(buffer))
    body = buffer[parts.body - offset : parts.tail - offset]
    with opened_regular(path, root=root) as plain:
        if not DIRECT or len(body) < _LEAST or not lies_on_block(body):
            return _filled(plain, offset, buffer)
        os.posix_fadvise(plain, 0, 0, os.POSIX_FADV_RANDOM)  # nothing is to be read ahead into the cache
        done = _filled(plain, offset, buffer[: parts.body - offset])
        if done < parts.body - offset:
            return done
        done += _straight(path, root, plain, parts.body, body)
        return done if done < parts.tail - offset else done + _filled(plain, parts.tail, buffer[done:])


def _straight(path: str, root: Root | None, plain: int, offset: int, body: memoryview) -> int:
    """Whole blocks; from the cache after all where the file system refuses, or the file ends within a block."""
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
    return done + _filled(plain, offset + done, body[done:])


def _filled(file: int, offset: int, buffer: memoryview) -> int:
    done = 0
    while done < len(buffer):
        count = os.preadv(file, [buffer[done:]], offset + done)
        if not count:
            break
        done += count
    return done


@contextmanager
def writing(path: Path) -> Generator[Callable[[memoryview, int], None]]:
    """What writes bytes at an offset of a file, which is made, for its user alone, where it is not there.

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
    """What fills a buffer from an offset of a file of ours, which has as many bytes as are asked for.

    Raises:
        StorageError: the storage failed.
    """
    with storage_errors(str(path)), opened_regular(str(path)) as file:

        def read(offset: int, buffer: memoryview) -> None:
            while buffer:
                count = os.preadv(file, [buffer], offset)
                if not count:
                    raise AssertionError(f"{path} is truncated: it ends at byte {offset}")
                offset, buffer = offset + count, buffer[count:]

        yield read
