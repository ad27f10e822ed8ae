"""plan, as a task: plan a conversion without writing anything."""

from __future__ import annotations

from typing import Any

from prefect import task

from wherry.converter.plan import plan_targets
from wherry.core.request import ConvertRequest
from wherry.core.units import short, show_size
from wherry.tasks.common import STEP
from wherry.tasks.run_log import run_logger
from wherry.watch.preflight import refuse_here

# The other fields of a plan name every tensor, which is too large for the result of a task.
_KEPT = (
    "target",
    "to",
    "format_version",
    "options",
    "digest",
    "tensors",
    "bytes_in",
    "bytes_out",
    "peak_memory",
)


@task(name="plan", task_run_name="plan {request[source][uri]}", **STEP)
def plan(request: dict[str, Any]) -> dict[str, Any]:
    """Plan a conversion.

    Args:
        request: the JSON form of a ConvertRequest with one target.

    Returns:
        The plan in brief, with its digest.

    Raises:
        UsageError: this worker is a container that would keep the target or the ledger inside itself.
    """
    parsed_request = ConvertRequest.from_json(request)
    refuse_here(parsed_request.targets[0].uri)
    (made,) = plan_targets(parsed_request)
    size = show_size(made.nbytes_in)
    run_logger().info("%d tensors, %s to read, plan %s", made.tensors, size, short(made.digest))
    data = made.to_json()
    return {name: data[name] for name in _KEPT}
