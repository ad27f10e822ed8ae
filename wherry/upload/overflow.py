"""overflow: pieces of incomplete parts that wait in the store, because memory may hold no more of them.

A pass that fills many parts at once, as one through another system's layout does, would hold an edge of each tensor
until its neighbour comes. Here pieces of the fullest incomplete parts are put as one object among the staging objects,
and each part reads its own when it is complete. Such an object belongs to one run: a later run removes it, and sends
its bytes again.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from wherry.errors import StorageError
from wherry.store.body import Body
from wherry.store.checksums import PartBytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from wherry.store.store import Store, StoredObject

PREFIX = "overflow-"


class StoredBytes:
    """Bytes of several parts that are held until their object is put, and are read from it afterwards.

    Attributes:
        nbytes: number of them.
    """

    def __init__(self, path: str, store: Store, run: str, read: Callable[[str, int, int], bytes]) -> None:
        """No bytes yet.

        Args:
            path: of the object.
            store: the store.
            run: id of the run.
            read: reads bytes [start, stop) of an object.
        """
        self.nbytes = 0
        self._path, self._store, self._run, self._read = path, store, run, read
        self._pieces: list[memoryview] | None = []
        self._found: StoredObject | None = None
        self._users = 0
        self._lock = threading.Lock()

    def append(self, pieces: list[memoryview]) -> int:
        """Add the pieces of one part, before the object is put; returns where they begin."""
        assert self._pieces is not None
        start = self.nbytes
        self._pieces += pieces
        self.nbytes += sum(map(len, pieces))
        self._users += 1
        return start

    def put(self) -> None:
        """Put the object, if a part still needs it; from now on the bytes are in the store only.

        Raises:
            StorageError: the storage failed.
        """
        with self._lock:
            if self._users and self._pieces is not None:
                self._found = self._store.put_object(self._path, PartBytes(self._pieces), self._run)
            self._pieces = None

    def bytes_of(self, start: int, stop: int) -> memoryview:
        """Bytes [start, stop).

        Raises:
            StorageError: the storage failed.
        """
        pieces = self._pieces
        if pieces is None:
            data = self._read(self._path, start, stop)
        else:
            body = Body(pieces)
            body.seek(start)
            data = body.read(stop - start)
        if len(data) != stop - start:
            raise StorageError(
                "an object of this run was altered or removed",
                uri=self._path,
                cure="run the conversion again",
            )
        return memoryview(data)

    def leave(self) -> None:
        """One part no longer needs its bytes; the last one removes the object.

        Raises:
            StorageError: the storage failed.
        """
        with self._lock:
            self._users -= 1
            if not self._users:
                self._remove()

    def drop(self) -> None:
        """Remove the object; no part can be completed any more.

        Raises:
            StorageError: the storage failed.
        """
        with self._lock:
            self._users = 0
            self._remove()

    def _remove(self) -> None:
        found, self._found = self._found, None
        if found is not None:
            self._store.remove_object(self._path, found.mark)


@dataclass(frozen=True, slots=True)
class StoredPiece:
    """A piece of a part whose bytes are [start, stop) of stored bytes; it is cut as a memoryview is."""

    whole: StoredBytes
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def __getitem__(self, cut: slice) -> StoredPiece:
        start, stop, _step = cut.indices(len(self))
        return StoredPiece(self.whole, self.start + start, self.start + stop)


@dataclass(slots=True)
class Overflow:
    """The objects of one run that hold pieces of incomplete parts; safe from several threads.

    Attributes:
        folder: path of the folder of staging objects.
        store: the store.
        run: id of the run.
        read: reads bytes [start, stop) of an object.
        made: the objects so far.
    """

    folder: str
    store: Store
    run: str
    read: Callable[[str, int, int], bytes]
    made: list[StoredBytes] = field(default_factory=list["StoredBytes"])

    def begin(self) -> StoredBytes:
        """A further object, without bytes yet."""
        path = f"{self.folder}/{PREFIX}{self.run}-{len(self.made):06d}"  # workers of one job share the folder
        one = StoredBytes(path, self.store, self.run, self.read)
        self.made.append(one)
        return one

    def remove(self) -> None:
        """Remove all objects.

        Raises:
            StorageError: the storage failed.
        """
        for one in self.made:
            one.drop()
