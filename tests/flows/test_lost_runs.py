"""A run whose worker died, and whose last events the server lost, is crashed by the next run; a living one stays."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta

import pytest

pytest.importorskip("prefect")

from prefect import flow
from prefect.client.orchestration import get_client
from prefect.events import emit_event
from prefect.events.filters import EventFilter, EventNameFilter, EventOccurredFilter, EventResourceFilter
from prefect.states import Pending, Running

from tests.support.infra import INFRA
from wherry.integrations.prefect import lost_runs
from wherry.integrations.prefect.automations import read_automations
from wherry.integrations.prefect.lost_runs import AUTOMATIONS, end_lost_runs
from wherry.tasks.ending import ending

pytestmark = pytest.mark.server


@flow
def some():
    """A flow of which runs are made by hand."""


@pytest.fixture
def client(server):
    """A client of a server with the shipped automations."""
    wanted = [one for one in read_automations(INFRA / "automations.yaml") if one.name in AUTOMATIONS.values()]
    assert len(wanted) == 2
    with get_client(sync_client=True) as client:
        ids = [client.create_automation(one) for one in wanted]
        yield client
        for one in ids:
            client.delete_automation(one)


@pytest.fixture
def later(monkeypatch):
    """An hour later."""
    now = datetime.now(UTC) + timedelta(hours=1)
    monkeypatch.setattr(lost_runs, "_now", lambda: now)


def test_lost_runs_are_crashed_by_the_next_run(client, later):
    lost = [client.create_flow_run(some, state=state, tags=["wherry"]) for state in (Pending(), Running())]
    other = client.create_flow_run(some, state=Running(), tags=["not-ours"])

    @flow
    def next_run():
        with ending("nightly-convert", "Nightly conversion", only_failures=True):
            pass

    next_run()
    states = [client.read_flow_run(run.id).state for run in (*lost, other)]
    assert [state.type.value for state in states] == ["CRASHED", "CRASHED", "RUNNING"]
    assert "the worker has died" in states[0].message
    client.delete_flow_run(other.id)


def test_the_run_that_looks_and_one_that_has_sent_an_event_stay(client, monkeypatch):
    run = client.create_flow_run(some, state=Running(), tags=["wherry"])
    assert end_lost_runs(client, None) == [], "it began just now"
    with monkeypatch.context() as patch:
        patch.setattr(lost_runs, "_now", lambda: datetime.now(UTC) + timedelta(hours=1))
        assert end_lost_runs(client, str(run.id)) == [], "it is the one that looks"
    moment = datetime.now(UTC) + timedelta(minutes=59)
    emit_event(
        "prefect.flow-run.heartbeat", {"prefect.resource.id": f"prefect.flow-run.{run.id}"}, occurred=moment
    )
    wanted = EventFilter(
        occurred=EventOccurredFilter(until=moment + timedelta(minutes=1)),
        resource=EventResourceFilter(id=[f"prefect.flow-run.{run.id}"]),
        event=EventNameFilter(name=["prefect.flow-run.heartbeat"]),
    )
    while not client.read_events(wanted, limit=1).events:
        time.sleep(0.2)
    monkeypatch.setattr(lost_runs, "_now", lambda: moment + timedelta(seconds=30))
    assert end_lost_runs(client, None) == [], "it sent a heartbeat"
    client.delete_flow_run(run.id)


def test_without_the_automations_nothing_is_ended(server, later):
    with get_client(sync_client=True) as client:
        run = client.create_flow_run(some, state=Running(), tags=["wherry"])
        assert end_lost_runs(client, None) == []
        client.delete_flow_run(run.id)
