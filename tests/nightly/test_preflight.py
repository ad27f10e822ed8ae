"""What a container would keep to itself is refused before a byte moves; what is shared or elsewhere passes."""

from __future__ import annotations

import pytest

from wherry.errors import UsageError
from wherry.nightly import preflight

CLEAN = {
    "target": "gs://runs/a",
    "ledger": "postgresql://u:secret@db/wherry",
    "MLflow registry": "http://mlflow:5000",
}


@pytest.fixture(autouse=True)
def bare(monkeypatch, tmp_path):
    for name in (
        "WHERRY_WORKER",
        "WHERRY_SHARED_PATHS",
        "WHERRY_LEDGER",
        "WHERRY_CONFIG",
        "MLFLOW_TRACKING_URI",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("pool_type", ["docker", "kubernetes"])
@pytest.mark.parametrize(
    ("what", "uri", "path"),
    [
        ("target", "file:///data/out", "/data/out"),
        ("target", "/data/out", "/data/out"),
        ("target", "file:///data/shared/../private%20/out", "/data/private /out"),
        ("ledger", "sqlite:////data/ledger.db", "/data/ledger.db"),
        ("ledger", "sqlite+pysqlite:////data/ledger.db?timeout=5", "/data/ledger.db"),
        ("ledger", "sqlite://", None),
    ],
)
def test_a_container_keeps_local_places_to_itself(pool_type, what, uri, path):
    found = preflight.unshared_places({**CLEAN, what: uri}, pool_type, ["/data/shared"])
    assert [one.what for one in found] == [what]
    assert path is None or found[0].path == path
    with pytest.raises(UsageError, match=what) as refused:
        preflight.refuse_unshared({**CLEAN, what: uri}, pool_type, ["/data/shared"])
    assert "WHERRY_SHARED_PATHS" in (refused.value.cure or "")


def test_shared_folders_and_stores_pass():
    places = {**CLEAN, "target": "file:///data/shared/out", "ledger": "sqlite:////data/shared/ledger.db"}
    assert preflight.unshared_places(places, "kubernetes", ["/data/shared/"]) == []
    assert preflight.unshared_places({"target": "/data/shared-not/out"}, "docker", ["/data/shared"])
    assert preflight.unshared_places({"target": "/data/x", "ledger": "sqlite:////x.db"}, "process", []) == []
    assert preflight.unshared_places({"target": "/anything"}, "docker", ["/"]) == []


def test_every_place_is_named_and_no_secret():
    places = {"target": "/a", "ledger": "sqlite:////b?password=hidden"}
    with pytest.raises(UsageError) as refused:
        preflight.refuse_unshared(places, "docker", [])
    assert "target /a" in refused.value.what
    assert "ledger sqlite:////b" in refused.value.what
    assert "hidden" not in str(refused.value)


def test_inside_a_run_the_pool_says_what_it_is(monkeypatch, tmp_path):
    preflight.refuse_here("/data/out")
    monkeypatch.setenv("WHERRY_WORKER", "process")
    preflight.refuse_here("/data/out")
    monkeypatch.setenv("WHERRY_WORKER", "kubernetes")
    with pytest.raises(UsageError, match=r"target 1 /data/out, ledger sqlite:///.*, MLflow"):
        preflight.refuse_here("/data/out")
    monkeypatch.setenv("WHERRY_LEDGER", "postgresql://db/wherry")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://mlflow:5000")
    with pytest.raises(UsageError, match=r"not shared with the workers of a \w+ pool: target 1 /data/out \("):
        preflight.refuse_here("/data/out")
    monkeypatch.setenv("WHERRY_SHARED_PATHS", "/data:/more")
    preflight.refuse_here("/data/out", "/more/out", "s3://bucket/out")


def test_unknown_pools_and_relative_folders_are_refused(monkeypatch):
    with pytest.raises(UsageError, match="unknown work pool type 'ecs'"):
        preflight.unshared_places(CLEAN, "ecs", [])
    monkeypatch.setenv("WHERRY_SHARED_PATHS", "data")
    with pytest.raises(UsageError, match="absolute"):
        preflight.shared_paths()


def test_a_slice_is_all_chips_of_one_host():
    for topology, chips in (("1x1", 1), ("2x2", 4), ("2x4", 8), ("2x2x1", 4)):
        preflight.refuse_slice(topology, chips)
    with pytest.raises(UsageError, match=r"2x4 has 8 chips, but tpu_chips is 4"):
        preflight.refuse_slice("2x4", 4)
    with pytest.raises(UsageError, match="invalid TPU topology 'large'"):
        preflight.refuse_slice("large", 4)


def test_the_first_task_of_a_conversion_asks(monkeypatch, tmp_path):
    pytest.importorskip("prefect")
    from wherry.core.request import TargetRequest, convert_request
    from wherry.tasks.steps import plan

    request = convert_request(tmp_path / "source", [TargetRequest(str(tmp_path / "out"), "orbax")])

    monkeypatch.setenv("WHERRY_WORKER", "kubernetes")
    with pytest.raises(UsageError, match=r"not shared with the workers of a \w+ pool: target 1"):
        plan.fn(request.to_json())


@pytest.mark.parametrize("flow", ["audit", "promote", "nightly-convert", "post-training-export", "work"])
def test_every_flow_asks_before_anything_else(monkeypatch, flow):
    pytest.importorskip("prefect")
    from wherry.tasks.ending import ending

    monkeypatch.setenv("WHERRY_WORKER", "kubernetes")
    with (
        pytest.raises(UsageError, match=r"not shared with the workers of a \w+ pool: ledger sqlite"),
        ending(flow, "A run"),
    ):
        pytest.fail("it went on")
    monkeypatch.setenv("WHERRY_SHARED_PATHS", "/")
    with pytest.raises(ZeroDivisionError), ending(flow, "A run"):
        raise ZeroDivisionError


def test_the_command_says_the_same(monkeypatch):
    import json

    from click.testing import CliRunner

    from wherry.cli.deploy import preflight as command

    monkeypatch.setenv("WHERRY_LEDGER", "postgresql://db/wherry")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://mlflow:5000")
    refused = CliRunner().invoke(command, ["/data/out", "--pool-type", "docker", "--json"])
    assert refused.exit_code == 2
    assert json.loads(refused.output)["unshared"] == [
        {"what": "target 1", "uri": "/data/out", "path": "/data/out"}
    ]
    passed = CliRunner().invoke(command, ["gs://bucket/out", "--pool-type", "docker"])
    assert (passed.exit_code, passed.output) == (0, "4 places are shared with the workers of a docker pool\n")
