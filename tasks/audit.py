"""audit, as a task: compare the ledger and the registry with the stores."""

from __future__ import annotations

from typing import Any

from prefect import task

from wherry.auditor.audit import audit as look
from wherry.auditor.markdown import markdown
from wherry.tasks.common import STEP, progress_artifact
from wherry.tasks.run_log import run_logger


@task(name="audit", task_run_name="audit {scope}", **STEP)
def audit(scope: str | list[str], **chosen: Any) -> dict[str, Any]:
    """Audit checkpoints; findings are results, not failures.

    Args:
        scope: `registered`, `all`, or roots.
        chosen: further arguments of `wherry.audit`.

    Returns:
        `report`: the JSON form of the report; `markdown`: the report as text.
    """
    shown = scope if isinstance(scope, str) else ", ".join(scope)
    reading = progress_artifact("audit", shown) if chosen.get("level") == "digest" else None
    report = look(scope, progress=reading, **chosen)  # pyright: ignore[reportArgumentType]  the flow's model has checked it
    counts = report.counts
    run_logger().info(
        "checkpoints: %d, errors: %d, warnings: %d, notes: %d, in %.1f s; anchor: statement %d, %s",
        counts["checkpoints"],
        counts["errors"],
        counts["warnings"],
        counts["notes"],
        report.seconds,
        report.chain.statements,
        report.chain.head,
    )
    return {"report": report.to_json(), "markdown": markdown(report)}
