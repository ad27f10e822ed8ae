"""What all tasks share: the log of the run, artifacts on its page, when to retry, how results are stored.

Names from checkpoints are shown escaped and without credentials. What cannot be shown is logged, and fails nothing.
"""

from __future__ import annotations

import contextvars
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from prefect.artifacts import (
    create_link_artifact,
    create_markdown_artifact,
    create_progress_artifact,
    create_table_artifact,
    update_progress_artifact,
)
from prefect.cache_policies import NO_CACHE
from prefect.exceptions import MissingContextError
from prefect.logging import get_run_logger

from wherry.core.progress import LineLogger, OnProgress, Progress, UnitCounts, logger
from wherry.core.units import plural, show_seconds, show_size
from wherry.credentials import redact
from wherry.errors import WherryError, printable
from wherry.integrations.prefect.server import answering_server

_T = TypeVar("_T")


def run_logger() -> Any:
    """The logger of the running task; wherry's own logger if a task's function is called outside a run."""
    try:
        return LineLogger(get_run_logger(), {})
    except MissingContextError:
        return logger("wherry")


def reporting(what: str, call: Callable[[], _T]) -> _T | None:
    """Make a call that only reports to Prefect's server, once the server answers.

    A client that has not yet reached its server does not try again. A server that stays away is a failure to report,
    and not one of the work: it is logged.

    Args:
        what: the words for the log: `the table wherry-conversion`.
        call: the call.

    Returns:
        What the call returns; None if it failed.
    """
    try:
        answering_server()
        return call()
    except Exception as error:  # noqa: BLE001  any failure of a client is only a failure to report
        run_logger().warning("could not show %s in Prefect: %s", what, error)
        return None


def show_text(text: str, *, lines: bool = False) -> str:
    """A text for a page: control characters and bidirectional marks escaped, credentials cut out.

    Args:
        text: text with names from checkpoints, paths or servers.
        lines: whether the text has several lines.
    """
    return printable(redact(text), lines=lines)


def show_table(rows: Sequence[Mapping[str, Any]], key: str, description: str) -> None:
    """Create a table artifact."""
    table = [
        {name: show_text(value) if isinstance(value, str) else value for name, value in row.items()}
        for row in rows
    ]
    shown = show_text(description)
    reporting(f"the table {key}", lambda: create_table_artifact(table, key=key, description=shown))


def show_link(page: str, text: str, key: str, description: str) -> None:
    """Create a link artifact."""
    words, shown = show_text(text), show_text(description)
    reporting(
        f"the link {key}", lambda: create_link_artifact(page, link_text=words, key=key, description=shown)
    )


def show_markdown(text: str, key: str, description: str) -> None:
    """Create a Markdown artifact from a report whose cells are escaped for Markdown."""
    page, shown = show_text(text, lines=True), show_text(description)
    reporting(f"the page {key}", lambda: create_markdown_artifact(page, key=key, description=shown))


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
