"""Writes in flight, the memory that they hold, and what makes finished ones durable.

tensorstore writes in the background. What is in flight is bounded in bytes, so that memory is, and a failure is
reported by the next call. Files are synced in groups: data files of OCDBT never change once they have their name.
"""

from __future__ import annotations

import os
import threading
import weakref
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wherry.integrations.containers.kvstore import translated
from wherry.integrations.orbax.layout import MANIFEST
from wherry.staging import sync_folder

if TYPE_CHECKING:
    import numpy as np

PENDING_BYTES = 32 << 20
LOCK_SUFFIX = ".__lock"  # tensorstore's name of a file that it has not renamed yet


class Pending:
    """Writes that tensorstore has not finished; the first error is kept and raised to whoever asks next."""

    def __init__(self, uri: str) -> None:
        self._uri = uri
        self._bytes = 0
        self._tickets = count()
        self._futures: dict[int, Any] = {}  # held here: a future that nobody holds is cancelled
        self._error: Exception | None = None
        self._room = threading.Condition()

    def reserve(self, nbytes: int) -> None:
        """Wait until there is room for so many bytes, or nothing is pending.

        Raises:
            StorageError: an earlier write failed.
        """
        with self._room:
            self._room.wait_for(
                lambda: self._error or not self._bytes or self._bytes + nbytes <= PENDING_BYTES
            )
            self._raise()
            self._bytes += nbytes

    def release(self, nbytes: int) -> None:
        """Give room back."""
        with self._room:
            self._bytes -= nbytes
            self._room.notify_all()

    def add(self, future: Any, nbytes: int) -> None:
        """Watch a write that has been started."""
        ticket = next(self._tickets)
        with self._room:
            self._futures[ticket] = future
        future.add_done_callback(partial(self._done, ticket, nbytes))

    def wait(self, *, quietly: bool = False) -> None:
        """Wait for everything that is pending now.

        Raises:
            StorageError: a write failed, now or earlier.
        """
        with self._room:
            awaited = set(self._futures)
            self._room.wait_for(lambda: awaited.isdisjoint(self._futures))
            if not quietly:
                self._raise()

    def _done(self, ticket: int, nbytes: int, future: Any) -> None:
        error = future.exception()
        with self._room:
            self._error = self._error or error
            del self._futures[ticket]
            self._bytes -= nbytes
            self._room.notify_all()

    def _raise(self) -> None:
        if self._error is not None:
            raise translated(self._error, self._uri) from self._error


class Buffers:
    """Private copies of what is being written, in memory that is used again: first touch costs more than copying.

    tensorstore may hold on to an array after the commit, so its memory is free again only once the array is gone.
    """

    def __init__(self) -> None:
        self._idle: list[memoryview] = []
        self._lock = threading.Lock()

    def copy(self, data: memoryview, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """An array of these bytes that nobody else will change."""
        import numpy  # noqa: ICN001

        memory = self._take(len(data))
        memory[: len(data)] = data
        array = numpy.ndarray(shape, dtype, buffer=memory[: len(data)])
        weakref.finalize(array, self._give, memory).atexit = False
        return array

    def _take(self, nbytes: int) -> memoryview:
        with self._lock:
            for index, memory in enumerate(self._idle):
                if nbytes <= len(memory) <= 2 * nbytes:
                    return self._idle.pop(index)
        return memoryview(bytearray(nbytes))

    def _give(self, memory: memoryview) -> None:
        with self._lock:
            self._idle.append(memory)
            while sum(map(len, self._idle)) > PENDING_BYTES:
                self._idle.pop(0)


class DatabaseSync:
    """Syncs what is new in a local OCDBT database since the last time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._synced: set[str] = set()

    def __call__(self) -> None:
        """Sync the data files that are new (they never change) and the manifest (it does)."""
        data = self._folder / "d"
        names = {entry.name for entry in os.scandir(data)} if data.is_dir() else set[str]()
        for name in sorted(names - self._synced):
            if not name.endswith(LOCK_SUFFIX):
                sync_file(data / name)
                self._synced.add(name)
        for place in (data, self._folder):
            if place.is_dir():
                sync_folder(place)
        sync_file(self._folder / MANIFEST)


def sync_everything(folder: Path) -> None:
    """Sync every file and folder below."""
    for home, _folders, files in os.walk(folder):
        for name in files:
            sync_file(Path(home) / name)
        sync_folder(Path(home))


def sync_file(file: Path) -> None:
    """Make the contents of a file durable."""
    descriptor = os.open(file, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
