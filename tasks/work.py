"""work, as a task: one worker of a job that `wherry split` has made, until every unit is written; then the commit."""

from __future__ import annotations

from typing import Any

from prefect import task

from wherry.core.receipt import GroupReceipt
from wherry.core.units import plural, show_seconds, show_size
from wherry.errors import NotFoundError, NotRecordedError, TargetInUseError
from wherry.storage.stores import locate
from wherry.tasks.artifacts import show_table
from wherry.tasks.common import STEP, progress_artifact
from wherry.tasks.run_log import run_logger
from wherry.workers.commit import commit as commit_job
from wherry.workers.records import TaskRecord, target_of
from wherry.workers.unit import Unit
from wherry.workers.work import work as make_units


@task(name="work", task_run_name="work on {job}", **STEP)
def work(job: str, expiry: float = 60.0, *, commit: bool = True) -> dict[str, Any]:
    """Write units of a job until none is left; any number of runs do so at the same time.

    A run that is cancelled or crashes leaves its unit to the others. One that comes after the commit has nothing to do.

    Args:
        job: its folder, or its target.
        expiry: seconds without a heartbeat after which the unit of another worker is written again.
        commit: whether to commit the target at the end, unless another run does.

    Returns:
        The JSON form of a WorkReport, and in `receipt` that of the target if this run has committed it.
    """
    log = run_logger()

    def log_unit(unit: Unit, receipt: TaskRecord) -> None:
        log.info("unit %s: %s in %s", unit.name, show_size(unit.nbytes), show_seconds(receipt.seconds))

    try:
        report: dict[str, Any] = make_units(job, expiry=expiry, on_unit=log_unit).to_json()
    except NotFoundError:
        target = target_of(locate(job))
        if target.entry is None:
            raise
        log.info("the job was committed before: %s", target.uri)
        report = {"job": job, "made": [], "nbytes": 0, "units": 0, "ended": True}
    group: GroupReceipt | None = None
    if commit and not report["ended"]:
        try:
            group = commit_job(job, progress=progress_artifact("commit", job))
        except NotRecordedError as error:
            group = error.result
        except (TargetInUseError, NotFoundError) as error:
            log.info("another run commits: %s", error.what)
    receipt = group.receipts[0].to_json() if group else None
    rows = [("job", report["job"]), ("written here", f"{plural(len(report['made']), 'unit')} of {report['units']}"),
            ("bytes", show_size(report["nbytes"])), ("committed here", "yes" if receipt else "no")]  # fmt: skip
    show_table([{"what": what, "value": value} for what, value in rows], "wherry-work", f"Work on {job}")
    return {**report, "receipt": receipt}
