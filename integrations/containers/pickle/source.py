"""The bytes that a pickle machine reads, without loading the file: a memory map, or pages of a remote or huge file.

Large pickles are mostly tensor data that the machine skips; only the pages that it reads are loaded.
"""

from __future__ import annotations

import errno
import mmap
from collections import OrderedDict
from contextlib import contextmanager
from typing import TYPE_CHECKING, overload

from wherry.errors import CorruptError, NotFoundError, storage_error
from wherry.storage.stores import LocalStore

if TYPE_CHECKING:
    from collections.abc import Generator

    from wherry.integrations.containers.pickle.values import PickleSource
    from wherry.storage.location import Location

PAGE = 1 << 20
_PAGES = 32


class PagedFile:
    """A remote file as a sequence of bytes; the pages that were read last are cached."""

    def __init__(self, location: Location, size: int) -> None:
        self._location = location
        self._size = size
        self._pages: OrderedDict[int, bytes] = OrderedDict()
        self._number, self._page = -1, b""

    def __len__(self) -> int:
        return self._size

    @overload
    def __getitem__(self, index: int, /) -> int: ...
    @overload
    def __getitem__(self, index: slice, /) -> bytes: ...
    def __getitem__(self, index: int | slice, /) -> int | bytes:
        if isinstance(index, slice):
            start, stop, _ = index.indices(self._size)
            return self._bytes(start, stop)
        if index // PAGE != self._number:
            self._number, self._page = index // PAGE, self._fetch(index // PAGE)
        return self._page[index % PAGE]

    def find(self, sub: bytes, start: int, stop: int, /) -> int:
        """As `bytes.find`."""
        found = self._bytes(start, stop).find(sub)
        return found if found < 0 else start + found

    def _bytes(self, start: int, stop: int) -> bytes:
        first, last = start // PAGE, max(stop - 1, start) // PAGE
        if first == last:
            return self._fetch(first)[start - first * PAGE : stop - first * PAGE]
        return self._location.read(start, stop)

    def _fetch(self, number: int) -> bytes:
        page = self._pages.get(number)
        if page is None:
            page = self._pages[number] = self._location.read(
                number * PAGE, min((number + 1) * PAGE, self._size)
            )
            if len(page) != min(PAGE, self._size - number * PAGE):
                raise CorruptError("the file was truncated while it was read", uri=self._location.uri)
            if len(self._pages) > _PAGES:
                self._pages.popitem(last=False)
        return page


@contextmanager
def open_for_walk(location: Location) -> Generator[PickleSource]:
    """The bytes of a file, for random access.

    Raises:
        NotFoundError: the file does not exist.
        CorruptError: the file was truncated while it was read.
        HostileError: it is not a regular file, or a link points to a forbidden place.
        StorageError: the storage failed.
    """
    entry = location.stat()
    size = entry.size if entry else 0
    if not isinstance(location.store, LocalStore) or not size:
        yield PagedFile(location, size)
        return
    mapped = _mapped_file(location)
    if mapped is None:
        yield PagedFile(location, size)
        return
    with mapped:
        yield mapped


def _mapped_file(location: Location) -> mmap.mmap | None:
    """The file as a memory map; None if it does not fit into the address space of a limited process."""
    assert isinstance(location.store, LocalStore)
    try:
        with location.store.descriptor(location.path) as descriptor:
            return mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
    except (FileNotFoundError, IsADirectoryError) as error:
        raise NotFoundError(
            f"file not found: {location.name}", uri=location.uri, cure="check the path"
        ) from error
    except OSError as error:
        if error.errno == errno.ENOMEM:
            return None
        raise storage_error(error, location.uri) from error
    except ValueError as error:
        raise CorruptError("the file was truncated while it was opened", uri=location.uri) from error
