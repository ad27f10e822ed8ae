"""The lease: one run at a time, dead ones are evicted, living ones never."""

import errno
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import wherry
from wherry import lease
from wherry.errors import StorageError, TargetInUseError
from wherry.lease import Lease

KILLED = """
import os, pathlib, sys
from wherry.lease import Lease
Lease(pathlib.Path(sys.argv[1]), "").__enter__()
os._exit(0)
"""


@pytest.fixture
def path(tmp_path):
    """Where a lease lies."""
    return tmp_path / ".wherry-x.lease"


def leave(path, *, age=0.0, **owner):
    path.write_text(json.dumps({"host": "elsewhere", "pid": 1, "id": "theirs", **owner}))
    os.utime(path, (time.time() - age, time.time() - age))


def test_two_runs_exclude_each_other_and_the_end_frees_it(path):
    with Lease(path, "t"):
        with pytest.raises(TargetInUseError, match=f"process {os.getpid()} on "), Lease(path, "t"):
            pass
        assert path.exists()
    assert os.listdir(path.parent) == []


def test_an_expired_lease_of_another_machine_is_taken_over(path):
    leave(path, age=lease.EXPIRY_SECONDS + 1)
    with Lease(path, "t"):
        assert json.loads(path.read_text())["pid"] == os.getpid()
    assert os.listdir(path.parent) == []


def test_a_living_lease_of_another_machine_is_not(path):
    leave(path, age=lease.EXPIRY_SECONDS / 2)
    with pytest.raises(TargetInUseError, match="process 1 on elsewhere"), Lease(path, "t"):
        pass
    assert json.loads(path.read_text())["id"] == "theirs"


def test_a_lease_that_was_lost_is_left_to_its_new_holder(path):
    with Lease(path, "t"):
        leave(path)
    assert json.loads(path.read_text())["id"] == "theirs"


def test_a_lease_made_while_a_dead_one_was_looked_at_is_put_back(path, monkeypatch):
    leave(path, age=lease.EXPIRY_SECONDS + 1)
    real = lease._owner

    def slow(where):
        found = real(where)
        if where == path and found["id"] == "theirs":
            leave(path, id="newer", pid=2)
            monkeypatch.setattr(lease, "_owner", real)
        return found

    monkeypatch.setattr(lease, "_owner", slow)
    with pytest.raises(TargetInUseError, match="process 2 on elsewhere"), Lease(path, "t"):
        pass
    assert json.loads(path.read_text())["id"] == "newer"
    assert os.listdir(path.parent) == [path.name]


class Stale:
    """Storage that is out of reach until it is mended."""

    def __init__(self, real):
        self.real, self.failed, self.mended = real, 0, False

    def __call__(self, *arguments, **options):
        if self.mended:
            return self.real(*arguments, **options)
        self.failed += 1
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))


def wait_for(condition, seconds=10):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.005)


@pytest.mark.parametrize("place", ["os.utime", "_owner"])
def test_a_beat_that_fails_is_tried_again(path, monkeypatch, caplog, place):
    monkeypatch.setattr(lease, "_HEARTBEAT_SECONDS", 0.01)
    utime = os.utime
    stale = Stale(utime if place == "os.utime" else lease._owner)
    with Lease(path, "t"), monkeypatch.context() as patch:
        patch.setattr(f"wherry.lease.{place}", stale)
        wait_for(lambda: stale.failed > 3)
        utime(path, (0, 0))
        stale.mended = True
        wait_for(lambda: path.stat().st_mtime > 0)
    assert [record.levelname for record in caplog.records] == ["WARNING"], "it is told once"
    assert f"{path} was not renewed" in caplog.text
    assert os.listdir(path.parent) == []


@pytest.mark.parametrize("lost", ["gone", "another's"])
def test_the_beat_of_a_lost_lease_ends(path, monkeypatch, caplog, lost):
    monkeypatch.setattr(lease, "_HEARTBEAT_SECONDS", 0.01)
    with Lease(path, "t") as held:
        theirs = path.with_name("theirs")
        leave(theirs)
        path.unlink() if lost == "gone" else theirs.replace(path)
        wait_for(lambda: not held._heart.is_alive())
    assert not caplog.records


def test_a_lease_that_cannot_be_given_back_changes_nothing_of_what_came_of_the_work(
    path, monkeypatch, caplog
):
    with Lease(path, "t"):
        monkeypatch.setattr(lease, "_owner", Stale(lease._owner))
    assert f"{path} stays" in caplog.text
    path.unlink()
    with pytest.raises(ValueError, match="of the work"), Lease(path, "t"):
        raise ValueError("of the work")


def test_a_lease_that_cannot_be_taken_is_a_storage_error(path, monkeypatch):
    leave(path, age=lease.EXPIRY_SECONDS + 1)
    monkeypatch.setattr(lease, "_owner", Stale(lease._owner))
    with pytest.raises(StorageError), Lease(path, "t"):
        pytest.fail("it was taken")


@pytest.fixture(scope="module")
def gone():
    """The number of a process that has ended."""
    with subprocess.Popen([sys.executable, "-c", "pass"]) as child:
        pass
    return child.pid


def test_a_process_of_ours_that_is_gone_is_evicted_at_once(path, gone):
    leave(path, host=socket.gethostname(), pid=gone, pid_namespace=lease._pid_namespace())
    assert not lease.is_alive(path)
    with Lease(path, "t"):
        owner = json.loads(path.read_text())
    assert owner["pid"] == os.getpid()
    assert str(Path("/proc/self/ns/pid").readlink()) in owner["pid_namespace"]


@pytest.mark.parametrize(
    "owner",
    [{}, {"pid_namespace": ""}, {"pid_namespace": "another boot pid:[1]"}],
    ids=["older wherry", "unknown", "another container"],
)
def test_of_a_process_that_cannot_be_seen_only_the_age_tells(path, gone, owner):
    owner = {"host": socket.gethostname(), "pid": gone, **owner}
    leave(path, **owner)
    assert lease.is_alive(path)
    with pytest.raises(TargetInUseError, match=f"process {gone} on "), Lease(path, "t"):
        pytest.fail("a living lease was taken away")
    leave(path, age=lease.EXPIRY_SECONDS + 1, **owner)
    assert not lease.is_alive(path)
    with Lease(path, "t"):
        pass


def test_where_the_namespace_cannot_be_told_only_the_age_tells(path, gone, monkeypatch):
    monkeypatch.setattr(lease, "_PID_NAMESPACE", str(path / "none"))
    assert lease._pid_namespace() == ""
    leave(path, host=socket.gethostname(), pid=gone, pid_namespace="")
    assert lease.is_alive(path)


def test_a_rerun_tidies_up_after_a_kill_that_came_just_after_the_commit(tmp_path):
    model = tmp_path / "model.npz"
    np.savez(model, w=np.arange(3.0))
    wherry.convert(model, tmp_path / "out", to="orbax")
    left = tmp_path / ".wherry-out.lease"
    subprocess.run([sys.executable, "-c", KILLED, str(left)], check=True)
    assert left.exists()
    (tmp_path / ".wherry-out.0123abcd.journal").write_text("{}")
    (tmp_path / ".wherry-out2.0123abcd.journal").write_text("theirs")
    assert wherry.convert(model, tmp_path / "out", to="orbax").already
    assert sorted(os.listdir(tmp_path)) == [".wherry-out2.0123abcd.journal", "model.npz", "out"]
