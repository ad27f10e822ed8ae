"""buffer_fill: a buffer of the mover that an answer of a store fills, block by block."""

from __future__ import annotations

import threading

from wherry.errors import StorageError

# The cure of an answer that is no range.
RANGE_CURE = "check the proxies between this machine and the store: they must pass on the header Range"


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
