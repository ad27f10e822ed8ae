"""Lost runs: flow runs whose worker has died, and which the automations have missed.

Prefect's automations see events, and events of the last seconds before its server is killed are lost: a run that such
an event is about would stay pending or running for ever, since its worker is gone, too. So each run of wherry looks
at the states themselves when it begins, and does what the automations would have done, by their times and messages. It
waits longer than they do, since the heartbeats of a living run are lost, too, while the server is away.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterState,
    FlowRunFilterStateType,
    FlowRunFilterTags,
)
from prefect.client.schemas.objects import State, StateType
from prefect.events.actions import ChangeFlowRunState
from prefect.events.filters import EventFilter, EventOccurredFilter, EventResourceFilter

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas.objects import FlowRun
    from prefect.events.schemas.automations import Automation

TAG = "wherry"
AUTOMATIONS = {
    StateType.PENDING: "wherry pending runs are crashed",
    StateType.RUNNING: "wherry zombie runs are crashed",
}
"""State of a lost run → the automation that is about it."""
GRACE = timedelta(minutes=3)
"""How much longer than the automation a run is silent: time for a server to come back, and for two heartbeats."""


def end_lost_runs(client: SyncPrefectClient, own: str | None) -> list[str]:
    """Mark the runs of wherry as crashed that have lost their worker.

    Args:
        client: client of the server.
        own: id of the run that looks.

    Returns:
        The names of the lost runs. Where an automation is missing or disabled, its runs are left as they are.
    """
    ended: list[str] = []
    for state, name in AUTOMATIONS.items():
        wanted = FlowRunFilter(
            tags=FlowRunFilterTags(all_=[TAG]),
            state=FlowRunFilterState(type=FlowRunFilterStateType(any_=[state])),
        )
        runs = [run for run in client.read_flow_runs(flow_run_filter=wanted) if str(run.id) != own]
        found = client.read_automations_by_name(name) if runs else []
        if found and found[0].enabled:
            ended += [run.name for run in runs if _end_if_lost(client, run, found[0])]
    return ended


def _end_if_lost(client: SyncPrefectClient, run: FlowRun, automation: Automation) -> bool:
    now: Any = _now()  # Prefect's own type of a time is another one
    since = now - automation.trigger.model_dump()["within"] - GRACE
    if run.state is None or run.state.timestamp > since:
        return False
    lately = EventFilter(
        occurred=EventOccurredFilter(since=since, until=now),
        resource=EventResourceFilter(id=[f"prefect.flow-run.{run.id}"]),
    )
    if client.read_events(lately, limit=1).events:
        return False
    actions = [one for one in automation.actions if isinstance(one, ChangeFlowRunState)]
    for action in actions:
        client.set_flow_run_state(run.id, State(type=action.state, message=action.message))
    return bool(actions)


def _now() -> datetime:
    return datetime.now(UTC)
