"""ending, as Prefect knows it: the message links to the page of the run, and its outcome stands in the run's log.

Every flow is inside of it, so it is also where a run begins: on a worker that would keep the ledger or the registry to
itself nothing is read or written, and that is told like any other failure.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from prefect.runtime import flow_run

from wherry.tasks.common import run_logger
from wherry.watch import ending as engine
from wherry.watch.preflight import refuse_here

if TYPE_CHECKING:
    from collections.abc import Generator


@contextmanager
def ending(flow: str, title: str, *, only_failures: bool = False) -> Generator[engine.Ending]:
    """Report and record how a flow run ends; wraps the whole flow. See `wherry.watch.ending`.

    It is no task: where the server itself is the trouble, that must not keep the message from going out.

    Args:
        flow: the name of the flow.
        title: one line about what this run does.
        only_failures: do not tell of a good end.

    Raises:
        UsageError: this worker is a container, and would keep the ledger or the registry to itself.
    """
    told = engine.ending(flow, title, page=flow_run.ui_url, only_failures=only_failures, log=run_logger())
    with told as end:
        refuse_here()
        yield end
