"""http_reads: ranges of files on web servers, and which redirects are followed.

The library takes whatever a server answers to a range: a whole file, more bytes, other bytes, or a compressed answer
that becomes gigabytes. Here an answer is checked before it is read, and read no further than was asked.
"""

from __future__ import annotations

import re
from functools import cache
from typing import TYPE_CHECKING, Any

from wherry.errors import StorageError
from wherry.remote.addresses import LOCAL, METADATA, AddressError, guard, kind_of_host
from wherry.remote.buffer_fill import RANGE_CURE

if TYPE_CHECKING:
    from collections.abc import Mapping

    from wherry.remote.buffer_fill import BufferFill

PROTOCOLS = ("http", "https")
_BLOCK = 256 << 10  # bytes that are read at a time
_WHOLE, _BEYOND = 200, 416  # statuses of HTTP; a range has 206
_CONTENT_RANGE = re.compile(r"\s*bytes\s+(\d{1,19})-")


async def fill_http(fs: Any, url: str, start: int, into: BufferFill, _mark: str) -> None:
    """Fill a buffer with bytes of a file, from an offset on.

    Args:
        fs: fsspec's HTTPFileSystem.
        url: of the file.
        start: offset of the first byte.
        into: the buffer.

    Raises:
        EOFError: the file ends before the offset.
        FileNotFoundError: the file does not exist.
        StorageError: the answer is compressed, or not the range that was asked for.
    """
    asked = {"Range": f"bytes={start}-{start + into.size - 1}", "Accept-Encoding": "identity"}
    options = {**fs.kwargs, "headers": {**fs.kwargs.get("headers", {}), **asked}}
    session = await fs.set_session()
    async with session.get(fs.encode_url(url), **options) as answer:
        if answer.status == _BEYOND:
            raise EOFError(url)
        fs._raise_not_found_for_status(answer, url)  # noqa: SLF001  fsspec's own way
        _require_plain(answer.headers)
        require_range(answer.status, answer.headers, start)
        while block := await answer.content.read(_next(answer.status, into)):
            into.add(block)


def _next(status: int, into: BufferFill) -> int:
    """How many bytes to read: of a whole file no more than was asked; a range that is too long is refused."""
    left = into.size - into.count
    return min(_BLOCK, left if status == _WHOLE else left + 1)


def require_range(status: int, headers: Mapping[str, str], start: int) -> None:
    """Require that an answer begins at the byte from which a range was asked for.

    Args:
        status: of HTTP.
        headers: their names in lower case, or of any case where the mapping does not care.
        start: offset of the first byte.

    Raises:
        StorageError: it is the complete object, where `Range` was lost on the way, or a range from another byte on.
    """
    if status == _WHOLE:
        if start:
            raise StorageError(
                f"the store sent the complete object instead of the requested range, which begins at byte {start}",
                cure=RANGE_CURE,
            )
        return
    found = _CONTENT_RANGE.match(headers.get("content-range", ""))
    if found is None or int(found[1]) != start:
        what = "a range that it does not name" if found is None else f"the range from byte {found[1]} on"
        raise StorageError(f"the store sent {what} instead of that from byte {start} on", cure=RANGE_CURE)


def _require_plain(headers: Mapping[str, str]) -> None:
    encoding = headers.get("content-encoding", "identity")
    if encoding != "identity":
        raise StorageError(f"the server compressed its answer: {encoding[:20]}", cure=RANGE_CURE)


async def open_session(**options: Any) -> Any:
    """A session of aiohttp that checks the address of each connection, for fsspec's HTTPFileSystem.

    Args:
        options: of aiohttp's ClientSession.
    """
    from aiohttp import ClientSession

    return guard(ClientSession(**options), configured=False)


@cache
def redirect_guard() -> Any:
    """A trace of aiohttp that refuses redirects from elsewhere to this machine, or to one that answers about it."""
    from aiohttp import TraceConfig

    trace = TraceConfig()
    trace.on_request_redirect.append(_require_elsewhere)
    return trace


async def _require_elsewhere(_session: Any, _context: Any, parameters: Any) -> None:
    origin = parameters.response.url
    target = origin.join(type(origin)(parameters.response.headers.get("Location", "")))
    host = target.host or ""
    kind = kind_of_host(host)
    if target.scheme not in PROTOCOLS:
        what = f"a {target.scheme} address"
    elif kind == METADATA:
        what = f"the metadata address of this machine: {host}"
    elif kind == LOCAL and kind_of_host(origin.host or "") != LOCAL:
        what = f"an address of this machine: {host}"
    else:
        return
    raise AddressError(f"the server redirects to {what}", cure="do not use this server")
