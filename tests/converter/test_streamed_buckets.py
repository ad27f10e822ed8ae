"""Targets in emulated buckets: streamed, and raced for by processes."""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import fsspec
import numpy as np
import pytest
from safetensors.numpy import save_file

import wherry
from tests.support import buckets
from tests.support.object_stores import model
from wherry.errors import TargetExistsError, TargetInUseError
from wherry.storage.stores import locate

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def bucket(emulated):
    return emulated.uri


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return model(tmp_path_factory.mktemp("source") / "model", rows=3000, count=8)


@pytest.fixture(scope="module")
def small(source):
    """The same as one file."""
    return source / "model.safetensors"


ARRAYS = {
    "database": {},
    "packed": {"compression": "zstd"},
    "objects": {"ocdbt": False},
}


def slow(*kinds):
    return [pytest.param(kind, marks=pytest.mark.slow) for kind in kinds]


@pytest.mark.parametrize("kind", ["files", "database", *slow("packed", "objects")])
def test_a_target_is_streamed(source, bucket, tmp_path, kind):
    files = ("dcp", {}) if bucket.startswith("gs:") else ("hf", {"max_shard_size": "12MB"})
    to, options = ("orbax", ARRAYS[kind]) if kind in ARRAYS else files
    target = f"{bucket}/{tmp_path.name}/out"
    ignore = ("companions",) if to == "dcp" else ()
    receipt = wherry.convert(source, target, to=to, options=options, ignore=ignore, lineage=False)
    assert receipt.verification["ok"]
    assert wherry.verify(target, level="digest").ok
    assert leftover_names(target) == []


def leftover_names(target):
    return [entry.name for entry in locate(target).parent.walk() if ".wherry-" in entry.name]


def test_of_two_runs_one_makes_the_target_and_the_other_touches_nothing(small, bucket, tmp_path):
    target, results = f"{bucket}/{tmp_path.name}/out", []

    def one(_number):
        try:
            wherry.convert(small, target, to="safetensors", lineage=False)
        except (TargetInUseError, TargetExistsError) as error:
            return error

    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(one, range(2)))
    assert None in results
    assert all(one is None or isinstance(one, TargetInUseError) for one in results)
    assert wherry.verify(target, level="digest").ok
    assert leftover_names(target) == []


@pytest.mark.slow
def test_of_four_processes_one_makes_the_target(small, bucket, tmp_path):
    target = f"{bucket}/{tmp_path.name}/out"
    command = [sys.executable, "-m", "tests.support.bucket_run", str(small), target, "safetensors", "0"]
    running = [
        subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    ended = [(one.communicate(timeout=300)[1], one.returncode) for one in running]
    assert 0 in [code for _err, code in ended]
    assert all(code == 0 or "TargetInUseError" in err for err, code in ended)
    assert wherry.verify(target, level="digest").ok
    assert leftover_names(target) == []


def test_the_memory_of_a_small_upload_of_dcp_is_bounded(tmp_path, monkeypatch):
    """Larger by far than what may be held, so that all of it is."""
    assert peak(tmp_path, monkeypatch, "files", "disk", tensors=5) <= 235_000_000


@pytest.mark.slow
@pytest.mark.parametrize("begin", ["disk", "bucket"])
@pytest.mark.parametrize("kind", ["files", *ARRAYS])
def test_the_memory_of_an_upload_does_not_grow_with_the_checkpoint(tmp_path, monkeypatch, kind, begin):
    assert peak(tmp_path, monkeypatch, kind, begin, tensors=14) <= 250_000_000  # 0.9 GB


def peak(tmp_path, monkeypatch, kind, begin, tensors):
    """The largest resident memory, in bytes, of a conversion of tensors of 67 MB each, in a process of its own."""
    chosen = ["orbax", "0", "", "", json.dumps(ARRAYS[kind])] if kind in ARRAYS else ["dcp", "0"]
    large = {f"layer.{n}.weight": np.full((4096, 4096), n, dtype="f4") for n in range(tensors)}
    source = tmp_path / "m.safetensors"
    save_file(large, source, metadata={"format": "pt"})
    del large
    with buckets.gcs_server() as server:  # no proxy, through which it would take minutes
        url = f"http://127.0.0.1:{server.port}"
        buckets.create_bucket("gs", SimpleNamespace(url=url), "large")
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", url)
        if begin == "bucket":
            fsspec.filesystem("gs", skip_instance_cache=True).put(str(source), "gs://large/m.safetensors")
            source = "gs://large/m.safetensors"
        line = [sys.executable, "-m", "tests.support.bucket_run", str(source)]
        done = subprocess.run(
            [*line, "gs://large/x/out", *chosen], cwd=ROOT, capture_output=True, text=True, check=True
        )
    return json.loads(done.stdout)["peak"]
