"""Jobs in emulated buckets: two worker processes, one of which is killed while it makes a unit."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import pytest

import wherry
from tests.support import buckets
from tests.support.command import command
from tests.support.jobs import undisturbed
from wherry.storage.stores import locate
from wherry.units.records import records_beside


@pytest.fixture(scope="module", params=["gs", pytest.param("s3", marks=pytest.mark.slow)])
def bucket(request):
    """The URI of an emulated bucket; the environment of this process leads to it."""
    with getattr(buckets, request.param)() as proxy, pytest.MonkeyPatch.context() as patch:
        buckets.create_bucket(request.param, proxy, "units")
        patch.setenv("WHERRY_KEY", "the key of the tests of buckets")
        patch.setenv("AWS_ENDPOINT_URL" if request.param == "s3" else "STORAGE_EMULATOR_HOST", proxy.url)
        for name, value in buckets.KEYS.items():
            patch.setenv(name, value)
        yield f"{request.param}://units"


def test_two_workers_of_which_one_is_killed_make_a_target_in_a_bucket(source, bucket, tmp_path):
    target = f"{bucket}/runs/out"
    words = ["--to", "dcp", "--set", "shard_size=250KB", "--no-lineage", "--unit", "300KB"]
    made = command("split", source, target, *words, "--json")
    assert made.returncode == 0, made.stderr
    count = len(json.loads(made.stdout)["units"])
    first = subprocess.Popen([sys.executable, "-m", "wherry.cli", "work", target, "--quiet"])
    while not any(name.startswith("claim") for name in records_beside(locate(target)).names()):
        time.sleep(0.01)
        assert first.poll() is None
    first.kill()
    first.wait()
    report = command("work", target, "--json")
    assert report.returncode == 0, report.stderr
    assert 0 < len(json.loads(report.stdout)["made"]) <= count
    done = command("commit", target, "--json")
    assert done.returncode == 0, done.stderr
    receipt = json.loads(done.stdout)
    assert receipt["target"]["checkpoint_digest"] == undisturbed(source, tmp_path, "dcp").checkpoint_digest
    assert receipt["resumed_bytes"] == receipt["bytes_written"]
    assert wherry.verify(target, level="digest").ok
    assert [entry.name for entry in locate(f"{bucket}/runs").entries()] == ["out"]
