"""A registration that is killed leaves a run open in MLflow: the next registration, night and `clean` end it."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from click.testing import CliRunner

import wherry
from tests.support.command import small
from wherry.cli import cli
from wherry.config.config import load_config
from wherry.nightly.doctor import diagnose
from wherry.nightly.night import run_night
from wherry.target import janitor

mlflow = pytest.importorskip("mlflow")

KILLED = """
import os, sys
import wherry
from wherry.integrations.mlflow import runs
runs._link = lambda *_: os.kill(os.getpid(), 9)
wherry.register(sys.argv[1], "cut")
"""


@pytest.fixture
def target(tmp_path, monkeypatch):
    """A checkpoint whose registration was killed; the store is not where wherry would look by itself."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    target = tmp_path / "target"
    wherry.convert(small(tmp_path / "source.safetensors"), target, to="dcp")
    done = subprocess.run([sys.executable, "-c", KILLED, str(target)], check=False, timeout=240)
    assert done.returncode == -9
    assert states() == ["RUNNING"]
    return target


def states():
    client = mlflow.MlflowClient(os.environ["MLFLOW_TRACKING_URI"])
    experiment = client.get_experiment_by_name("wherry")
    return sorted(run.info.status for run in client.search_runs([experiment.experiment_id]))


def nothing_is_left():
    return janitor.left_runs() == [] and list((janitor.home() / "made").iterdir()) == []


@pytest.mark.full
def test_the_next_registration_ends_it(target):
    wherry.register(target, "cut")
    assert states() == ["FINISHED", "KILLED"]
    assert nothing_is_left()


@pytest.mark.full
def test_a_night_ends_it_though_it_registers_nothing(target, tmp_path):
    (tmp_path / "runs").mkdir()
    (tmp_path / "wherry.toml").write_text(
        f'[routes.a]\nroot = "{tmp_path}/runs"\n[[routes.a.targets]]\nformat = "dcp"\nuri = "{tmp_path}/o/{{run}}"\n'
    )
    loaded = load_config(tmp_path / "wherry.toml")
    run_night(loaded, loaded.routes, dry_run=True)
    assert states() == ["RUNNING"]
    run_night(loaded, loaded.routes)
    assert states() == ["KILLED"]
    assert nothing_is_left()


def test_doctor_counts_it_and_clean_ends_it(target, tmp_path, monkeypatch):
    [finding] = [one for one in diagnose() if one.name == "left behind"]
    assert finding.detail.startswith("1 registration of processes that have ended")
    empty = tmp_path / "empty"
    empty.mkdir()
    store = os.environ["MLFLOW_TRACKING_URI"]
    # the database of another place: what was left is in the store that it names
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'other.db'}")
    command = finding.cure.split("`")[1].split()[1:]
    rows = json.loads(CliRunner().invoke(cli, [*command, "--dry-run", "--json"]).stdout)
    assert [(row["uri"], row["removed"]) for row in rows] == [(store, False)]
    rows = json.loads(CliRunner().invoke(cli, [*command, "--json"]).stdout)
    assert [(row["uri"], row["removed"]) for row in rows] == [(store, True)]
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store)
    assert states() == ["KILLED"]
    assert nothing_is_left()
    assert not [one for one in diagnose() if one.name == "left behind"]
