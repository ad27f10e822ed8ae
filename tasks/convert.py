"""convert, as a task: carry out a conversion to one or several targets, with its progress on the run's page."""

from __future__ import annotations

from typing import Any

from prefect import task

from wherry.core.request import ConvertRequest
from wherry.core.units import DEFAULT_UNIT, parse_size
from wherry.errors import NotRecordedError
from wherry.tasks.common import STEP, progress_artifact
from wherry.tasks.run_log import run_logger
from wherry.workers import convert_on


@task(name="convert", task_run_name="convert {request[source][uri]}", **STEP)
def convert(request: dict[str, Any], on: str = "threads", unit: str = DEFAULT_UNIT) -> list[dict[str, Any]]:
    """Convert a checkpoint, reading it once.

    A run that was killed can be run again: a target appears complete or not at all, and if it already exists as the
    result of this same conversion, nothing is done. With an engine, the progress is by units, and a run that was
    cancelled or has crashed leaves a job that the next run takes up.

    Args:
        request: the JSON form of a ConvertRequest.
        on: what makes the target, as `wherry convert --on` takes it.
        unit: size of a unit of an engine.

    Returns:
        The JSON form of the receipt of each target, in order. If the ledger cannot be used, their `lineage` states it,
        and the task `lineage`, which comes last, tries again.
    """
    parsed_request = ConvertRequest.from_json(request)
    try:
        progress = progress_artifact("convert", parsed_request.source.uri)
        group = convert_on(parsed_request, on, unit_bytes=parse_size(unit), progress=progress)
    except NotRecordedError as error:
        group = error.result
    for receipt in group.receipts:
        outcome = "exists already" if receipt.already else f"written in {receipt.seconds:.1f} s"
        run_logger().info("%s %s; lineage: %s", receipt.target.uri, outcome, receipt.lineage)
    return [receipt.to_json() for receipt in group.receipts]
