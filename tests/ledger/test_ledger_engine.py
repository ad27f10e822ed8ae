"""The connections to a ledger in SQLite: one stays open between transactions, none after the ledger is closed."""

from __future__ import annotations

import functools
import gc
import os
import sqlite3
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from wherry.errors import StorageError
from wherry.ledger import database
from wherry.ledger.database import open_ledger
from wherry.ledger.record import record_event
from wherry.ledger.statements import statements


def opened(file):
    """How often this process has a file open."""
    found = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            found.append(descriptor.readlink())
    return found.count(file)


def test_one_connection_stays_open_until_the_ledger_is_closed(tmp_path):
    file = tmp_path / "ledger.db"
    with open_ledger(f"sqlite:///{file}") as ledger:
        for _ in range(3):
            record_event(ledger, "note", None, {})
            assert opened(file) == 1
        with ledger.read(), ledger.read():
            assert opened(file) == 2
    assert opened(file) == 0


def test_rows_that_are_left_say_nothing_when_they_go_after_their_ledger(tmp_path, monkeypatch):
    """As where a row is refused: the error holds the rows until it was printed, and the ledger is closed before."""
    complaints = []
    monkeypatch.setattr(sys, "unraisablehook", complaints.append)
    with open_ledger(f"sqlite:///{tmp_path / 'ledger.db'}") as ledger:
        for number in range(3):
            record_event(ledger, "note", None, {"number": number})
        with ledger.read() as connection:
            rows = connection.rows("SELECT seq FROM statement ORDER BY seq")
            assert next(rows) == (1,)
    del rows
    gc.collect()
    assert complaints == []
    assert opened(tmp_path / "ledger.db") == 0


def test_a_relative_path_is_that_of_the_folder_in_which_it_is_opened(tmp_path, monkeypatch):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        with open_ledger("sqlite:///ledger.db") as ledger:
            record_event(ledger, "note", None, {"folder": name})
    for name in ("a", "b"):
        with open_ledger(f"sqlite:///{tmp_path / name / 'ledger.db'}") as ledger:
            assert [one.body["folder"] for one in statements(ledger)] == [name]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_the_child_of_a_process_with_an_open_ledger_is_refused(tmp_path):
    """SQLite's list of file locks is inherited, so parent and child would write at the same time."""
    url = f"sqlite:///{tmp_path / 'ledger.db'}"
    with open_ledger(url) as ledger:
        record_event(ledger, "note", None, {"by": "parent"})
        child = os.fork()
        if child == 0:
            code = 3
            try:
                with open_ledger(url) as other:
                    record_event(other, "note", None, {"by": "child"})
            except StorageError as error:
                code = 0 if "open when this process was forked" in error.what else 4
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        record_event(ledger, "note", None, {"by": "parent again"})
        assert [one.body["by"] for one in statements(ledger)] == ["parent", "parent again"]


def test_one_thread_may_close_the_ledger_while_another_uses_it(tmp_path):
    url = f"sqlite:///{tmp_path / 'ledger.db'}"
    with open_ledger(url) as outer:
        with open_ledger(url) as inner:
            record_event(inner, "note", None, {"by": "inner"})
        record_event(outer, "note", None, {"by": "outer"})
        assert [one.body["by"] for one in statements(outer)] == ["inner", "outer"]


class NeverRolledBack(sqlite3.Connection):
    """A connection of which a rollback fails as the transaction did, for example where the disk fails."""

    def rollback(self):
        raise sqlite3.OperationalError("disk I/O error")


def test_a_connection_whose_transaction_stays_open_is_not_used_again(tmp_path, monkeypatch):
    connect = functools.partial(sqlite3.connect, factory=NeverRolledBack)
    monkeypatch.setattr(database.sqlite3, "connect", connect)
    with open_ledger(f"sqlite:///{tmp_path / 'ledger.db'}") as ledger:
        with pytest.raises(RuntimeError), ledger.write():
            raise RuntimeError
        record_event(ledger, "note", None, {"by": "the next transaction"})
        assert [one.body["by"] for one in statements(ledger)] == ["the next transaction"]
