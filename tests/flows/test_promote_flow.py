"""The promote flow against a real (temporary) Prefect server: what it shows, how it is refused, and the way back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pydantic import ValidationError

import wherry
from tests.support.registry import converted, flip_a_bit
from wherry.errors import MismatchError

pytest.importorskip("prefect")
pytest.importorskip("mlflow")

from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId

from wherry.flows.promote import PromoteSpec, promote


def artifacts(state):
    with get_client(sync_client=True) as client:
        chosen = ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[state.state_details.flow_run_id]))
        rows = {row.key: row.data for row in client.read_artifacts(artifact_filter=chosen)}
    return {key: json.loads(data) for key, data in rows.items() if isinstance(data, str) and data[:1] == "["}


@pytest.mark.server
def test_promoted_refused_and_rolled_back(server, tmp_path, monkeypatch):
    for name in ("WHERRY_LEDGER", "MLFLOW_TRACKING_URI", "MLFLOW_REGISTRY_URI"):
        monkeypatch.delenv(name, raising=False)
    places = [converted(tmp_path / str(number)).target.uri for number in range(3)]
    for place in places:
        wherry.register(place, "m")
    for number in ("1", "2"):
        state = promote(PromoteSpec(subject=f"models:/m/{number}"), return_state=True)
        assert state.is_completed(), state.message
    table = {row["what"]: row["value"] for row in artifacts(state)["wherry-promotion"]}
    assert (table["model"], table["replaced"]) == ("m version 2", "1")
    assert table["gate level at least digest"] == "digest"

    flip_a_bit(Path(places[2]))
    state = promote(PromoteSpec(subject="models:/m/3"), return_state=True)
    assert state.is_failed()
    assert isinstance(state.result(raise_on_failure=False), MismatchError)
    assert "differs from the registered one" in artifacts(state)["wherry-failure"][1]["value"]

    done = promote(PromoteSpec(subject="models:/m", rollback=True))
    assert (done["version"], done["replaced"]) == ("1", "2")


def test_the_form_is_described_and_checked():
    spec = promote.parameters.model_dump()["definitions"]["PromoteSpec"]["properties"]
    rare = spec["advanced"]["properties"]
    for rows in (spec, rare, rare["policy"]["properties"]):
        assert [name for name, field in rows.items() if not field.get("description")] == []
    for bad, words in (
        ({}, "subject"),
        ({"rollback": True}, "subject"),
        ({"rollback": True, "subject": "/data/x"}, "names no model"),
        ({"subject": "x", "subjct": "x"}, "subjct"),
    ):
        with pytest.raises(ValidationError, match=words):
            PromoteSpec(**bad)
