"""verify, as a task: is the checkpoint complete, and does it match the record? The ledger records the outcome."""

from __future__ import annotations

from typing import Any

from prefect import task

from wherry.tasks.common import STEP, progress_artifact, run_logger
from wherry.verifier.verify import verified


@task(name="verify", **STEP)
def verify(
    uri: str, level: str = "present", against: str | None = None, family_file: str | None = None
) -> dict[str, Any]:
    """Verify a checkpoint; fails if it does not pass.

    Args:
        uri: the checkpoint.
        level: how far.
        against: the source, at levels that compare with it.
        family_file: the file that declared the family through whose layouts it was made of the source.

    Returns:
        The JSON form of the verification, with `lineage`: whether the ledger recorded it.

    Raises:
        IncompleteError: something is missing.
        MismatchError: something is not what was recorded, or not what `against` holds.
    """
    progress = progress_artifact("verify", uri)
    outcome, recorded = verified(
        uri, level=level, against=against, family_file=family_file, progress=progress
    )
    run_logger().info("%s at level %s: %s; lineage: %s", outcome.uri, level, outcome.verdict, recorded)
    return {**outcome.to_json(), "lineage": recorded}
