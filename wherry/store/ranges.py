"""ranges: reads many ranges of one file with few requests, several at a time, in bounded memory.

Ranges with a small gap between them are read together, and large ones in parts, so that every request moves a few MiB:
on an object store a request costs as much time as moving 1 to 4 MiB over its connection. One long range is read in
order by `ReadAhead`, the next request while the bytes of one are used.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import wait
from typing import TYPE_CHECKING

from wherry.core import threads
from wherry.core.lazy_dataclass import dataclass
from wherry.errors import IncompleteError, UsageError

if TYPE_CHECKING:
    from concurrent.futures import Future

    from wherry.store.location import Location


GAP = 1 << 20  # a smaller gap between two ranges is read with them
LARGEST = 8 << 20  # bytes of one request at most; the parts of a larger range have at least half
MOST_REQUESTS = 10  # at a time: 80 MiB, so that a conversion stays within 250 MB
_DEFAULT_MEMORY = 64 << 20
_pool: threads.ThreadPool | None = None
_pool_lock = threading.Lock()
STEP = LARGEST // 2  # bytes of one request; one is used while the next is read


@dataclass(frozen=True, slots=True)
class RangePart:
    """Some or all of the bytes of one range.

    Attributes:
        number: index of the range.
        offset: where the bytes begin in the range.
        data: the bytes.
    """

    number: int
    offset: int
    data: memoryview


@dataclass(frozen=True, slots=True)
class RangeRequest:
    """One request, and which bytes of it belong to which range.

    Attributes:
        start, stop: the bytes of the file.
        parts: start and stop in the file, index of the range, and start of the range, each.
    """

    start: int
    stop: int
    parts: tuple[tuple[int, int, int, int], ...]


def requests_for(ranges: Sequence[tuple[int, int]]) -> list[RangeRequest]:
    """The requests that read ranges `(start, stop)`, in the order of the file; empty ranges need none.

    Raises:
        UsageError: a range ends before it starts, or starts below 0.
    """
    for start, stop in ranges:
        if not 0 <= start <= stop:
            raise UsageError(f"invalid byte range [{start}, {stop})", cure="pass 0 <= start <= stop")
    found: list[RangeRequest] = []
    for part in sorted(_parts(ranges)):
        start, stop, *_range = part
        last = found[-1] if found else None
        if last is None or start - last.stop >= GAP or max(stop, last.stop) - last.start > LARGEST:
            found.append(RangeRequest(start, stop, (part,)))
        else:
            found[-1] = RangeRequest(last.start, max(stop, last.stop), (*last.parts, part))
    return found


def read_ranges(
    place: Location, ranges: Sequence[tuple[int, int]], memory: int = _DEFAULT_MEMORY
) -> Iterator[RangePart]:
    """The bytes of ranges of a file, in the order of the file; each byte of a range once.

    Args:
        place: the file.
        ranges: `(start, stop)` of each, in any order; they may overlap.
        memory: bytes that are held or requested at a time; at least one request is.

    Raises:
        UsageError: a range is invalid.
        IncompleteError: the file ends before a range does.
        NotFoundError, StorageError: see `Location.read`.
    """
    planned = requests_for(ranges)
    most = min(max(memory // LARGEST, 1), MOST_REQUESTS)
    if len(planned) <= 1 or most == 1 or place.store.capabilities.local:
        for request in planned:
            yield from _split(request, _read(place, request))
        return
    with threads.executor(most, "wherry-ranges", numbers=False) as pool:
        try:
            yield from _read_ahead(place, planned, most, pool)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def fill_together(requests: Sequence[tuple[Location, RangeRequest, memoryview]]) -> None:
    """Fill a buffer for each request to a file of a remote store, as many at a time as there are connections.

    Raises: what `read_ranges` does.
    """
    if len(requests) == 1:
        _fill(*requests[0])
        return
    futures = [request_pool().submit(_fill, *request) for request in requests]
    try:
        for future in futures:
            future.result()
    finally:
        for future in futures:
            future.cancel()
        wait(futures)  # nothing may fill a buffer that its owner has given back


def request_pool() -> threads.ThreadPool:
    """The threads of this process that wait for requests; a task of it must not wait for another one."""
    global _pool  # noqa: PLW0603  state of the process
    with _pool_lock:
        if _pool is None:
            _pool = threads.executor(MOST_REQUESTS, "wherry-requests", numbers=False)
        return _pool


def _begin_anew() -> None:
    """Forget the threads in a forked child, where they do not exist."""
    global _pool, _pool_lock
    _pool, _pool_lock = None, threading.Lock()


os.register_at_fork(after_in_child=_begin_anew)


def _read_ahead(
    place: Location, planned: Iterable[RangeRequest], most: int, pool: threads.ThreadPool
) -> Iterator[RangePart]:
    """Keep this many requests running, read, or held by the caller."""
    waiting: deque[tuple[RangeRequest, Future[bytes]]] = deque()
    for request in planned:
        if len(waiting) == most:
            first, result = waiting.popleft()
            yield from _split(first, result.result())
            del result  # its bytes, before the next ones are requested
        waiting.append((request, pool.submit(_read, place, request)))
    while waiting:
        first, result = waiting.popleft()
        yield from _split(first, result.result())


def _parts(ranges: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int, int, int]]:
    for number, (start, stop) in enumerate(ranges):
        size, count = stop - start, -(-(stop - start) // LARGEST)
        for part in range(count):
            yield start + size * part // count, start + size * (part + 1) // count, number, start


def _split(request: RangeRequest, data: bytes) -> Iterator[RangePart]:
    view = memoryview(data)
    for start, stop, number, begin in request.parts:
        yield RangePart(number, start - begin, view[start - request.start : stop - request.start])


def _read(place: Location, request: RangeRequest) -> bytes:
    data = place.read(request.start, request.stop)
    _require_whole(place, request, len(data))
    return data


def _fill(place: Location, request: RangeRequest, buffer: memoryview) -> None:
    _require_whole(place, request, place.fill(request.start, buffer))


def _require_whole(place: Location, request: RangeRequest, count: int) -> None:
    if count != request.stop - request.start:
        raise IncompleteError(
            f"the file ends early: expected {request.stop} bytes, got {request.start + count}",
            uri=place.uri,
            cure="copy or save the checkpoint again; it was truncated",
        )


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
