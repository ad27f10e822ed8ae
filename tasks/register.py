"""register, as a task: register a converted checkpoint as a version in the model registry."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from prefect import task
from prefect.runtime import flow_run

from wherry.core.request import SourceRequest
from wherry.models.register import register as enter
from wherry.tasks.common import STEP
from wherry.tasks.run_log import run_logger


@task(name="register", task_run_name="register {uri}", **STEP)
def register(
    uri: str,
    model: str,
    alias: str | None = None,
    tracking_uri: str | None = None,
    registry_uri: str | None = None,
    tags: dict[str, str] | None = None,
    below: str | None = None,
) -> dict[str, Any]:
    """Register a checkpoint by reference; the same checkpoint and model always give the same version.

    Args:
        uri: the checkpoint.
        model: the registered model.
        alias, tracking_uri, registry_uri, tags: as for `wherry.register`.
        below: a folder that the checkpoint must not leave.

    Returns:
        The fields of the registration.
    """
    stores = {"tracking_uri": tracking_uri, "registry_uri": registry_uri}
    done = enter(
        SourceRequest(uri, below=below), model, alias=alias, tags=tags, run_page=flow_run.ui_url, **stores
    )
    run_logger().info(
        "%s version %s %s", model, done.version, "created" if done.created else "exists already"
    )
    return asdict(done)
