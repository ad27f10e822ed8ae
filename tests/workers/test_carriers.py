"""The contract of every carrier: the result of one process, whatever happens to its workers, or no result."""

from __future__ import annotations

import os
import re
import signal
from contextlib import suppress
from dataclasses import replace

import pytest
from click.testing import CliRunner

import wherry
from tests.support.jobs import by_two, changed, proofs, receipts
from tests.support.object_stores import leftover_names
from tests.support.processes import gone
from tests.support.worker_pools import job_of, request_of, same_tensors
from wherry.cli import cli
from wherry.core.services import _SERVICES
from wherry.errors import (
    IncompleteError,
    MismatchError,
    NotFoundError,
    StorageError,
    TargetExistsError,
    TargetInUseError,
    UsageError,
)
from wherry.store.local_store import locate
from wherry.workers import THREADS, convert_on
from wherry.workers.engines import ENGINES, carry, engine_of
from wherry.workers.records import job_records

UNIT = 110_000


def by_processes(name):
    """A carrier with two workers on this machine; skips the test where its engine is not installed."""
    if name in _SERVICES:
        package = _SERVICES[name][1]
        pytest.importorskip(package, reason=f"{package} is not installed")
    return f"{name}:2"


@pytest.fixture(params=sorted(ENGINES))
def on(request):
    return by_processes(request.param)


@pytest.fixture
def target(tmp_path):
    return str(tmp_path / "out")


class Observer:
    """Gets the name of every unit; at the first one, it acts.

    Attributes:
        units: the names of the units.
        workers: process IDs of the workers that have made units.
    """

    def __init__(self, target, act=lambda _observer: None):
        self.target, self.act, self.units, self.workers = target, act, [], set()

    def __call__(self, progress):
        if progress.stage == "convert" and re.fullmatch(r"\d{5}-\w{8}", progress.current):
            rows = receipts(self.target).values()
            self.workers |= {int(re.match(r"process (\d+) on", row["worker"])[1]) for row in rows}
            self.units.append(progress.current)
            if len(self.units) == 1:
                self.act(self)


@pytest.fixture
def no_home(tmp_path, monkeypatch):
    """A home that cannot hold the key."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("WHERRY_HOME", str(tmp_path / "file" / "home"))
    monkeypatch.delenv("WHERRY_KEY", raising=False)


@pytest.mark.usefixtures("no_home")
def test_workers_get_the_key_of_a_process_that_cannot_store_one(source, target):
    request = replace(request_of(source, target), lineage=False)
    [receipt] = convert_on(request, "processes:2", unit_bytes=UNIT).receipts
    assert receipt.verification["ok"]


@pytest.mark.usefixtures("no_home")
def test_a_job_for_others_needs_a_key_that_they_can_have(source, target, tmp_path):
    words = ["split", str(source), target, "--to", "dcp"]
    with pytest.raises(UsageError, match="need one key") as refused:
        CliRunner().invoke(cli, words, catch_exceptions=False)
    assert refused.value.cure.startswith("export WHERRY_KEY=")
    assert sorted(os.listdir(tmp_path)) == ["file"]


@pytest.mark.parametrize("name", [THREADS, *sorted(ENGINES)])
def test_the_result_is_that_of_one_process(source, target, tmp_path, name):
    observer = Observer(target)
    on = name if name == THREADS else by_processes(name)
    [receipt] = convert_on(request_of(source, target), on, unit_bytes=UNIT, progress=observer).receipts
    assert same_tensors(receipt, source, tmp_path)
    assert receipt.verification["level"] == "digest"
    assert [one for one in leftover_names(target) if not one.startswith("undisturbed")] == []
    if name != THREADS:
        assert observer.units
        assert os.getpid() not in observer.workers
        assert gone(observer.workers)
    [again] = convert_on(request_of(source, target), on, unit_bytes=UNIT).receipts
    assert again.already


def test_a_worker_that_is_killed_changes_nothing(source, target, tmp_path, on):
    def kill(observer):
        killed.append(min(observer.workers))
        os.kill(killed[0], signal.SIGKILL)

    killed = []
    observer = Observer(target, kill)
    [receipt] = convert_on(request_of(source, target), on, unit_bytes=UNIT, progress=observer).receipts
    assert killed
    assert same_tensors(receipt, source, tmp_path)
    assert [one for one in leftover_names(target) if not one.startswith("undisturbed")] == []
    assert gone(observer.workers)


def test_an_interrupted_carriage_leaves_a_job_that_the_next_takes_up(source, target, tmp_path, on):
    def interrupt(_observer):
        raise KeyboardInterrupt

    first = Observer(target, interrupt)
    with pytest.raises(KeyboardInterrupt):
        convert_on(request_of(source, target), on, unit_bytes=UNIT, progress=first)
    assert gone(first.workers)
    assert "job.json" in job_records(locate(target)).names()
    made_before = set(receipts(target))
    [receipt] = convert_on(
        request_of(source, target), on, unit_bytes=UNIT, progress=Observer(target)
    ).receipts
    assert made_before
    assert receipt.resumed_bytes == receipt.bytes_written
    assert same_tensors(receipt, source, tmp_path)
    assert [one for one in leftover_names(target) if not one.startswith("undisturbed")] == []


def test_the_workers_read_back_what_others_have_made(source, target, tmp_path, on):
    """Where two have made units; a worker that was alone leaves the reading to the commit."""
    found = []

    def observe(progress):
        if progress.stage == "verify" and re.fullmatch(r"\d{5}-\w{8}", progress.current):
            found.append(progress.current)
            for row in proofs(target).values():
                [maker] = {one["worker"] for one in receipts(target).values() if one["unit"] == row["unit"]}
                assert row["worker"] != maker

    [receipt] = convert_on(request_of(source, target), on, unit_bytes=UNIT, progress=observe).receipts
    assert same_tensors(receipt, source, tmp_path)
    assert not found or receipt.verification["bytes_by_workers"] >= 100_000


def test_a_receipt_that_lies_brings_no_wrong_result(source, target, tmp_path, on):
    """A worker that reads back finds it, and the unit is made again; where nobody else is left, the commit refuses."""

    def lie(_observer):
        name, row = next(iter(receipts(target).items()))
        moves = [list(move) for move in row["moves"]]
        moves[0][4] = ("B" if moves[0][4][0] == "A" else "A") + moves[0][4][1:]
        changed(target, name, moves=moves)

    with suppress(MismatchError):
        [receipt] = convert_on(
            request_of(source, target), on, unit_bytes=UNIT, progress=Observer(target, lie)
        ).receipts
        assert same_tensors(receipt, source, tmp_path)
        assert wherry.verify(target, level="digest").ok
        return
    assert not locate(target).join("model.safetensors.index.json").exists()


@pytest.mark.parametrize(
    "name",
    [
        "horses",
        "processes:0",
        "processes:many",
        "processes://here",
        "processes:-1",
        "processes:٣",
        "threads:2",
    ],
)
def test_a_name_that_is_unknown_is_refused(source, target, name):
    with pytest.raises(UsageError):
        convert_on(request_of(source, target), name)
    assert leftover_names(target) == []


def test_a_number_of_workers_is_that_of_the_cores_by_default():
    assert engine_of("processes")[1].workers == os.cpu_count()
    assert engine_of("processes:3")[1].workers == 3


def test_several_targets_are_refused(source, target):
    one = request_of(source, target)
    two = type(one)(source=one.source, targets=one.targets * 2)
    with pytest.raises(UsageError, match="one target at a time"):
        convert_on(two, "processes:2")


def test_workers_that_fail_are_named(source, target, monkeypatch):
    made = job_of(source, target)
    monkeypatch.setenv("WHERRY_KEY", "a key of somebody else")
    with pytest.raises(
        StorageError, match=r"12 of 12 units are not written; 2 workers failed: .*signed with another key"
    ):
        list(carry(made, "processes:2"))


def test_paths_that_are_relative_mean_the_same_to_every_worker(source, target, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    request = request_of(os.path.relpath(source), "out")
    [receipt] = convert_on(request, "processes:1", unit_bytes=UNIT).receipts
    assert same_tensors(receipt, source, tmp_path)


def test_two_coordinators_carry_one_job_at_the_same_time(source, target, tmp_path):
    """Each with a worker of its own; together they make each unit once, and one target."""
    request = request_of(source, target)
    winners, failed = by_two(
        lambda: convert_on(request, "processes:1", unit_bytes=UNIT).receipts[0],
        (TargetInUseError, NotFoundError, TargetExistsError, IncompleteError, StorageError),
    )
    assert winners, failed
    assert all(same_tensors(one, source, tmp_path) for one in winners)
    assert all(getattr(one, "retryable", True) for one in failed), failed
    [again] = convert_on(request, "processes:1", unit_bytes=UNIT).receipts
    assert again.already
    assert wherry.verify(target, level="digest").ok
    assert [name for name in leftover_names(target) if not name.startswith("undisturbed")] == []
