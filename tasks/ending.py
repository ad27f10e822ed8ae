"""ending, for Prefect: the message links to the page of the run, and its delivery is written to the run's log.

Long waits for remote stores are written to that log too.

Every flow runs inside it, so it also ends runs that have lost their worker, and checks at the start of a run that a
container does not keep the ledger or the registry inside itself; then nothing is read or written, and the failure is
reported like any other. It warns of credentials in the run's parameters, too: Prefect stores them when the run is
submitted, before any code of wherry runs, so they cannot be cut there.
"""

from __future__ import annotations

import contextvars
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from prefect.client.orchestration import get_client
from prefect.runtime import flow_run
from pydantic import BaseModel

from wherry.credentials import redact, redact_values
from wherry.integrations.prefect.lost_runs import end_lost_runs
from wherry.nightly import ending as engine
from wherry.nightly.preflight import refuse_here
from wherry.store.waits import reporting_waits_to
from wherry.tasks.common import reporting, run_logger

_OF_THE_USER = ("meta", "tags")  # fields with names that the user chooses, such as `token`


def credentials_in(value: Any, name: str = "") -> Iterator[str]:
    """The dotted names of the parameters with a credential, without their values.

    Args:
        value: parameters of a run, as Prefect passes them to the flow.
        name: of the value.
    """
    if isinstance(value, BaseModel):
        value = value.model_dump(mode="json")
    if isinstance(value, Mapping):
        by_name = name.rpartition(".")[2] in _OF_THE_USER
        for key, inner in value.items():
            inner_name = f"{name}.{key}" if name else str(key)
            if by_name and isinstance(inner, str):
                if redact_values({str(key): inner}) != {str(key): inner}:
                    yield redact(inner_name)
            else:
                yield from credentials_in(inner, inner_name)
    elif isinstance(value, list | tuple):
        for number, inner in enumerate(value):
            yield from credentials_in(inner, f"{name}[{number}]")
    elif isinstance(value, str) and redact(value) != value:
        yield name


_STORED = (
    "the parameter %s contains a credential, which Prefect has stored as it was given; set it in the environment "
    "of the worker instead, and delete this run"
)


@contextmanager
def ending(flow: str, title: str, *, only_failures: bool = False) -> Generator[engine.Ending]:
    """Report and record how a flow run ends; wraps the whole flow. See `wherry.nightly.ending`.

    It is not a task, so that the message is sent even if the Prefect server is the problem.

    Args:
        flow: the name of the flow.
        title: one line about what this run does.
        only_failures: whether to report only failures.

    Raises:
        UsageError: this worker is a container that would keep the ledger or the registry inside itself.
    """
    log = run_logger()
    for name in credentials_in(flow_run.parameters or {}):
        log.warning(_STORED, name)
    # Another thread, which has no settings of the run, reports the waits.
    context = contextvars.copy_context()
    _end_lost_runs()
    reported_run = engine.ending(flow, title, page=flow_run.ui_url, only_failures=only_failures, log=log)
    with reported_run as end, reporting_waits_to(lambda line: context.run(log.warning, line)):
        refuse_here()
        yield end


def _end_lost_runs() -> None:
    """Mark runs that have lost their worker as crashed; a server that does not take that keeps nobody from working."""
    if not flow_run.id:
        return  # outside of a run there is no server

    def end() -> list[str]:
        with get_client(sync_client=True) as client:
            return end_lost_runs(client, flow_run.id)

    for name in reporting("which runs have lost their worker", end) or ():
        run_logger().warning("the run %s had lost its worker and was still open; it is crashed now", name)
