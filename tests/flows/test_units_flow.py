"""Conversions by units as flow runs: progress, runs that crash or are cancelled, and runs that are workers of a job."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("prefect")

from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId
from prefect.settings import PREFECT_API_URL, get_current_settings

import wherry
from tests.support.jobs import receipts, undisturbed
from tests.support.killed_coordinator import SHARD, UNIT, spec_of
from tests.support.object_stores import model
from tests.support.processes import gone
from tests.support.worker_pools import request_of
from wherry.core.progress import Progress, UnitCounts
from wherry.errors import NotFoundError
from wherry.flows.convert import convert_checkpoint
from wherry.flows.work import work_on_units
from wherry.tasks import common, steps
from wherry.workers.job import split

ROOT = Path(__file__).parents[2]
UNITS = 6
pytestmark = [pytest.mark.server]


@pytest.fixture(autouse=True)
def own_home(tmp_path, monkeypatch):
    monkeypatch.setenv("WHERRY_HOME", str(tmp_path / "home"))
    for name in ("WHERRY_LEDGER", "MLFLOW_TRACKING_URI", "MLFLOW_REGISTRY_URI"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def source(tmp_path):
    return model(tmp_path / "model")


@pytest.fixture
def target(tmp_path):
    (tmp_path / "place").mkdir()
    return str(tmp_path / "place" / "out")


def killed(verb, source, target, place, number, kind="SIGKILL"):
    """The exit code of a flow run, as a process of its own, that gets a signal at a step."""
    line = [
        sys.executable,
        "-m",
        "tests.support.killed_coordinator",
        verb,
        str(source),
        target,
        place,
        str(number),
    ]
    settings = {**get_current_settings().to_environment_variables(exclude_unset=True)}
    api = PREFECT_API_URL.value()
    if api is None:
        with get_client(sync_client=True) as client:
            api = str(client.api_url)
    environment = {**os.environ, **settings, "PREFECT_API_URL": api, "WHERRY_TEST_SIGNAL": kind}
    return subprocess.run(
        line, cwd=ROOT, env=environment, capture_output=True, check=False, timeout=120
    ).returncode


def makers(target):
    return {int(re.match(r"process (\d+) on", row["worker"])[1]) for row in receipts(target).values()}


def artifacts(flow_run_id):
    with get_client(sync_client=True) as client:
        chosen = ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[flow_run_id]))
        return {row.key: row for row in client.read_artifacts(artifact_filter=chosen)}


@pytest.mark.parametrize(
    ("place", "number", "kind"),
    [
        ("receipt in", 2, "SIGKILL"),
        pytest.param("receipt in", 2, "SIGTERM", marks=pytest.mark.slow),  # as a worker cancels a run
        pytest.param("commit", 1, "SIGKILL", marks=pytest.mark.slow),
        pytest.param("end", 1, "SIGKILL", marks=pytest.mark.slow),
    ],
)
def test_a_run_that_ended_early_leaves_a_job_that_the_next_takes_up(
    server, source, target, tmp_path, place, number, kind
):
    code = killed("convert", source, target, place, number, kind)
    assert code == -9 if kind == "SIGKILL" else code != 0
    assert gone(makers(target))
    before = receipts(target)
    assert len(before) >= 2
    state = convert_checkpoint(spec_of("convert", str(source), target), return_state=True)
    receipt = state.result()["receipt"]
    assert receipt["resumed_bytes"] == receipt["bytes_written"] or receipt["already"]
    assert receipt["target"]["checkpoint_digest"] == undisturbed(source, tmp_path).checkpoint_digest
    assert wherry.verify(target, level="digest").ok
    assert os.listdir(Path(target).parent) == ["out"]
    bar = artifacts(state.state_details.flow_run_id)["wherry-convert"]
    assert receipt["already"] or ": 6 of 6 units, " in bar.description


def test_progress_says_units_rate_time_left_workers_and_failed_attempts(monkeypatch):
    sent = []
    monkeypatch.setattr(common, "create_progress_artifact", lambda *_, **__: "id")
    monkeypatch.setattr(
        common, "update_progress_artifact", lambda _id, percent, **how: sent.append((percent, how))
    )
    monkeypatch.setattr(common, "_INTERVAL", 0.0)
    report = common.progress_artifact("convert", "/a")
    counts = UnitCounts(total=40, done=3, workers=4, failed=1)
    report(Progress("convert", 3 << 20, 40 << 20, 1 << 20, 37.0, "unit", counts))
    report(Progress("verify", 1 << 20, 40 << 20, 1 << 20, None, "a tensor"))
    texts = [how["description"] for _percent, how in sent]
    assert texts[0] == (
        "convert /a: 3 of 40 units, 3.1 MB of 41.9 MB, 1.0 MB/s, 37 s left, 4 workers, 1 failed attempt"
    )
    assert texts[1].startswith("verify /a: 3 of 40 units, 1.0 MB of 41.9 MB")
    assert sent[0][0] == 7.5


def test_runs_of_the_flow_work_write_a_job_and_one_commits(server, source, target, tmp_path):
    made = split(request_of(source, target, SHARD), UNIT)
    state = work_on_units(spec_of("work", source, target), return_state=True)
    done = state.result()
    assert (len(done["made"]), done["units"]) == (UNITS, UNITS)
    reference = done["receipt"]["target"]
    assert reference["uri"] == target
    assert reference["checkpoint_digest"] == undisturbed(source, tmp_path).checkpoint_digest
    table = json.loads(artifacts(state.state_details.flow_run_id)["wherry-work"].data)
    rows = {row["what"]: row["value"] for row in table}
    assert (rows["job"], rows["written here"], rows["committed here"]) == (made.uri, "6 units of 6", "yes")
    assert wherry.verify(target, level="digest").ok
    late = work_on_units(spec_of("work", source, target))
    assert (late["made"], late["ended"], late["receipt"]) == ([], True, None)


@pytest.mark.slow
def test_a_run_of_the_flow_work_that_crashed_leaves_its_unit_to_another(server, source, target, tmp_path):
    split(request_of(source, target, SHARD), UNIT)
    assert killed("work", source, target, "create receipt", 3) == -9
    before = receipts(target)
    assert len(before) == 2
    done = work_on_units(spec_of("work", source, target))
    assert len(done["made"]) == UNITS - 2
    assert wherry.verify(target, level="digest").ok
    assert os.listdir(Path(target).parent) == ["out"]


def test_a_run_of_the_flow_work_without_a_job_fails(tmp_path):
    with pytest.raises(NotFoundError, match="no job found"):
        steps.work.fn(str(tmp_path / "nothing"))
