"""Conversions by units on a Prefect site: a run that is cancelled by its worker, and the machines of a work pool.

Real servers, process workers and the deployments of `prefect.yaml`, as tests/infra/test_end_to_end.py has them.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

pytest.importorskip("prefect")
pytest.importorskip("psutil")
pytest.importorskip("yaml")

import psutil

import wherry
from tests.support.e2e import post, site, start_prefect, start_worker
from tests.support.infra import INFRA
from tests.support.object_stores import model

pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.timeout(1500)]
OPTIONS = {"max_shard_size": "1MB"}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A Prefect server with the deployments."""
    found = site(tmp_path_factory.mktemp("site"))
    found.environment["WHERRY_CONFIG"] = str(found.folder / "wherry.toml")
    (found.folder / "wherry.toml").write_text("")
    try:
        start_prefect(found)
        command(found, "deploy", str(INFRA / "prefect.yaml"), "--pools", str(INFRA / "pools"), "--json")
        yield found
    finally:
        found.close()


@pytest.fixture(scope="module")
def source(place):
    """240 tensors of 1 MB: with their headers one unit each."""
    return model(place.folder / "model", rows=1000, count=240)


@pytest.fixture(scope="module")
def expected(source, place):
    one = wherry.convert(source, place.folder / "undisturbed", to="hf", options=OPTIONS, lineage=False)
    return one.target.checkpoint_digest


def command(place, *words):
    return place.run(sys.executable, "-m", "wherry.cli", *words)


def answered(place, path, body):
    """The answer of the server; the request is repeated while the server is overloaded (503)."""

    def ask():
        try:
            return [post(f"{place.environment['PREFECT_API_URL']}/{path}", body)]
        except OSError as error:
            if ": 503 " not in str(error):
                raise
            return None

    return place.await_(f"an answer of {path}", ask, every=2.0)[0]


def rows(place, kind, body=None):
    return answered(place, f"{kind}/filter", body or {})


def started(place, deployment, spec):
    """The ID of a new flow run."""
    [found] = rows(place, "deployments", {"deployments": {"name": {"any_": [deployment]}}})
    return answered(place, f"deployments/{found['id']}/create_flow_run", {"parameters": {"spec": spec}})["id"]


def state(place, run):
    [row] = rows(place, "flow_runs", {"flow_runs": {"id": {"any_": [run]}}})
    return row["state_type"]


def ended(place, run):
    return place.await_("the end of the run", lambda: (one := state(place, run)) in ENDED and one)


ENDED = ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")


def progress(place, run):
    """What the progress artifact of a run says."""
    body = {"artifacts": {"flow_run_id": {"any_": [run]}, "key": {"any_": ["wherry-convert"]}}}
    return next((row["description"] for row in rows(place, "artifacts", body)), "")


def working_on(target):
    """The processes whose command line names a target."""
    return [
        one
        for one in psutil.process_iter(["cmdline"])
        if any(target in word for word in one.info["cmdline"] or ())
    ]


def test_a_run_that_is_cancelled_leaves_a_job_that_the_next_takes_up(place, source, expected):
    target = str(place.folder / "cancelled" / "out")
    Path(target).parent.mkdir()
    start_worker(place, "wherry-process")
    spec = {
        "source": str(source),
        "target": target,
        "to": "hf",
        "options": OPTIONS,
        "advanced": {"engine": "processes:2", "unit": "1100KB"},
    }
    run = started(place, "convert", spec)
    place.await_("a unit", lambda: " of 240 units" in progress(place, run))
    answered(place, f"flow_runs/{run}/set_state", {"state": {"type": "CANCELLING", "name": "Cancelling"}})
    assert ended(place, run) == "CANCELLED"
    place.await_("the end of its workers", lambda: not working_on(target), 60)
    assert not Path(target).exists()
    done = len(
        [
            name
            for name in os.listdir(f"{place.folder}/cancelled/.wherry-out.job")
            if name.startswith("receipt")
        ]
    )
    assert 0 < done < 240
    again = started(place, "convert", spec)
    assert ended(place, again) == "COMPLETED"
    assert ": 240 of 240 units, " in progress(place, again)
    with wherry.open(target) as checkpoint:
        assert checkpoint.manifest.tensors
    receipt = json.loads((Path(target) / "wherry.json").read_text())
    assert expected in json.dumps(receipt)
    assert wherry.verify(target, level="digest").ok
    assert os.listdir(Path(target).parent) == ["out"]


def test_the_machines_of_a_work_pool_write_a_job_and_one_is_killed(place, source, expected):
    target = str(place.folder / "pool" / "out")
    Path(target).parent.mkdir()
    command(
        place, "split", str(source), target, "--to", "hf", "--set", "max_shard_size=1MB", "--unit", "1100KB"
    )
    machines = [start_worker(place, "wherry-units", f"machine-{number}", limit=1) for number in range(2)]
    runs = [started(place, "work", {"job": target}) for _ in range(2)]
    records = Path(f"{place.folder}/pool/.wherry-out.job")
    place.await_("units", lambda: sum(name.startswith("receipt") for name in os.listdir(records)) > 5)
    machines[0].kill()
    place.await_("one run to end", lambda: "COMPLETED" in [state(place, run) for run in runs])
    assert wherry.verify(target, level="digest").ok
    assert expected in (Path(target) / "wherry.json").read_text()
    assert os.listdir(Path(target).parent) == ["out"]
