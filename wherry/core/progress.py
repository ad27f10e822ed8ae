"""Progress of a long step, as data for the terminal, a log or a flow; and the loggers, whose records are safe lines.

The engine prints nothing. It calls the caller's function a few times a second with a `Progress`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeAlias

from wherry.core.lazy_dataclass import dataclass
from wherry.credentials import redact
from wherry.errors import printable

_INTERVAL = 0.1  # seconds between two calls: enough for a smooth bar, negligible for the mover


@dataclass(slots=True)
class UnitCounts:
    """Units of a conversion that several workers make.

    Attributes:
        total: number of units.
        done: of these, how many are made.
        workers: number of workers that make units now.
        failed: attempts that failed, or whose worker was lost.
    """

    total: int = 0
    done: int = 0
    workers: int = 0
    failed: int = 0


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of a step.

    Attributes:
        stage: the verb (`convert`, `verify`, …), with its phase where it has several.
        done: bytes done.
        total: total bytes.
        rate: bytes per second since the stage began.
        eta: seconds left at that rate; None before the rate is known.
        current: printed key path of the tensor that was processed last.
        units: where workers make units, how many.
    """

    stage: str
    done: int
    total: int
    rate: float
    eta: float | None
    current: str
    units: UnitCounts | None = None


OnProgress: TypeAlias = Callable[[Progress], None]


class Meter:
    """Counts bytes from several threads and reports at intervals."""

    def __init__(
        self, stage: str, total: int, report: OnProgress | None, units: UnitCounts | None = None
    ) -> None:
        self._stage = stage
        self._total = total
        self._report = report
        self._units = units
        self._before = 0
        self._started = time.monotonic()
        self._last = 0.0
        self._lock = threading.Lock()
        self.done = 0

    def resume(self, nbytes: int) -> None:
        """Count bytes as done by an earlier run, so that they do not count for the rate."""
        self.done += nbytes
        self._before += nbytes

    def add(self, nbytes: int, current: str) -> None:
        """Count bytes as done."""
        with self._lock:
            self.done += nbytes
            now = time.monotonic()
            due = now - self._last >= _INTERVAL or self.done >= self._total
            if self._report is None or not due:
                return
            self._last = now
            rate = (self.done - self._before) / max(now - self._started, 1e-9)
            eta = (self._total - self.done) / rate if rate else None
            units = self._units and replace(self._units)
            self._report(Progress(self._stage, self.done, self._total, rate, eta, current, units))


@dataclass(frozen=True, slots=True)
class RunContext:
    """A conversion or rewrite in progress.

    Attributes:
        progress: called a few times a second.
        started: UTC.
        clock: monotonic seconds at the start.
    """

    progress: OnProgress | None
    started: str
    clock: float

    @classmethod
    def begun(cls, progress: OnProgress | None = None) -> RunContext:
        """A run that begins now."""
        from wherry.core.receipt import utc_now

        return cls(progress, utc_now(), time.monotonic())

    @property
    def seconds(self) -> float:
        """Seconds since its start."""
        return round(time.monotonic() - self.clock, 3)


class LineLogger(logging.LoggerAdapter[Any]):
    """Logs like the logger within it, after the text has been made safe for people, terminals and files."""

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        """Log the text as one line; see `logging.Logger.log`."""
        if self.isEnabledFor(level):
            # An error and its cure become one line; their names are printable already.
            shown = tuple(
                " ".join(str(value).splitlines()) if isinstance(value, BaseException) else value
                for value in args
            )
            text = str(msg) % shown if shown else str(msg)
            kwargs["stacklevel"] = kwargs.get("stacklevel", 1) + 1  # the caller, not this file
            self.logger.log(level, printable(redact(text)), **kwargs)


def logger(name: str) -> LineLogger:
    """The logger of a module.

    Args:
        name: its `__name__`.
    """
    return LineLogger(logging.getLogger(name), {})
