"""discover, as a task: the checkpoints below a root."""

from __future__ import annotations

from typing import Any

from prefect import task

from wherry.formats.discover import SkippedPath
from wherry.formats.discover import discover as find
from wherry.tasks.common import STEP, run_logger


@task(name="discover", **STEP)
def discover(root: str) -> list[dict[str, Any]]:
    """Find the checkpoints below a root; skipped paths are logged.

    Returns:
        The JSON form of a detection each.
    """
    log = run_logger()

    def passed_over(skipped: SkippedPath) -> None:
        log.info("passed over %s: %s", skipped.uri, skipped.reason)

    found = [detection.to_json() for detection in find(root, on_skip=passed_over)]
    log.info("%d checkpoints below %s", len(found), root)
    return found
