"""The lease: one run at a time; who is gone or silent is evicted, who shows life never."""

import errno
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

import wherry
from tests.support.processes import open_descriptors
from wherry.errors import StorageError, TargetInUseError
from wherry.target import lease
from wherry.target.lease import Lease, LeaseFile, Verdict, Watch, judge

KILLED = """
import os, pathlib, sys
from wherry.target.lease import Lease, LeaseFile
Lease(LeaseFile(pathlib.Path(sys.argv[1])), "").__enter__()
os._exit(0)
"""
HELD = """
import pathlib, sys
from wherry.target.lease import Lease, LeaseFile
with Lease(LeaseFile(pathlib.Path(sys.argv[1])), ""):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def path(tmp_path):
    """Where a lease lies."""
    return tmp_path / ".wherry-x.lease"


@pytest.fixture
def quick(monkeypatch):
    """Leases expire soon."""
    monkeypatch.setattr(lease, "EXPIRY_SECONDS", 0.3)


def leave(path, **owner):
    """A lease of another machine, or whatever its fields say."""
    fields = lease.this_process("0123abcd").to_json()
    path.write_text(json.dumps({**fields, "host": "elsewhere", "pid": 1, "beat": "0", **owner}))


def verdict(path):
    return judge([path])[path].verdict


def test_two_runs_exclude_each_other_and_the_end_frees_it(path):
    with Lease(LeaseFile(path), "t"):
        with pytest.raises(TargetInUseError, match=f"process {os.getpid()} on "), Lease(LeaseFile(path), "t"):
            pass
        assert path.exists()
    assert os.listdir(path.parent) == []


def test_a_silent_lease_of_another_machine_is_taken_over(path, quick, caplog, monkeypatch):
    monkeypatch.setattr(lease, "NOTICE_SECONDS", 0.1)
    leave(path)
    with Lease(LeaseFile(path), "t") as held:
        assert json.loads(path.read_text())["pid"] == os.getpid()
        assert held.dead is None, "it is not known to have ended"
    assert os.listdir(path.parent) == []
    assert [record.levelname for record in caplog.records] == ["WARNING"], "the wait is reported once"
    assert str(path) in caplog.text


@pytest.mark.parametrize("sign", ["beat", "touch", "replace"])
def test_any_change_of_a_lease_is_a_sign_of_life(path, quick, monkeypatch, sign):
    leave(path)

    def change(_seconds):
        if sign == "beat":
            leave(path, beat="1")
        elif sign == "touch":
            os.utime(path, (1, 1))
        else:
            other_lease = path.with_name("other")
            leave(other_lease)
            other_lease.replace(path)

    monkeypatch.setattr(lease.time, "sleep", change)
    with pytest.raises(TargetInUseError, match="process 1 on elsewhere"), Lease(LeaseFile(path), "t"):
        pytest.fail("a living lease was taken over")
    assert json.loads(path.read_text())["token"] == "0123abcd"


@pytest.mark.parametrize("age", [10 * 365 * 86400, -75 * 365 * 86400], ids=["long ago", "in 2099"])
def test_the_time_of_a_lease_says_nothing(path, quick, age):
    leave(path)
    os.utime(path, (time.time() - age,) * 2)
    watch = Watch(path)
    assert watch.look() is Verdict.UNDECIDED
    with Lease(LeaseFile(path), "t"):
        pass
    assert os.listdir(path.parent) == []


def test_a_watcher_that_was_stopped_itself_has_seen_nothing_meanwhile(path, monkeypatch):
    clock = iter([0.0, 0.0, 1000.0, 1000.0, 1001.0, 1001.0])
    monkeypatch.setattr(lease.time, "monotonic", lambda: next(clock))
    leave(path)
    watch = Watch(path)
    assert [watch.look() for _ in range(3)] == [Verdict.UNDECIDED] * 3


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[]",
        b"null",
        b'"x"',
        b"{}",
        b"[" * 4096,
        b"\xff\xfe",
        *(
            json.dumps(
                {"host": "h", "pid_namespace": "", "process_start": None, "token": "t", **odd}
            ).encode()
            for odd in (
                {"pid": 1 << 70},
                {"pid": -1},
                {"pid": 0},
                {"pid": "1"},
                {"pid": True},
                {"pid": 1.5},
                {"pid": 1, "host": "\x1b[2J"},
                {"pid": 1, "host": ["h"]},
                {"pid": 1, "process_start": "now"},
            )
        ),
    ],
)
def test_a_hostile_lease_is_judged_by_watching_alone(path, quick, text):
    path.write_bytes(text)
    with Lease(LeaseFile(path), "t"):
        assert json.loads(path.read_text())["pid"] == os.getpid()
    assert os.listdir(path.parent) == []


@pytest.mark.parametrize("kind", ["fifo", "link", "lost link", "sparse", "socket", "device", "unreadable"])
def test_a_lease_that_is_no_file_is_replaced_and_never_followed(
    path, quick, kind, tmp_path_factory, monkeypatch
):
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "file"
    elsewhere.write_text("foreign")
    if kind == "fifo":
        os.mkfifo(path)
    elif kind in ("link", "lost link"):
        path.symlink_to(elsewhere if kind == "link" else path / "nowhere")
    elif kind == "sparse":
        with path.open("wb") as file:
            file.truncate(1 << 30)
    elif kind == "socket":
        held = socket.socket(socket.AF_UNIX)
        monkeypatch.chdir(path.parent)
        held.bind(path.name)  # a socket's path is short
        held.close()
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.write_text("x")
        path.chmod(0)
    with Lease(LeaseFile(path), "t"):
        assert json.loads(path.read_text())["pid"] == os.getpid()
    assert os.listdir(path.parent) == []
    assert elsewhere.read_text() == "foreign"


def test_a_folder_in_the_place_of_a_lease_is_named_with_its_cure(path):
    path.mkdir()
    with (
        pytest.raises(StorageError, match="the lease is a folder; expected a file") as failure,
        Lease(LeaseFile(path), "t"),
    ):
        pytest.fail("it was taken")
    assert failure.value.cure == f"rm -r {shlex.quote(str(path))}"
    assert os.listdir(path.parent) == [path.name]


def test_a_lease_that_was_lost_is_left_to_its_new_holder(path):
    with Lease(LeaseFile(path), "t") as held:
        other_lease = path.with_name("other")
        leave(other_lease)
        other_lease.replace(path)
        assert not held.holds()
        with pytest.raises(TargetInUseError, match="another run took over this target"), held.exclusive():
            pytest.fail("it is not held any more")
    assert json.loads(path.read_text())["token"] == "0123abcd"


def test_a_beat_never_touches_the_lease_of_another(path, monkeypatch):
    """The path leads to another's lease between the look and the beat."""
    monkeypatch.setattr(LeaseFile, "heartbeat", 0.01)
    monkeypatch.setattr(LeaseFile, "holds", lambda _self: True)  # a real one would end the beats
    with Lease(LeaseFile(path), "t") as held:
        other_lease = path.with_name("other")
        leave(other_lease)
        other_lease.replace(path)
        before = path.read_bytes(), path.stat().st_mtime_ns
        wait_for(lambda: int(json.loads(os.pread(held.register._descriptor, 4096, 0))["beat"]) > 3)
        assert (path.read_bytes(), path.stat().st_mtime_ns) == before
        monkeypatch.undo()
    assert path.read_bytes() == before[0]


def test_a_lease_is_not_replaced_while_its_owner_commits(path, quick):
    leave(path)
    with path.open("rb") as lease_file:
        lease.fcntl.flock(lease_file, lease.fcntl.LOCK_EX)
        with pytest.raises(TargetInUseError), Lease(LeaseFile(path), "t"):
            pytest.fail("it was taken over")
    with Lease(LeaseFile(path), "t"):
        pass


def test_an_owner_that_cannot_get_its_own_lock_does_not_commit(path, monkeypatch):
    """Another run is just replacing the lease, or was stopped in that."""
    monkeypatch.setattr(lease, "_LOCK_SECONDS", 0.05)
    with Lease(LeaseFile(path), "t") as held:
        with path.open("rb") as lease_file:
            lease.fcntl.flock(lease_file, lease.fcntl.LOCK_EX)
            with pytest.raises(TargetInUseError, match="is checking the lease"), held.exclusive():
                pytest.fail("it was not excluded")
        with held.exclusive():
            pass


def test_a_lease_made_while_a_dead_one_was_looked_at_is_not_replaced(path, monkeypatch):
    leave(path)
    found = {path: lease.Judgement(Verdict.EXPIRED, lease.see(path))}
    newer = path.with_name("newer")
    leave(newer, pid=2, pid_namespace="", token="89abcdef")
    newer.replace(path)
    beats = iter(range(1, 100))
    monkeypatch.setattr(
        lease.time, "sleep", lambda _: leave(path, pid=2, token="89abcdef", beat=str(next(beats)))
    )
    with (
        pytest.raises(TargetInUseError, match="process 2 on elsewhere"),
        Lease(LeaseFile(path), "t", found[path]),
    ):
        pytest.fail("it was taken over")
    assert json.loads(path.read_text())["token"] == "89abcdef"
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

    def method(self):
        def call(owner):
            return self(owner)

        return call


def wait_for(condition, seconds=120):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.005)


@pytest.mark.parametrize("place", ["os.pwrite", "LeaseFile.holds"])
def test_a_beat_that_fails_is_tried_again(path, monkeypatch, caplog, place):
    monkeypatch.setattr(LeaseFile, "heartbeat", 0.01)
    stale = Stale(os.pwrite if place == "os.pwrite" else LeaseFile.holds)
    with Lease(LeaseFile(path), "t") as held, monkeypatch.context() as patch:
        if place == "os.pwrite":
            patch.setattr(os, "pwrite", stale)
        else:
            patch.setattr(LeaseFile, "holds", stale.method())
        wait_for(lambda: stale.failed > 3)
        before = lease.see(path)
        stale.mended = True
        wait_for(lambda: lease.see(path) != before)
        assert held.holds()
    assert [record.levelname for record in caplog.records] == ["WARNING"], "it is reported once"
    assert f"{path} was not renewed" in caplog.text
    assert os.listdir(path.parent) == []


def test_a_lease_that_took_long_to_take_is_renewed_at_once(path, monkeypatch):
    """The draft is removed after the lease is visible, and others watch it meanwhile."""
    real = LeaseFile.swap

    def swap(self, *arguments):
        monkeypatch.setattr(lease.time, "monotonic", lambda: 29 + clock())
        return real(self, *arguments)

    clock = time.monotonic
    monkeypatch.setattr(LeaseFile, "swap", swap)
    with Lease(LeaseFile(path), "t"):
        wait_for(lambda: json.loads(path.read_text())["beat"] == f"{1:012d}", seconds=4)


@pytest.mark.parametrize("lost", ["gone", "another's"])
def test_the_beat_of_a_lost_lease_ends(path, monkeypatch, caplog, lost):
    monkeypatch.setattr(LeaseFile, "heartbeat", 0.01)
    with Lease(LeaseFile(path), "t") as held:
        other_lease = path.with_name("other")
        leave(other_lease)
        path.unlink() if lost == "gone" else other_lease.replace(path)
        wait_for(lambda: not held._heart.is_alive())
    assert not caplog.records


def test_a_lease_that_cannot_be_given_back_is_removed_later(path, monkeypatch, caplog):
    """What came of the work counts; and a process that lives long does not hold the target for as long."""
    monkeypatch.setattr(LeaseFile, "heartbeat", 0.01)
    with pytest.raises(ValueError, match="of the work"), Lease(LeaseFile(path), "t"):
        stale = Stale(LeaseFile.holds)
        monkeypatch.setattr(LeaseFile, "holds", stale.method())
        raise ValueError("of the work")
    assert f"{path} was not released" in caplog.text
    assert path.exists()
    stale.mended = True
    wait_for(lambda: not path.exists())


def test_a_lease_that_cannot_be_taken_is_a_storage_error(path, monkeypatch):
    leave(path)
    monkeypatch.setattr(lease, "judge_all", Stale(judge))
    with pytest.raises(StorageError), Lease(LeaseFile(path), "t"):
        pytest.fail("it was taken")
    assert os.listdir(path.parent) == [path.name]


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EBADF])
def test_a_file_system_without_locks_has_leases_too(path, quick, monkeypatch, code):
    def refuse(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(lease.fcntl, "flock", refuse)
    leave(path)
    with Lease(LeaseFile(path), "t") as held, held.exclusive():
        pass
    assert os.listdir(path.parent) == []


@pytest.fixture(scope="module")
def gone():
    """The number of a process that has ended."""
    with subprocess.Popen([sys.executable, "-c", "pass"]) as child:
        pass
    return child.pid


def ours(pid, **more):
    return {"host": socket.gethostname(), "pid": pid, **more}


def test_a_process_of_ours_that_is_gone_is_evicted_at_once(path, gone):
    leave(path, **ours(gone))
    assert verdict(path) is Verdict.DEAD
    with Lease(LeaseFile(path), "t") as held:
        assert json.loads(path.read_text())["pid"] == os.getpid()
        assert held.dead == "0123abcd"


def test_a_process_that_was_killed_and_not_collected_is_gone(path):
    with subprocess.Popen([sys.executable, "-c", HELD, str(path)], stdin=-1, stdout=-1) as child:
        assert child.stdout.readline() == b"held\n"
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert verdict(path) is Verdict.DEAD


def test_a_reused_process_number_is_no_sign_of_life(path):
    leave(path, **ours(os.getpid(), process_start=1))
    assert verdict(path) is Verdict.DEAD


def test_a_stopped_process_is_watched_and_a_running_one_holds(path, quick):
    with subprocess.Popen([sys.executable, "-c", HELD, str(path)], stdin=-1, stdout=-1) as child:
        assert child.stdout.readline() == b"held\n"
        assert Watch(path).look() is Verdict.ALIVE, "it is known at the first look"
        child.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
        assert Watch(path).look() is Verdict.UNDECIDED
        with Lease(LeaseFile(path), "t") as held:
            assert held.dead is None
            child.send_signal(signal.SIGCONT)
            child.communicate(b"")
            assert held.holds(), "the former owner frees no lease but its own"
    assert child.returncode == 0
    assert os.listdir(path.parent) == []


@pytest.mark.parametrize(
    "owner",
    [{"pid_namespace": ""}, {"pid_namespace": "another boot pid:[1]"}],
    ids=["unknown", "another container"],
)
def test_of_a_process_that_cannot_be_seen_only_changes_tell(path, gone, owner):
    leave(path, **ours(gone, **owner))
    assert Watch(path).look() is Verdict.UNDECIDED


def test_where_the_namespace_is_unknown_only_changes_tell(path, gone, monkeypatch):
    monkeypatch.setattr(lease, "_PID_NAMESPACE", str(path / "none"))
    leave(path, **ours(gone, pid_namespace=""))
    assert Watch(path).look() is Verdict.UNDECIDED


def test_several_leases_are_watched_at_the_same_time(tmp_path, quick, monkeypatch):
    real, pauses = time.sleep, []
    monkeypatch.setattr(time, "sleep", lambda seconds: (pauses.append(seconds), real(seconds)))
    paths = [tmp_path / f".wherry-{name}.lease" for name in "abcdefgh"]
    for path in paths:
        leave(path)
    found = judge(paths)
    assert {one.verdict for one in found.values()} == {Verdict.EXPIRED}
    assert sum(pauses) < len(paths) / 2 * lease.EXPIRY_SECONDS, "one after the other"


def test_of_many_that_try_to_take_over_one_succeeds(path, quick):
    leave(path)
    won, over, results = [], threading.Event(), []

    def take():
        try:
            with Lease(LeaseFile(path), "t") as held:
                won.append(held)
                over.wait(20)
        except TargetInUseError as error:
            results.append(error)

    threads = [threading.Thread(target=take) for _ in range(12)]
    for thread in threads:
        thread.start()
    wait_for(lambda: len(results) == 11 and won)
    assert len(won) == 1
    assert won[0].holds()
    over.set()
    for thread in threads:
        thread.join(20)
    assert os.listdir(path.parent) == []


def test_a_rerun_tidies_up_after_a_kill_that_came_just_after_the_commit(tmp_path):
    model = tmp_path / "model.npz"
    np.savez(model, w=np.arange(3.0))
    wherry.convert(model, tmp_path / "out", to="orbax")
    left = tmp_path / ".wherry-out.lease"
    subprocess.run([sys.executable, "-c", KILLED, str(left)], check=True)
    assert left.exists()
    (tmp_path / ".wherry-out.0123abcd.journal").write_text("{}")
    (tmp_path / ".wherry-out.0123abcd-89abcdef").mkdir()
    (tmp_path / ".wherry-out2.0123abcd.journal").write_text("foreign")
    (tmp_path / ".wherry-out2.0123abcd-89abcdef").mkdir()
    assert wherry.convert(model, tmp_path / "out", to="orbax").already
    foreign = [".wherry-out2.0123abcd-89abcdef", ".wherry-out2.0123abcd.journal"]
    assert sorted(os.listdir(tmp_path)) == [*foreign, "model.npz", "out"]


def test_a_lease_whose_heart_cannot_start_is_given_back(path, monkeypatch):
    def refuse():
        raise RuntimeError("can't start new thread")

    before, held = open_descriptors(), Lease(LeaseFile(path), "t")
    monkeypatch.setattr(held._heart, "start", refuse)
    with pytest.raises(RuntimeError, match="new thread"), held:
        pytest.fail("it was taken")
    assert os.listdir(path.parent) == []
    assert open_descriptors() == before


def test_a_lease_that_cannot_be_written_keeps_no_descriptor_open(path, monkeypatch):
    """Without links it is written twice, and the second time the disk is full."""

    def refuse(*_arguments, **_options):
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    real, written = os.write, []

    def write(descriptor, data):
        written.append(descriptor)
        if len(written) > 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(descriptor, data)

    monkeypatch.setattr(os, "link", refuse)
    monkeypatch.setattr(os, "write", write)
    before = open_descriptors()
    with pytest.raises(StorageError, match="No space"), Lease(LeaseFile(path), "t"):
        pytest.fail("it was taken")
    assert os.listdir(path.parent) == []
    assert open_descriptors() == before
