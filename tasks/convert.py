"""convert, as a task: carry out a conversion, with its progress in the run's page."""

from __future__ import annotations

from typing import Any

from prefect import task

from wherry.convert import convert as carry_out
from wherry.tasks.common import STEP, progress_artifact, run_logger


@task(name="convert", **STEP)
def convert(source: str, target: str, to: str, **chosen: Any) -> dict[str, Any]:
    """Convert a checkpoint.

    A run that was killed is simply run again: the target appears whole or not at all, and where it is there already
    as the result of this same conversion, nothing is done.

    Args:
        source: the checkpoint or run folder.
        target: where it shall be written.
        to: the format.
        chosen: further arguments of `wherry.convert`.

    Returns:
        The JSON form of the receipt.
    """
    receipt = carry_out(source, target, to=to, progress=progress_artifact("convert", source), **chosen)
    outcome = "was there already" if receipt.already else f"written in {receipt.seconds:.1f} s"
    run_logger().info("%s %s; lineage: %s", receipt.target.uri, outcome, receipt.lineage)
    return receipt.to_json()
