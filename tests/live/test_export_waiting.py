"""Exports by several processes: nobody waits for one that is gone."""

from __future__ import annotations

import json
import logging
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace

import numpy as np
import pytest

import wherry
from tests.support.export import held
from tests.support.export_programs import EIGHT_DEVICES, EXIT, JAX_RANKS, TORCH_RANKS
from tests.support.waits import waits_reported_at_once
from wherry.core.tensorspec import TensorSpec
from wherry.errors import IncompleteError, MismatchError, StorageError, UsageError, WherryError
from wherry.integrations.live import export as export_live
from wherry.integrations.live import processes
from wherry.live import handle as export_handle
from wherry.live import shares
from wherry.live.shares import Ticket
from wherry.live.snapshot import Snapshot
from wherry.target.lease import Lease, LeaseFile

STATE = {"w": np.arange(6, dtype=np.float32)}
QUICK = 0.2
KILLED = """
import os, sys
from pathlib import Path
from wherry.target.lease import Lease, LeaseFile
Lease(LeaseFile(Path(sys.argv[1])), "t").__enter__()
os._exit(0)
"""


@pytest.fixture
def folder(tmp_path):
    spool = tmp_path / "spool"
    spool.mkdir()
    return spool


@pytest.fixture
def as_rank(monkeypatch, folder):
    """Be one of two processes that share a state; rank 0 has named the folder."""
    ticket = Ticket("0123abcd", str(folder)).to_text()

    def become(rank, count=2):
        group = processes.ProcessGroup(rank, count, (lambda _: ticket) if rank else str)
        monkeypatch.setattr(processes, "group", lambda _: group)

    return become


@pytest.fixture
def no_thread(monkeypatch):
    real = threading.Thread.start

    def start(self):
        if self.name == "wherry-export":
            raise RuntimeError("can't start new thread")
        real(self)

    monkeypatch.setattr(export_handle.threading.Thread, "start", start)


def export(folder, **more):
    handle = wherry.export(STATE, folder.parent / "t", to="orbax", **{"patience": QUICK, **more})
    assert handle.wait(30)
    return handle


def test_who_waits_says_for_whom(folder, monkeypatch):
    with waits_reported_at_once(monkeypatch) as lines, pytest.raises(IncompleteError):
        shares.gather_shares(folder, {}, {}, [1], patience=QUICK)
    with waits_reported_at_once(monkeypatch) as more:
        monkeypatch.setattr(shares, "_GOODBYE", QUICK)
        shares.put_outcome(folder, [1], None, "")
    assert lines == [f"{folder}: waiting for the share of process 1"]
    assert more == [f"{folder}: waiting for process 1, which has not read the outcome"]


def test_who_waits_for_an_export_says_where_it_goes(monkeypatch):
    with waits_reported_at_once(monkeypatch) as lines:
        assert not export_handle.Export("gs://bucket/1000").wait(QUICK)
    assert lines == ["gs://bucket/1000: waiting for the export to end"]


def test_nobody_waits_for_a_leader_that_gives_no_sign_of_life(folder):
    with pytest.raises(StorageError, match=r"timed out after 0\.2 s without a heartbeat") as failure:
        shares.await_outcome(folder, 1, patience=QUICK)
    assert "spool=" in failure.value.cure
    assert not folder.exists()


def test_nor_for_one_that_does_not_renew_its_lease(folder):
    lease = folder / shares.LEASE
    lease.write_text("{}")
    os.utime(lease, (time.time() - 3600,) * 2)
    with pytest.raises(StorageError, match="without a heartbeat"):
        shares.await_outcome(folder, 1, patience=QUICK)


def test_nor_for_one_that_was_killed(folder):
    subprocess.run([sys.executable, "-c", KILLED, str(folder / shares.LEASE)], check=True)
    with pytest.raises(StorageError, match="without a heartbeat"):
        shares.await_outcome(folder, 1, patience=QUICK)


def test_a_living_leader_is_waited_for_longer_than_patience(folder):
    def lead():
        with Lease(LeaseFile(folder / shares.LEASE), "t"):
            time.sleep(5 * QUICK)
            shares.put_outcome(folder, [1], {"n": 1}, "")

    begun = time.monotonic()
    leader = threading.Thread(target=lead)
    leader.start()
    assert shares.await_outcome(folder, 1, patience=QUICK) == {"n": 1}
    assert time.monotonic() - begun >= 5 * QUICK
    leader.join(30)
    assert not folder.exists()


def test_a_folder_that_was_removed_ends_the_wait(folder):
    (folder / shares.LEASE).write_text("{}")  # fresh
    threading.Timer(QUICK, shutil.rmtree, [folder]).start()
    with pytest.raises(StorageError, match="ended without reporting") as failure:
        shares.await_outcome(folder, 1, patience=600)
    assert "spool=" in failure.value.cure


def test_storage_that_does_not_say_who_leads_gives_no_sign_of_life(folder, monkeypatch):
    def stale(_watch):
        raise OSError(116, "Stale file handle")

    monkeypatch.setattr(shares.Watch, "look", stale)
    with pytest.raises(StorageError, match="without a heartbeat"):
        shares.await_outcome(folder, 1, patience=QUICK)


def test_the_last_who_reads_why_the_leader_gave_up_removes_the_folder(folder):
    (folder / "part-1").write_bytes(b"x")
    shares.leave_failure(folder, [1, 2, 3], "No space left on device")
    assert not (folder / "part-1").exists()
    for rank in (1, 2):
        with pytest.raises(WherryError, match="process 0 failed: No space left"):
            shares.await_outcome(folder, rank, patience=QUICK)
        assert folder.exists()
    shares.put_failure(folder, 3, OSError("it failed too, and does not read"))
    assert not folder.exists()


def test_an_outcome_that_cannot_be_left_removes_the_folder(folder, monkeypatch):
    def refuse(*_given):
        raise StorageError("there is no space for the outcome")

    monkeypatch.setattr(shares, "_put", refuse)
    with pytest.raises(StorageError, match="no space"):
        shares.leave_failure(folder, [1], "whatever it was")
    assert not folder.exists()


def test_other_tensors_name_the_way_of_a_pipeline(folder):
    shares.put_share(folder, 1, {("b",): TensorSpec(("b",), (2,), "float32")}, {})
    specs = {("a",): TensorSpec(("a",), (2,), "float32")}
    with pytest.raises(MismatchError) as failure:
        shares.gather_shares(folder, {}, specs, [1], patience=QUICK)
    assert "alone=True" in failure.value.cure


@pytest.mark.parametrize("snapshot", ["host", "disk"])
def test_a_folder_on_another_host_is_named_before_the_copy(folder, as_rank, monkeypatch, caplog, snapshot):
    folder.rmdir()
    as_rank(1)
    monkeypatch.setattr(Snapshot, "take", lambda *_: pytest.fail("copied"))
    error = export(folder, snapshot=snapshot).error
    assert isinstance(error, StorageError)
    assert "export folder not found" in error.what
    assert "spool=" in error.cure
    assert "could not notify the other processes" in caplog.text
    assert not folder.exists()


def test_a_folder_that_goes_meanwhile_does_not_hide_the_reason(folder, as_rank, monkeypatch, caplog):
    def take(_self, _tensors):
        shutil.rmtree(folder)
        raise OSError(28, "No space left on device")

    as_rank(1)
    monkeypatch.setattr(Snapshot, "take", take)
    assert "No space left" in str(export(folder).error)
    assert "spool=" in caplog.text
    assert not folder.exists()


@pytest.mark.parametrize("snapshot", ["host", "disk"])
def test_a_leader_that_was_killed_is_given_up(folder, as_rank, snapshot):
    as_rank(1)
    error = export(folder, snapshot=snapshot).error
    assert "without a heartbeat" in str(error)
    assert not folder.exists()


@pytest.mark.parametrize("snapshot", ["host", "disk"])
def test_a_leader_without_a_thread_tells_the_others(tmp_path, as_rank, no_thread, monkeypatch, snapshot):
    closed, close = [], Snapshot.close
    monkeypatch.setattr(Snapshot, "close", lambda self: closed.append(close(self)))
    as_rank(0)
    handle = wherry.export(STATE, tmp_path / "t", to="orbax", snapshot=snapshot)
    assert handle.done()
    assert closed
    (spool,) = tmp_path.glob(".wherry-*.spool")
    assert not (spool / "part-0").exists()
    with pytest.raises(WherryError, match="start new thread"):
        shares.await_outcome(spool, 1, patience=QUICK)
    assert not spool.exists()


def test_another_process_without_a_thread_tells_the_leader(folder, as_rank, no_thread):
    as_rank(1)
    assert "start new thread" in str(export(folder, snapshot="disk").error)
    assert "start new thread" in json.loads((folder / "share-1.json").read_text())["failed"]
    assert not (folder / "part-1").exists()


def test_one_process_without_a_thread_leaves_nothing(folder, no_thread):
    assert "start new thread" in str(export(folder, snapshot="disk").error)
    assert list(folder.parent.iterdir()) == [folder]


def test_what_cannot_be_given_back_is_not_raised_into_training(folder, no_thread, monkeypatch, caplog):
    def refuse(_self):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(Snapshot, "close", refuse)
    assert "start new thread" in str(export(folder).error)
    assert "could not release" in caplog.text


def test_a_state_of_ones_own_is_exported_by_every_process(tmp_path, as_rank, caplog):
    as_rank(3, count=1)
    with caplog.at_level(logging.INFO, "wherry.export"):
        assert wherry.export(STATE, tmp_path / "same", to="orbax").result(60) is None
    assert "alone=True" in caplog.text
    assert not (tmp_path / "same").exists()
    assert wherry.export(STATE, tmp_path / "own", to="orbax", alone=True).result(60).target.tensors == 1
    assert np.array_equal(held(tmp_path / "own")["w",], STATE["w"])


def test_parts_of_a_shared_state_are_not_ones_own(tmp_path, monkeypatch):
    survey = export_live.survey

    def partly(state):
        found = survey(state)
        return replace(found, tensors=tuple(one._replace(boxes=()) for one in found.tensors))

    monkeypatch.setattr(export_live, "survey", partly)
    with pytest.raises(UsageError) as refused:
        wherry.export(STATE, tmp_path / "t", to="orbax", alone=True)
    assert refused.value.path == "w"
    assert "without alone=True" in refused.value.cure


GONE = """
import sys
from pathlib import Path
from wherry.live.shares import put_owner
put_owner(Path(sys.argv[1]), int(sys.argv[2]))
"""


def _gone(folder, rank):
    """A process that has said which rank it is, and has ended."""
    process = subprocess.Popen([sys.executable, "-c", GONE, str(folder), str(rank)])
    assert process.wait(120) == 0
    return process.pid


LONG = 100_000.0  # seconds: a test that waited for it would not end


def test_a_process_that_has_ended_is_named_long_before_the_patience(folder):
    pid = _gone(folder, 1)
    with pytest.raises(IncompleteError, match=rf"process 1 has ended \(process number {pid} on "):
        shares.gather_shares(folder, {}, {}, [1], patience=LONG)


def test_what_a_process_sent_before_its_end_counts(folder):
    _gone(folder, 1)
    shares.put_share(folder, 1, {}, {})
    assert shares.gather_shares(folder, {}, {}, [1], patience=LONG) == {}


def test_what_failed_in_a_process_is_said_also_after_its_end(folder):
    _gone(folder, 1)
    shares.put_failure(folder, 1, StorageError("disk full"))
    with pytest.raises(IncompleteError, match="process 1 failed: disk full"):
        shares.gather_shares(folder, {}, {}, [1], patience=LONG)


def test_process_0_that_has_ended_is_named_and_its_folder_removed(folder):
    pid = _gone(folder, 0)
    with pytest.raises(StorageError, match=rf"process 0 has ended \(process number {pid} on "):
        shares.await_outcome(folder, 1, patience=LONG)
    assert not folder.exists()


def test_a_group_that_lost_a_process_says_so(monkeypatch):
    class Lost:
        def broadcast_object_list(self, objects, src):
            raise RuntimeError("Connection closed by peer")

        get_rank, get_world_size = (lambda self: 1), (lambda self: 2)

    monkeypatch.setitem(sys.modules, "torch", type("torch", (), {"distributed": Lost()}))
    with pytest.raises(
        IncompleteError, match=r"another process of the training has ended .*Connection closed"
    ):
        processes.group("torch").broadcast("x")


def test_the_outcome_does_not_wait_for_a_process_that_has_ended(folder, monkeypatch):
    _gone(folder, 1)
    monkeypatch.setattr(shares, "_GOODBYE", LONG)
    shares.put_outcome(folder, [1], None, "no")
    assert not folder.exists()


# Export from real processes: 8 devices with donation, torchrun with 2 ranks, 2 JAX processes, and the
# exit.


LIMIT = 240


def program(tmp_path, text):
    path = tmp_path / "program.py"
    path.write_text(text)
    return str(path)


def run(command, **more):
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=LIMIT, **more)


def torchrun(script, *arguments):
    pytest.importorskip("torch")
    return run([
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", script,
        *map(str, arguments),
    ], env=os.environ | {"OMP_NUM_THREADS": "1"})  # fmt: skip


@pytest.fixture
def out(tmp_path):
    folder = tmp_path / "out"
    folder.mkdir()
    return folder


def test_a_training_loop_on_eight_devices_that_donates_its_state(tmp_path, out):
    pytest.importorskip("flax")
    pytest.importorskip("optax")
    env = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    done = run([sys.executable, program(tmp_path, EIGHT_DEVICES), str(out)], env=env)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout.splitlines()[-1])
    assert [row[0] for row in rows] == [2, 3]
    assert rows[0][1] == rows[1][1] == 14
    assert "8 devices" in rows[0][2]
    assert sorted(os.listdir(out)) == ["disk", "host"]


def test_two_ranks_of_torchrun_give_their_shards(tmp_path, out):
    """Both kinds of snapshot, a state that all ranks hold whole, one of each rank's own, and ranks without space."""
    done = torchrun(program(tmp_path, TORCH_RANKS), out)
    assert done.returncode == 0, done.stderr
    names = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("[")))
    files = [f"{name}.safetensors" for name in ("replicated", "stage0", "stage1")]
    assert names == sorted(["disk", "host", *files, *(f"{file}.wherry.json" for file in files)])
    assert wherry.verify(out / "disk", level="digest").ok


def test_two_jax_processes_give_their_shards(tmp_path, out):
    pytest.importorskip("jax")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    script = program(tmp_path, JAX_RANKS)
    env = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    other = subprocess.Popen(
        [sys.executable, script, "1", port, str(out)], env=env, stderr=subprocess.PIPE, text=True
    )
    try:
        done = run([sys.executable, script, "0", port, str(out)], env=env)
        _, said = other.communicate(timeout=LIMIT)
    finally:
        other.kill()
    assert done.returncode == 0, done.stderr
    assert other.returncode == 0, said
    assert json.loads(done.stdout.splitlines()[-1]) == ["jax"]


def test_a_process_that_ends_waits_for_its_export(tmp_path, out):
    done = run([sys.executable, program(tmp_path, EXIT), str(out / "w.safetensors"), "100"])
    assert done.returncode == 0, done.stderr
    assert "waiting for the export" in done.stderr
    assert wherry.verify(out / "w.safetensors", level="digest").ok


def test_but_not_longer_than_its_exit_wait(tmp_path, out):
    done = run([sys.executable, program(tmp_path, EXIT), str(out / "w.safetensors"), "0"])
    assert done.returncode == 0, done.stderr
    assert "timed out after 0 s; nothing was committed" in done.stderr
    assert not (out / "w.safetensors").exists()
