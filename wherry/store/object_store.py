"""ObjectStore: the rules of parts, puts and removals, over the single calls of a provider.

- An answer that was lost is resolved by asking: what the store has is the caller's own if its run, its size and its
  checksum are those of what was sent.
- A state is named by whoever acts on it; what is in another state is left as it is.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any

from wherry.runtime import threads
from wherry.store.body import views_of
from wherry.store.checksums import CRC32C, checksum_of, is_same, joined_checksum
from wherry.store.fsspec_store import FsspecStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from wherry.store.body import Content
    from wherry.store.store import Part, Store, StoredObject, Upload

_AT_ONCE = 16  # small requests at the same time


class ObjectStore(FsspecStore):
    """A store of objects that takes parts.

    Attributes:
        algorithm: of the checksum of an object that is put at once.
    """

    algorithm = CRC32C

    def put_object(self, path: str, data: Content, run: str, *, replaces: str = "") -> StoredObject:
        """See Store."""
        views = views_of(data)
        checksum = checksum_of(views, self.algorithm)
        try:
            return self._put(path, views, checksum, run, replaces)
        except (FileExistsError, FileNotFoundError) as error:
            if (found := self._own(path, run, sum(map(len, views)), checksum)) is None:
                raise FileExistsError(path) from error
            return found

    def remove_object(self, path: str, mark: str, guard: Callable[[], None] = lambda: None) -> bool:
        """See Store. The state is compared here too, because not every store compares it.

        A client repeats a removal whose answer is lost, and the store then answers that the state is another one, or
        that there is no object.
        """
        found, sent = self.head(path), 0
        if found is None or found.mark != mark:
            return False
        guard()

        async def remove(fs: Any) -> bool:
            nonlocal sent
            if sent and await self._mark_of(fs, path) != mark:
                return False
            sent += 1
            await self._delete(fs, path, mark)
            return True

        try:
            return self.request(path, remove)
        except (FileExistsError, FileNotFoundError):
            return sent > 0 and self.head(path) is None

    def remove_many(self, marks: Mapping[str, str]) -> None:
        """See Store."""
        for_each(self.remove_object, marks, marks.values())

    def copy_object(
        self, source: str, mark: str, path: str, run: str, guard: Callable[[], None] = lambda: None
    ) -> StoredObject:
        """See Store."""
        found = self.head(source)
        if found is None or found.mark != mark:
            raise FileNotFoundError(f"{source} in the state {mark}")
        if found.nbytes:
            return self._copy(source, found, path, run, guard)
        guard()
        return self.put_object(path, b"", run)

    def assemble(self, upload: Upload, parts: Sequence[Part]) -> StoredObject:
        """See Store."""
        try:
            return self._assemble(upload, parts)
        except (FileExistsError, FileNotFoundError):
            nbytes = sum(part.nbytes for part in parts)
            if (found := self._own(upload.path, upload.run, nbytes, joined_checksum(parts))) is None:
                raise
            self.abort(upload)
            return found

    def _own(self, path: str, run: str, nbytes: int, checksum: str) -> StoredObject | None:
        """The object at a path, if it is the one that a call sent whose answer was lost."""
        found = self.head(path)
        return found if found is not None and is_same(found, run, nbytes, checksum) else None

    def _put(
        self, path: str, data: Sequence[memoryview], checksum: str, run: str, replaces: str
    ) -> StoredObject:
        """Put an object that is in a state; that does not exist, if none is named.

        Raises:
            FileExistsError, FileNotFoundError: it is in another one.
        """
        raise NotImplementedError

    async def _mark_of(self, fs: Any, path: str) -> str:
        """The state of an object.

        Raises:
            FileNotFoundError: it does not exist.
        """
        raise NotImplementedError

    async def _delete(self, fs: Any, path: str, mark: str) -> None:
        """Remove an object in one state.

        Raises:
            FileExistsError, FileNotFoundError: it is in another one, or does not exist.
        """
        raise NotImplementedError

    def _copy(
        self, source: str, found: StoredObject, path: str, run: str, guard: Callable[[], None]
    ) -> StoredObject:
        """Create an object of all bytes of one that is not empty, in the state in which it was found; see Store."""
        raise NotImplementedError

    def _assemble(self, upload: Upload, parts: Sequence[Part]) -> StoredObject:
        """Make the object of all parts.

        Raises:
            FileExistsError: an object exists at the path.
            FileNotFoundError: the upload no longer exists.
        """
        raise NotImplementedError


def for_each(call: Callable[..., Any], *items: Iterable[Any], at_once: int = _AT_ONCE) -> list[Any]:
    """Call a function for each item, or for one of each of several rows; some at the same time.

    Raises: what the function raises.
    """
    with threads.executor(at_once, "wherry-objects", numbers=False) as pool:
        return list(pool.map(call, *items))


def heads(store: Store, paths: Iterable[str]) -> Iterator[tuple[str, StoredObject | None]]:
    """The object at each path, None if there is none; some are requested at the same time.

    Raises:
        StorageError: the storage failed.
    """
    waiting, count = iter(paths), 1
    with threads.executor(_AT_ONCE, "wherry-heads", numbers=False) as pool:
        while some := list(islice(waiting, count)):  # a caller may stop after the first of a million
            yield from zip(some, pool.map(store.head, some), strict=True)
            count = min(2 * count, _AT_ONCE)
