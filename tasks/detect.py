"""detect, as a task: what lies at a URI, and whether it is whole."""

from __future__ import annotations

from typing import Any

from prefect import task

from wherry.core.opaque import allowing
from wherry.ledger.named import detect_named as look
from wherry.tasks.common import STEP, run_logger


@task(name="detect", **STEP)
def detect(
    uri: str,
    format: str | None = None,
    step: int | None = None,
    item: str | None = None,
    opaque: tuple[str, ...] = (),
) -> dict[str, Any]:
    """Detect what lies at a URI; returns the JSON form of the detection, whatever its verdict."""
    with allowing(opaque):
        found = look(uri, format=format, step=step, item=item)
    run_logger().info("%s is %s (%s): %s", found.uri, found.format, found.format_version, found.verdict)
    return found.to_json()
