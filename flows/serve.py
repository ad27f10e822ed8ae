"""serve: run the deployments of a `prefect.yaml` from this process, without a work pool or a worker.

For a laptop or a single machine: schedules, triggers and limits are those of the file. Runs are child processes of
this one, which stops taking up new ones at Ctrl-C or SIGTERM and pauses the schedules.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from prefect import serve as carry_out
from prefect.client.schemas.actions import DeploymentScheduleCreate
from prefect.client.schemas.objects import ConcurrencyLimitConfig
from prefect.client.schemas.schedules import CronSchedule
from prefect.events import DeploymentTriggerTypes
from prefect.flows import load_flow_from_entrypoint
from prefect.types.entrypoint import EntrypointType
from pydantic import TypeAdapter, ValidationError

from wherry.errors import UsageError
from wherry.integrations.prefect.deploy import read_deployments

if TYPE_CHECKING:
    from pathlib import Path

    from prefect.deployments.runner import RunnerDeployment

_TRIGGERS: TypeAdapter[list[Any]] = TypeAdapter(list[DeploymentTriggerTypes])
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
        NotFoundError: there is no such file.
        UsageError: it is faulty, or states something that cannot be served.
        StorageError: it cannot be read.
    """
    return [_deployment(entry, file) for entry in read_deployments(file)]


def serve(file: Path, *, limit: int = 2) -> None:
    """Serve the deployments of a file until stopped.

    Args:
        file: the `prefect.yaml`.
        limit: runs at a time.

    Raises:
        NotFoundError: there is no such file.
        UsageError: it is faulty, or states something that cannot be served.
        StorageError: it cannot be read.
    """
    carry_out(*deployments(file), limit=limit)


def _deployment(entry: dict[str, Any], file: Path) -> RunnerDeployment:
    unknown = sorted(set(entry) - _KNOWN)
    if unknown:
        raise UsageError(f"{entry['name']}: {', '.join(unknown)} cannot be served", uri=str(file))
    try:
        flow = load_flow_from_entrypoint(entry["entrypoint"])
        made = flow.to_deployment(
            name=entry["name"],
            description=entry.get("description"),
            tags=entry.get("tags"),
            parameters=entry.get("parameters"),
            schedules=[_schedule(row) for row in entry.get("schedules", ())],
            triggers=_TRIGGERS.validate_python(entry.get("triggers", [])),
            concurrency_limit=_limit(entry.get("concurrency_limit")),
            entrypoint_type=EntrypointType.MODULE_PATH,
        )
    except (ImportError, AttributeError, ValidationError) as error:
        raise UsageError(f"{entry['name']} cannot be served: {error}", uri=str(file)) from error
    return cast("RunnerDeployment", made)  # a coroutine only where an event loop runs already


def _schedule(row: dict[str, Any]) -> DeploymentScheduleCreate:
    schedule = CronSchedule(cron=row["cron"], timezone=row.get("timezone"))
    return DeploymentScheduleCreate(
        schedule=schedule,
        active=row.get("active", True),
        slug=row.get("slug"),
        parameters=row.get("parameters", {}),
    )


def _limit(stated: dict[str, Any] | int | None) -> ConcurrencyLimitConfig | int | None:
    return ConcurrencyLimitConfig(**stated) if isinstance(stated, dict) else stated
