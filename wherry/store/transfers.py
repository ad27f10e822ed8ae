"""transfers: the body of a request or an answer, over a blocking connection in the thread that has the bytes.

The clients of the storage libraries send and receive everything in one thread, and copy it in small blocks. Here the
library still makes the request, with its address, its login and its signature, and the body goes between the socket and
the buffer. Where a plain connection may differ from that of the library, behind a proxy, the library carries it.
"""

from __future__ import annotations

import os
import threading
import time
import urllib.request
from collections.abc import Iterable, Iterator, Mapping
from functools import cache, partial
from typing import Any
from urllib.parse import urlsplit

from wherry.core.lazy_dataclass import dataclass
from wherry.errors import StorageError
from wherry.store.addresses import RefusedConnectionError, checked_pools, require_address

# The cure of an answer that is no range.
RANGE_CURE = "check the proxies between this machine and the store: they must pass on the header Range"
_SENT = 1 << 20  # bytes at a time
_RECEIVED = 256 << 10  # bytes at a time, in memory that malloc keeps for each thread
CONNECT_SECONDS = 10.0
CONNECTIONS = 32  # to one store
_LONGEST_TEXT = 64 << 10  # bytes of an answer without a buffer
_FIRST_FAILURE = 300  # the smallest status of HTTP that brings no body of an object


class BufferFill:
    """A buffer that one attempt of a read fills, from its beginning.

    Attributes:
        size: of the buffer, in bytes.
        count: bytes that it has.
    """

    def __init__(self, buffer: memoryview) -> None:
        self.size, self.count = len(buffer), 0
        self._buffer: memoryview | None = buffer
        self._lock = threading.Lock()

    def add(self, data: bytes) -> None:
        """Take the next bytes; those of an attempt that was given up are dropped.

        Raises:
            StorageError: they are more than the buffer holds.
        """
        with self._lock:
            if self._buffer is None:
                return
            stop = self.count + len(data)
            if stop > self.size:
                raise StorageError(
                    f"the store sent more than the {self.size} requested bytes",
                    cure=RANGE_CURE,
                )
            self._buffer[self.count : stop] = data
            self.count = stop

    def close(self) -> None:
        """The attempt is over: an answer that is late must not reach a buffer that now has another use."""
        with self._lock:
            self._buffer = None


@dataclass(frozen=True, slots=True)
class BodyRequest:
    """A request as a library has made it, without its body.

    Attributes:
        method: of HTTP.
        url: complete, quoted.
        headers: all that the library states.
        certificates: file with the trusted certificates; empty for those of the system.
    """

    method: str
    url: str
    headers: Mapping[str, str]
    certificates: str = ""


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """An answer whose body is short, or went into a buffer.

    Attributes:
        status: of HTTP.
        headers: their names in lower case.
        body: the bytes that went into no buffer.
    """

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def is_success(self) -> bool:
        """Whether the server did what was requested."""
        return self.status < _FIRST_FAILURE


def is_plain(url: str) -> bool:
    """Whether every library reaches a URL in the same way: without a proxy."""
    place, proxies = urlsplit(url), urllib.request.getproxies()
    named = place.scheme in proxies or "all" in proxies
    return not named or bool(urllib.request.proxy_bypass(place.hostname or ""))


def exchange(
    request: BodyRequest,
    seconds: float,
    *,
    views: Iterable[memoryview] | None = None,
    into: BufferFill | None = None,
) -> HttpAnswer:
    """Send a request once, with or without a body, and take its answer.

    Args:
        request: all but the body.
        seconds: that it may take, the whole transfer included.
        views: the body, in pieces.
        into: takes the body of a successful answer.

    Raises:
        TimeoutError: it took longer.
        AddressError: the host leads to an address that must not be reached.
        StorageError: the answer is longer than the buffer.
        urllib3.exceptions.HTTPError: the connection failed.
    """
    from urllib3 import Timeout

    deadline = time.monotonic() + seconds
    pieces = list(views) if views is not None else None
    headers = dict(request.headers)
    if pieces is not None:
        headers["Content-Length"] = str(sum(one.nbytes for one in pieces))
    try:
        answer: Any = _pool(request.certificates).urlopen(
            request.method,
            request.url,
            body=None if pieces is None else _blocks(pieces, deadline),
            headers=headers,
            redirect=False,
            retries=False,
            preload_content=False,
            decode_content=False,
            timeout=Timeout(connect=min(CONNECT_SECONDS, seconds), read=seconds),
        )
    except RefusedConnectionError as error:
        raise error.__cause__ or error from None
    try:
        known = {name.lower(): value for name, value in answer.headers.items()}
        if into is None or answer.status >= _FIRST_FAILURE:
            return HttpAnswer(answer.status, known, _text(answer))
        for block in answer.stream(_RECEIVED):
            into.add(block)
            _require_time(deadline)
        return HttpAnswer(answer.status, known, b"")
    finally:
        answer.close()  # a connection whose answer was read to its end is in the pool again already


def _text(answer: Any) -> bytes:
    """The beginning of a response's body; raises if the body was cut, which a single read does not notice."""
    found = bytearray()
    for block in answer.stream(_LONGEST_TEXT):
        found += block
        if len(found) >= _LONGEST_TEXT:
            break
    return bytes(found)


def _blocks(views: Iterable[memoryview], deadline: float) -> Iterator[memoryview]:
    for view in views:
        whole = view.cast("B")
        for start in range(0, len(whole), _SENT):
            _require_time(deadline)
            yield whole[start : start + _SENT]


def _require_time(deadline: float) -> None:
    if time.monotonic() > deadline:
        raise TimeoutError


@cache
def _pool(certificates: str) -> Any:
    """The connections to all hosts; the address of each is checked before a byte is sent to it."""
    from urllib3 import PoolManager

    pools = PoolManager(maxsize=CONNECTIONS, ca_certs=certificates or None)
    # Only the configuration names the servers of buckets: they may be on this machine.
    pools.pool_classes_by_scheme = checked_pools(partial(require_address, local=True))
    return pools


os.register_at_fork(after_in_child=_pool.cache_clear)  # a child must not use the connections of its parent
