"""Descriptors: a bounded cache of open files, kept open over many reads or writes.

A descriptor in use is never closed; of the others, the least recently used one is closed first.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from contextlib import contextmanager
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Hashable

MOST_OPEN = 64
_Key = TypeVar("_Key", bound="Hashable")


class Descriptors(Generic[_Key]):
    """Open files by key; safe from several threads.

    Args:
        open_file: opens the file of a key and returns its descriptor.
    """

    def __init__(self, open_file: Callable[[_Key], int]) -> None:
        self._open_file = open_file
        self._open: OrderedDict[_Key, int] = OrderedDict()
        self._users: dict[_Key, int] = {}
        self._lock = threading.Lock()
        self._closed = False

    @contextmanager
    def using(self, key: _Key) -> Generator[int]:
        """The descriptor of a key while the block runs.

        Raises:
            OSError: the file could not be opened.
        """
        with self._lock:
            if key not in self._open:
                self._close_idle(max(len(self._open) - MOST_OPEN + 1, 0))
                self._open[key] = self._open_file(key)
            self._open.move_to_end(key)
            self._users[key] = self._users.get(key, 0) + 1
            descriptor = self._open[key]
        try:
            yield descriptor
        finally:
            with self._lock:
                self._users[key] -= 1
                if self._closed:
                    self._close_idle()

    def close(self) -> None:
        """Close every descriptor; one in use, or opened later, is closed when its block ends."""
        with self._lock:
            self._closed = True
            self._close_idle()

    def _close_idle(self, most: int | None = None) -> None:
        idle = [key for key in self._open if not self._users.get(key)]
        for key in idle[:most]:
            os.close(self._open.pop(key))
