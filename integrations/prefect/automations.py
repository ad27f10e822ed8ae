"""Automations: actions that a Prefect server takes on wherry's runs, created or updated by name.

The file has Prefect's own form (`prefect automation create --from-file` accepts it too). An alarm of the file that
does nothing sends a notification if a block is given, and starts the deployment whose runs it misses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import UUID

from wherry.errors import NotFoundError, UsageError
from wherry.integrations.prefect.documents import read_yaml

if TYPE_CHECKING:
    from prefect.client.orchestration import PrefectClient
    from prefect.events.schemas.automations import AutomationCore

    from wherry.integrations.prefect.pools import Outcome

_BODY = "{{ automation.name }}: {{ automation.description }}"


def read_automations(path: Path, notify: UUID | None = None) -> tuple[AutomationCore, ...]:
    """The automations of a file.

    Args:
        path: the YAML file.
        notify: the notification block that precedes `do-nothing` in the file.

    Raises:
        UsageError: the file is not YAML, or does not list automations.
        StorageError: the file cannot be read.
    """
    from prefect.events.schemas.automations import AutomationCore
    from pydantic import TypeAdapter, ValidationError

    try:
        rows: Any = read_yaml(path, "automations file", "pass the path of an automations.yaml")["automations"]
        found = TypeAdapter(tuple[AutomationCore, ...]).validate_python(
            [_notify_action(row, notify) for row in rows]
        )
    except (ValidationError, KeyError, TypeError) as error:
        raise UsageError(f"invalid automations file: {error}", uri=str(path)) from error
    return found


async def notification_block(client: PrefectClient, slug: str) -> UUID:
    """The id of a notification block, given as `slack-webhook/team`.

    Raises:
        UsageError: the name does not have the form TYPE/NAME.
        NotFoundError: the server has no block of that name.
    """
    from prefect.exceptions import ObjectNotFound

    kind, separator, name = slug.partition("/")
    if not (kind and separator and name):
        raise UsageError(
            f"invalid notification block name {slug!r}",
            cure="use the form TYPE/NAME, for example slack-webhook/team",
        )
    try:
        return (await client.read_block_document_by_name(name, kind, include_secrets=False)).id
    except ObjectNotFound as error:
        raise NotFoundError(
            f"notification block not found: {slug}", cure="create it in the Prefect UI under Blocks"
        ) from error


def with_runs(wanted: Sequence[AutomationCore], ids: Mapping[str, str]) -> tuple[AutomationCore, ...]:
    """The automations, with a run of the missing deployment in place of `do-nothing`.

    Args:
        wanted: the automations.
        ids: deployment → its id; a deployment has the name of its flow.
    """
    from prefect.events.actions import DoNothing, RunDeployment

    found: list[AutomationCore] = []
    for one in wanted:
        related = one.trigger.model_dump().get("match_related") or {}
        missed = ids.get(str(related.get("prefect.resource.name")))
        actions = [
            RunDeployment(source="selected", deployment_id=UUID(missed), parameters=None, job_variables=None)
            if missed and isinstance(action, DoNothing)
            else action
            for action in one.actions
        ]
        found.append(one.model_copy(update={"actions": actions}))
    return tuple(found)


async def ensure_automations(client: PrefectClient, wanted: Sequence[AutomationCore]) -> dict[str, Outcome]:
    """Create or update automations by name; of several with the same name, the newest is kept."""
    return {one.name: await _ensure(client, one) for one in wanted}


async def _ensure(client: PrefectClient, wanted: AutomationCore) -> Outcome:
    found = await client.read_automations_by_name(wanted.name)
    if not found:
        await client.create_automation(wanted)
        return "created"
    first, *further = found
    for one in further:
        await client.delete_automation(one.id)
    if not further and _comparable(first) == _comparable(wanted):
        return "unchanged"
    await client.update_automation(first.id, wanted)
    return "updated"


def _comparable(automation: AutomationCore) -> Any:
    """The comparable part of an automation: sets have no order, and triggers have ids from the server."""
    data = automation.model_dump(mode="json", exclude={"id", "owner_resource", "tags"})
    return _without_order(
        {**data, "trigger": {key: value for key, value in data["trigger"].items() if key != "id"}}
    )


def _without_order(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_order(one) for key, one in value.items()}
    return sorted(map(_without_order, value), key=repr) if isinstance(value, list) else value


def _notify_action(row: dict[str, Any], notify: UUID | None) -> dict[str, Any]:
    alert = {"type": "send-notification", "block_document_id": notify, "subject": row["name"], "body": _BODY}
    silent = any(action["type"] == "do-nothing" for action in row["actions"])
    return {**row, "actions": [*([alert] if notify and silent else []), *row["actions"]]}
