"""The size of a file that several processes write.

A file has its full size before the first byte, and never another one, so nobody truncates what somebody else has
written; space is allocated in a way that changes no byte.
"""

from __future__ import annotations

import ctypes
import errno
import os
from typing import TYPE_CHECKING

from wherry.errors import StorageError

if TYPE_CHECKING:
    from pathlib import Path

_FULL = (errno.ENOSPC, errno.EDQUOT)


def require_size(descriptor: int, path: Path, size: int) -> None:
    """Give a file its size if it is new.

    Args:
        descriptor: of the file.
        path: for errors.
        size: bytes that it has in every process.

    Raises:
        StorageError: it has another size.
        OSError: the storage is full or failed.
    """
    found = os.fstat(descriptor).st_size
    if found not in (0, size):
        raise StorageError(
            f"the file that the units share has {found:,} bytes instead of {size:,}",
            uri=str(path),
            cure="remove it, and run `wherry work` again",
        )
    if not found:
        os.ftruncate(descriptor, size)  # two processes that both do this leave the same file
    # Space is allocated where the file system can do so: `posix_fallocate` may write zeros, which are not harmless.
    libc = ctypes.CDLL(None, use_errno=True)
    if size and hasattr(libc, "fallocate64"):
        code = libc.fallocate64(descriptor, 0, ctypes.c_int64(0), ctypes.c_int64(size))
        number = ctypes.get_errno() if code else 0
        if number in _FULL:
            raise OSError(number, os.strerror(number))
