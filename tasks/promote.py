"""promote, as tasks: verify a registered checkpoint, check the policy and move an alias; or roll back."""

from __future__ import annotations

from typing import Any

from prefect import task

from wherry.models.promote import promote as carry_out
from wherry.models.promote import rollback as go_back
from wherry.tasks.common import STEP, progress_artifact
from wherry.tasks.run_log import run_logger


@task(name="promote", task_run_name="promote {subject}", **STEP)
def promote(subject: str, **chosen: Any) -> dict[str, Any]:
    """Promote a checkpoint or model version; fail if the verification or the policy does not pass.

    Args:
        subject: a model URI or a checkpoint's URI.
        chosen: further arguments of `wherry.promote`.

    Returns:
        The JSON form of the promotion.
    """
    done = carry_out(subject, progress=progress_artifact("promote", subject), **chosen)
    outcome = (
        "was set already"
        if done.already
        else f"replaces {f'version {done.replaced}' if done.replaced else 'nothing'}"
    )
    run_logger().info("%s version %s is %s; it %s", done.name, done.version, done.alias, outcome)
    return done.to_json()


@task(name="rollback", task_run_name="rollback {model}", **STEP)
def rollback(model: str, **chosen: Any) -> dict[str, Any]:
    """Move an alias back to the version that had it before.

    Args:
        model: the registered model.
        chosen: further arguments of `wherry.models.promote.rollback`.

    Returns:
        The JSON form of the rollback.
    """
    done = go_back(model, progress=progress_artifact("rollback", model), **chosen)
    run_logger().info("%s version %s is %s again", done.name, done.version, done.alias)
    return done.to_json()
