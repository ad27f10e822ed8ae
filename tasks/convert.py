"""convert, as a task: carry out a conversion to one or several targets, with its progress on the run's page."""

from __future__ import annotations

from typing import Any

from prefect import task

from wherry.converter.convert import convert_all
from wherry.core.request import ConvertRequest
from wherry.errors import NotRecordedError
from wherry.tasks.common import STEP, progress_artifact, run_logger


@task(name="convert", **STEP)
def convert(request: dict[str, Any]) -> list[dict[str, Any]]:
    """Convert a checkpoint, reading it once.

    A run that was killed can be run again: a target appears complete or not at all, and if it already exists as the
    result of this same conversion, nothing is done.

    Args:
        request: the JSON form of a ConvertRequest.

    Returns:
        The JSON form of the receipt of each target, in order. If the ledger cannot be used, their `lineage` states it,
        and the task `lineage`, which comes last, tries again.
    """
    asked = ConvertRequest.from_json(request)
    try:
        group = convert_all(asked, progress=progress_artifact("convert", asked.source.uri))
    except NotRecordedError as error:
        group = error.result
    for receipt in group.receipts:
        outcome = "exists already" if receipt.already else f"written in {receipt.seconds:.1f} s"
        run_logger().info("%s %s; lineage: %s", receipt.target.uri, outcome, receipt.lineage)
    return [receipt.to_json() for receipt in group.receipts]
