"""read_ahead: the bytes of a range of a remote file, read in order by large requests, the next while one is used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from wherry.storage.ranges import LARGEST, request_pool

if TYPE_CHECKING:
    from concurrent.futures import Future

    from wherry.storage.location import Location

STEP = LARGEST // 2  # bytes of one request; one is used while the next is read


class ReadAhead:
    """Bytes [offset, offset + length) of a file; for one thread that reads them mostly in order."""

    def __init__(self, place: Location, offset: int, length: int) -> None:
        """Nothing is read yet.

        Args:
            place: the file.
            offset: of the range in the file.
            length: of the range, in bytes.
        """
        self._place, self._offset, self._length = place, offset, length
        self._start, self._data = 0, b""
        self._next: tuple[int, Future[bytes]] | None = None

    def read(self, start: int, stop: int) -> bytes:
        """Bytes [start, stop) of the range; fewer at its end, and where the file ends.

        Raises:
            NotFoundError, StorageError: as `Location.read`.
        """
        stop, parts = min(stop, self._length), list[bytes]()
        while start < stop:
            if not self._start <= start < self._start + len(self._data):
                self._load(start)
            at = start - self._start
            part = self._data[at : at + stop - start]
            if not part:
                break  # the file ends early
            parts.append(part)
            start += len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _load(self, start: int) -> None:
        """Take the bytes from `start` on, and request those after them."""
        expected = self._next is not None and self._next[0] == start
        data = self._next[1].result() if self._next and expected else self._request(start)
        self._start, self._data = start, data
        after = start + len(data)
        more = data and after < self._length
        self._next = (after, request_pool().submit(self._request, after)) if more else None

    def _request(self, start: int) -> bytes:
        return self._place.read(self._offset + start, self._offset + min(start + STEP, self._length))
