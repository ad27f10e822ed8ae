"""ending: at the end of every workflow, send a notification and record the run for the metrics.

    with ending("promote", "Promotion of models:/m/3") as end:
        …
        end.counts = {"promoted": 1}

An error that leaves the block becomes the first error of the notification, with its cure, and propagates to the caller.
Failures of the notification or of the metrics never fail the workflow: they are logged. A run that is cancelled or
killed sends nothing: it has not ended, and will be resumed.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import field
from typing import Any

from wherry.core.lazy_dataclass import dataclass
from wherry.core.progress import logger
from wherry.errors import WherryError
from wherry.nightly.metrics import after_run
from wherry.nightly.notify import Notice, send

_log = logger(__name__)


@dataclass(slots=True)
class Ending:
    """Contents of the notification; the block fills it in.

    Attributes:
        title: one line.
        counts: number of results by outcome.
        first_error: the first error, where it is more specific than the exception that ends the run.
        cure: what to do about it.
        warning: what the run left out although nobody excluded it; it is logged and sent, and the run succeeds.
        silent: True where nothing was done, so that nothing is sent or recorded.
    """

    title: str
    counts: Mapping[str, int] = field(default_factory=dict[str, int])
    first_error: str | None = None
    cure: str | None = None
    warning: str | None = None
    silent: bool = False


@contextmanager
def ending(
    flow: str, title: str, *, page: str | None = None, only_failures: bool = False, log: Any = _log
) -> Generator[Ending]:
    """Notify and record how a run ends.

    Args:
        flow: name of the workflow in the metrics.
        title: one line about the workflow.
        page: URL of the run's page.
        only_failures: do not notify of a success even where `notify.on` is `always`.
        log: logger for the results of notification and metrics.
    """
    end = Ending(title)
    try:
        yield end
    except Exception as error:
        blame(end, error)
        _close(flow, end, page, log, tell=True)
        raise
    if end.first_error is not None or not end.silent:
        if end.warning is not None:
            log.warning("%s", end.warning)
        noteworthy = end.first_error is not None or end.warning is not None
        _close(flow, end, page, log, tell=noteworthy or not only_failures)


def blame(end: Ending, error: Exception) -> None:
    """Mark a run as failed by an error; fields that the block has set are kept."""
    if isinstance(error, WherryError):
        words = ": ".join(str(part) for part in (error.uri, error.path, error.what) if part)
        end.first_error = end.first_error or words
        end.cure = end.cure or error.cure
    else:
        end.first_error = end.first_error or f"{type(error).__name__}: {error}"
        end.cure = end.cure or "see the log of the run"
    end.counts = end.counts or {"failed": 1}


def _close(flow: str, end: Ending, page: str | None, log: Any, *, tell: bool) -> None:
    if tell:
        notice = Notice(end.title, end.counts, end.first_error, end.cure, warning=end.warning)
        log.info("notification: %s", send(None, notice, page=page))
    log.info("metrics: %s", after_run(flow, ok=end.first_error is None, counts=end.counts))
