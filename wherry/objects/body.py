"""body: the body of a request that is made of buffers, without a copy of them all."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from typing_extensions import Buffer


class Body(io.RawIOBase):
    """Buffers, one after the other, as a file that HTTP clients read and rewind.

    Attributes:
        nbytes: size of all.
    """

    def __init__(self, buffers: Iterable[Buffer]) -> None:
        super().__init__()
        self._views = [memoryview(one).cast("B") for one in buffers]
        self._starts: list[int] = []
        self.nbytes = 0
        for view in self._views:
            self._starts.append(self.nbytes)
            self.nbytes += len(view)
        self._position = 0

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

    def readinto(self, buffer: Buffer) -> int:
        """Fill a buffer from the position on; returns the number of bytes, 0 at the end."""
        into = memoryview(buffer).cast("B")
        filled = 0
        for start, view in zip(self._starts, self._views, strict=True):
            skip = self._position - start
            if 0 <= skip < len(view) and filled < len(into):
                piece = view[skip : skip + len(into) - filled]
                into[filled : filled + len(piece)] = piece
                filled += len(piece)
                self._position += len(piece)
        return filled
