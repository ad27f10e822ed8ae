"""The ledger among others, on SQLite and on PostgreSQL: one writer at a time, readers in peace, refusals."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from tests.support.command import typed
from tests.support.ledger import altered, conversion, filled
from tests.support.postgres import new_database
from wherry.errors import StorageError, UnsupportedError, UsageError
from wherry.ledger import schema as tables
from wherry.ledger.database import Sqlite, prepare_sqlite
from wherry.ledger.record import check_chain, head, open_ledger, record_conversion, record_event

pytest_plugins = ["tests.support.ledger"]  # its fixtures


APPEND = """
import sys
from wherry.ledger.record import open_ledger, record_verification
from wherry.core.receipt import CheckpointRef
subject = CheckpointRef("/c", "npz", None, "c" * 64, "d" * 64, "mark")
for number in range(20):
    with open_ledger(sys.argv[1]) as ledger:
        record_verification(ledger, subject, {"worker": sys.argv[2], "number": number})
"""


def test_a_new_file_that_another_process_writes_is_waited_for(tmp_path):
    """While another connection writes, SQLite refuses at once to change a new file to WAL, whatever its timeout."""
    file = tmp_path / "new.db"
    other = sqlite3.connect(file, isolation_level=None, check_same_thread=False)
    other.execute("BEGIN IMMEDIATE")
    other.execute("CREATE TABLE unfinished (x)")
    later = threading.Timer(0.5, other.rollback)
    later.start()
    with open_ledger(f"sqlite:///{file}") as ledger:
        assert check_chain(ledger).statements == 0
    later.join()
    other.close()


def test_several_processes_keep_one_chain(url):
    """They also make the tables at the same time, as workers of a first night do."""
    command = [sys.executable, "-c", APPEND, url]
    workers = [subprocess.Popen([*command, str(number)]) for number in range(4)]
    assert [worker.wait(timeout=300) for worker in workers] == [0] * 4
    with open_ledger(url) as ledger:
        chain = check_chain(ledger)
        assert (chain.statements, chain.altered) == (80, None)


class OthersBegin(sqlite3.Connection):
    """A connection that meets others while it changes the database to WAL mode, for so many times."""

    times, reason = 3, "database is locked"

    def execute(self, sql, *parameters):
        if "journal_mode" in sql and self.times:
            self.times -= 1
            raise sqlite3.OperationalError(self.reason)
        return super().execute(sql, *parameters)


@pytest.mark.parametrize("reason", ["database is locked", "database table is locked", "locking protocol"])
def test_several_openers_of_a_new_file_wait_for_one_another(tmp_path, monkeypatch, reason):
    monkeypatch.setattr(OthersBegin, "reason", reason)
    with closing(sqlite3.connect(tmp_path / "new.db", factory=OthersBegin)) as connection:
        prepare_sqlite(connection)
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    monkeypatch.setattr("wherry.ledger.database.BUSY_SECONDS", 0)
    with closing(sqlite3.connect(tmp_path / "other.db", factory=OthersBegin)) as connection:
        with pytest.raises(sqlite3.OperationalError, match=reason):
            prepare_sqlite(connection)
        assert connection.times < OthersBegin.times
    assert Sqlite(tmp_path / "new.db").busy(sqlite3.OperationalError(reason))


def test_a_reader_sees_one_state_and_does_not_wait(url):
    with open_ledger(url) as ledger, open_ledger(url) as other:
        record_event(ledger, "note", None, {})
        query = "SELECT seq FROM statement"
        with ledger.read() as connection:
            before = list(connection.rows(query))
            record_event(other, "note", None, {})
            assert list(connection.rows(query)) == before == [(1,)]
        with ledger.write() as connection:
            assert len(list(connection.rows(query))) == 2
            with other.read() as reading:
                assert len(list(reading.rows(query))) == 2


def test_a_writer_waits_for_the_one_before_it_and_reads_what_that_committed(url):
    with open_ledger(url) as ledger, open_ledger(url) as other:
        done: list[int] = []
        second = threading.Thread(
            target=lambda: done.append(record_event(other, "note", None, {"is": "second"}))
        )
        with ledger.write() as connection:
            second.start()
            time.sleep(0.3)
            assert not done
            from wherry.ledger.statements import append

            append(connection, "note", {"is": "first"})
        second.join(timeout=60)
        assert done == [2]
        assert check_chain(ledger).altered is None


def test_a_failed_statement_leaves_nothing(url):
    with open_ledger(url) as ledger:
        with pytest.raises(KeyError), ledger.write() as connection:
            from wherry.ledger.statements import append

            append(connection, "verification", {"subject": {"uri": "/c"}})
        assert head(ledger).seq == 0


def test_commits_are_durable(url):
    postgres = url.startswith("postgresql")
    if postgres:
        altered(url, f"ALTER DATABASE {url.rpartition('/')[2]} SET synchronous_commit = off")
    with open_ledger(url) as ledger, ledger.write() as connection:
        if postgres:
            assert connection.value("SHOW synchronous_commit") == "on"
        else:
            assert connection.value("PRAGMA journal_mode") == "wal"
            assert connection.value("PRAGMA synchronous") == 2


def of_schema(url, schema):
    """Let a ledger state another schema."""
    noted = f"COMMENT ON TABLE statement IS 'wherry ledger, schema {schema}'"
    altered(url, noted if url.startswith("postgresql") else f"PRAGMA user_version = {schema}")


@pytest.mark.parametrize("schema", [1, 3, 5, 99])
def test_a_ledger_of_another_schema_is_refused_and_left_alone(url, schema):
    filled(url)
    of_schema(url, schema)
    said = f"the ledger has schema {schema}, but this wherry requires {tables.SCHEMA}"
    for _ in range(2):
        with pytest.raises(UnsupportedError, match=said) as refusal, open_ledger(url):
            pass
        assert url.rpartition("/")[2] in refusal.value.uri
    assert (refusal.value.exit_code, "`wherry ledger rebuild ROOT`" in refusal.value.cure) == (4, True)
    of_schema(url, tables.SCHEMA)
    with open_ledger(url) as ledger:
        assert check_chain(ledger).altered is None


def test_a_ledger_of_another_schema_is_moved_away_and_rebuilt(url, tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("WHERRY_LEDGER", url)
    np.savez(tmp_path / "source.npz", w=np.ones(3))
    assert (
        typed(f"convert {tmp_path}/source.npz {tmp_path}/made/out --to orbax --quiet", tmp_path, capfd)[0]
        == 0
    )
    of_schema(url, 3)
    code, printed = typed("lineage stale", tmp_path, capfd)
    assert (code, "schema 3" in printed, "ledger rebuild ROOT" in printed) == (4, True, True)
    if url.startswith("postgresql"):
        altered(url, "ALTER SCHEMA wherry RENAME TO wherry_3")
    else:
        file = Path(url.removeprefix("sqlite:///"))
        file.rename(file.with_name("moved.db"))
    assert typed(f"ledger rebuild {tmp_path}/made --no-registry", tmp_path, capfd)[0] == 0
    code, printed = typed("ledger check --json", tmp_path, capfd)
    assert (code, json.loads(printed)["ok"]) == (0, True)


def test_its_tables_are_away_from_everybody_elses(postgres):
    import psycopg

    shared = new_database(postgres, "crowded")
    with psycopg.connect(shared) as connection:
        connection.execute("CREATE TABLE statement (note text)")
    with open_ledger(shared) as ledger:
        record_conversion(ledger, conversion("a", "b"))
        assert check_chain(ledger).statements == 1
    with psycopg.connect(shared) as connection:
        [(found,)] = connection.execute("SELECT count(*) FROM public.statement").fetchall()
        assert found == 0


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ("mysql://u:secret@h/db", UnsupportedError),
        ("postgresql+psycopg2://u:secret@h/db", UsageError),
        ("postgresql://u:secret@127.0.0.1:1/db", StorageError),
    ],
)
def test_what_cannot_be_a_ledger_is_refused_without_its_secrets(wrong, error, monkeypatch):
    monkeypatch.setenv("WHERRY_STORAGE_TIMEOUT", "0.1s")
    with pytest.raises(error) as refusal, open_ledger(wrong):
        pass
    assert "secret" not in str(refusal.value)
    assert refusal.value.cure


def test_a_file_that_is_no_ledger_is_refused(tmp_path):
    (tmp_path / "text.db").write_text("not a database, but long enough to be read as one" * 20)
    with pytest.raises(StorageError, match="ledger"), open_ledger(f"sqlite:///{tmp_path / 'text.db'}"):
        pass


@pytest.mark.parametrize(
    ("login", "reason"),
    [
        ("nobody@{host}/postgres", 'FATAL: role "nobody" does not exist'),
        ("postgres@{host}/nowhere", 'FATAL: database "nowhere" does not exist'),
    ],
)
def test_a_login_that_the_server_refuses_is_not_tried_again(postgres, login, reason):
    host = postgres.partition("@")[2].partition("/")[0]
    url = f"postgresql://{login.format(host=host)}"
    with pytest.raises(StorageError) as caught, open_ledger(url):
        pass
    assert reason in str(caught.value)
    assert not caught.value.retryable
    assert "set WHERRY_LEDGER" in caught.value.cure
