"""web: files of web servers, http:// and https://, of which only ranges are read.

The library takes whatever a server answers to a range: a whole file, more bytes, other bytes, or a compressed answer
that becomes gigabytes. Here an answer is checked before it is read, and read no further than was requested.
"""

from __future__ import annotations

from typing import Any

from wherry.errors import StorageError
from wherry.store.addresses import guard, redirect_guard
from wherry.store.remote_store import (
    RangedStore,
    aiohttp_timeout,
    range_header,
    require_range,
    stated_options,
)
from wherry.store.transfers import RANGE_CURE, BufferFill

_BLOCK = 256 << 10  # bytes that are read at a time
_WHOLE, _BEYOND = 200, 416  # statuses of HTTP


class WebStore(RangedStore):
    """Files of a web server."""

    def read(self, path: str, start: int, stop: int) -> bytes:
        """See Store; the library takes whatever a server answers."""
        data = bytearray(stop - start)
        return bytes(memoryview(data)[: self.readinto(path, start, memoryview(data))])

    def _open(self, timeout: float) -> Any:
        import fsspec

        client = {"timeout": aiohttp_timeout(timeout), "trace_configs": [redirect_guard()]}
        ours = {"client_kwargs": client, "get_client": _open_session}
        return fsspec.filesystem(self.protocol, **stated_options(self.protocol, **ours))

    async def _receive(self, path: str, start: int, into: BufferFill, mark: str) -> None:  # noqa: ARG002  it names none
        fs, headers = self.fs, {"Range": range_header(start, into.size), "Accept-Encoding": "identity"}
        options = {**fs.kwargs, "headers": {**fs.kwargs.get("headers", {}), **headers}}
        session = await fs.set_session()
        async with session.get(fs.encode_url(path), **options) as answer:
            if answer.status == _BEYOND:
                raise EOFError(path)
            fs._raise_not_found_for_status(answer, path)  # noqa: SLF001  fsspec's own way
            encoding = answer.headers.get("content-encoding", "identity")
            if encoding != "identity":
                raise StorageError(f"the server compressed its answer: {encoding[:20]}", cure=RANGE_CURE)
            require_range(answer.status, answer.headers, start)
            while block := await answer.content.read(_next(answer.status, into)):
                into.add(block)


def _next(status: int, into: BufferFill) -> int:
    """How many bytes to read: of a whole file no more than was requested; a range that is too long is refused."""
    left = into.size - into.count
    return min(_BLOCK, left if status == _WHOLE else left + 1)


async def _open_session(**options: Any) -> Any:
    """A session of aiohttp that checks the address of each connection, for fsspec's HTTPFileSystem.

    Args:
        options: of aiohttp's ClientSession.
    """
    from aiohttp import ClientSession

    return guard(ClientSession(**options), configured=False)
