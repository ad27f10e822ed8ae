"""A hostile ledger where it is read as a file, before the ledger itself is opened and refused."""

from __future__ import annotations

import os
import sqlite3
import time
from contextlib import closing
from pathlib import Path

import pytest

from tests.support.ledger import run_sql
from wherry.config.digests import digest_choice
from wherry.core.receipt import CheckpointRef
from wherry.ledger.record import open_ledger, record_sighting
from wherry.storage.home import irregular_sqlite_file, sqlite_to_read
from wherry.verifier.records import entry_at

URI = "/x/model.safetensors"
NODE = CheckpointRef(
    uri=URI, format="safetensors", format_version=None, checkpoint_digest=f"sha256:{'a' * 64}",
    weights_digest=f"sha256:{'b' * 64}", fingerprint="f", kind="params", step=None, tensors=1, parameters=1, nbytes=4,
)  # fmt: skip
VIEWS = {
    "endless": "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT {} FROM c",
    "long": "SELECT {} FROM (SELECT printf('%.*c', 900000000, 'x') AS x)",
}


@pytest.fixture
def file(tmp_path, monkeypatch):
    """A ledger with one place."""
    path = tmp_path / "ledger.db"
    monkeypatch.setenv("WHERRY_LEDGER", f"sqlite:///{path}")
    with open_ledger() as ledger:
        record_sighting(ledger, NODE)
    return path


def test_a_sound_ledger_has_its_entry(file):
    assert entry_at(URI).node == NODE
    assert irregular_sqlite_file(file) is None


def test_a_log_that_sqlite_removes_while_it_is_looked_at_is_no_irregular_file(file, monkeypatch):
    """The last connection that another thread closes removes it: a conversion of a night was not recorded then."""
    log, real = file.with_name(f"{file.name}-wal"), Path.stat
    log.touch()

    def stat(path, **how):
        found = real(path, **how)
        if path == log:
            log.unlink()
        return found

    monkeypatch.setattr(Path, "stat", stat)
    assert irregular_sqlite_file(file) is None
    assert not log.exists()


@pytest.mark.parametrize("table", ["location", "checkpoint", "tombstone", "conversion"])
@pytest.mark.parametrize("kind", VIEWS)
def test_a_view_in_the_place_of_a_table_is_never_read(file, table, kind):
    with closing(sqlite3.connect(file)) as connection:
        names = [row[1] for row in connection.execute(f"PRAGMA table_info({table})")]
    columns = ", ".join(f'x AS "{name}"' for name in names)
    run_sql(file, f"DROP TABLE {table}", f"CREATE VIEW {table} AS {VIEWS[kind].format(columns)}")
    started = time.process_time()
    if table != "conversion":  # of which a checkpoint's entry has nothing
        assert "a view that wherry does not create" in (entry_at(URI).unread or "")
    assert "ledger" not in digest_choice().reason
    assert time.process_time() - started < 2


@pytest.mark.parametrize(
    "table",
    [
        "TABLE location (uri, fingerprint AS (printf('%.*c', 900000000, 'x')))",
        "VIRTUAL TABLE Location USING fts5(uri, fingerprint)",
    ],
)
def test_what_is_computed_is_never_read(file, table):
    run_sql(file, "DROP TABLE location", f"CREATE {table}")
    with pytest.raises(sqlite3.Error, match="computes"), sqlite_to_read(file, ["location"]):
        pytest.fail("it was opened")


@pytest.mark.parametrize(("table", "column"), [("location", "fingerprint"), ("checkpoint", "weights_digest")])
def test_a_value_of_another_type_is_no_bug(file, table, column):
    run_sql(file, f"UPDATE {table} SET {column} = x'00'")
    assert "invalid values" in (entry_at(URI).unread or "")


@pytest.mark.parametrize("suffix", ["", "-journal", "-wal", "-shm"])
def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(file, suffix):
    place = file.with_name(f"ledger.db{suffix}")
    place.unlink(missing_ok=True)
    os.mkfifo(place)
    assert irregular_sqlite_file(file) == place
    with pytest.raises(sqlite3.Error, match="not a regular file"), sqlite_to_read(file, []):
        pytest.fail("it was opened")
    assert "not a regular file" in (entry_at(URI).unread or "")
