"""verify, as a task: check that a checkpoint is complete and matches its record; the ledger records the outcome."""

from __future__ import annotations

from typing import Any

from prefect import task

from wherry.tasks.common import STEP, progress_artifact
from wherry.tasks.run_log import run_logger
from wherry.verifier.verify import verify_and_record


@task(name="verify", task_run_name="verify {uri}", **STEP)
def verify(
    uri: str,
    level: str = "present",
    against: str | None = None,
    family_file: str | None = None,
    below: str | None = None,
    against_below: str | None = None,
) -> dict[str, Any]:
    """Verify a checkpoint, and fail if it does not pass.

    Args:
        uri: the checkpoint.
        level: level of the verification.
        against: the source, at levels that compare with it.
        family_file: the file that declares the model family with whose layouts it was converted from the source.
        below: a folder that the checkpoint must not leave.
        against_below: a folder that the source must not leave.

    Returns:
        The JSON form of the verification, with `lineage`: whether the ledger recorded it.

    Raises:
        IncompleteError: a part of the checkpoint is missing.
        MismatchError: the checkpoint differs from its record, or from `against`.
    """
    progress = progress_artifact("verify", uri)
    outcome, recorded = verify_and_record(
        uri, below=below, level=level, against=against, against_below=against_below, family_file=family_file,
        progress=progress,
    )  # fmt: skip
    run_logger().info("%s at level %s: %s; lineage: %s", outcome.uri, level, outcome.verdict, recorded)
    return {**outcome.to_json(), "lineage": recorded}
