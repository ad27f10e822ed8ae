"""plan, as a task: what a conversion would do; nothing is written."""

from __future__ import annotations

from typing import Any

from prefect import task

from wherry.converter.plan import plan as make
from wherry.core.opaque import allowing
from wherry.core.request import Wish
from wherry.core.units import short, show_size
from wherry.tasks.common import STEP, run_logger
from wherry.watch.preflight import refuse_here

# The rest of a plan names every tensor, which is more than a result of a task should hold.
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


@task(name="plan", **STEP)
def plan(
    source: str,
    target: str,
    to: str,
    wish: dict[str, Any] | None = None,
    opaque: tuple[str, ...] = (),
    **chosen: Any,
) -> dict[str, Any]:
    """Plan a conversion.

    Args:
        source: the checkpoint or run folder.
        target: where it shall be written.
        to: the format.
        wish: what is asked of the layout: the fields of a Wish.
        opaque: classes in pickles that may pass unread.
        chosen: further arguments of `wherry.plan`.

    Returns:
        The plan in brief, with its digest.

    Raises:
        UsageError: this worker is a container, and would keep the target or the ledger to itself.
    """
    refuse_here(target)
    with allowing(opaque):
        made = make(source, target, to=to, wish=Wish(**(wish or {})), **chosen)
    size = show_size(made.nbytes_in)
    run_logger().info("%d tensors, %s to read, plan %s", made.tensors, size, short(made.digest))
    data = made.to_json()
    return {name: data[name] for name in _KEPT}
