"""Killed at any moment: the target is whole or absent, and running again ends as an undisturbed run does.

Kills happen in forked children, for every format that is written. The short version takes samples of the moments,
the slow one all of them, which is hundreds of kills.
"""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import socket
import time

import pytest

import wherry
from tests.support.crash import (
    RENAME,
    assert_done,
    assert_whole_or_absent,
    convert,
    each_written,
    order,
    spread,
    written,
)
from wherry.errors import TargetInUseError
from wherry.target import lease as leases
from wherry.testing import faults
from wherry.testing.faults import Fault, Faults

pytest_plugins = ("tests.support.crash_fixtures",)


@pytest.mark.parametrize("act", ["kill", "tear"])
@written(12, 400)
def test_killed_at_every_step_and_taken_up(
    source, undisturbed, children, tmp_path, record_property, to, act, most
):
    counted = children.run(order(source, tmp_path / "counted" / to, to))
    assert_done(counted.receipt, tmp_path / "counted" / to, undisturbed[to])
    places = [None] if act == "kill" else faults.WRITES
    totals = {
        place: sum(counted.calls.values()) if place is None else counted.calls.get(place, 0)
        for place in places
    }
    resumed = 0
    moments = [(place, number) for place, total in totals.items() for number in spread(total, most)]
    for place, number in moments:
        target = tmp_path / f"{place}-{number}".replace(":", ".") / to
        outcome = children.run(order(source, target, to, act=act, number=number, place=place))
        assert outcome.killed
        if target.parent.exists():
            assert_whole_or_absent(target)
        receipt = convert(source, target)
        resumed += receipt["resumed_bytes"] > 0
        assert_done(receipt, target, undisturbed[to])
        shutil.rmtree(target.parent)
    assert resumed
    record_property("kills", len(moments))


@written(12, 160)
def test_killed_at_random_moments_again_and_again(
    source, undisturbed, children, tmp_path, record_property, to, most
):
    """Each run is killed at some moment, resumed ones too, until one lives; threads as many as it takes."""
    generator, killed = random.Random(0), 0
    for name in ("warm", "timed"):
        clock = time.monotonic()
        children.run(order(source, tmp_path / name / to, to, workers=None))
        usual = time.monotonic() - clock
    for trial in range(max(most // 4, 2)):
        target = tmp_path / str(trial) / to
        for _run in range(8):
            after = generator.uniform(0, 1.1 * usual) if killed else usual / 4
            outcome = children.run(order(source, target, to, after=after, workers=None))
            if not outcome.killed:
                break
            killed += 1
            if target.parent.exists():
                assert_whole_or_absent(target)
        assert_done(convert(source, target), target, undisturbed[to])
        shutil.rmtree(target.parent)
    assert killed
    record_property("kills", killed)


@each_written
def test_killed_while_resuming(source, undisturbed, children, tmp_path, record_property, to):
    """Each run gets a little further than the one before, over what that one left."""
    target = tmp_path / "out" / to
    kills = 0
    while children.run(order(source, target, to, number=14 + 9 * kills)).killed:
        assert_whole_or_absent(target)
        kills += 1
    assert kills > 1
    record_property("kills", kills)
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


def test_the_lease_of_another_machine_is_taken_over_when_it_expires(
    source, undisturbed, children, tmp_path, monkeypatch
):
    target = tmp_path / "out" / "huggingface"
    lease = killed_with_lease(children, source, target)
    owner = {**json.loads(lease.read_text()), "host": "elsewhere"}
    lease.write_text(json.dumps(owner))
    before = sorted(os.listdir(target.parent))
    monkeypatch.setattr(leases, "EXPIRY_SECONDS", 0.5)
    beats = iter(range(1, 1000))
    with monkeypatch.context() as patch:
        patch.setattr(
            leases.time, "sleep", lambda _: lease.write_text(json.dumps({**owner, "beat": next(beats)}))
        )
        with pytest.raises(TargetInUseError, match="elsewhere"):
            convert(source, target)
    assert sorted(os.listdir(target.parent)) == before, "a refused run touches nothing"
    receipt = convert(source, target)
    assert receipt["resumed_bytes"] > 0
    assert_done(receipt, target, undisturbed["huggingface"])


def test_a_file_system_without_hard_links_has_leases_too(source, undisturbed, tmp_path):
    target = tmp_path / "out" / "huggingface"
    with Faults(Fault(faults.failing(errno.EPERM), 1, "os:link", lasting=True)) as injected:
        receipt = convert(source, target)
    assert injected.struck == 1
    assert_done(receipt, target, undisturbed["huggingface"])


def test_a_kill_never_leaves_a_lease_without_owner(source, children, tmp_path):
    for number in range(1, 12):
        target = tmp_path / str(number) / "huggingface"
        children.run(order(source, target, "huggingface", number=number))
        lease = target.parent / f".wherry-{target.name}.lease"
        assert not lease.exists() or json.loads(lease.read_text())["pid"]
        convert(source, target)


def test_an_interrupted_item_is_not_taken_for_the_item_of_its_step(sources, children, tmp_path):
    """An area inside a step folder lies where Orbax items lie; even a finished one does not count."""
    source = sources["orbax"]
    step = tmp_path / "2"
    assert children.run(order(source, step / "default", "orbax", number=1, place=RENAME)).killed
    assert any(name.startswith(".wherry-default.") for name in os.listdir(step))
    assert wherry.detect(step).verdict != "ok"
    assert list(wherry.discover(tmp_path)) == []
    convert(source, step / "default", "orbax")
    assert wherry.detect(step).uri == str(step / "default")


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
