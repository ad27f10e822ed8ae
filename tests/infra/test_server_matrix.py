"""The matrix of servers, whole; and that a run of it is held where it says, and its table names what broke the rule."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

pytest.importorskip("prefect")
pytest.importorskip("mlflow")
pytest.importorskip("psycopg")

from tests.support import held_runs, server_matrix
from tests.support.server_matrix import AT_WORK, FLOWS, MOMENTS, PARTS, SERVERS, Away, run_matrix

HELD = """
import textwrap
print(textwrap.dedent("  done"), flush=True)
"""


@pytest.mark.slow
@pytest.mark.timeout(4 * 3600)
@pytest.mark.parametrize("flow", FLOWS)
def test_the_next_run_completes_whatever_is_killed_whenever(flow, tmp_path):
    cells = run_matrix(tmp_path, (flow,), PARTS, MOMENTS)
    assert [one for one in cells if not one.holds] == []
    assert len(cells) == len(PARTS) * len(MOMENTS) - 1


@pytest.mark.slow
@pytest.mark.timeout(2 * 3600)
@pytest.mark.parametrize("stopped", [False, True], ids=["killed", "stopped"])
def test_a_server_that_is_away_for_a_minute_changes_no_end(stopped, tmp_path):
    cells = run_matrix(tmp_path, ("nightly", "promote"), SERVERS, AT_WORK, away=Away(60.0, stopped))
    assert [one for one in cells if not one.holds] == []
    assert len(cells) == 18


def test_a_process_is_held_at_a_function_until_it_may_go_on(tmp_path):
    variables = held_runs.install(tmp_path / "held")
    wanted, reached = tmp_path / "held" / "wanted" / "a-run", tmp_path / "held" / "reached" / "a-run"
    wanted.write_text("textwrap:dedent")
    environment = {**os.environ, **variables, held_runs.RUN: "a-run"}
    with subprocess.Popen(
        [sys.executable, "-c", HELD], env=environment, stdout=subprocess.PIPE, text=True
    ) as process:
        while not reached.exists():
            assert process.poll() is None
            time.sleep(0.01)
        assert process.poll() is None
        wanted.unlink()
        assert process.communicate(timeout=60)[0] == "done\n"
    assert process.returncode == 0


def test_the_table_names_what_broke_the_rule():
    row = {"flow": "nightly", "part": "all", "moment": "running", "killed": "Crashed", "following": "Completed",
           "open": [], "missed": True, "commit": "c"}  # fmt: skip
    bad = {
        **row,
        "part": "server",
        "following": "Failed",
        "open": ["MLflow: run a|b is RUNNING"],
        "missed": False,
    }
    page = server_matrix.table({"machine": "m", "cells": [row, bad]})
    assert "ok (Crashed, later)" in page
    assert r"**Failed** (Crashed): MLflow: run a\|b is RUNNING" in page
    assert "| run | – | not run |" in page


def test_the_shipped_automations_are_those_whose_times_are_shortened(tmp_path):
    assert server_matrix._automations(tmp_path).exists()
