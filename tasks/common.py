"""Code that all tasks share: when to retry, how results are stored, and the progress artifact."""

from __future__ import annotations

import contextvars
import threading
import time
from typing import Any

from prefect.artifacts import create_progress_artifact, update_progress_artifact
from prefect.cache_policies import NO_CACHE

from wherry.core.progress import OnProgress, Progress, UnitCounts
from wherry.core.units import plural, show_seconds, show_size
from wherry.errors import WherryError
from wherry.tasks.artifacts import show_table, show_text
from wherry.tasks.run_log import reporting, run_logger

_INTERVAL = 1.0  # seconds between two updates of an artifact: each is a request and a row


def retryable(_task: object, _run: object, state: Any) -> bool:
    """Whether to retry a failed task: only if its error is marked as retryable."""
    error = state.data if isinstance(state.data, BaseException) else state.result(raise_on_failure=False)
    return isinstance(error, WherryError) and error.retryable


STEP: dict[str, Any] = {
    "retries": 3,
    "retry_delay_seconds": [2, 15, 60],
    "retry_jitter_factor": 0.5,
    "retry_condition_fn": retryable,
    "result_serializer": "json",
    "cache_policy": NO_CACHE,
}
"""Options of every task. A damaged or hostile checkpoint fails at once; a lost connection is retried.

Results of earlier attempts of the same run are not reused: each step is idempotent and checks the current state.
"""


def show_failure(error: WherryError, description: str) -> None:
    """Show the error of a flow, field by field, as a table on the run's page."""
    rows = [
        {"what": name, "value": str(value)} for name, value in error.to_json().items() if value is not None
    ]
    show_table(rows, "wherry-failure", description)


def progress_artifact(verb: str, subject: str) -> OnProgress:
    """A progress bar on the run's page: updated at most once a second, and at the end.

    A bar that cannot be made or updated does not stop the conversion: it is logged once, and left as it is.

    Args:
        verb: the step; it becomes part of the artifact's key.
        subject: what the step works on, for the description.
    """
    log = run_logger()
    description = show_text(f"{verb} {subject}")
    artifact: Any = reporting(
        "the progress", lambda: create_progress_artifact(0.0, key=f"wherry-{verb}", description=description)
    )
    context = (
        contextvars.copy_context()
    )  # the engine reports from its own threads, which have no settings of the run
    busy = threading.Lock()
    last = time.monotonic()
    broken = artifact is None
    units: UnitCounts | None = None  # those of workers are shown to the end

    def report(progress: Progress) -> None:
        nonlocal last, broken, units
        units = progress.units or units
        done = progress.done >= progress.total
        if broken or (time.monotonic() - last < _INTERVAL and not done) or not busy.acquire(blocking=done):
            return
        try:
            text = show_text(f"{progress.stage} {subject}: {_words(progress, units)}")
            percent = 100.0 * progress.done / progress.total if progress.total else 100.0
            context.run(update_progress_artifact, artifact, percent, description=text)
            last = time.monotonic()
        except Exception as error:  # noqa: BLE001  any failure of a client is only a failure to report
            broken = True
            log.warning("could not update the progress artifact; progress is no longer reported: %s", error)
        finally:
            busy.release()

    return report


def _words(progress: Progress, units: UnitCounts | None) -> str:
    """How far a step is, as `3 of 40 units, 3.2 GB of 40 GB, 210 MB/s, 2:55 left, 4 workers, 1 failed attempt`."""
    words = [f"{show_size(progress.done)} of {show_size(progress.total)}"]
    if units:
        words.insert(0, f"{units.done} of {plural(units.total, 'unit')}")
    words += [f"{show_size(progress.rate)}/s"] if progress.rate else []
    words += [f"{show_seconds(progress.eta)} left"] if progress.eta else []
    if units:
        words += [plural(units.workers, "worker"), plural(units.failed, "failed attempt")]
    return ", ".join(words)
