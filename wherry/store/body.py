"""body: the body of a request that is made of buffers, without a copy of them all.

aiohttp reads a file in a thread, and after its first block all the rest at once. So a body is no file to it, but
gives its blocks one after the other; to other clients it is what they read, rewind and measure.
"""

from __future__ import annotations

import io
from bisect import bisect_right
from itertools import accumulate
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
    from typing import TypeAlias

    from typing_extensions import Buffer

    Content: TypeAlias = bytes | Sequence[memoryview]

_BLOCK = 256 << 10  # bytes that are given at a time, of a large buffer
_SMALL = 64 << 10  # bytes of a buffer that is given together with others


def views_of(data: Content) -> Sequence[memoryview]:
    """The buffers of bytes that are given whole, or in pieces."""
    return [memoryview(data)] if isinstance(data, bytes) else data


class Body:
    """Buffers, one after the other, as clients of HTTP take them.

    Attributes:
        nbytes: size of all.
    """

    def __init__(self, buffers: Iterable[Buffer]) -> None:
        self._views = [memoryview(one).cast("B") for one in buffers]
        *self._starts, self.nbytes = accumulate(map(len, self._views), initial=0)
        self._position = 0

    async def __aiter__(self) -> AsyncIterator[memoryview | bytes]:
        """All bytes, in blocks."""
        for block in self._blocks():
            yield block

    def readable(self) -> bool:
        """Always."""
        return True

    def seekable(self) -> bool:
        """Always."""
        return True

    def tell(self) -> int:
        """The position, in bytes."""
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move the position; returns it."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self.nbytes}[whence]
        self._position = base + offset
        return self._position

    def read(self, size: int | None = -1) -> bytes:
        """The next bytes, as many as that or up to the end; all of them without a size."""
        start, rest = self._position, max(self.nbytes - self._position, 0)
        count = rest if size is None or size < 0 else min(size, rest)
        self._position += count
        return b"".join(self._between(start, start + count))

    def _between(self, start: int, stop: int) -> Iterator[memoryview]:
        first = max(bisect_right(self._starts, start) - 1, 0)
        for at, view in zip(self._starts[first:], self._views[first:], strict=True):
            if at >= stop:
                return
            yield view[max(start - at, 0) : stop - at]

    def _blocks(self) -> Iterator[memoryview | bytes]:
        small = bytearray()
        for view in self._views:
            large = len(view) >= _SMALL
            if not large:
                small += view
            if small and (large or len(small) >= _SMALL):
                yield bytes(small)
                small.clear()
            if large:
                yield from (view[at : at + _BLOCK] for at in range(0, len(view), _BLOCK))
        if small:
            yield bytes(small)
