"""Two writers of one target: at whatever moment one is stopped, one of them wins, and nothing wrong is ever visible.

Run A is stopped before a call that changes the file system; run B takes the target over and runs to its end; A is
continued. The short version takes samples of the moments, half as many on a disk, where a sync takes its time, if there
is a tmpfs; the slow one takes all of them on each file system.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import wherry
from tests.support.crash import complete, convert, order, spread
from tests.support.memory_files import memory_folder, temporary_folder
from wherry.testing.children import Outcome
from wherry.testing.faults import PLACES

pytest_plugins = ("tests.support.crash_fixtures",)

EXPIRY = 0.1  # of a stopped owner; a living one is found in the process table, whatever its heartbeats
FEW = 7  # moments of a case
STEPS = (*PLACES, "fcntl:flock", "os:lseek")  # the last: copies of areas
SHORT = ("safetensors", "huggingface", "orbax")
LONG = (*SHORT, "npz", "dcp", "flax-msgpack", "t5x-legacy", "paxml", "torch-zip")


def cases(few, many):
    """Parametrize by format and moments: few of three formats, and, slow, many of more."""
    rows = [pytest.param(to, {}, few, id=f"few-{to}") for to in SHORT]
    rows += [pytest.param(to, {}, many, id=f"many-{to}", marks=pytest.mark.slow) for to in LONG]
    # Compressed chunks are appended as they come: their files grow, and a log says where they lie.
    grown = {"compression": "zstd"}
    rows += [
        pytest.param("orbax", grown, few, id="few-orbax-zstd"),
        pytest.param("orbax", grown, many, id="many-orbax-zstd", marks=pytest.mark.slow),
    ]
    return pytest.mark.parametrize(("to", "options", "most"), rows)


def wanted_of(source, target, to, options, **more):
    plain = order(source, target, to, **more)
    return replace(plain, options={**plain.options, **options})


@pytest.fixture(params=["disk", "tmpfs"])
def folder(request, tmp_path):
    if request.param == "disk":
        yield tmp_path
        return
    if memory_folder() is None:
        pytest.skip("there is no tmpfs with room")
    with temporary_folder("crash") as made:
        yield Path(made)


def moments_in(folder, total, most):
    """The moments that are tried: on a disk half of the few, if a tmpfs has all of them."""
    memory = memory_folder()
    half = most <= FEW and memory is not None and memory not in folder.parents
    return spread(total, (most + 1) // 2 if half else most)


def code(outcome: Outcome) -> int:
    assert not outcome.killed
    assert not outcome.stopped
    return 0 if outcome.receipt else outcome.error["exit_code"]


def recorded_moves(target):
    """Lines with moves in the journals of all areas of a target."""
    found = target.parent.glob(".wherry-*/.wherry-journal") if target.parent.exists() else ()
    return sum(max(journal.read_bytes().count(b"\n") - 1, 0) for journal in found)


def assert_one_won(outcomes, target, digest):
    """One run made the target, the others ended with 8 or found it made; nothing else is left."""
    made = [one for one in outcomes if one.receipt and not one.receipt["already"]]
    said = [one.error or one.receipt for one in outcomes]
    assert len(made) == 1, said
    assert made[0].receipt["target"]["checkpoint_digest"] == digest
    assert {code(one) for one in outcomes} <= {0, 8}, said
    assert set(os.listdir(target.parent)) == complete(target)
    verification = wherry.verify(target, level="digest")
    assert verification.ok
    assert wherry.open(target).detection.verdict == "ok"


@pytest.mark.parametrize("verify", ["digest", pytest.param("none", marks=pytest.mark.slow)])
@cases(FEW, 30)
def test_one_that_was_stopped_never_commits_the_work_of_another(
    source, undisturbed, children, folder, record_property, to, options, most, verify
):
    wanted = wanted_of(source, folder / "counted" / to, to, options, verify=verify, places=STEPS)
    total = sum(children.run(wanted).calls.values())
    moments, resumed, committed = moments_in(folder, total, most), 0, 0
    for number in moments:
        target = folder / str(number) / to
        own_order = replace(wanted, target=str(target), expiry=EXPIRY)
        stopped = children.run(replace(own_order, act="stop", number=number))
        assert stopped.stopped
        committed += target.exists()
        moves = recorded_moves(target)
        second = children.run(own_order)
        if moves and second.receipt and not second.receipt["already"]:
            assert second.receipt["resumed_bytes"] > 0, f"progress was lost at {number}"
            resumed += 1
        first = children.resume(stopped)
        assert_one_won([first, second], target, undisturbed[to])
        shutil.rmtree(target.parent)
    assert resumed
    assert committed, "no run was stopped after its commit"
    record_property("interleavings", len(moments))


@pytest.mark.parametrize("former", ["killed", "stopped"])
@cases(5, 15)
def test_one_that_was_stopped_while_it_took_over_is_taken_over_itself(
    source, undisturbed, children, folder, record_property, to, options, most, former
):
    """Run A was killed or stopped with work recorded; B is stopped at each step of taking over; C runs; all go on."""
    wanted = wanted_of(source, folder / "counted" / to, to, options, expiry=EXPIRY, places=STEPS)
    act = {"killed": "kill", "stopped": "stop"}[former]
    total = sum(children.run(wanted).calls.values())
    begun, moments = total * 2 // 3, moments_in(folder, min(60, total), most)
    for number in moments:
        target = folder / str(number) / to
        own_order = replace(wanted, target=str(target))
        first = children.run(replace(own_order, act=act, number=begun))
        assert recorded_moves(target), "there is something to lose"
        second = children.run(replace(own_order, act="stop", number=number))
        third = children.run(own_order)
        outcomes = [third]
        if second.stopped:
            second = children.resume(second)
        outcomes.append(second)
        if first.stopped:
            outcomes.append(children.resume(first))
        made = next(one.receipt for one in outcomes if one.receipt and not one.receipt["already"])
        assert made["resumed_bytes"] > 0, f"progress was lost at {number}"
        assert_one_won(outcomes, target, undisturbed[to])
        shutil.rmtree(target.parent)
    record_property("interleavings", len(moments))


@pytest.mark.parametrize("to", ["safetensors", "huggingface"])
def test_names_alone_fence_where_the_file_system_has_no_locks(source, undisturbed, children, tmp_path, to):
    wanted = order(source, tmp_path / "counted" / to, to, places=STEPS, locks=False)
    total, committed = sum(children.run(wanted).calls.values()), 0
    for number in spread(total, 9):
        target = tmp_path / str(number) / to
        own_order = replace(wanted, target=str(target), expiry=EXPIRY)
        stopped = children.run(replace(own_order, act="stop", number=number))
        assert stopped.stopped
        committed += target.exists()
        second = children.run(own_order)
        first = children.resume(stopped)
        assert_one_won([first, second], target, undisturbed[to])
    assert committed, "no run was stopped after its commit"


def test_a_clock_that_is_ahead_takes_over_no_living_lease(source, undisturbed, children, tmp_path):
    """The owner lives in another namespace, so that only its beats show it; our clock is 40 s ahead of its lease."""
    target = tmp_path / "out" / "huggingface"
    assert children.run(order(source, target, "huggingface", number=40)).killed
    lease = target.parent / ".wherry-huggingface.lease"
    owner = {**json.loads(lease.read_text()), "host": "elsewhere"}
    over = threading.Event()

    def beat():
        count = 0
        with lease.open("r+b", buffering=0) as file:
            while not over.wait(0.1):
                count += 1
                os.pwrite(file.fileno(), json.dumps({**owner, "beat": f"{count:012}"}).encode(), 0)

    lease.write_text(json.dumps({**owner, "beat": f"{0:012}"}))
    before = time.time() - 40
    os.utime(lease, (before, before))
    heart = threading.Thread(target=beat)
    heart.start()
    try:
        outcome = children.run(order(source, target, "huggingface", ahead=40.0))
    finally:
        over.set()
        heart.join()
    assert code(outcome) == 8
    assert "elsewhere" in outcome.error["what"]
    lease.unlink()
    assert convert(source, target)["target"]["checkpoint_digest"] == undisturbed["huggingface"]


SLOW = """
import sys, time
import wherry.target.lease as lease_watch
from wherry.target.lease import LeaseFile
import wherry.mover.carrier as mover, wherry.mover.output as output, wherry.core.threads as threads
from wherry.cli import main
lease_watch.EXPIRY_SECONDS, LeaseFile.heartbeat = 1.0, 0.1
real = mover.Carrier._carry
def slow(*arguments):
    time.sleep(float(sys.argv[1]))
    return real(*arguments)
mover.Carrier._carry = slow
threads.worker_count = lambda: 1
output._GROUP_BYTES = 1
main(sys.argv[2:])
"""


@pytest.mark.parametrize("verify", ["digest", "none"])
def test_a_process_that_was_stopped_wakes_and_ends_with_8(tmp_path, verify):
    """The whole command, stopped from outside in the midst of its work."""
    generator = np.random.default_rng(0)
    tensors = {f"layer.{n}.weight": generator.standard_normal((250, 1000), dtype="f4") for n in range(12)}
    source, target = tmp_path / "model.safetensors", tmp_path / "out" / "safetensors"
    save_file(tensors, source)
    command = [
        "convert",
        str(source),
        str(target),
        "--to",
        "safetensors",
        "--no-lineage",
        "--json",
        "--verify",
        verify,
    ]

    def run(pause):
        return subprocess.Popen(
            [sys.executable, "-c", SLOW, pause, *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    first = run("0.2")
    deadline = time.monotonic() + 60
    while recorded_moves(target) < 3:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    first.send_signal(signal.SIGSTOP)
    second = run("0")
    out, err = second.communicate(timeout=60)
    assert second.returncode == 0, err
    assert json.loads(out)["resumed_bytes"] >= 3 * tensors["layer.0.weight"].nbytes
    first.send_signal(signal.SIGCONT)
    out, err = first.communicate(timeout=60)
    assert first.returncode == 8, err
    assert "another run took over this target" in out + err
    assert "Traceback" not in err
    assert sorted(os.listdir(target.parent)) == sorted(complete(target))
    found = load_file(target)
    assert found.keys() == tensors.keys()
    assert all(np.array_equal(found[name], array) for name, array in tensors.items())
    assert wherry.verify(target, level="digest").ok
