"""The coordinator killed at every step: the next run ends with the digests of one process, and makes no unit again."""

from __future__ import annotations

import atexit
import json
import os
import re
import shutil
import sys
from functools import cache
from pathlib import Path

import pytest

import wherry
from tests.support.crash import spread
from tests.support.jobs import as_dead, claimants, receipts
from tests.support.killed_coordinator import SHARD, UNIT
from tests.support.object_stores import Killed, leftover_names, release, uploads_below, watched
from tests.support.processes import gone
from tests.support.warm import Warm
from tests.support.worker_pools import ImaginaryPool, carried, request_of, same_tensors
from wherry.converter.convert import convert_all
from wherry.errors import TargetExistsError
from wherry.store.local_store import locate
from wherry.target.clean import clean
from wherry.workers import convert_on
from wherry.workers import engines as module
from wherry.workers.commit import commit
from wherry.workers.job import split
from wherry.workers.work import work

ROOT = Path(__file__).parents[2]
UNITS = 6
# Steps that the records of a job know, and a commit on a file system, by the program that is killed at them.
STEPS = {
    "split": ("begin", "create job.json"),
    "pool": ("create challenge", "out prove", "out unit", "create claim", "create receipt", "receipt in",
             "remove challenge", "os.link", "commit", "os.rename", "end", "remove job.json"),
    "commit": ("os.mkdir", "os.unlink", "os.fsync"),
}  # fmt: skip


@cache
def waiting():
    """A process from which those that kill themselves are forked: it has imported wherry."""
    made = Warm(
        [sys.executable, "-m", "tests.support.warm"],
        os.environ,
        ["wherry.converter.convert", "tests.support.worker_pools"],
        os.fspath(ROOT),
    )
    atexit.register(made.close)
    return made


def run(verb, source, target, place="", number=0):
    """The exit code of the program, and how often each place was called."""
    words = [verb, str(source), target, place, str(number)]
    code, output, errors = waiting().run(
        "tests.support.killed_coordinator", words, cwd=os.fspath(ROOT), env=os.environ
    )
    assert code in (0, -9), errors.decode()
    return code, json.loads(output) if code == 0 else {}


@pytest.fixture
def place(tmp_path):
    """A folder for each target."""

    def make(name):
        folder = tmp_path / re.sub(r"\W", "-", name)
        folder.mkdir()
        return str(folder / "out")

    return make


@pytest.fixture
def counts(source, place):
    """How often each place of a program is called, if nothing kills it; the first of all makes the key as well."""

    def count(verb):
        for number in range(2):
            target = place(f"counted {verb} {number}")
            prepare(verb, source, target)
            found = run(verb, source, target)[1]
        return found

    return count


def prepare(verb, source, target):
    """What lies next to a target before a program is started."""
    if verb == "commit":
        split(request_of(source, target, SHARD), UNIT)
        work(target)


def gone_on(source, target):
    """Carry on as the next run does; its receipt, and how many units it has made."""
    before = receipts(target)
    try:
        made = split(request_of(source, target, SHARD), UNIT)
    except TargetExistsError:  # only the end of the job was left
        [receipt] = convert_on(request_of(source, target, SHARD), "processes:1", unit_bytes=UNIT).receipts
        assert receipt.already
        return receipt, 0
    pool = ImaginaryPool("cd")
    assert set(carried(made, pool)) == set(range(UNITS))
    after = receipts(target)
    assert before.items() <= after.items()
    [receipt] = commit(made.uri).receipts
    return receipt, len(after) - len(before)


def assert_whole_or_absent(target):
    """And nothing next to it is taken for a checkpoint."""
    folder = Path(target).parent
    assert all(name == "out" or name.startswith(".wherry-out.") for name in os.listdir(folder))
    if Path(target).exists():
        assert wherry.verify(target, level="digest").ok
    found = [one.uri for one in wherry.discover(folder)]
    assert found == ([target] if Path(target).exists() else [])


def assert_clean_knows(target):
    """Where nobody goes on, `wherry clean` removes all that is left, and not the target."""
    copy = Path(target).parent.with_suffix(".left")
    shutil.copytree(Path(target).parent, copy, symlinks=True)
    assert all(report.removed for report in clean(copy, min_age=0))
    assert os.listdir(copy) == (["out"] if Path(target).exists() else [])
    shutil.rmtree(copy)


def assert_taken_up(source, target, folder):
    """The result of one process, of which no unit is made again that has a receipt."""
    assert_whole_or_absent(target)
    assert_clean_knows(target)
    there, was_committed = len(receipts(target)), Path(target).exists()
    receipt, units = gone_on(source, target)
    assert units == (0 if was_committed else UNITS - there)
    assert same_tensors(receipt, source, folder)
    assert wherry.verify(target, level="digest").ok
    assert os.listdir(Path(target).parent) == ["out"]


def moments(counts, verb, most):
    """Places and numbers of calls."""
    total = counts(verb)
    if most is None:
        return [(name, number) for name in total for number in range(1, total[name] + 1)]
    assert set(STEPS[verb]) <= set(total), "a step has another name"
    return [(name, number) for name in STEPS[verb] for number in spread(total[name], most)]


@pytest.mark.timeout(3600)  # the slow forms kill some hundred times
@pytest.mark.parametrize(
    ("verb", "most"),
    [
        pytest.param(verb, most, id=f"{verb}-{most or 'all'}", marks=[] if most else pytest.mark.slow)
        for verb in STEPS
        for most in (1, None)
    ],
)
def test_killed_at_every_step_and_taken_up(source, place, counts, tmp_path, record_property, verb, most):
    tried, alive = moments(counts, verb, most), []
    for name, number in tried:
        target = place(f"{verb} {name} {number}")
        prepare(verb, source, target)
        code, _calls = run(verb, source, target, name, number)
        alive += [(name, number)] if code == 0 else []
        assert_taken_up(source, target, tmp_path)
    assert len(alive) <= (0 if most else 3), alive  # how often files are synced depends on the clock
    record_property("kills", len(tried))


ENGINE_STEPS = {
    "processes:2": (("begin", 1), ("worker started", 2), ("receipt in", 1), ("receipt in", 6), ("os.link", 3),
                    ("commit", 1), ("end", 1), ("remove job.json", 1)),
    "dask:2": (("create challenge", 1), ("out prove", 2), ("out unit", 3), ("receipt in", 6),
               ("remove challenge", 1), ("commit", 1)),
}  # fmt: skip


@pytest.mark.parametrize(
    ("on", "name", "number"),
    [
        *((on, "receipt in", 2) for on in ENGINE_STEPS),
        *(
            pytest.param(on, *step, marks=pytest.mark.slow)
            for on in ENGINE_STEPS
            for step in ENGINE_STEPS[on]
        ),
    ],
)
def test_killed_with_an_engine_and_taken_up(source, place, tmp_path, monkeypatch, on, name, number):
    """Its workers are killed with it: at most the units that they were making are made again."""
    if on.startswith("dask"):
        pytest.importorskip("distributed", reason="distributed is not installed")
    target, committed = place("out"), []
    assert run(on, source, target, name, number)[0] == -9
    before = receipts(target)
    assert gone(claimants(target))
    assert gone(claimants(target))  # also those that claimed meanwhile
    assert_whole_or_absent(target)
    assert_clean_knows(target)

    def observed(uri, **how):
        committed.append(receipts(target))
        return commit(uri, **how)

    monkeypatch.setattr(module, "commit", observed)
    [receipt] = convert_on(request_of(source, target, SHARD), on, unit_bytes=UNIT).receipts
    assert all(before.items() <= after.items() and len(after) == UNITS for after in committed)
    assert committed or receipt.already
    assert same_tensors(receipt, source, tmp_path)
    assert os.listdir(Path(target).parent) == ["out"]


@pytest.mark.parametrize("most", [8, pytest.param(None, marks=pytest.mark.slow)])
def test_killed_at_every_call_of_a_store_and_taken_up(source, tmp_path, monkeypatch, record_property, most):
    """Of objects. Where nobody goes on, after every third kill, `wherry clean` removes all that is left."""
    with watched() as calls:
        carried_on_objects(source, f"memory://bucket{tmp_path}/counted/out")
    numbers = range(1, len(calls) + 1) if most is None else spread(len(calls), most)
    for number in numbers:
        target = f"memory://bucket{tmp_path}/{number}/out"
        with monkeypatch.context() as patch:
            as_dead(patch)
            with watched(number), pytest.raises(Killed):
                carried_on_objects(source, target)
        release(target)
        was_committed = locate(target).join("model.safetensors.index.json").exists()
        if number % 3 == 0 or most is None:
            assert all(report.removed for report in clean(locate(target).parent.uri, min_age=0))
            assert leftover_names(target) == uploads_below(target) == []
            assert locate(target).exists() == was_committed
        if number % 3 or most is None:
            [receipt] = carried_on_objects(source, target).receipts
            assert same_tensors(receipt, source, tmp_path)
            assert wherry.verify(target, level="digest").ok
            assert leftover_names(target) == uploads_below(target) == []
    record_property("kills", len(numbers))


def carried_on_objects(source, target):
    """As `convert_on` does it."""
    request = request_of(source, target, SHARD)
    try:
        made = split(request, UNIT)
    except TargetExistsError:
        return convert_all(request)
    before = receipts(target)
    assert set(carried(made, ImaginaryPool("ab"))) == set(range(UNITS))
    assert before.items() <= receipts(target).items()
    return commit(made.uri)


def test_the_spill_folder_of_a_killed_worker_is_removed_by_clean(source, place, tmp_path, monkeypatch):
    """It lies where WHERRY_SPILL says, as that of one process."""
    spill = tmp_path / "spill"
    spill.mkdir()
    monkeypatch.setenv("WHERRY_SPILL", str(spill))
    assert run("pool", source, place("out"), "move", 2)[0] == -9
    assert os.listdir(spill)
    assert all(report.removed for report in clean(spill, min_age=0))
    assert os.listdir(spill) == []


def test_the_folder_of_a_dask_cluster_that_was_killed_is_removed_by_clean(
    source, place, tmp_path, monkeypatch
):
    """It lies where TMPDIR says, and holds the keys of the cluster."""
    pytest.importorskip("distributed", reason="distributed is not installed")
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    assert run("dask:2", source, place("out"), "receipt in", 2)[0] == -9
    assert list(folder.rglob("key"))
    assert all(report.removed for report in clean(folder, min_age=0))
    assert not [
        path for path in folder.rglob("*") if not path.is_dir()
    ]  # empty folders of its processes are left
    assert not [name for name in os.listdir(folder) if "dask" in name]
