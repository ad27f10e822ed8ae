"""Targets in emulated buckets, also when the process is killed."""

import atexit
import json
import os
import random
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import fsspec
import numpy as np
import pytest
from safetensors.numpy import save_file

import wherry
from tests.support import buckets
from tests.support.object_stores import model
from tests.support.store_rules import RULES
from tests.support.warm import Warm
from wherry.errors import TargetExistsError, TargetInUseError
from wherry.store.local_store import locate
from wherry.target.clean import clean
from wherry.target.object_staging import is_committed
from wherry.target.parts import SENDERS

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


ARRAYS = {"database": {}, "packed": {"compression": "zstd"}, "objects": {"ocdbt": False}}


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


# Conversions to emulated buckets that are killed with SIGKILL, and resumed by another process.


PART, MIB = 64 << 10, 1 << 20
_numbers = count()


@pytest.fixture(scope="module")
def source_of_kills(tmp_path_factory):
    """About 50 parts of DCP."""
    return model(tmp_path_factory.mktemp("source") / "model", rows=400, count=8) / "model.safetensors"


@pytest.fixture(scope="module")
def bucket_of_kills(emulated):
    emulated.proxy.rules = RULES[emulated.scheme]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("moto.s3.models.S3_UPLOAD_PART_MIN_SIZE", 1)
        yield emulated.uri
    emulated.proxy.rules = None


@cache
def waiting():
    """A process from which those that convert are forked: it has imported wherry and the clients of the stores."""
    line = [sys.executable, "-m", "tests.support.warm"]
    modules = ["wherry.converter.convert", "wherry.integrations.formats.dcp", "s3fs", "gcsfs.core", "adlfs"]
    made = Warm(line, os.environ, modules, os.fspath(ROOT))
    atexit.register(made.close)
    return made


def run(source, target, log, moment="0", to="dcp", part=PART, machine="", env=None, **options):
    """What a process says that converts; None if it was killed at that moment."""
    words = [str(source), target, to, moment, str(part), str(log), json.dumps(options), machine]
    env = {**os.environ, **(env or {})}
    code, out, err = waiting().run("tests.support.bucket_run", words, cwd=os.fspath(ROOT), env=env)
    assert code in (0, -signal.SIGKILL), err.decode()
    return json.loads(out) if code == 0 else None


def parts_sent(log):
    return log.stat().st_size if log.exists() else 0


def left(target):
    place = locate(target)
    names = [entry.name for entry in place.parent.walk() if ".wherry-" in entry.name]
    return names + [one.key for one in place.store.uploads(place.parent.path)]


def has_finished_moves(target):
    """Whether the journal names a tensor of which every part was sent; which parts are sent first is chance."""
    place = locate(target).parent
    lines = [place.join(entry.name).read_whole(MIB) for entry in place.walk() if "/journal-" in entry.name]
    assert lines
    return any(b'"done": [[' in bytes(line) for line in lines)


@pytest.fixture(scope="module")
def whole(source_of_kills, bucket_of_kills, tmp_path_factory):
    """What an undisturbed process says."""
    return run(source_of_kills, f"{bucket_of_kills}/whole/out", tmp_path_factory.mktemp("whole") / "log")


def assert_resumed(source, bucket, whole, folder, moment):
    """Kill a process at a moment, and let another one go on."""
    target, log = f"{bucket}/{folder.name}-{next(_numbers)}/out", folder / f"log-{next(_numbers)}"
    killed = run(source, target, log, moment) is None
    before, committed = parts_sent(log), is_committed(locate(target), (".metadata",))
    assert committed or killed
    assert not committed or wherry.verify(target, level="digest").ok
    assert bool(left(target)) == bool(clean(locate(target).parent.uri, dry_run=True, min_age=0))
    again = run(source, target, log)
    assert again["digest"] == whole["digest"]
    if not committed:
        assert parts_sent(log) <= whole["sent"] + SENDERS + 1  # of 50 parts
        assert before + again["sent"] == parts_sent(log)
    assert left(target) == []
    return killed


@pytest.mark.parametrize(
    "share", [0.4, *(pytest.param(n / 10, marks=pytest.mark.slow) for n in range(11) if n != 4)]
)
@pytest.mark.parametrize("after", [pytest.param("", marks=pytest.mark.slow), "+"])
def test_killed_at_a_step_of_the_journal(source_of_kills, bucket_of_kills, tmp_path, whole, share, after):
    """Before and after the journal's objects are put; the slow suite tests more of them."""
    step = 1 + round(share * (whole["journal"] - 2))
    while not assert_resumed(source_of_kills, bucket_of_kills, whole, tmp_path, f"journal:{step}{after}"):
        step -= (
            5  # parts that were sent meanwhile share an object of the journal, so another run may have fewer
        )
    assert step > 0


@pytest.mark.parametrize(
    "emulated", ["s3", *(pytest.param(one, marks=pytest.mark.slow) for one in ("gs", "az"))], indirect=True
)
@pytest.mark.parametrize("key", ["a key that machines share", "the key of another user"])
def test_killed_and_resumed_from_another_machine(bucket_of_kills, tmp_path, key):
    source, target = model(tmp_path / "model", rows=3000, count=8), f"{bucket_of_kills}/{tmp_path.name}/out"
    whole = wherry.convert(source, tmp_path / "disk", to="dcp", ignore=("companions",), lineage=False)
    parts = whole.bytes_written // MIB
    first = {"WHERRY_HOME": str(tmp_path / "first"), "WHERRY_KEY": "a key that machines share"}
    moment = f"journal:{round(parts * 0.7)}"
    assert run(source, target, "", moment, part=MIB, machine="first", env=first) is None
    second, shared = {"WHERRY_HOME": str(tmp_path / "second"), "WHERRY_KEY": key}, key == first["WHERRY_KEY"]
    finished = has_finished_moves(target)
    again = run(source, target, "", part=MIB, machine="second", env=second)
    assert (again["sent"] < parts) == shared
    assert (again["resumed"] > 0) == (shared and finished)
    assert again["digest"] == whole.target.checkpoint_digest
    assert wherry.verify(target, level="digest").ok
    assert left(target) == []


def test_killed_at_a_random_moment(source_of_kills, bucket_of_kills, tmp_path, whole):
    moment = random.Random(0).uniform(0.1, 0.9) * whole["seconds"]
    assert_resumed(source_of_kills, bucket_of_kills, whole, tmp_path, f"{moment:.3f}s")


@pytest.mark.slow
@pytest.mark.parametrize("after", ["", "+"])
@pytest.mark.parametrize("tenth", range(10))
def test_killed_at_every_step_of_the_journal(source_of_kills, bucket_of_kills, tmp_path, whole, tenth, after):
    for step in range(1 + tenth, whole["journal"], 10):
        assert_resumed(source_of_kills, bucket_of_kills, whole, tmp_path, f"journal:{step}{after}")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40))
def test_killed_at_200_random_moments(source_of_kills, bucket_of_kills, tmp_path, whole, seed):
    chance = random.Random(seed)
    killed = [
        assert_resumed(
            source_of_kills,
            bucket_of_kills,
            whole,
            tmp_path,
            f"{chance.uniform(0, 1) * whole['seconds']:.3f}s",
        )
        for _ in range(5)
    ]
    assert any(killed)


@pytest.mark.parametrize(
    "emulated", [pytest.param("s3", marks=pytest.mark.slow), "gs"], indirect=True
)  # to az:// Orbax is copied from a local folder
@pytest.mark.parametrize(
    "kind", ["packed", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("database", "objects"))]
)
def test_a_killed_process_that_wrote_arrays_is_resumed_by_another(
    source_of_kills, bucket_of_kills, tmp_path, kind
):
    folder, chosen = f"{bucket_of_kills}/{tmp_path.name}", {"to": "orbax", "part": "", **ARRAYS[kind]}
    made = run(source_of_kills, f"{folder}/whole/out", "", **chosen)
    target = next(
        f"{folder}/{call}/out"
        for call in range(int(made["calls"] * 0.7), 0, -1)
        if run(source_of_kills, f"{folder}/{call}/out", "", str(call), **chosen) is None
    )
    assert wherry.detect(target).verdict == "incomplete"
    again = run(source_of_kills, target, "", **chosen)
    assert again["digest"] == made["digest"]
    assert again["sent"] <= made["sent"]  # the whole checkpoint is no larger than what may be in flight
    assert wherry.verify(target, level="digest").ok
    assert left(target) == []
