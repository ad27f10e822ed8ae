"""PinnedStore: the local files of one opened checkpoint, each of them the same file from the first read to the last.

A file is opened once and read by that descriptor, so that a file which is renamed over it changes nothing of what is
read. Where many files are open, a descriptor makes room for another and its file is opened again later; then it must
still be the file that was read before. A file that is changed in place is noticed by `wherry.pin`.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from wherry.descriptors import Descriptors
from wherry.errors import MismatchError
from wherry.store import LocalStore, entry_of

if TYPE_CHECKING:
    from collections.abc import Generator

    from wherry.location import Entry

CHANGED_CURE = "convert it again once nothing writes to it"


class PinnedStore(LocalStore):
    """Local files that are opened once; `close` releases them."""

    def __init__(self) -> None:
        self._descriptors = Descriptors(self._open)
        self._first: dict[str, Entry] = {}

    def first_seen(self, path: str) -> Entry | None:
        """What the file at a path was when it was opened first; None where nothing was read of it."""
        return self._first.get(path)

    def read(self, path: str, start: int, stop: int | None) -> bytes:
        """See Store."""
        with self.descriptor(path) as descriptor:
            size = os.fstat(descriptor).st_size
            return _read(descriptor, start, size if stop is None else min(stop, size))

    @contextmanager
    def descriptor(self, path: str) -> Generator[int]:
        """The descriptor of a file; see LocalStore.

        Raises:
            MismatchError: another file is at the path now.
            OSError: the file could not be opened.
        """
        with self._descriptors.using(path) as descriptor:
            yield descriptor

    def close(self) -> None:
        """Close the files."""
        self._descriptors.close()

    def __del__(self) -> None:
        self.close()

    def _open(self, path: str) -> int:
        with super().descriptor(path) as opened:
            now = entry_of(Path(path).name, os.fstat(opened))
            if now.is_dir:
                raise IsADirectoryError(path)
            first = self._first.setdefault(path, now)
            if now.inode != first.inode:
                raise MismatchError("the file was replaced while it was read", uri=path, cure=CHANGED_CURE)
            return os.dup(opened)


def _read(descriptor: int, start: int, stop: int) -> bytes:
    """Bytes of a file; fewer where it ends earlier."""
    pieces: list[bytes] = []
    while start < stop and (piece := os.pread(descriptor, stop - start, start)):
        pieces.append(piece)
        start += len(piece)
    return b"".join(pieces)
