"""detect, as a task: the format of the checkpoint at a URI, and whether it is complete."""

from __future__ import annotations

from typing import Any

from prefect import task

from wherry.core.request import SourceRequest
from wherry.formats.detect import detect_source
from wherry.ledger.resolve import resolve_named
from wherry.tasks.common import STEP
from wherry.tasks.run_log import run_logger


@task(name="detect", task_run_name="detect {uri}", **STEP)
def detect(uri: str, **which: Any) -> dict[str, Any]:
    """Detect the checkpoint at a URI; return the JSON form of the detection, whatever its verdict.

    Args:
        uri: a checkpoint, step or run.
        which: further fields of a SourceRequest.
    """
    found = detect_source(resolve_named(SourceRequest(uri, **which)))
    run_logger().info("%s is %s (%s): %s", found.uri, found.format, found.format_version, found.verdict)
    return found.to_json()
