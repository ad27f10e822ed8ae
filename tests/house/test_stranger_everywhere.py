"""The format of docs/develop.md is written everywhere: what it states of its bytes is all that the engine needs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.support.readme import ROOT
from tests.support.stranger import examples
from wherry.storage.stores import locate
from wherry.workers.records import job_records

pytest_plugins = ("tests.support.bucket_fixtures", "tests.support.stranger")
MB = 1 << 20


@pytest.fixture
def stranger(tree, tmp_path):
    """Runs Python in a folder with a model, where wherry has the format."""
    row, _suites = examples("Add a format", "python")
    (tree / "integrations" / "formats" / "tray.py").write_text(row)
    values = np.random.default_rng(0).standard_normal((12, 1 << 18), "f4")
    save_file({f"layer.{number}": row for number, row in enumerate(values)}, tmp_path / "model.safetensors")

    def start(*words):
        return subprocess.Popen(
            [sys.executable, *words], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": f"{tree}{os.pathsep}{ROOT}"},
        )  # fmt: skip

    return start


@pytest.fixture
def wherry(stranger):
    """Runs a command to its end."""
    return lambda line: ended(stranger("-m", "wherry.cli", *line.split()))


def ended(process):
    """What a process printed that has succeeded."""
    output, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors
    return output


@pytest.fixture
def wanted(wherry, tmp_path):
    """The bytes of the file, as one undisturbed process writes it."""
    wherry("convert model.safetensors whole.tray --to tray --no-lineage")
    return (tmp_path / "whole.tray").read_bytes()


def test_it_is_written_after_kills(stranger, wherry, wanted, tmp_path):
    def run(fatal_call):
        target = str(tmp_path / "killed.tray")
        process = stranger("-m", "tests.support.killed", "model.safetensors", target, "tray", str(fatal_call))
        process.communicate(timeout=240)
        return process.returncode

    assert [run(call) for call in (40, 25, 12)] == [-signal.SIGKILL] * 3
    assert not (tmp_path / "killed.tray").exists()
    receipt = json.loads(wherry("convert model.safetensors killed.tray --to tray --no-lineage --json"))
    assert receipt["resumed_bytes"] > MB
    assert (tmp_path / "killed.tray").read_bytes() == wanted


def test_three_workers_write_it_of_which_one_is_killed(stranger, wherry, wanted, tmp_path):
    target = str(tmp_path / "shared.tray")
    split = wherry("split model.safetensors shared.tray --to tray --no-lineage --unit 3MB --json")
    units = json.loads(split)["units"]
    assert len(units) > 3
    workers = [stranger("-m", "wherry.cli", "work", target)]
    while not job_records(locate(target)).names()[0].startswith("claim"):
        time.sleep(0.005)
    workers[0].send_signal(signal.SIGSTOP)
    workers += [stranger("-m", "wherry.cli", "work", target, "--json") for _ in range(2)]
    time.sleep(1)
    workers[0].kill()
    workers[0].communicate()
    reports = [json.loads(ended(worker)) for worker in workers[1:]]
    assert sum(len(report["made"]) for report in reports) >= len(units) - 1
    wherry(f"commit {target}")
    assert Path(target).read_bytes() == wanted


@pytest.mark.parametrize("bucket", ["s3"], indirect=True)
def test_it_is_written_to_a_bucket(bucket, wherry, wanted):
    target = f"{bucket.uri}/out.tray"
    wherry(f"convert model.safetensors {target} --to tray --no-lineage")
    assert bucket.at("out.tray").read_whole(2 * len(wanted)) == wanted
    assert wherry(f"verify {target} --level digest").startswith("ok: 12 tensors")
