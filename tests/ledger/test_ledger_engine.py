"""The engine of a SQLite ledger stays with its process, which compiles each statement once; its connections do not."""

from __future__ import annotations

import os

import pytest

from wherry.errors import StorageError
from wherry.ledger import database
from wherry.ledger.database import open_ledger
from wherry.ledger.record import record_event
from wherry.ledger.statements import statements


def engine_of(url):
    with open_ledger(url) as ledger:
        return ledger._engine


def test_a_file_has_one_engine_and_closing_the_ledger_closes_its_connections(tmp_path):
    url = f"sqlite:///{tmp_path / 'ledger.db'}"
    engine = engine_of(url)
    assert engine_of(url) is engine
    assert engine.pool.checkedin() == engine.pool.checkedout() == 0
    assert engine_of(f"sqlite:///{tmp_path / 'other.db'}") is not engine


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
    assert database._sqlite_engine.cache_info().maxsize == 4
