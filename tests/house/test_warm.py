"""Processes forked for tests end in time, take nothing of each other's, and leave nothing behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading

import pytest

from tests.support.house import ROOT
from tests.support.processes import gone
from tests.support.warm import Warm

PROGRAM = """
import os, signal, subprocess, sys, time
how, *words = sys.argv[1:]
if how == "hang":
    inner = subprocess.Popen(["sleep", "600"])
    with open(words[0], "w") as file:
        print(os.getppid(), os.getpid(), inner.pid, file=file, flush=True)
    time.sleep(600)
if how == "orphan":
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(600)
if how == "places":
    import warm_early
    print(warm_early.PLACE, os.environ["WHERRY_HOME"])
print(how, len("".join(words)))
"""


@pytest.fixture
def warm(tmp_path):
    (tmp_path / "warm_program.py").write_text(PROGRAM)
    (tmp_path / "warm_early.py").write_text("import os; PLACE = os.environ.get('WHERRY_HOME')")
    line = [sys.executable, "-m", "tests.support.warm"]
    made = Warm(line, {**os.environ, "PYTHONPATH": str(tmp_path)}, ["warm_early"], os.fspath(ROOT))
    yield made
    made.close()


def run(warm, *words, seconds=60.0):
    return warm.run("warm_program", words, cwd="/", env=os.environ, seconds=seconds)


class Interrupted(BaseException):
    """As pytest-timeout's: raised in the midst of a wait."""


@pytest.fixture
def interruption():
    """Interrupts this thread in so many seconds."""

    def interrupt(_signal, _frame):
        raise Interrupted

    before = signal.signal(signal.SIGUSR1, interrupt)
    yield lambda seconds: threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGUSR1)).start()
    signal.signal(signal.SIGUSR1, before)


def assert_ended(file):
    pids = [int(word) for word in file.read_text().split()]
    assert len(pids) == 3
    assert gone(pids)


def test_a_run_that_hangs_is_stopped_and_the_next_gets_its_own_answer(warm, tmp_path):
    assert run(warm, "first") == (0, b"first 0\n", b"")
    with pytest.raises(subprocess.TimeoutExpired, match="warm_program"):
        run(warm, "hang", str(tmp_path / "pids"), seconds=3)
    assert_ended(tmp_path / "pids")
    assert run(warm, "next") == (0, b"next 0\n", b"")


def test_a_run_that_is_interrupted_is_stopped_and_the_next_gets_its_own_answer(warm, tmp_path, interruption):
    assert run(warm, "first") == (0, b"first 0\n", b"")
    interruption(3)
    with pytest.raises(Interrupted):
        run(warm, "hang", str(tmp_path / "pids"))
    assert_ended(tmp_path / "pids")
    assert run(warm, "next") == (0, b"next 0\n", b"")


def test_a_waiting_process_that_died_is_started_anew(warm):
    with pytest.raises((AssertionError, ConnectionError)):
        run(warm, "orphan")
    assert run(warm, "next") == (0, b"next 0\n", b"")


def test_an_answer_to_another_run_is_refused(warm, monkeypatch):
    """The waiting process does not end by itself here, for the other end of its own socket stays open: it is killed."""
    assert run(warm, "first") == (0, b"first 0\n", b"")
    monkeypatch.setattr("tests.support.warm._GRACE", 0.1)
    first, real = warm._process, warm._socket
    warm._socket, peer = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with real, peer:
        peer.send(b"1 0")
        with pytest.raises(AssertionError, match="that of another run"):
            run(warm, "second")
        assert first.returncode == -signal.SIGKILL
    assert run(warm, "next") == (0, b"next 0\n", b"")


def test_a_long_command_line_arrives_whole(warm):
    assert run(warm, "long", "x" * 3_000_000) == (0, b"long 3000000\n", b"")


def test_what_is_imported_early_does_not_know_the_places_of_the_first_test(warm):
    code, output, _errors = run(warm, "places")
    assert (code, output.decode().splitlines()[0]) == (0, f"None {os.environ['WHERRY_HOME']}")
