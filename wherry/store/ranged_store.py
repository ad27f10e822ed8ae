"""RangedStore: a store whose answers go straight into buffers, in the state that is named, if one is.

The libraries hold an answer in small blocks, and then all of it once more. Here each block goes to its place as it
comes, so that a range takes no memory but that of the buffer. Where the library can make a request without sending it,
the thread that has the buffer sends it (`wherry.remote.transfers`).
"""

from __future__ import annotations

import re
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING

from wherry.errors import MismatchError, StorageError
from wherry.remote.buffer_fill import RANGE_CURE, BufferFill
from wherry.remote.filesystems import call_async
from wherry.remote.transfers import exchange
from wherry.store.fsspec_store import FsspecStore

if TYPE_CHECKING:
    from collections.abc import Mapping

    from wherry.remote.transfers import BodyRequest, HttpAnswer

_WHOLE = 200  # status of HTTP; a range has 206
_CONTENT_RANGE = re.compile(r"\s*bytes\s+(\d{1,19})-")


class RangedStore(FsspecStore):
    """A store of which ranges of bytes are requested; its classes make the requests."""

    def readinto(self, path: str, start: int, buffer: memoryview, mark: str = "") -> int:
        """See Store. Stores refuse a range that begins at the end of an object."""
        if not buffer:
            return 0
        try:
            return self.transfer(path, partial(self._fill, path, start, buffer, mark), len(buffer))
        except (EOFError, FileExistsError, FileNotFoundError) as error:
            if mark:
                what = "the object was replaced or removed while it was read"
                uri = f"{self.protocol}://{path}"
                raise MismatchError(
                    what, uri=uri, cure="convert it again once nothing writes to it"
                ) from error
            if isinstance(error, EOFError):
                return 0
            raise

    def _fill(self, path: str, start: int, buffer: memoryview, mark: str, seconds: float) -> int:
        """Fill a buffer in one attempt; the number of bytes.

        Raises:
            TimeoutError: it took longer.
            Exception: as `wherry.remote.errors` translates it, FileNotFoundError or FileExistsError if nothing is in
                that state, EOFError beyond the end.
        """
        full = self._full(path)
        with closing(BufferFill(buffer)) as into:
            request = call_async(self.fs, lambda: self._range_request(full, start, into.size, mark), seconds)
            if request is not None:
                answer = exchange(request, seconds, into=into)
                if answer.is_success:
                    require_range(answer.status, answer.headers, start)
                    return into.count
                if (error := self._refusal(answer, full)) is not None:
                    raise error
            call_async(self.fs, lambda: self._receive(full, start, into, mark), seconds)
            return into.count

    async def _range_request(self, path: str, start: int, nbytes: int, mark: str) -> BodyRequest | None:  # noqa: ARG002
        """The request whose answer goes straight into the buffer; None if only the library can send it."""
        return None

    def _refusal(self, answer: HttpAnswer, path: str) -> Exception | None:
        """The exception for an answer to such a request; None if the library must try it itself."""
        raise NotImplementedError

    async def _receive(self, path: str, start: int, into: BufferFill, mark: str) -> None:
        """Fill a buffer through the library, from an offset on."""
        raise NotImplementedError


def range_header(start: int, nbytes: int) -> str:
    """The header `Range` of a request for some bytes from an offset on."""
    return f"bytes={start}-{start + nbytes - 1}"


def require_range(status: int, headers: Mapping[str, str], start: int) -> None:
    """Require that an answer begins at the first byte of the requested range.

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
