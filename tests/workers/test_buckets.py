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
from tests.support.large_files import alone
from wherry.store.local_store import locate
from wherry.workers.records import job_records


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
    words = ["--to", "dcp", "--set", "shard_size=250KB", "--no-lineage", "--unit", "300KB"]
    receipt = made_by_two(source, f"{bucket}/runs/out", words)
    assert receipt["target"]["checkpoint_digest"] == undisturbed(source, tmp_path, "dcp").checkpoint_digest
    assert receipt["resumed_bytes"] == receipt["bytes_written"]


def test_two_workers_of_which_one_is_killed_make_the_files_of_a_tensor_that_is_cut(model, bucket, tmp_path):
    options = {"shard_size": "4MB"}
    words = ["--to", "dcp", "--set", "shard_size=4MB", "--no-lineage", "--unit", "5MB"]
    receipt = made_by_two(model, f"{bucket}/cut/out", words)
    one = wherry.convert(model, tmp_path / "one", to="dcp", options=options, lineage=False)
    assert receipt["target"]["checkpoint_digest"] == one.target.checkpoint_digest
    assert receipt["resumed_bytes"] == receipt["bytes_written"]
    for file in (tmp_path / "one").glob("*.distcp"):
        assert locate(f"{bucket}/cut/out/{file.name}").read_whole(1 << 30) == file.read_bytes()


@pytest.mark.parametrize("to", ["safetensors", pytest.param("torch-zip", marks=pytest.mark.slow)])
def test_two_workers_of_which_one_is_killed_send_the_parts_of_one_upload(model, bucket, tmp_path, to):
    """Parts of 8 MiB: a unit is one of three, and the last one has what is left."""
    target = f"{bucket}/{to}/out"
    receipt = made_by_two(model, target, ["--to", to, "--no-lineage", "--unit", "8MB"])
    one, file = alone(model, tmp_path, to)
    assert receipt["target"]["checkpoint_digest"] == one.target.checkpoint_digest
    assert locate(target).read_whole(1 << 30) == file.read_bytes()
    assert (receipt["resumed_bytes"] == receipt["bytes_written"]) == (to == "safetensors")


def made_by_two(source, target, words):
    """The receipt of a job whose first worker is killed, and which leaves nothing next to its target."""
    made = command("split", source, target, *words, "--json")
    assert made.returncode == 0, made.stderr
    count = len(json.loads(made.stdout)["units"])
    first = subprocess.Popen([sys.executable, "-m", "wherry.cli", "work", target, "--quiet"])
    while not any(name.startswith("claim") for name in job_records(locate(target)).names()):
        time.sleep(0.01)
        assert first.poll() is None
    first.kill()
    first.wait()
    report = command("work", target, "--json")
    assert report.returncode == 0, report.stderr
    assert 0 < len(json.loads(report.stdout)["made"]) <= count
    done = command("commit", target, "--json")
    assert done.returncode == 0, done.stderr
    assert wherry.verify(target, level="digest").ok
    assert {entry.name for entry in locate(target).parent.entries()} <= {"out", "out.wherry.json"}
    place = locate(target)
    store = place.store
    assert store is not None
    assert list(store.uploads(place.parent.path)) == []
    return json.loads(done.stdout)
