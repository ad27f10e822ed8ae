"""Files of which other processes write other regions: each process writes exactly its own bytes, and no others.

A file has its full size before the first byte, and never another one, so nobody truncates what somebody else has
written; space is allocated in a way that changes no byte. No block is read, changed and written again, as by `Blocks`:
a process that was slow would put back what it had read before somebody else wrote there.
"""

from __future__ import annotations

import ctypes
import errno
import os
from typing import TYPE_CHECKING

from wherry.errors import StorageError
from wherry.integrations.containers.flat.files import SMALL, FlatFiles
from wherry.storage.direct import cut, lies_on_block

if TYPE_CHECKING:
    from pathlib import Path

_FULL = (errno.ENOSPC, errno.EDQUOT)


class SharedFiles(FlatFiles):
    """Files of a folder that several processes write at the same time."""

    def add(self, name: str, size: int) -> None:
        """Create one more file, or open it.

        Raises:
            StorageError: the file has another size; or the storage is full or failed.
        """
        self._sizes[name] = size
        self._guarded(name, lambda descriptor: _require_size(descriptor, self._folder / name, size))

    def finish(self) -> None:
        """Make what was written durable."""
        self.sync()

    def _write_blocks(self, name: str, offset: int, view: memoryview) -> None:
        if len(view) < SMALL:
            self._write(name, offset, view)
            return
        parts = cut(offset, len(view))
        body = view[parts.body - offset : parts.tail - offset]
        self._write(name, offset, view[: parts.body - offset])
        with self._turn:
            self._write(name, parts.body, body, direct=lies_on_block(body))
        self._write(name, parts.tail, view[parts.tail - offset :])


def _require_size(descriptor: int, path: Path, size: int) -> None:
    found = os.fstat(descriptor).st_size
    if found not in (0, size):
        raise StorageError(
            f"the file that the units share has {found:,} bytes instead of {size:,}",
            uri=str(path),
            cure="remove it, and run `wherry work` again",
        )
    if not found:
        os.ftruncate(descriptor, size)  # two processes that both do this leave the same file
    _reserve(descriptor, size)


def _reserve(descriptor: int, size: int) -> None:
    """Allocate space where the file system can do so; `posix_fallocate` may write zeros, which would not be harmless.

    Raises:
        OSError: the storage is full.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if size and hasattr(libc, "fallocate64"):
        code = libc.fallocate64(descriptor, 0, ctypes.c_int64(0), ctypes.c_int64(size))
        number = ctypes.get_errno() if code else 0
        if number in _FULL:
            raise OSError(number, os.strerror(number))
