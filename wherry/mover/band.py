"""Band: one spill file, made by all workers that wait for it together."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from wherry.runtime.crew import StoppedError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from wherry.core.tensorspec import Region, Span


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
