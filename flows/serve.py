"""serve: run the deployments of a `prefect.yaml` in this process, without a work pool or worker.

For a laptop or a single machine: schedules, triggers and limits are those of the file. Runs are child processes of this
process, which at Ctrl-C or SIGTERM starts no more runs and pauses the schedules.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from prefect import serve as carry_out
from prefect.client.schemas.actions import DeploymentScheduleCreate
from prefect.client.schemas.objects import ConcurrencyLimitConfig
from prefect.client.schemas.schedules import CronSchedule
from prefect.events import DeploymentTriggerTypes
from prefect.flows import load_flow_from_entrypoint
from prefect.types.entrypoint import EntrypointType
from pydantic import TypeAdapter, ValidationError

from wherry.cures import Command, Cure
from wherry.errors import UsageError
from wherry.integrations.prefect.deploy import read_deployments
from wherry.integrations.prefect.server import answering_server

if TYPE_CHECKING:
    from prefect.deployments.runner import RunnerDeployment

_TRIGGERS: TypeAdapter[list[Any]] = TypeAdapter(list[DeploymentTriggerTypes])
# As in `infra/pools`: a heartbeat each 30 s, and tries of a server that is away for two minutes.
_ENVIRONMENT = {"PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30", "PREFECT_CLIENT_MAX_RETRIES": "6"}
_KNOWN = {
    "name",
    "description",
    "entrypoint",
    "tags",
    "work_pool",
    "parameters",
    "schedules",
    "triggers",
    "concurrency_limit",
}


def deployments(file: Path) -> list[RunnerDeployment]:
    """The deployments of a `prefect.yaml`, for `prefect.serve`; its work pools are ignored.

    Raises:
        NotFoundError: the file does not exist.
        UsageError: the file is invalid, or a deployment cannot be served.
        StorageError: the file cannot be read.
    """
    return [_deployment(entry, file) for entry in read_deployments(file)]


def serve(file: Path, *, limit: int = 2) -> None:
    """Run the deployments of a file until stopped.

    Args:
        file: the `prefect.yaml`.
        limit: runs at a time.

    Raises:
        NotFoundError: the file does not exist.
        UsageError: the file is invalid, or a deployment cannot be served.
        StorageError: the file cannot be read, or the configured server does not answer.
    """
    answering_server()
    for name, value in _ENVIRONMENT.items():  # for the runs: a run without heartbeats counts as crashed
        os.environ.setdefault(name, value)
    carry_out(*deployments(file), limit=limit)


def _deployment(entry: dict[str, Any], file: Path) -> RunnerDeployment:
    unknown = sorted(set(entry) - _KNOWN)
    if unknown:
        raise UsageError(
            f"unsupported field {', '.join(unknown)} of deployment {entry['name']}",
            uri=str(file),
            cure=Cure("remove it, or create the deployment with {}", Command("deploy")),
        )
    try:
        flow = load_flow_from_entrypoint(entry["entrypoint"])
        limit = entry.get("concurrency_limit")
        made = flow.to_deployment(
            name=entry["name"],
            description=entry.get("description"),
            tags=entry.get("tags"),
            parameters=entry.get("parameters"),
            schedules=[
                DeploymentScheduleCreate(
                    schedule=CronSchedule(cron=row["cron"], timezone=row.get("timezone")),
                    active=row.get("active", True),
                    slug=row.get("slug"),
                    parameters=row.get("parameters", {}),
                )
                for row in entry.get("schedules", ())
            ],
            triggers=_TRIGGERS.validate_python(entry.get("triggers", [])),
            concurrency_limit=ConcurrencyLimitConfig(**limit) if isinstance(limit, dict) else limit,
            entrypoint_type=EntrypointType.MODULE_PATH,
        )
    except (ImportError, AttributeError, ValidationError) as error:
        raise UsageError(f"cannot serve deployment {entry['name']}: {error}", uri=str(file)) from error
    return cast("RunnerDeployment", made)  # a coroutine only if an event loop is running already
