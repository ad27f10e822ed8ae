"""The whole of it as a platform team runs it: real servers, a process worker, the deployments of `prefect.yaml`.

One site for the module: a Prefect server, and what `wherry deploy` makes there. The long test adds an MLflow server and
trainings, kills the worker in the middle of a night and restarts the registry.
"""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest
from safetensors.numpy import save_file

pytest.importorskip("prefect")
pytest.importorskip("psutil")
pytest.importorskip("yaml")

import psutil
import yaml

from tests.support import e2e_programs
from tests.support.e2e import get, patch, post, site, start_mlflow, start_prefect, start_worker
from tests.support.infra import INFRA

pytestmark = [pytest.mark.server, pytest.mark.timeout(1500)]
POOL = "wherry-process"
FLOWS = {"nightly-convert", "post-training-export", "promote", "audit", "convert-checkpoint", "work"}

DRIFT = {"is_paused": True, "concurrency_limit": 7, "base_job_template": {}}
RESUME = {"is_paused": False, "concurrency_limit": None}

CONFIG = """
[mlflow]
{mlflow}

[routes.t5x]
root = "runs/t5x"
select = "all"
min_age = 0
first_night = "convert"
concurrency = 1
{t5x_model}
[[routes.t5x.targets]]
format = "orbax"
uri = "out/{{run}}/{{step}}"
family = "none"

[routes.committed]
root = "runs/committed"
min_age = 0
{model}
[[routes.committed.targets]]
format = "orbax"
uri = "out/{{run}}/{{step|final}}"
family = "none"
only = "params"
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A Prefect server; nothing is deployed yet."""
    found = site(tmp_path_factory.mktemp("site"))
    found.environment["WHERRY_CONFIG"] = str(found.folder / "wherry.toml")
    try:
        start_prefect(found)
        yield found
    finally:
        found.close()


def wherry(place, *words, **environment):
    return place.run(sys.executable, "-m", "wherry.cli", *words, **environment)


def configure(place, mlflow="", t5x_model="", model=""):
    text = CONFIG.format(mlflow=mlflow, t5x_model=t5x_model, model=model)
    (place.folder / "wherry.toml").write_text(text)


def deploy(place, file=INFRA / "prefect.yaml"):
    return json.loads(
        wherry(place, "deploy", str(file), "--pools", str(INFRA / "pools"), "--automations",
               str(INFRA / "automations.yaml"), "--json")
    )  # fmt: skip


def rows(place, kind, body=None):
    return post(f"{place.environment['PREFECT_API_URL']}/{kind}/filter", body or {})


def runs(place, deployment):
    """The flow runs of a deployment that were not cancelled by its concurrency limit, oldest first."""
    body = {"deployments": {"name": {"any_": [deployment]}}, "sort": "EXPECTED_START_TIME_ASC"}
    return [
        row for row in rows(place, "flow_runs", body) if row["state_type"] not in ("SCHEDULED", "CANCELLED")
    ]


def finished(place, deployment, count=1, state="COMPLETED"):
    def ready():
        found = [row for row in runs(place, deployment) if row["state_type"] == state]
        return found if len(found) >= count else None

    return place.await_(f"{count} {state} of {deployment}", ready)


def test_the_shipped_files_deploy_and_deploying_again_mends_drift_only(place):
    configure(place)
    first = deploy(place)
    assert set(first["deployments"]) == {
        "nightly-convert", "post-training-export", "promote", "audit", "convert", "work",
    }  # fmt: skip
    assert set(first["pools"]) == {"wherry-process", "wherry-units"}, "no other pool is used"
    assert {*first["pools"].values(), *first["automations"].values()} == {"created"}
    pool = f"{place.environment['PREFECT_API_URL']}/work_pools/wherry-process"
    wanted = get(pool)["base_job_template"]
    patch(pool, DRIFT)
    again = deploy(place)
    assert again["deployments"] == first["deployments"]
    assert again["pools"].pop("wherry-process") == "updated"
    assert {*again["automations"].values()} == {"unchanged"}
    mended = get(pool)
    assert mended["base_job_template"] == wanted
    assert (mended["is_paused"], mended["concurrency_limit"]) == (True, 7), "what an operator set is kept"
    patch(pool, RESUME)  # the other tests run in it
    assert {row["name"] for row in rows(place, "flows")} == FLOWS
    _as_stated(place)


def _as_stated(place):
    """What the server made of the file's schedules, limits and triggers.

    With SQLAlchemy 2.1 the scheduler of Prefect 3.8 only logs an error, and no run is ever on the calendar.
    """
    found = {row["name"]: row for row in rows(place, "deployments")}
    night = found["nightly-convert"]
    assert night["schedules"][0]["schedule"] == {"cron": "30 2 * * *", "timezone": "UTC", "day_or": True}
    assert night["global_concurrency_limit"] is None, "a run that died would keep the slot of the next night"
    assert night["parameter_openapi_schema"]["definitions"]["NightlySpec"]["properties"]["dry_run"][
        "description"
    ]
    owned = {row["name"] for row in rows(place, "automations")}
    assert "wherry export of a committed checkpoint" in owned
    body = {"deployments": {"name": {"any_": ["nightly-convert"]}}, "limit": 1}
    place.await_("a night on the calendar", lambda: rows(place, "flow_runs", body), 60)


def test_an_event_runs_the_deployed_export(place):
    source = place.folder / "runs" / "committed" / "small" / "model.safetensors"
    source.parent.mkdir(parents=True)
    save_file({"a": np.arange(12, dtype=np.float32)}, source)
    worker = start_worker(place, POOL)
    try:
        wherry(place, "emit", str(source))
        done = finished(place, "post-training-export")
        assert done[0]["parameters"] == {"spec": {"source": str(source)}}
        target = place.folder / "out" / "small" / "model" / "final"
        outcome = json.loads(wherry(place, "verify", str(target), "--level", "digest", "--json"))
        assert outcome["verdict"] == "ok"
    finally:
        worker.stop()


def kill_tree(child):
    """As if the machine had lost its power: the worker and all runs, whichever sessions they made."""
    root = psutil.Process(child.process.pid)
    for process in [*root.children(recursive=True), root]:
        process.kill()
    child.kill()


def every_minute(place):
    """The shipped file, with a night that begins each minute."""
    data = yaml.safe_load((INFRA / "prefect.yaml").read_text())
    night = next(entry for entry in data["deployments"] if entry["name"] == "nightly-convert")
    night["schedules"][0]["cron"] = "* * * * *"
    path = place.folder / "prefect.yaml"
    path.write_text(yaml.safe_dump(data))
    return path


def versions(mlflow, name):
    found = get(f"{mlflow}/api/2.0/mlflow/model-versions/search?filter=name%3D%27{name}%27")
    return found.get("model_versions", [])


@pytest.mark.slow
def test_the_whole_story(place):
    """One run by schedule, one by event, two by `wherry.export`; the worker is killed, the registry restarted."""
    pytest.importorskip("jax")
    pytest.importorskip("torch")
    mlflow = start_mlflow(place)
    before = len(runs(place, "post-training-export"))
    configure(place, f'tracking_uri = "{mlflow}"', 'model = "t5x"', 'model = "{run}"')
    committed, python = place.folder / "runs" / "committed", sys.executable
    t5x = place.folder / "runs" / "t5x" / "base"
    t5x.mkdir(parents=True)
    committed.mkdir(exist_ok=True)
    place.run(python, "-c", e2e_programs.T5X_RUN, str(t5x), str(place.folder / "scratch.safetensors"), "48")

    deploy(place, every_minute(place))
    worker = start_worker(place, POOL, "first")
    out = place.folder / "out"
    place.await_(
        "the night's first staging area",
        lambda: list(out.glob("base/.wherry-*")),
        every=0.01,  # it is there for half a second
    )
    kill_tree(worker)
    stuck = [row for row in runs(place, "nightly-convert") if row["state_type"] == "RUNNING"]
    assert stuck, "the worker died while a night was at work"
    unfinished = 3 - len(list(out.glob("base/[0-9]*")))
    assert unfinished > 0
    server = place.children["mlflow"]
    server.stop()
    server.start()
    place.await_url(server, f"{mlflow}/health")

    start_worker(place, POOL, "second")
    place.run(
        python, "-c", e2e_programs.JAX_LOOP, str(_made(committed / "maxtext") / "100"),
        XLA_FLAGS="--xla_force_host_platform_device_count=8",
    )  # fmt: skip
    loop = place.folder / "loop.py"
    loop.write_text(e2e_programs.LINGUA_LOOP)
    step = _made(committed / "lingua") / "0000000002"
    place.run(
        python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(loop),
        str(step), str(committed / "exported"),
    )  # fmt: skip
    finished(place, "post-training-export", 3 + before)
    crashed = finished(place, "nightly-convert", state="CRASHED")
    assert crashed[0]["id"] == stuck[0]["id"]
    place.await_("the T5X run", lambda: len(list(out.glob("base/[0-9]*"))) == 3 or None)
    place.await_("the other runs", lambda: all(list(out.glob(f"{name}/[0-9f]*")) for name in _LATER))
    finished(place, "nightly-convert")

    for name, count in (("t5x", 3), ("maxtext", 1), ("lingua", 1), ("exported", 1)):
        found = place.await_(
            f"{count} of {name}", lambda name=name, count=count: len(versions(mlflow, name)) >= count
        ) and versions(mlflow, name)
        assert len(found) == count, found
    for name, steps, conversions in (("base", 3, 1), ("lingua", 1, 1), ("maxtext", 1, 2), ("exported", 1, 2)):
        made = list(out.glob(f"{name}/[0-9f]*"))
        assert len(made) == steps, made
        for target in made:
            _proved(place, target, conversions)


_LATER = ("maxtext", "lingua", "exported")


def _made(folder):
    folder.mkdir(parents=True)
    return folder


def _proved(place, target, conversions):
    """Every byte is what was recorded, and the ledger knows from what it was made; a live state counts as one."""
    outcome = json.loads(wherry(place, "verify", str(target), "--level", "digest", "--json"))
    assert outcome["verdict"] == "ok", outcome
    tree = json.loads(wherry(place, "lineage", "show", str(target), "--json"))
    assert len(tree["edges"]) == conversions, tree
