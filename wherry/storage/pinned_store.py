"""PinnedStore: the local files of one opened checkpoint; each stays the same file from the first read to the last.

A file is opened once and read through that descriptor, so renaming another file over it does not change what is read.
If too many files are open, a descriptor is closed and its file is opened again later; it must then be the same file as
before. `wherry.formats.pin` detects files that are changed in place.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from wherry.errors import MismatchError
from wherry.storage.descriptors import Descriptors
from wherry.storage.open_file import open_regular, read_descriptor
from wherry.storage.stores import LocalStore, entry_of

if TYPE_CHECKING:
    from collections.abc import Generator

    from wherry.storage.links import Root
    from wherry.store.store import Entry

CHANGED_CURE = "convert it again once nothing writes to it"


class PinnedStore(LocalStore):
    """Local files that are opened once; `close` closes them."""

    def __init__(self, root: Root | None) -> None:
        super().__init__(root)
        self._descriptors = Descriptors(self._open)
        self._first: dict[str, Entry] = {}

    def first_seen(self, path: str) -> Entry | None:
        """The entry of a file when it was first opened; None if it was never read."""
        return self._first.get(path)

    def read(self, path: str, start: int, stop: int) -> bytes:
        """See Store."""
        with self.descriptor(path) as descriptor:
            return read_descriptor(descriptor, start, stop)

    @contextmanager
    def descriptor(self, path: str) -> Generator[int]:
        """The descriptor of a file; see LocalStore.

        Raises:
            MismatchError: the file at the path was replaced.
            HostileError, OSError: as `open_regular`.
        """
        with self._descriptors.using(path) as descriptor:
            yield descriptor

    def close(self) -> None:
        """Close the files, and the folder of the root."""
        self._descriptors.close()
        if self.root is not None and self.root.folder is not None:
            self.root.folder.close()

    def __del__(self) -> None:
        self.close()

    def _open(self, path: str) -> int:
        descriptor = open_regular(path, root=self.root)
        now = entry_of(Path(path).name, os.fstat(descriptor))
        if self._first.setdefault(path, now).inode != now.inode:
            os.close(descriptor)
            raise MismatchError("the file was replaced while it was read", uri=path, cure=CHANGED_CURE)
        return descriptor
