"""Forks of a process whose threads use the ledger: the child gets no lock that is never given back."""

from __future__ import annotations

import os
import sys
import threading
import time
from contextlib import contextmanager
from importlib import import_module

import pytest

from wherry.core import blank_values, forks
from wherry.core.forks import without_forks
from wherry.errors import StorageError
from wherry.ledger.record import check_chain, open_ledger, record_event
from wherry.ledger.replay import LedgerState


def note(url, text):
    with open_ledger(url) as ledger:
        record_event(ledger, "note", None, {"text": text})


def forked(work):
    """The exit code of a child that does some work."""
    child = os.fork()
    if not child:
        try:
            work()
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_fork_waits_for_the_transaction_of_another_thread(tmp_path, monkeypatch):
    monkeypatch.setattr(forks, "_PATIENCE", 60.0)
    url, inside, leave, left = f"sqlite:///{tmp_path / 'ledger.db'}", *(threading.Event() for _ in range(3))

    def hold():
        with open_ledger(url) as ledger:
            with ledger.write():
                inside.set()
                leave.wait(60)
            left.set()

    thread = threading.Thread(target=hold)
    thread.start()
    assert inside.wait(60)
    threading.Timer(0.3, leave.set).start()
    assert forked(lambda: os._exit(0 if leave.is_set() else 2)) == 0
    thread.join()
    assert left.is_set()


def test_a_fork_inside_a_transaction_of_its_own_does_not_wait(tmp_path):
    url = f"sqlite:///{tmp_path / 'ledger.db'}"
    note(url, "x")
    with open_ledger(url) as ledger, ledger.read():
        assert forked(lambda: note(f"sqlite:///{tmp_path / 'another.db'}", "y")) == 0


def test_a_child_begins_anew():
    with without_forks():
        assert forked(lambda: None) == 0
    assert forked(lambda: forked(lambda: None)) == 0


def test_a_fork_waits_until_the_ledger_is_closed(tmp_path, monkeypatch):
    """Between its transactions, too: the child has SQLite's list of the locks of its parent, but not the locks."""
    monkeypatch.setattr(forks, "_PATIENCE", 60.0)
    url, inside, leave = f"sqlite:///{tmp_path / 'ledger.db'}", threading.Event(), threading.Event()

    def hold():
        with open_ledger(url):
            inside.set()
            leave.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    assert inside.wait(60)
    threading.Timer(0.3, leave.set).start()
    assert forked(lambda: (note(url, "x"), os._exit(0 if leave.is_set() else 2))) == 0
    thread.join()


def test_a_child_that_was_forked_while_the_ledger_was_open_is_refused(tmp_path):
    """Both would write at once, without the locks of each other: the file was malformed then."""
    url = f"sqlite:///{tmp_path / 'ledger.db'}"

    def use():
        with pytest.raises(StorageError, match="the ledger was open when this process was forked") as caught:
            note(url, "x")
        assert "spawn" in caught.value.cure
        note(f"sqlite:///{tmp_path / 'another.db'}", "y")

    with open_ledger(url):
        assert forked(use) == 0
        note(url, "z")
    assert forked(lambda: note(url, "x")) == 0, "and after it is closed, all can use it"
    with open_ledger(url) as ledger:
        assert check_chain(ledger).statements == 2


@pytest.mark.parametrize("held", ["wherry.core.blank_values", "a cached property"])
def test_a_child_gets_locks_that_no_thread_of_its_parent_holds(held):
    if held == "a cached property":
        lock = getattr(LedgerState.by_source, "lock", None) or pytest.skip("it has no lock in this Python")
    else:
        lock = blank_values._LOCK
    inside, leave = threading.Event(), threading.Event()

    def hold():
        with lock:
            inside.set()
            leave.wait(60)

    def use():
        assert blank_values._LOCK.acquire(timeout=5)
        assert LedgerState().by_source == {}

    thread = threading.Thread(target=hold)
    thread.start()
    assert inside.wait(60)
    assert forked(use) == 0
    leave.set()
    thread.join()


@contextmanager
def importing(name):
    """While the block begins, another thread imports a module."""
    thread, deadline = threading.Thread(target=import_module, args=(name,)), time.monotonic() + 60
    thread.start()
    while name not in sys.modules:
        assert thread.is_alive(), f"{name} cannot be imported"
        assert time.monotonic() < deadline, f"{name} is not imported"
        time.sleep(0.001)
    yield
    thread.join()


def test_a_fork_waits_for_the_imports_of_other_threads(tmp_path, monkeypatch):
    (tmp_path / "slow_module.py").write_text("import time\ntime.sleep(0.5)\n")
    monkeypatch.syspath_prepend(tmp_path)
    with importing("slow_module"):
        assert forked(lambda: import_module("slow_module")) == 0


def test_a_child_imports_anew_what_another_thread_imports_for_long(tmp_path, monkeypatch):
    monkeypatch.setattr(forks, "_PATIENCE", 0.1)
    code = "import os, time\nwhile os.getpid() == {} and not os.path.exists({!r}):\n    time.sleep(0.01)\n"
    (tmp_path / "endless_module.py").write_text(code.format(os.getpid(), str(tmp_path / "go")))
    monkeypatch.syspath_prepend(tmp_path)
    with importing("endless_module"):
        assert forked(lambda: import_module("endless_module")) == 0
        (tmp_path / "go").touch()
