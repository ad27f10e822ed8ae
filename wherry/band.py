"""Band: one spill file, made by all workers that wait for it together."""

from __future__ import annotations

import os
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from wherry.errors import storage_error

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator
    from pathlib import Path

    from wherry.tensorspec import Region, Span


class StoppedError(Exception):
    """The pass was stopped while a band was being made; nothing is wrong."""


@dataclass(slots=True)
class Band:
    """One spill file.

    Attributes:
        path: where it is.
        span: canonical bytes of the tensor that it holds.
        cells: chunks that nobody has begun to decode.
        left: bytes that no move has read.
        running: chunks that are being decoded.
        error: why it could not be made.
    """

    path: Path
    span: Span
    cells: Iterator[Region]
    left: int
    running: int = 0
    error: BaseException | None = None
    changed: threading.Condition = field(default_factory=threading.Condition)

    def take(self) -> Region | None:
        """A chunk to decode; None where none is left or the band has failed."""
        with self.changed:
            cell = None if self.error else next(self.cells, None)
            self.running += cell is not None
            return cell

    def done(self, error: BaseException | None) -> None:
        """A chunk that was taken is decoded, or failed."""
        with self.changed:
            self.running -= 1
            self.error = self.error or error
            self.changed.notify_all()

    def wait(self, stopped: threading.Event) -> None:
        """Until all of it is there; raises what went wrong."""
        with self.changed:
            while self.running and not self.error:
                self.changed.wait(0.2)
                if stopped.is_set():
                    raise StoppedError
        if self.error:
            raise self.error


@contextmanager
def opened(path: Path) -> Generator[Callable[[memoryview, int], None]]:
    """A file to write at offsets; it is made where it is not there."""

    def write(data: memoryview, offset: int) -> None:
        while data:
            written = os.pwrite(descriptor, data, offset)
            data, offset = data[written:], offset + written

    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            yield write
        finally:
            os.close(descriptor)
    except OSError as error:
        raise storage_error(error, str(path)) from error
