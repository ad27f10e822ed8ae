"""ending: what every workflow does at its end, however it ends: tell people, and note the run for the metrics.

    with ending("promote", "Promotion of models:/m/3") as end:
        …
        end.counts = {"promoted": 1}

An error that leaves the block is the first error of the message, with its cure, and goes on to the caller. Neither the
telling nor the noting ever fails the workflow: what could not be told or noted is logged. A run that is cancelled or
killed tells nothing: it has not ended, and is resumed.
"""

from __future__ import annotations

import logging
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from wherry.errors import WherryError
from wherry.watch.metrics import after_run
from wherry.watch.notify import Notice, send

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Ending:
    """What there is to tell of a run; the block fills it in.

    Attributes:
        title: one line.
        counts: what was done, by outcome.
        first_error: the first thing that went wrong, where it is more than the error that ends the run says.
        cure: what to do about it.
        silent: True where nothing was done, so that there is nothing to tell or note.
    """

    title: str
    counts: Mapping[str, int] = field(default_factory=dict[str, int])
    first_error: str | None = None
    cure: str | None = None
    silent: bool = False


@contextmanager
def ending(
    flow: str, title: str, *, page: str | None = None, only_failures: bool = False, log: Any = _log
) -> Generator[Ending]:
    """Tell and note how a run ends.

    Args:
        flow: the name of the workflow, as the metrics have it.
        title: one line about what it does.
        page: where to look.
        only_failures: do not tell of a good end even where `notify.on` is `always`.
        log: takes what came of it, in words.
    """
    end = Ending(title)
    try:
        yield end
    except Exception as error:
        blame(end, error)
        _close(flow, end, page, log, tell=True)
        raise
    if end.first_error is not None or not end.silent:
        _close(flow, end, page, log, tell=end.first_error is not None or not only_failures)


def blame(end: Ending, error: Exception) -> None:
    """Say that a run failed, by an error; what the block has said itself stays."""
    ours = isinstance(error, WherryError)
    end.first_error = end.first_error or (_words(error) if ours else f"{type(error).__name__}: {error}")
    end.cure = end.cure or (error.cure if ours else "look at the log of the run")
    end.counts = end.counts or {"failed": 1}


def _words(error: WherryError) -> str:
    return ": ".join(str(part) for part in (error.uri, error.path, error.what) if part)


def _close(flow: str, end: Ending, page: str | None, log: Any, *, tell: bool) -> None:
    if tell:
        notice = Notice(end.title, end.counts, end.first_error, end.cure)
        log.info("notification: %s", send(None, notice, page=page))
    log.info("metrics: %s", after_run(flow, ok=end.first_error is None, counts=end.counts))
