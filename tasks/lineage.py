"""lineage, as a task: make sure that the ledger has the conversion, and return the checkpoint's lineage."""

from __future__ import annotations

from typing import Any

from prefect import task

from wherry.core.receipt import from_json
from wherry.errors import NotRecordedError
from wherry.ledger.record import record
from wherry.lineage.lineage import show
from wherry.tasks.common import STEP
from wherry.tasks.run_log import run_logger


@task(name="lineage", task_run_name="lineage {receipt[target][uri]}", **STEP)
def lineage(receipt: dict[str, Any]) -> dict[str, Any]:
    """Record a conversion if it is not recorded yet, and return its lineage.

    `convert` commits even if the ledger cannot be written; here, where a retry is possible, that is a failure.

    Args:
        receipt: JSON form of a receipt.

    Returns:
        The JSON form of the lineage tree.

    Raises:
        NotRecordedError: the ledger cannot be used; the conversion itself is committed.
    """
    try:
        record(from_json(receipt))
    except NotRecordedError as error:
        error.retryable = True  # the database server of a ledger may recover
        raise
    tree = show(receipt["target"]["checkpoint_digest"])
    run_logger().info("lineage: %d checkpoints, %d conversions", len(tree.nodes), len(tree.edges))
    return tree.to_json()
