"""StagedObjects: a store as one run sees it before the commit, with its own objects under their final names.

Writers put files into it, and the reader of the finished target reads them back from it: what is complete from the
store, a commit member from where it is held back.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import replace
from typing import TYPE_CHECKING

from wherry.store.store import Entry, Store, StoreOver

if TYPE_CHECKING:
    from wherry.store.location import Location
    from wherry.target.upload_run import UploadRun


_BLOCK = 16 << 10  # bytes: the end of one item of a DCP file, and the beginning of the next
_MOST_BLOCKS = 64


class StagedObjects(StoreOver):
    """The store of the target of one run; see Store.

    Attributes:
        run: the objects of the run.
    """

    def __init__(self, base: Store, run: UploadRun) -> None:
        super().__init__(base)
        self.capabilities = replace(self.capabilities, staged=True)
        self.run = run
        self._blocks: OrderedDict[tuple[str, int], bytes] = OrderedDict()
        self._lock = threading.Lock()

    def stat(self, path: str) -> Entry | None:
        """See Store."""
        name = path.rpartition("/")[2]
        self.run.settle(path)
        found = self.inner.stat(self.run.place(path))
        if found is None and self.run.names_in(path):
            return Entry(name, 0, is_dir=True)
        return found and replace(found, name=name)

    def entries(self, path: str) -> list[Entry]:
        """See Store."""
        try:
            found = {entry.name: entry for entry in self.inner.entries(path)}
        except FileNotFoundError:
            found = {}
        for name in self.run.names_in(path) - found.keys():
            entry = self.stat(f"{path.rstrip('/')}/{name}")
            if entry is not None:
                found[name] = entry
        if not found:
            raise FileNotFoundError(path)
        return sorted(found.values(), key=lambda entry: entry.name)

    def read(self, path: str, start: int, stop: int) -> bytes:
        """See Store. A short read of a complete object, which never changes, is served from blocks that were read."""
        self.run.settle(path)
        size = self.run.complete_size(path)
        if size is None or stop - start > _BLOCK:
            return self.inner.read(self.run.place(path), start, stop)
        first, stop = start // _BLOCK * _BLOCK, min(stop, size)
        blocks = [self._block(path, at, min(at + _BLOCK, size)) for at in range(first, stop, _BLOCK)]
        return b"".join(blocks)[start - first : max(stop - first, 0)]

    def readinto(self, path: str, start: int, buffer: memoryview, mark: str = "") -> int:
        """See Store."""
        self.run.settle(path)
        return self.inner.readinto(self.run.place(path), start, buffer, mark)

    def put(self, path: str, data: bytes, *, create_only: bool = False) -> None:  # noqa: ARG002  always is
        """See Store."""
        self.run.put(path, data)

    def _block(self, path: str, start: int, stop: int) -> bytes:
        with self._lock:
            held = self._blocks.pop((path, start), None)
        if held is None:
            memory = memoryview(bytearray(stop - start))  # `readinto` goes past the client of the library
            held = bytes(memory[: self.inner.readinto(self.run.place(path), start, memory)])
        with self._lock:
            self._blocks[path, start] = held
            while len(self._blocks) > _MOST_BLOCKS:
                self._blocks.popitem(last=False)
        return held


def run_of(folder: Location) -> UploadRun:
    """The run whose staged objects a location is in."""
    store = folder.store
    while not isinstance(store, StagedObjects):
        assert isinstance(store, StoreOver), "the caller has checked that it is staged"
        store = store.inner
    return store.run


def is_readable(location: Location) -> bool:
    """Whether the file at a location can be read: in the staged objects of a run, once its object is complete."""
    return (
        not location.store.capabilities.staged or run_of(location).file_at(location.path).stored is not None
    )
