"""waits: says what a run waits for, after 2 s and then every 30 s, in one line for each bucket, server or database.

    gs://bucket/key has not answered for 12 s; attempt 2 of 12
    models:/small: waiting for another process that moves its aliases, 12 s so far

The line is logged as a warning, which the command line prints on the standard error; a flow passes it to the log of
its run with `reporting_waits_to`. One thread looks at all waits; it exists only while something is waited for.
"""

from __future__ import annotations

import itertools
import math
import os
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from wherry.core.progress import logger

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

NOTICE_SECONDS = 2.0  # a longer wait is reported
REPEAT_SECONDS = 30.0  # between two lines about one bucket
_LOOK_SECONDS = 0.5
_log = logger(__name__)


@dataclass(slots=True, eq=False)
class Wait:
    """One call, or work of others, that is waited for.

    Attributes:
        uri: what is read or written, or where others work.
        what: what is waited for there; empty for an answer.
        most: number of attempts at most.
        attempt: the present attempt, from 1.
        since: when the first attempt began, by the monotonic clock.
    """

    uri: str
    most: int = 1
    what: str = ""
    attempt: int = 1
    since: float = field(default_factory=time.monotonic)

    @property
    def bucket(self) -> str:
        """Protocol and bucket, or server, and what is waited for there."""
        return "/".join([*self.uri.split("/", 3)[:3], self.what])

    def line(self, now: float) -> str:
        """The line about this wait."""
        if self.what:
            return f"{self.uri}: waiting for {self.what}, {now - self.since:.0f} s so far"
        text = f"{self.uri} has not answered for {now - self.since:.0f} s"
        return f"{text}; attempt {self.attempt} of {self.most}" if self.most > 1 else text


class _Watch:
    """All waits of this process, and the thread that looks at them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._waits: dict[int, Wait] = {}
        self._reported_at: dict[str, float] = {}
        self._running = False

    def add(self, wait: Wait) -> int:
        number = next(self._numbers)
        with self._lock:
            self._waits[number] = wait
            starts = not self._running
            self._running = True
        if starts:
            try:
                threading.Thread(target=self._look_on, name="wherry-waits", daemon=True).start()
            except RuntimeError:  # there are no more threads: no wait is reported, but the work goes on
                with self._lock:
                    self._running = False
        return number

    def remove(self, number: int) -> None:
        with self._lock:
            self._waits.pop(number, None)

    def look(self, now: float) -> list[str]:
        """The lines to print now: of the oldest wait of each bucket."""
        with self._lock:
            oldest: dict[str, Wait] = {}
            for wait in self._waits.values():  # in the order of their beginning
                oldest.setdefault(wait.bucket, wait)
            due = [
                wait
                for bucket, wait in oldest.items()
                if now - wait.since >= NOTICE_SECONDS
                and now - self._reported_at.get(bucket, -math.inf) >= REPEAT_SECONDS
            ]
            self._reported_at |= {wait.bucket: now for wait in due}
        return [wait.line(now) for wait in due]

    def _look_on(self) -> None:
        try:
            while self._has_waits_after_pause():
                for line in self.look(time.monotonic()):
                    _tell(line)
        except BaseException:
            with self._lock:
                self._running = False  # the next wait starts another thread
            raise

    def _has_waits_after_pause(self) -> bool:
        time.sleep(_LOOK_SECONDS)
        with self._lock:
            self._running = bool(self._waits)
            return self._running


_watch = _Watch()
_listeners: list[Callable[[str], object]] = []


def _begin_anew() -> None:
    """In a child of a fork: the thread that looked at the waits does not exist there."""
    global _watch  # noqa: PLW0603  state of the process
    _watch = _Watch()


os.register_at_fork(after_in_child=_begin_anew)


@contextmanager
def waiting(uri: str, most: int = 1, *, what: str = "") -> Generator[Wait]:
    """Watch a call of a store, server or database, or the work of others, while the block runs.

    Args:
        uri: what is called, without secrets, or where others work.
        most: number of attempts at most; the block sets `attempt`.
        what: the work of others that is waited for.
    """
    wait, watch = Wait(uri, most, what), _watch
    number = watch.add(wait)
    try:
        yield wait
    finally:
        watch.remove(number)


@contextmanager
def reporting_waits_to(say: Callable[[str], object]) -> Generator[None]:
    """Pass the lines to a function instead of the log while the block runs; it is called from another thread."""
    _listeners.append(say)
    try:
        yield
    finally:
        _listeners.remove(say)


def _tell(line: str) -> None:
    (_listeners[-1] if _listeners else _log.warning)(line)
