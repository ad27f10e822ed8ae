"""verify, as a task: is the checkpoint whole and what was recorded? The outcome goes to the ledger."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from prefect import task

from wherry.errors import IncompleteError, MismatchError, WherryError
from wherry.lineage import record_outcome
from wherry.sidecar import read_sidecar
from wherry.store import locate
from wherry.tasks.common import STEP, progress_artifact, run_logger
from wherry.verify import verify as examine

if TYPE_CHECKING:
    from wherry.verify import Verification


@task(name="verify", **STEP)
def verify(uri: str, level: str = "present", against: str | None = None) -> dict[str, Any]:
    """Verify a checkpoint, and fail where it does not pass.

    Returns:
        The JSON form of the verification, with `lineage`: whether the ledger recorded it.

    Raises:
        IncompleteError: something is missing.
        MismatchError: something is not what was recorded, or not what `against` holds.
    """
    outcome = examine(uri, level=level, against=against, progress=progress_artifact("verify", uri))
    sidecar = read_sidecar(locate(outcome.uri))
    data = outcome.to_json()
    recorded = record_outcome(sidecar.checkpoint, data) if sidecar else "not recorded: it has no sidecar"
    run_logger().info("%s at level %s: %s; lineage: %s", outcome.uri, level, outcome.verdict, recorded)
    if not outcome.ok:
        raise _failure(outcome)
    return {**data, "lineage": recorded}


def _failure(outcome: Verification) -> WherryError:
    kind = IncompleteError if outcome.verdict == "incomplete" else MismatchError
    first = outcome.failed[0]
    more = f"; {len(outcome.failed) - 1} more" if len(outcome.failed) > 1 else ""
    return kind(
        f"verification failed: {first.reason}{more}",
        uri=outcome.uri,
        path=first.path,
        cure="restore the checkpoint, or delete it and convert again",
        stage="verify",
    )
