"""Flat files of known size, written by offset from several threads and made durable in groups.

Every file is created and its space allocated before the first byte, so that a full disk fails early. `sync`
makes durable everything whose `write` had returned, and then drops it from the page cache, so that a read-back
comes from storage. At most 64 descriptors are open, whatever the number of shards. Once the storage has failed
to sync, every later `sync` fails too: the kernel forgets such pages, and a second fsync would lie.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from contextlib import contextmanager
from typing import TYPE_CHECKING

from wherry.errors import StorageError, storage_error
from wherry.staging import sync_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping
    from pathlib import Path

_MOST_OPEN = 64


class FlatFiles:
    """A set of preallocated files in one local folder."""

    def __init__(self, folder: Path, sizes: Mapping[str, int]) -> None:
        """Create the files.

        Args:
            folder: an existing folder.
            sizes: name → bytes.

        Raises:
            StorageError: the storage is full or failed.
        """
        self._folder = folder
        self._names: list[str] = []
        self._lock = threading.Lock()
        self._syncing = threading.Lock()
        self._open: OrderedDict[str, int] = OrderedDict()
        self._users: dict[str, int] = {}
        self._dirty: set[str] = set()
        self._failed: StorageError | None = None
        try:
            for name, size in sizes.items():
                self.add(name, size)
            for parent in {(folder / name).parent for name in sizes}:
                self._checked(lambda parent=parent: sync_folder(parent))
        except BaseException:
            self.close()
            raise

    def add(self, name: str, size: int) -> None:
        """Create one more file; what it holds beyond its size is cut off.

        Raises:
            StorageError: the storage is full or failed.
        """
        self._names.append(name)
        self._guarded(name, lambda fd: _allocate(fd, size))

    def write(self, name: str, offset: int, data: memoryview | bytes) -> None:
        """Write bytes at an offset of a file.

        Raises:
            StorageError: the storage failed.
        """
        view = memoryview(data).cast("B")
        self._guarded(name, lambda fd: _write_all(fd, offset, view))
        with self._lock:
            self._dirty.add(name)

    def sync(self) -> None:
        """Make everything durable whose `write` has returned.

        Raises:
            StorageError: the storage failed, now or in an earlier call.
        """
        with self._syncing:  # a second caller returns when what the first took is durable
            with self._lock:
                dirty, self._dirty = self._dirty, set()
            self._checked(lambda: [self._guarded(name, _settle) for name in sorted(dirty)])

    def finish(self) -> None:
        """Make the files and their names durable.

        Raises:
            StorageError: the storage failed, now or in an earlier call.
        """
        self.sync()
        self._checked(lambda: [self._guarded(name, os.fsync) for name in self._names])
        self._checked(lambda: sync_folder(self._folder))

    def close(self) -> None:
        """Close every descriptor."""
        with self._lock:
            while self._open:
                os.close(self._open.popitem()[1])

    def _checked(self, act: Callable[[], object]) -> None:
        if self._failed is not None:
            raise self._failed
        try:
            act()
        except OSError as error:
            self._failed = storage_error(error, str(self._folder))
            raise self._failed from error

    def _guarded(self, name: str, act: Callable[[int], None]) -> None:
        try:
            with self._descriptor(name) as descriptor:
                act(descriptor)
        except OSError as error:
            raise storage_error(error, str(self._folder / name)) from error

    @contextmanager
    def _descriptor(self, name: str) -> Generator[int]:
        with self._lock:
            if name not in self._open:
                self._make_room()
                self._open[name] = os.open(self._folder / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            self._open.move_to_end(name)
            self._users[name] = self._users.get(name, 0) + 1
            descriptor = self._open[name]
        try:
            yield descriptor
        finally:
            with self._lock:
                self._users[name] -= 1

    def _make_room(self) -> None:
        idle = [name for name in self._open if not self._users.get(name)]
        for name in idle[: max(len(self._open) - _MOST_OPEN + 1, 0)]:
            os.close(self._open.pop(name))


def _allocate(descriptor: int, size: int) -> None:
    os.ftruncate(descriptor, size)
    if size:
        os.posix_fallocate(descriptor, 0, size)


def _write_all(descriptor: int, offset: int, view: memoryview) -> None:
    done = 0
    while done < len(view):
        done += os.pwrite(descriptor, view[done:], offset + done)


def _settle(descriptor: int) -> None:
    os.fdatasync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)  # pages used again cost less than fresh ones
