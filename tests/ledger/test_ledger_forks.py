"""Forks of a process whose threads use the ledger: the child gets no lock that is never given back."""

from __future__ import annotations

import os
import threading

from wherry.core.forks import without_forks
from wherry.ledger.record import open_ledger, record_event


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


def test_a_fork_waits_for_the_transaction_of_another_thread(tmp_path):
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
