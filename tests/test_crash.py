"""Whatever fails and whenever it is killed: the target is whole or absent, and running again ends the same.

Faults of storage are injected in this process, kills in forked children. Every format that is written is tried; the
short version takes samples of the moments, the slow one all of them.
"""

from __future__ import annotations

import errno
import json
import os
import random
import re
import socket
import time
from typing import TYPE_CHECKING

import numpy as np
import pytest
from safetensors.numpy import save_file

import wherry
from wherry.clean import clean
from wherry.errors import StorageError, TargetInUseError
from wherry.lease import EXPIRY_SECONDS
from wherry.registry import find_format, formats
from wherry.testing import faults
from wherry.testing.faults import Children, Fault, Faults, Order

if TYPE_CHECKING:
    from pathlib import Path

WRITTEN = [name for name, row in formats().items() if row.create is not None]
FAILING = [place for place in faults.PLACES if place.split(":")[1] not in ("unlink", "rmdir")]
PRELOAD = ["tensorstore", "wherry.integrations.orbax.writer"]
OPTIONS = {"orbax": {"chunks": "1"}}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Six small tensors, and two of more than a move."""
    folder = tmp_path_factory.mktemp("source") / "model"
    folder.mkdir()
    generator = np.random.default_rng(0)
    tensors = {f"layer.{n}.weight": generator.standard_normal((50, 101), dtype="f4") for n in range(6)}
    tensors |= {f"table.{n}": generator.integers(0, 255, (9, 1_000_003), dtype="u1") for n in range(2)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text("{}")
    return folder


@pytest.fixture(scope="module")
def children():
    with Children(PRELOAD) as running:
        yield running


@pytest.fixture(scope="module")
def undisturbed(source, tmp_path_factory):
    """Checkpoint digest of a conversion that nothing disturbs, by format."""
    folder = tmp_path_factory.mktemp("undisturbed")
    return {to: convert(source, folder / to)["target"]["checkpoint_digest"] for to in WRITTEN}


def convert(source, target, to=None):
    to = to or target.name.split(".")[0]
    with faults.small_steps():
        return wherry.convert(source, target, to=to, options=OPTIONS.get(to, {}), lineage=False).to_json()


def failure_of(source, target):
    """The storage error that a conversion ends with, or None."""
    try:
        convert(source, target)
    except StorageError as error:
        return error
    return None


def order(source, target, to, **more):
    return Order(str(source), str(target), to, OPTIONS.get(to, {}), **more)


def complete(target: Path) -> set[str]:
    """What lies in the target's folder when all is done."""
    to = target.name.split(".")[0]
    return {target.name, f"{target.name}.wherry.json"} if find_format(to).single_file else {target.name}


def assert_done(receipt, target, digest):
    """The target is what an undisturbed run makes, and nothing else is left."""
    assert receipt["target"]["checkpoint_digest"] == digest
    left = set(os.listdir(target.parent)) - complete(target)
    if receipt[
        "already"
    ]:  # killed after the commit: only the lease and the journal can be there, and mean nothing
        assert all(re.fullmatch(rf"\.wherry-{target.name}\.(lease|\w+\.journal)", name) for name in left), (
            left
        )
        assert all(row.removed for row in clean(target.parent, min_age=0))
        left = set(os.listdir(target.parent)) - complete(target)
    assert not left


def assert_whole_or_absent(target):
    if target.exists():
        assert wherry.verify(target, level="digest").ok
    for name in os.listdir(target.parent):
        path = target.parent / name
        if path != target:
            assert name.startswith(".wherry-") or name == f"{target.name}.wherry.json", name
            assert wherry.detect(path).verdict != "ok"
    assert [one.uri for one in wherry.discover(target.parent)] in ([], [str(target)])


def spread(total: int, most: int) -> list[int]:
    """Up to so many call numbers, first and last among them."""
    return sorted({1 + round(step * (total - 1) / (most - 1)) for step in range(most)}) if total else []


few_or_all = pytest.mark.parametrize(
    "most", [3, pytest.param(1000, marks=pytest.mark.slow)], ids=["few", "all"]
)
few_or_all_kills = pytest.mark.parametrize(
    "most", [12, pytest.param(400, marks=pytest.mark.slow)], ids=["few", "all"]
)
written = pytest.mark.parametrize("to", WRITTEN)


@few_or_all
@pytest.mark.parametrize(
    ("code", "lasting"), [(errno.ENOSPC, True), (errno.EIO, False)], ids=["ENOSPC", "EIO"]
)
@written
def test_storage_that_fails(source, undisturbed, tmp_path, to, code, lasting, most):
    with Faults() as counted:
        convert(source, tmp_path / "counted" / to)
    moments = [(place, number) for place in FAILING for number in spread(counted.calls[place], most)]
    assert len(moments) > 5
    for place, number in moments:
        target = tmp_path / f"{place}-{number}".replace(":", ".") / to
        with Faults(Fault(faults.failing(code), number, place, lasting)) as injected:
            failed = failure_of(source, target)
        assert injected.struck
        if failed is None:
            assert place == "os:mkdir", f"call {number} of {place} failed, and nobody said so"  # it was there
        else:
            assert (failed.exit_code, failed.retryable) == (10, code == errno.EIO), failed
            assert_left_after(failed, target)
        assert_done(convert(source, target), target, undisturbed[to])


def assert_left_after(failed, target):
    """After an error: resumable state where a retry can help, else nothing; a target only if it is whole."""
    if target.exists():  # the commit had happened, only making its name durable failed
        assert_whole_or_absent(target)
        assert set(os.listdir(target.parent)) == complete(target)
    elif not failed.retryable:
        assert not target.parent.exists(), os.listdir(target.parent)
    elif target.parent.exists():
        left = os.listdir(target.parent)
        assert all(name.startswith(f".wherry-{target.name}.") for name in left), left
        assert not any(name.endswith(".lease") for name in left), left


@written
def test_short_writes_are_completed(source, undisturbed, tmp_path, to):
    for place in faults.WRITES:
        with Faults(Fault(faults.falling_short, 1, place, lasting=True)) as injected:
            receipt = convert(source, tmp_path / place / to)
        assert injected.struck or place == "os:pwrite"
        assert_done(receipt, tmp_path / place / to, undisturbed[to])


@written
def test_the_kernel_refuses_larger_files(source, undisturbed, children, tmp_path, to):
    for size in (2_000, 200_000, 6_000_000):
        target = tmp_path / str(size) / to
        outcome = children.run(order(source, target, to, file_size=size))
        if outcome.error is None:
            assert_done(outcome.receipt, target, undisturbed[to])  # its files are smaller
            continue
        assert outcome.error["exit_code"] == 10, outcome.error
        assert "File too large" in outcome.error["what"]
        assert not target.parent.exists()
        assert_done(convert(source, target), target, undisturbed[to])


TENSORSTORE = {
    errno.ENOSPC: 'RESOURCE_EXHAUSTED: Error writing "x": [OS error 28: ENOSPC No space left on device]',
    errno.EIO: 'UNKNOWN: Error writing "x": [OS error 5: EIO Input/output error]',
}


class Failed:
    """A future of tensorstore that has failed."""

    def __init__(self, code):
        self.error = ValueError(TENSORSTORE[code])

    def exception(self):
        return self.error

    def add_done_callback(self, call):
        call(self)


@pytest.mark.parametrize("code", TENSORSTORE, ids=errno.errorcode.get)
@pytest.mark.parametrize("function", ["put_all", "link_all", "open_store", "open_to_write", "a chunk"])
def test_tensorstore_fails(source, undisturbed, tmp_path, monkeypatch, function, code):
    from wherry.integrations.containers import kvstore
    from wherry.integrations.orbax.pending import Pending

    def fails(*_arguments, **_options):
        raise kvstore.translated(ValueError(TENSORSTORE[code]), "x")

    target = tmp_path / "out" / "orbax"
    if function == "a chunk":
        real, calls = Pending.add, iter(range(100))
        monkeypatch.setattr(
            Pending,
            "add",
            lambda self, future, nbytes: real(self, Failed(code) if next(calls) == 9 else future, nbytes),
        )
    else:
        monkeypatch.setattr(kvstore, function, fails)
    failed = failure_of(source, target)
    assert failed is not None
    assert (failed.exit_code, failed.retryable) == (10, code == errno.EIO), failed
    assert_left_after(failed, target)
    monkeypatch.undo()
    assert_done(convert(source, target), target, undisturbed["orbax"])


@few_or_all_kills
@pytest.mark.parametrize("act", ["kill", "tear"])
@written
def test_killed_at_every_step_and_taken_up(source, undisturbed, children, tmp_path, to, act, most):
    counted = children.run(order(source, tmp_path / "counted" / to, to))
    assert_done(counted.receipt, tmp_path / "counted" / to, undisturbed[to])
    places = [None] if act == "kill" else faults.WRITES
    totals = {
        place: sum(counted.calls.values()) if place is None else counted.calls.get(place, 0)
        for place in places
    }
    resumed = 0
    for place, number in [(one, number) for one, total in totals.items() for number in spread(total, most)]:
        target = tmp_path / f"{place}-{number}".replace(":", ".") / to
        outcome = children.run(order(source, target, to, act=act, number=number, place=place))
        assert outcome.killed or outcome.receipt  # tensorstore decides how many files there are to be synced
        if target.parent.exists():
            assert_whole_or_absent(target)
        receipt = convert(source, target)
        resumed += receipt["resumed_bytes"] > 0
        assert_done(receipt, target, undisturbed[to])
    assert resumed


@few_or_all_kills
@written
def test_killed_at_random_moments_again_and_again(source, undisturbed, children, tmp_path, to, most):
    """Each run is killed at some moment, resumed ones too, until one lives; threads as many as it takes."""
    generator, killed = random.Random(0), 0
    clock = time.monotonic()
    children.run(order(source, tmp_path / "timed" / to, to, workers=None))
    usual = time.monotonic() - clock
    for trial in range(max(most // 4, 1)):
        target = tmp_path / str(trial) / to
        for _run in range(8):
            after = generator.uniform(0, 1.1 * usual)
            outcome = children.run(order(source, target, to, after=after, workers=None))
            if not outcome.killed:
                break
            killed += 1
            if target.parent.exists():
                assert_whole_or_absent(target)
        assert_done(convert(source, target), target, undisturbed[to])
    assert killed


@written
def test_killed_while_resuming(source, undisturbed, children, tmp_path, to):
    """Each run gets a little further than the one before, over what that one left."""
    target = tmp_path / "out" / to
    kills = 0
    while children.run(order(source, target, to, number=14 + 9 * kills)).killed:
        assert_whole_or_absent(target)
        kills += 1
    assert kills > 1
    assert_done(convert(source, target), target, undisturbed[to])


def killed_with_lease(children, source, target):
    """Kill a run in the middle; its lease file."""
    assert children.run(order(source, target, "huggingface", number=4, place="os:write")).killed
    lease = target.parent / f".wherry-{target.name}.lease"
    assert lease.exists()
    return lease


def test_the_lease_of_a_dead_process_is_taken_over_at_once(source, undisturbed, children, tmp_path):
    target = tmp_path / "out" / "huggingface"
    lease = killed_with_lease(children, source, target)
    assert json.loads(lease.read_text())["host"] == socket.gethostname()
    receipt = convert(source, target)
    assert receipt["resumed_bytes"] > 0
    assert_done(receipt, target, undisturbed["huggingface"])


def test_the_lease_of_another_machine_is_taken_over_when_it_expires(source, undisturbed, children, tmp_path):
    target = tmp_path / "out" / "huggingface"
    lease = killed_with_lease(children, source, target)
    lease.write_text(json.dumps({**json.loads(lease.read_text()), "host": "elsewhere"}))
    before = sorted(os.listdir(target.parent))
    with pytest.raises(TargetInUseError, match="elsewhere"):
        convert(source, target)
    assert sorted(os.listdir(target.parent)) == before, "a refused run touches nothing"
    long_ago = time.time() - EXPIRY_SECONDS - 1
    os.utime(lease, (long_ago, long_ago))
    receipt = convert(source, target)
    assert receipt["resumed_bytes"] > 0
    assert_done(receipt, target, undisturbed["huggingface"])


@pytest.mark.parametrize("neighbour", ["a.b", "a.0123abcd", "a.lease", "a.journal", "a.0123abcd.journal"])
def test_neighbours_with_like_names_are_not_confused(source, undisturbed, children, tmp_path, neighbour):
    """An interrupted `a.b` survives everything that happens to `a`, and the other way round."""
    for first, second in (("a", neighbour), (neighbour, "a")):
        folder = tmp_path / first
        kept, made = folder / first, folder / second
        assert children.run(order(source, kept, "huggingface", number=4, place="os:write")).killed
        left = {name: (folder / name).stat().st_mtime_ns for name in os.listdir(folder)}
        assert children.run(order(source, made, "huggingface", number=4, place="os:write")).killed
        assert convert(source, made, "huggingface")["resumed_bytes"] > 0
        now = {name: (folder / name).stat().st_mtime_ns for name in os.listdir(folder) if name != second}
        assert now == left
        receipt = convert(source, kept, "huggingface")
        assert receipt["resumed_bytes"] > 0
        assert receipt["target"]["checkpoint_digest"] == undisturbed["huggingface"]
        assert sorted(os.listdir(folder)) == sorted((first, second))
