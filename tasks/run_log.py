"""The log of a run, and calls of Prefect's server that a run can do without."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from prefect.exceptions import MissingContextError
from prefect.logging import get_run_logger

from wherry.core.progress import LineLogger, logger
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
