"""Targets in emulated buckets: streamed, raced for by processes, killed, resumed."""

import atexit
import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import save_file

import wherry
from tests.support import buckets
from tests.support.object_stores import model
from tests.support.warm import Warm
from wherry.errors import TargetExistsError, TargetInUseError
from wherry.storage.stores import locate

ROOT = Path(__file__).parents[2]
SCHEMES = ["s3", "gs"]


@pytest.fixture(scope="module", params=SCHEMES)
def bucket(request):
    """The URI of an emulated bucket; the environment of this process leads to it."""
    with getattr(buckets, request.param)() as proxy, pytest.MonkeyPatch.context() as patch:
        buckets.create_bucket(request.param, proxy, "streams")
        patch.setenv("WHERRY_KEY", "the key of the tests of buckets")
        patch.setenv("AWS_ENDPOINT_URL" if request.param == "s3" else "STORAGE_EMULATOR_HOST", proxy.url)
        for name, value in buckets.KEYS.items():
            patch.setenv(name, value)
        yield f"{request.param}://streams"


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
    files = {"s3": ("hf", {"max_shard_size": "12MB"}), "gs": ("dcp", {})}[bucket.partition(":")[0]]
    to, options = ("orbax", ARRAYS[kind]) if kind in ARRAYS else files
    target = f"{bucket}/{tmp_path.name}/out"
    ignore = ("companions",) if to == "dcp" else ()
    receipt = wherry.convert(source, target, to=to, options=options, ignore=ignore, lineage=False)
    assert receipt.verification["ok"]
    assert wherry.verify(target, level="digest").ok
    assert left_beside(target) == []


@cache
def waiting():
    """A process from which those that convert are forked: it has imported wherry and the clients of the stores."""
    line = [sys.executable, "-m", "tests.support.warm"]
    modules = ["wherry.converter.convert", "wherry.integrations.formats.safetensors", "s3fs", "gcsfs.core"]
    made = Warm(line, os.environ, modules, os.fspath(ROOT))
    atexit.register(made.close)
    return made


def run(source, target, fatal=0, to="safetensors", **options):
    """Exit code, and what a process says that converts, killed at a call of the store."""
    arguments = [str(source), target, to, str(fatal), json.dumps(options)]
    code, out, err = waiting().run("tests.support.bucket_run", arguments, cwd=os.fspath(ROOT), env=os.environ)
    assert code in (0, -signal.SIGKILL) or b"TargetInUseError" in err, err.decode()
    return code, json.loads(out) if code == 0 else {}


def left_beside(target):
    return [entry.name for entry in locate(target).parent.walk() if ".wherry-" in entry.name]


def assert_whole_or_absent(target):
    if locate(target).exists():
        assert wherry.verify(target, level="digest").ok


@pytest.fixture(scope="module")
def whole(small, bucket):
    """What an undisturbed process says."""
    return run(small, f"{bucket}/whole/out")[1]


def killed(source, folder, fatal, **more):
    """The target of a process that was killed at a call, or at one before it if its run had fewer."""
    for call in range(fatal, 0, -1):
        target = f"{folder}/{call}/out"
        code, _said = run(source, target, fatal=call, **more)
        if code != 0:
            break
    assert code == -signal.SIGKILL
    return target


SLOW = [pytest.param(share / 20, marks=pytest.mark.slow) for share in range(1, 20)]


@pytest.mark.parametrize("share", [0.6, *SLOW])
def test_a_killed_process_is_resumed_by_another_and_sends_the_rest(small, bucket, tmp_path, whole, share):
    target = killed(small, f"{bucket}/{tmp_path.name}", int(whole["calls"] * share))
    assert_whole_or_absent(target)
    code, again = run(small, target)
    assert code == 0
    assert again["digest"] == whole["digest"]
    assert again["sent"] <= whole["sent"]
    assert wherry.verify(target, level="digest").ok
    assert left_beside(target) == []


@pytest.mark.parametrize("kind", ["packed", *slow("database", "objects")])
def test_a_killed_process_that_wrote_arrays_is_resumed_by_another(small, bucket, tmp_path, kind):
    folder, chosen = f"{bucket}/{tmp_path.name}", {"to": "orbax", **ARRAYS[kind]}
    _code, made = run(small, f"{folder}/whole/out", **chosen)
    target = killed(small, folder, int(made["calls"] * 0.7), **chosen)
    assert wherry.detect(target).verdict == "incomplete"
    code, again = run(small, target, **chosen)
    assert code == 0
    assert again["digest"] == made["digest"]
    assert again["sent"] <= made["sent"]  # the whole checkpoint is no larger than what may be in flight
    assert wherry.verify(target, level="digest").ok
    assert left_beside(target) == []


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
    assert left_beside(target) == []


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
    assert left_beside(target) == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["files", *ARRAYS])
def test_the_memory_of_an_upload_does_not_grow_with_the_checkpoint(tmp_path, monkeypatch, kind):
    chosen = ["orbax", "0", json.dumps(ARRAYS[kind])] if kind in ARRAYS else ["dcp", "0"]
    large = {f"layer.{n}.weight": np.full((4096, 4096), n, dtype="f4") for n in range(24)}  # 1.6 GB
    save_file(large, tmp_path / "m.safetensors", metadata={"format": "pt"})
    del large
    with buckets.gcs_server() as server:  # no proxy, through which it would take minutes
        url = f"http://127.0.0.1:{server.port}"
        buckets.create_bucket("gs", SimpleNamespace(url=url), "large")
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", url)
        line = [sys.executable, "-m", "tests.support.bucket_run", str(tmp_path / "m.safetensors")]
        done = subprocess.run(
            [*line, "gs://large/x/out", *chosen], cwd=ROOT, capture_output=True, text=True, check=True
        )
    assert json.loads(done.stdout)["peak"] <= 250 << 20
