"""Locates the arrays of a numpy pickle: raw in the file, in memory if they are small, or encoded as text.

Protocol 2 encodes bytes as the UTF-8 of their Latin-1 characters: those from 128 on take two bytes. One pass over the
text counts them page by page; afterwards any range can be read with the memory of a page.
"""

from __future__ import annotations

from bisect import bisect_right
from threading import Lock
from typing import TYPE_CHECKING

from wherry.errors import CorruptError
from wherry.integrations.containers.flat.strides import PlacedTensor
from wherry.integrations.containers.pickle.source import PAGE
from wherry.integrations.containers.pickle.values import Far
from wherry.storage.location import Location
from wherry.store.store import READ_ONLY, Entry, Store

if TYPE_CHECKING:
    from wherry.integrations.containers.pickle.numpy_objects import PickledArray

_CONTINUED, _MASK = 0x80, 0xC0


def placed_array(file: Location, array: PickledArray) -> PlacedTensor:
    """The position of an array's bytes."""
    data = array.data
    where, start, decoded = file, 0, True
    if isinstance(data, Far) and not data.text:
        start, length, decoded = data.start, data.length, False
    elif isinstance(data, Far):
        where, length = Location(_MemoryStore(Latin(file, data)), file.path), data.length
    else:
        where, length = Location(_MemoryStore(data), file.path), len(data)
    return PlacedTensor(
        where, start, length, 0, array.shape, array.strides, array.dtype, array.big_endian, decoded=decoded
    )


class Latin:
    """Bytes that are stored in a file as the UTF-8 of their Latin-1 characters."""

    def __init__(self, file: Location, far: Far) -> None:
        self._file = file
        self._far = far
        self._begins: list[int] = []
        self._lock = Lock()

    def __getitem__(self, index: slice) -> bytes:
        with self._lock:
            self._begins = self._begins or self._index()
        start, stop = index.start, index.stop
        pieces: list[bytes] = []
        page = bisect_right(self._begins, start) - 1
        while page < len(self._begins) and self._begins[page] < stop:
            begin = self._begins[page]
            pieces.append(self._decode(page)[max(start - begin, 0) : stop - begin])
            page += 1
        return b"".join(pieces)

    def _index(self) -> list[int]:
        """The number of bytes that are encoded before each page of the text."""
        import numpy as np

        begins, count = [0], 0
        for page in range(-(-self._far.length // PAGE)):
            raw = np.frombuffer(self._page(page), "u1")
            count += raw.size - int(np.count_nonzero((raw & _MASK) == _CONTINUED))
            begins.append(count)
        return begins[:-1] or [0]

    def _page(self, number: int, more: int = 0) -> bytes:
        start = number * PAGE
        stop = min(start + PAGE + more, self._far.length)
        return self._file.read(self._far.start + start, self._far.start + stop)

    def _decode(self, page: int) -> bytes:
        """The characters that begin in a page; the last one may end in the next."""
        raw = self._page(page, 1)
        first = 1 if page and raw[:1] and raw[0] & _MASK == _CONTINUED else 0
        last = PAGE + 1 if len(raw) > PAGE and raw[PAGE] & _MASK == _CONTINUED else PAGE
        try:
            return raw[first:last].decode("utf-8").encode("latin-1")
        except UnicodeError as error:
            raise CorruptError(
                "invalid Latin-1 text for the bytes of an array", uri=self._file.uri
            ) from error


class _MemoryStore(Store):
    """A store of one file: bytes in memory, or bytes that are decoded on demand."""

    protocol = "pickle"
    capabilities = READ_ONLY

    def __init__(self, data: bytes | Latin) -> None:
        self._data = data

    def stat(self, path: str) -> Entry | None:
        """See Store."""
        return Entry(path.rsplit("/", 1)[-1], 0, is_dir=False)

    def entries(self, path: str) -> list[Entry]:
        """See Store."""
        raise NotADirectoryError(path)

    def read(self, path: str, start: int, stop: int) -> bytes:
        """See Store."""
        del path
        return self._data[slice(start, stop)]
