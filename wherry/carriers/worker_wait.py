"""WorkerWait: how long a coordinator waits for a worker that can make units, and what it says meanwhile.

Spot machines that are lost together take minutes to be replaced, so it waits for ten by default (`worker_wait`). Where
every worker that is there has failed its proof and none has ever passed it, it waits for one: time rarely helps there.
"""

from __future__ import annotations

import os
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING

from wherry.config.settings import configured_value
from wherry.core.units import duration, plural, show_seconds
from wherry.errors import StorageError
from wherry.remote.waits import waiting

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

WAIT_SECONDS = 600.0
REFUSED_SECONDS = 60.0
_VARIABLE = "WHERRY_WORKER_WAIT"
_NAMED = 3  # workers that a line names


def worker_wait() -> float:
    """Seconds without a usable worker after which a coordinator gives up: `WHERRY_WORKER_WAIT`, or the setting.

    Raises:
        UsageError: it is not a duration, or the configuration is invalid.
    """
    stated = os.environ.get(_VARIABLE) or configured_value("worker_wait")
    return WAIT_SECONDS if stated is None else duration(stated)


class WorkerWait:
    """Waits of one coordinator; begins with the first."""

    def __init__(self, uri: str, again: str) -> None:
        """Begin to wait.

        Args:
            uri: of the workload.
            again: what the same command does when it is run again.
        """
        self._uri, self._again = uri, again
        self._seconds = worker_wait()
        self._since = time.monotonic()
        self._had_worker = False
        self._line = ExitStack()
        self._text = ""

    def end(self) -> None:
        """Note that a worker is there that can make units, or that none is needed."""
        self._line.close()
        self._since, self._had_worker, self._text = time.monotonic(), True, ""

    def go_on(self, left_out: Mapping[str, str], silent: Collection[str]) -> None:
        """Wait on, as there is no worker that can make units.

        Args:
            left_out: name of each worker that gets no unit → why.
            silent: the names of those that have not answered.

        Raises:
            StorageError: it has waited long enough.
        """
        refused = left_out and not silent and not self._had_worker
        limit = min(self._seconds, REFUSED_SECONDS) if refused else self._seconds
        why = _why(left_out, silent)
        if time.monotonic() - self._since > limit:
            raise StorageError(
                f"no worker can make units; {why}",
                uri=self._uri,
                cure="start workers that see source and target, with the same wherry and WHERRY_KEY, and run the same "
                f"command again; it {self._again}. To wait longer for workers, set {_VARIABLE}, for example 1h",
                retryable=True,
            )
        if why != self._text:
            self._line.close()
            what = f"a worker that can make units ({why}; gives up after {show_seconds(limit)})"
            self._line.enter_context(waiting(self._uri, what=what)).since = self._since
            self._text = why


def _why(left_out: Mapping[str, str], silent: Collection[str]) -> str:
    rows = [f"{name}: {why}" for name, why in sorted(left_out.items())]
    rows += [f"{name} has not answered" for name in sorted(silent)]
    more = [f"{plural(len(rows) - _NAMED, 'other')}"] if len(rows) > _NAMED else []
    return "; ".join([*rows[:_NAMED], *more]) or "there is none"
