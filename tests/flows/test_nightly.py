"""The nightly flow against a real (temporary) Prefect server: reconciliation, isolation, skips and the summary."""

from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.support.flow import occupied, watched
from wherry.errors import CorruptError

pytest.importorskip("prefect")

from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId

from wherry.flows.nightly import NightlySpec, nightly
from wherry.ledger.nodes import conversions
from wherry.ledger.record import check_chain, open_ledger
from wherry.nightly.night import holding
from wherry.nightly.routes import load_config

pytestmark = [pytest.mark.server]

# Where it is stated, two checkpoints at a time wait for seconds: the server's SQLite is locked by one for the other.
LIMITED = "[concurrency]\nfile = 1\n"
CONFIG = """
[routes.night]
root = "runs"
select = "{select}"
min_age = 0
level = "digest"
{more}

[[routes.night.targets]]
format = "safetensors"
uri = "out/{{run}}/{{step}}.safetensors"

[[routes.night.targets]]
format = "orbax"
uri = "out/{{run}}/{{step}}-orbax"
"""


@pytest.fixture
def notices(monkeypatch):
    from wherry.nightly import ending

    sent = []
    monkeypatch.setattr(ending, "send", lambda _, notice, page: sent.append((notice, page)))
    return sent


def write(folder, select="all", more="", head=""):
    (folder / "wherry.toml").write_text(head + CONFIG.format(select=select, more=more))
    return NightlySpec(config=str(folder / "wherry.toml"))


def checkpoint(folder, run, step, value=1.0):
    place = folder / "runs" / run / f"checkpoint-{step}"
    place.mkdir(parents=True)
    save_file({"w": np.full((8, 4), value, np.float32)}, place / "model.safetensors")
    return place


def page(state):
    with get_client(sync_client=True) as client:
        chosen = ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[state.state_details.flow_run_id]))
        rows = {row.key: row for row in client.read_artifacts(artifact_filter=chosen)}
    return rows["wherry-nightly"].data


def test_a_night_and_the_next_one(server, tmp_path, notices, monkeypatch):
    places = [checkpoint(tmp_path, "a", 100), checkpoint(tmp_path, "a", 200), checkpoint(tmp_path, "b", 5)]
    spec = write(tmp_path)
    state = nightly(spec, return_state=True)
    assert state.is_completed(), state.message
    done = json.loads(json.dumps(state.result()))
    assert done["counts"] == {"converted": 3}
    assert {one["source"] for one in done["outcomes"]} == {str(place) for place in places}
    assert (tmp_path / "out" / "a" / "200.safetensors").is_file()
    assert (tmp_path / "out" / "b" / "5-orbax" / "wherry.json").is_file()
    assert "**converted**: 3" in page(state)
    [(notice, page_of_run)] = notices
    assert notice.counts == {"converted": 3}
    assert str(state.state_details.flow_run_id) in page_of_run

    checkpoint(tmp_path, "b", 6)
    held = watched(monkeypatch)
    again = nightly(write(tmp_path, head=LIMITED))
    assert again["counts"] == {"converted": 1, "done": 6}
    assert (held, occupied()) == ([(1, 1)], (0, 1))
    with open_ledger() as ledger:
        assert check_chain(ledger).altered is None
        assert len({(one.source_uri, one.source_fingerprint) for one in conversions(ledger)}) == 4


def test_one_that_fails_stops_nothing_and_is_not_tried_again(server, tmp_path, notices):
    checkpoint(tmp_path, "good", 1)
    blocked = checkpoint(tmp_path, "half", 1)
    (tmp_path / "out" / "half").mkdir(parents=True)
    (tmp_path / "out" / "half" / "1.safetensors").write_text("somebody's")
    bad = checkpoint(tmp_path, "bad", 1)
    data = (bad / "model.safetensors").read_bytes()
    (bad / "model.safetensors").write_bytes(data[:-4])
    spec = write(tmp_path)
    state = nightly(spec, return_state=True)
    assert state.is_failed()
    assert "1 of 3 failed; the first: target already exists" in state.message
    text = page(state)
    assert "**damaged**: 1" in text
    assert "somebody" not in text
    assert (tmp_path / "out" / "good" / "1.safetensors").is_file()
    assert (tmp_path / "out" / "half" / "1-orbax").is_dir(), "the other target of the same source is made"
    assert "target already exists" in notices[0][0].first_error
    assert notices[0][0].cure

    again = nightly(spec, return_state=True)
    assert again.is_failed(), "as long as its cause stands"
    assert "1 of 1 failed; the first: it failed before with the same files and options" in again.message
    assert notices[-1][0].counts == {"damaged": 1, "done": 3, "failed": 1}
    assert f"{blocked.parent.parent.parent}/out/half/1.safetensors" in page(again)
    (tmp_path / "out" / "half" / "1.safetensors").unlink()
    retried = nightly(spec.model_copy(update={"retry_failed": True}), return_state=True)
    assert retried.is_completed()
    assert retried.message.startswith(f"1 converted, 1 damaged: {bad}: ")
    assert notices[-1][0].warning == retried.message
    assert retried.result()["counts"] == {"converted": 1, "damaged": 1, "done": 3}


def test_a_first_night_estimates_and_a_second_night_skips(server, tmp_path, notices):
    for step in (1, 2, 3):
        checkpoint(tmp_path, "r", step)
    spec = write(tmp_path, more="first_night_items = 2")
    state = nightly(spec, return_state=True)
    done = state.result()
    assert (done["plans"][0]["count"], done["plans"][0]["tonight"]) == (3, 0)
    assert "3 checkpoints are waiting" in page(state)
    assert not (tmp_path / "out").exists()
    config = load_config(spec.config)
    with holding(config.routes[0]) as held:
        assert held
        skipped = nightly(spec.model_copy(update={"go": True}), return_state=True)
    assert skipped.name == "Skipped"
    assert len(notices) == 1, "a skipped night has nothing to report"
    assert skipped.result()["skipped"] == ["night"]
    assert nightly(spec.model_copy(update={"go": True}))["counts"] == {"converted": 3}


def test_what_vanishes_is_reported_and_not_a_failure(server, tmp_path, notices, monkeypatch):
    from wherry.nightly import night as module

    gone, _kept = checkpoint(tmp_path, "r", 1), checkpoint(tmp_path, "r", 2)
    plan = module.plan_night

    def and_vanish(*args, **kwargs):
        found = plan(*args, **kwargs)
        (gone / "model.safetensors").unlink()
        gone.rmdir()
        return found

    monkeypatch.setattr(module, "plan_night", and_vanish)
    done = nightly(write(tmp_path))
    assert done["counts"] == {"converted": 1, "vanished": 1}


def test_a_damaged_root_is_a_failure_of_its_route(server, tmp_path, notices):
    spec = write(tmp_path)
    state = nightly(spec, return_state=True)
    assert state.is_failed()
    assert "file or folder not found" in state.message
    assert not isinstance(state.result(raise_on_failure=False), CorruptError)
