"""waits: the one policy by which calls of remote stores are repeated, and what a run says while it waits.

The retries of the libraries are switched off (`wherry.store.remote_store`), so that attempts do not multiply, and every
attempt is counted, bounded and reported to the user.

What a run waits for is said after 2 s and then every 30 s, in one line for each bucket, server or database:

    gs://bucket/key has not answered for 12 s; attempt 2 of 12
    models:/small: waiting for another process that moves its aliases, 12 s so far

The line is logged as a warning, which the command line prints on the standard error; a flow passes it to the log of
its run with `reporting_waits_to`. One thread looks at all waits; it exists only while something is waited for.
"""

from __future__ import annotations

import itertools
import math
import os
import random
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import field
from typing import TypeVar

from wherry.core.lazy_dataclass import dataclass
from wherry.core.progress import logger
from wherry.core.services import service
from wherry.core.units import duration
from wherry.errors import StorageError, UsageError
from wherry.store.failures import UNREACHABLE

NOTICE_SECONDS = 2.0  # a longer wait is reported
REPEAT_SECONDS = 30.0  # between two lines about one bucket
_LOOK_SECONDS = 0.5
_log = logger(__name__)
_listeners: list[Callable[[str], object]] = []
TIMEOUT_SECONDS = 60.0
TIMEOUT_VARIABLE = "WHERRY_STORAGE_TIMEOUT"
_MOST_ATTEMPTS = 60  # until a server or database answers
_SLOWEST = 1 << 20  # bytes a second; a slower transfer makes no progress
_T = TypeVar("_T")


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


def _begin_anew() -> None:
    """Forget the watching thread in a forked child, where it does not exist."""
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


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often, how long and with what pauses calls of a store are attempted.

    Attributes:
        timeout: seconds without progress after which an attempt has failed.
        attempts: number of attempts at most.
        first_attempts: the same for a store that has never answered and cannot be connected to: its address is
            probably wrong.
        pause: seconds before the second attempt; each further pause is twice as long.
        longest_pause: seconds at most.
    """

    timeout: float = TIMEOUT_SECONDS
    attempts: int = 12
    first_attempts: int = 3
    pause: float = 0.5
    longest_pause: float = 8.0

    @property
    def budget(self) -> float:
        """Seconds after which no further attempt begins."""
        return 2 * self.timeout

    def deadline(self, nbytes: int) -> float:
        """Seconds that an attempt to transfer this many bytes may take."""
        return self.timeout + nbytes / _SLOWEST

    def pause_after(self, attempt: int, retry_after: float | None) -> float:
        """Seconds to wait after a failed attempt: exponential, with jitter, and never less than the store requires."""
        longest = min(self.pause * 2 ** (attempt - 1), self.longest_pause)
        return max(longest * random.uniform(0.5, 1.0), retry_after or 0.0)  # noqa: S311  no secret


def answer_policy() -> RetryPolicy:
    """How long a server or database is waited for: as a store, and its time ends the attempts, not their number."""
    return RetryPolicy(storage_timeout(), attempts=_MOST_ATTEMPTS)


def storage_timeout() -> float:
    """Seconds without progress after which a call of a remote store fails: `WHERRY_STORAGE_TIMEOUT`, or the setting.

    Raises:
        UsageError: it is not a positive duration, or the configuration is invalid.
    """
    stated = os.environ.get(TIMEOUT_VARIABLE) or service("settings").configured_value("storage_timeout")
    return parse_timeout(stated) if stated else TIMEOUT_SECONDS


def parse_timeout(text: str | float) -> float:
    """Seconds of a `storage_timeout`.

    Raises:
        UsageError: it is not a positive duration.
    """
    seconds = duration(text)
    if seconds <= 0:
        raise UsageError(
            f"invalid storage_timeout {text!r}: expected more than 0", cure="write for example 60s or 5m"
        )
    return seconds


def call_with_retries(
    call: Callable[[float], _T], uri: str, policy: RetryPolicy, *, nbytes: int = 0, known: bool = True
) -> _T:
    """Call until it succeeds, fails permanently, or the policy ends it.

    Args:
        call: one attempt; it gets the seconds that it may take.
        uri: what is read or written, for the user.
        policy: how often and how long.
        nbytes: size of the transfer.
        known: whether the store has answered before.

    Raises:
        StorageError: the last failure; it says how many attempts were made.
        Exception: an error of the call that is not retryable.
    """
    with waiting(uri, policy.attempts) as wait:
        while True:
            try:
                return call(policy.deadline(nbytes))
            except StorageError as error:
                pause = policy.pause_after(wait.attempt, error.retry_after)
                most = policy.first_attempts if error.kind == UNREACHABLE and not known else policy.attempts
                spent = time.monotonic() - wait.since
                goes_on = error.retryable and wait.attempt < most and spent + pause < policy.budget
                if not goes_on:
                    raise _final_error(error, wait)  # noqa: B904  the same error
            time.sleep(pause)
            wait.attempt += 1


def _final_error(error: StorageError, wait: Wait) -> StorageError:
    """The error with the number of attempts, if there was more than one, or the store asks for a longer wait."""
    if error.retryable and error.retry_after:
        error.what += f"; the store asks to wait {error.retry_after:.0f} s"
    if wait.attempt > 1:
        error.what += f"; {wait.attempt} attempts in {time.monotonic() - wait.since:.0f} s"
    return error
