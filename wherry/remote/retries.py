"""retries: the one policy by which calls of remote stores are repeated, and the deadline of each attempt.

The retries of the libraries are switched off (`wherry.remote.filesystems`), so that attempts do not multiply, and
every attempt is counted, bounded and reported to the user.
"""

from __future__ import annotations

import os
import random
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from wherry.core.services import service
from wherry.core.units import duration
from wherry.errors import StorageError, UsageError
from wherry.remote.failures import UNREACHABLE
from wherry.remote.waits import waiting

if TYPE_CHECKING:
    from collections.abc import Callable

    from wherry.remote.waits import Wait

TIMEOUT_SECONDS = 60.0
TIMEOUT_VARIABLE = "WHERRY_STORAGE_TIMEOUT"
_MOST_ATTEMPTS = 60  # until a server or database answers
_SLOWEST = 1 << 20  # bytes a second; a slower transfer makes no progress

_T = TypeVar("_T")


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
        """Seconds that an attempt to transfer so many bytes may take."""
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
    """Call until it succeeds, fails for good, or the policy ends it.

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
