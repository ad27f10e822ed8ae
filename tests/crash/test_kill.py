"""Killed at any moment, a conversion leaves nothing that wherry or Orbax takes for a finished checkpoint."""

import atexit
import json
import os
import signal
import subprocess
import sys
import time
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import wherry
from tests.support.warm import Warm
from wherry.errors import TargetInUseError
from wherry.mover.readback import ReadBack

ROOT = Path(__file__).parents[2]


@cache
def waiting():
    """A process from which those that kill themselves are forked: it has imported wherry."""
    line = [sys.executable, "-m", "tests.support.warm"]
    made = Warm(line, os.environ, ["wherry.converter.convert", "tensorstore"], os.fspath(ROOT))
    atexit.register(made.close)
    return made


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Twelve tensors of 1 MB."""
    folder = tmp_path_factory.mktemp("source") / "model"
    folder.mkdir()
    generator = np.random.default_rng(0)
    tensors = {f"layer.{n}.weight": generator.standard_normal((250, 1000), dtype="f4") for n in range(12)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text("{}")
    return folder


def run(*arguments):
    code, output, errors = waiting().run(
        "tests.support.killed", [*map(str, arguments)], cwd=os.fspath(ROOT), env=os.environ
    )
    return subprocess.CompletedProcess(arguments, code, output.decode(), errors.decode())


def orbax_steps(run_folder):
    """What Orbax takes for steps of a run."""
    from orbax.checkpoint.path import step as step_lib

    return [found.step for found in step_lib.standard_name_format().find_all(run_folder)]


def assert_nothing_half_done(folder, target):
    """Either the target is whole, or there is none; what is left besides is known as unfinished."""
    for name in os.listdir(folder):
        path = Path(folder) / name
        if path == target:
            assert wherry.verify(path, level="digest").ok
        else:
            assert name.startswith(".wherry-") or name.endswith(".wherry.json"), name
            assert wherry.detect(path).verdict != "ok"
    found = [one.uri for one in wherry.discover(folder)]
    assert found in ([], [str(target)])
    assert orbax_steps(folder) == ([8] if target.name == "8" and target.exists() else [])


SLOW = """
import sys, time
import wherry.mover.carrier as mover, wherry.core.threads as threads
from wherry.cli import main
real = mover.Carrier._carry
def slow(*arguments):
    time.sleep(0.2)
    return real(*arguments)
mover.Carrier._carry = slow
threads.worker_count = lambda: 1  # so that it lasts several groups on any machine
main()
"""


@pytest.mark.parametrize("to", ["orbax", "hf"])
def test_sigterm_ends_with_130_and_the_next_run_writes_only_the_rest(source, tmp_path, to):
    target = tmp_path / "out" / "8"
    command = ["convert", str(source), str(target), "--to", to, "--no-lineage", "--json"]
    child = subprocess.Popen([sys.executable, "-c", SLOW, *command], stderr=subprocess.PIPE, text=True)
    wait_for(
        lambda: any(path.read_bytes().count(b"\n") > 1 for path in tmp_path.glob("out/*/.wherry-journal"))
    )
    child.send_signal(signal.SIGTERM)
    _out, err = child.communicate(timeout=120)
    assert child.returncode == 130, err
    assert_nothing_half_done(target.parent, target)
    done = subprocess.run(
        [sys.executable, "-m", "wherry.cli", *command], check=True, capture_output=True, text=True
    )
    receipt = json.loads(done.stdout)
    assert 0 < receipt["resumed_bytes"] < receipt["bytes_written"]
    assert os.listdir(target.parent) == ["8"]
    assert wherry.verify(target, level="digest").ok
    undisturbed = wherry.convert(source, tmp_path / "undisturbed", to=to, lineage=False)
    assert receipt["target"]["checkpoint_digest"] == undisturbed.target.checkpoint_digest


class Cancelled(BaseException):
    """As Prefect's TerminationSignal: neither an Exception nor a KeyboardInterrupt."""


@pytest.fixture
def stop(monkeypatch):
    """A function that stops the run which called it as progress, once half of a stage is done."""
    monkeypatch.setattr("wherry.core.progress._INTERVAL", 0)
    monkeypatch.setattr("wherry.core.threads.worker_count", lambda: 1)

    def handler(*_):
        raise Cancelled

    def stopper(how, stage):
        def report(progress):
            if progress.stage != stage or progress.done * 2 < progress.total:
                return
            if how != "signal":
                raise how
            os.kill(os.getpid(), signal.SIGTERM)  # the waiting main thread raises, as under Prefect
            time.sleep(1)  # so that it has raised before the rest is done

        return report

    before = signal.signal(signal.SIGTERM, handler)
    yield stopper
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("how", ["signal", Cancelled, SystemExit], ids=["signal", "callback", "exit"])
@pytest.mark.parametrize("to", ["orbax", "hf"])
def test_a_cancelled_run_keeps_what_it_did(source, tmp_path, stop, to, how):
    target = tmp_path / "out" / "8"
    with pytest.raises(SystemExit if how is SystemExit else Cancelled):
        wherry.convert(source, target, to=to, lineage=False, progress=stop(how, "convert"))
    (area,) = os.listdir(target.parent)
    assert sorted(os.listdir(target.parent / area)) == [".wherry-journal", "8"]
    assert_nothing_half_done(target.parent, target)
    receipt = wherry.convert(source, target, to=to, lineage=False)
    assert receipt.bytes_written / 3 < receipt.resumed_bytes < receipt.bytes_written
    assert os.listdir(target.parent) == ["8"]
    undisturbed = wherry.convert(source, tmp_path / "undisturbed", to=to, lineage=False)
    assert receipt.target.checkpoint_digest == undisturbed.target.checkpoint_digest


def test_a_run_that_is_cancelled_while_it_reads_back_writes_nothing_again(
    source, tmp_path, stop, monkeypatch
):
    """At the end, the reader reads what the pass could not prove: here, everything."""
    monkeypatch.setattr(ReadBack, "proved", lambda _self, _written: set())
    how = {"to": "orbax", "lineage": False, "options": {"compression": "zstd"}}
    with pytest.raises(Cancelled):
        wherry.convert(source, tmp_path / "8", progress=stop(Cancelled, "verify"), **how)
    receipt = wherry.convert(source, tmp_path / "8", **how)
    assert receipt.resumed_bytes == receipt.bytes_written
    assert os.listdir(tmp_path) == ["8"]


def test_a_cancelled_fetch_keeps_what_it_copied(source, tmp_path, stop):
    made = wherry.convert(source, tmp_path / "made", to="hf", lineage=False).target
    with pytest.raises(Cancelled):
        wherry.fetch(made.uri, tmp_path / "copy", progress=stop(Cancelled, "fetch"))
    assert not (tmp_path / "copy").exists()
    fetched = wherry.fetch(made.uri, tmp_path / "copy")
    assert fetched.resumed_bytes > 0
    assert fetched.checkpoint_digest == made.checkpoint_digest
    assert sorted(os.listdir(tmp_path)) == ["copy", "made"]


def wait_for(condition, seconds=120, pause=0.01):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(pause)


def test_a_changed_source_is_not_resumed(tmp_path):
    model = tmp_path / "m.safetensors"
    save_file({"w": np.zeros(3_000_000, dtype="f4")}, model)
    target = tmp_path / "to" / "8"
    assert run(model, target, "orbax", 9).returncode == -signal.SIGKILL
    save_file({"w": np.ones(3_000_000, dtype="f4")}, model)
    receipt = wherry.convert(model, target, to="orbax", lineage=False)
    assert receipt.resumed_bytes == 0
    assert "a different source" in receipt.note
    assert os.listdir(target.parent) == ["8"]
    assert wherry.open(target).read("w").sum() == 3_000_000


def test_two_runs_on_one_target_exclude_each_other(source, tmp_path):
    command = ["convert", str(source), str(tmp_path / "8"), "--to", "orbax", "--no-lineage"]
    child = subprocess.Popen([sys.executable, "-c", SLOW, *command], stderr=subprocess.PIPE)
    wait_for(lambda: list(tmp_path.glob(".wherry-8.lease")))
    with pytest.raises(TargetInUseError, match=f"process {child.pid} on "):
        wherry.convert(source, tmp_path / "8", to="orbax", lineage=False)
    child.kill()
    child.wait()
    assert not wherry.convert(source, tmp_path / "8", to="orbax", lineage=False).already


def test_clean_leaves_the_area_of_a_living_job_however_old(tmp_path):
    from wherry.target.clean import clean
    from wherry.target.lease import Lease, LeaseFile

    area = tmp_path / ".wherry-8.0123abcd"
    area.mkdir()
    with Lease(LeaseFile(tmp_path / ".wherry-8.lease"), "8"):
        assert {row.removed for row in clean(tmp_path, min_age=-1)} == {False}
    assert area.exists()
    assert {row.removed for row in clean(tmp_path, min_age=-1)} == {True}


def test_clean_removes_what_a_kill_left_and_nothing_else(source, tmp_path):
    from wherry.target.clean import clean

    run(source, tmp_path / "out", "hf", 6)
    wherry.convert(source, tmp_path / "kept", to="hf")
    assert {row.removed for row in clean(tmp_path)} == {True}
    assert os.listdir(tmp_path) == ["kept"]
