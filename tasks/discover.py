"""discover, as a task: find the checkpoints below a root."""

from __future__ import annotations

from typing import Any

from prefect import task

from wherry.formats.discover import SkippedPath
from wherry.formats.discover import discover as find
from wherry.tasks.common import STEP
from wherry.tasks.run_log import run_logger


@task(name="discover", task_run_name="discover {root}", **STEP)
def discover(root: str) -> list[dict[str, Any]]:
    """Find the checkpoints below a root; log skipped paths.

    Returns:
        The JSON form of each detection.
    """
    log = run_logger()

    def passed_over(skipped: SkippedPath) -> None:
        log.info("skipped %s: %s", skipped.uri, skipped.reason)

    found = [detection.to_json() for detection in find(root, on_skip=passed_over)]
    log.info("found %d checkpoints below %s", len(found), root)
    return found
