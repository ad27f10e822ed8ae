"""The commands: `split`, `work` and `commit`, and `convert --on`, also when a worker is killed."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time

import wherry
from tests.support.command import command
from tests.support.jobs import SIZES, undisturbed
from wherry.storage.stores import locate
from wherry.workers.records import job_records

WORDS = ["--to", "hf", "--set", "max_shard_size=250KB", "--no-lineage"]


def worker(target, *more):
    line = [sys.executable, "-m", "wherry.cli", "work", target, *more]
    return subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_the_commands_with_a_worker_that_is_killed(source, tmp_path):
    """Three workers, one of which is stopped in a unit and then killed; the others make its unit."""
    target = str(tmp_path / "out")
    data = json.loads(command("split", source, target, *WORDS, "--unit", "300KB", "--json").stdout)
    assert data["job"] == str(tmp_path / ".wherry-out.job")
    assert len(data["units"]) == 6
    text = command("commit", target)
    assert text.returncode == 5
    assert "6 of 6 units are not written" in text.stderr
    first = worker(target)
    while not job_records(locate(target)).names()[0].startswith("claim"):
        time.sleep(0.005)
    first.send_signal(signal.SIGSTOP)
    rest = [worker(target, "--json") for _ in range(2)]
    time.sleep(1)
    first.kill()
    first.communicate()
    reports = [json.loads(one.communicate(timeout=60)[0]) for one in rest]
    made = [name for report in reports for name in report["made"]]
    assert len(made) == len(set(made))
    assert {report["units"] for report in reports} == {6}
    receipt = json.loads(command("commit", target, "--json").stdout)
    assert receipt["target"]["checkpoint_digest"] == undisturbed(source, tmp_path).checkpoint_digest
    assert wherry.verify(target, level="digest").ok


def test_the_last_worker_can_commit(source, tmp_path):
    target = str(tmp_path / "out")
    text = command("split", source, target, *WORDS, "--unit", "300KB").stdout
    assert re.search(r"^next: +wherry work /\S+/out", text, re.MULTILINE)
    text = command("work", target, "--commit")
    assert "unit 00000-" in text.stderr
    assert wherry.verify(target, level="digest").ok


def test_convert_takes_an_engine(source, tmp_path):
    shards = [f"{name}={value}" for name, value in SIZES["hf"].items()]
    target = str(tmp_path / "out")
    done_ = command("convert", source, target, "--to", "hf", "--set", *shards, "--no-lineage", "--json",
                    "--on", "processes:2", "--unit", "300KB")  # fmt: skip
    assert done_.returncode == 0, done_.stderr
    assert json.loads(done_.stdout)["resumed_bytes"] > 0
    two = command(
        "convert", source, f"{target}-1", f"{target}-2", "--to", "hf", "--to", "hf", "--on", "processes:2"
    )
    assert two.returncode == 2
