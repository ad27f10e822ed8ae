"""lineage, as a task: make sure that the ledger has the conversion, and say what it knows of the checkpoint."""

from __future__ import annotations

from typing import Any

from prefect import task

from wherry.errors import StorageError
from wherry.lineage import record, show
from wherry.receipt import from_json
from wherry.tasks.common import STEP, run_logger


@task(name="lineage", **STEP)
def lineage(receipt: dict[str, Any]) -> dict[str, Any]:
    """Record a conversion where that has not been done, and return its lineage.

    `convert` commits even where the ledger cannot be written; here, where a retry is possible, that is a failure.

    Args:
        receipt: JSON form of a receipt.

    Returns:
        The JSON form of the lineage tree.
    """
    outcome = record(from_json(receipt))
    if outcome != "recorded":
        raise StorageError(
            f"lineage was {outcome}",
            cure="check WHERRY_LEDGER; the conversion itself is done",
            retryable=True,
        )
    tree = show(receipt["target"]["checkpoint_digest"])
    run_logger().info("lineage: %d checkpoints, %d conversions", len(tree.nodes), len(tree.edges))
    return tree.to_json()
