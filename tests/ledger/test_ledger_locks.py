"""The ledger among others: writers, readers, forks, and a server that is lost or away."""

from __future__ import annotations

import functools
import gc
import json
import os
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from contextlib import closing, contextmanager, suppress
from importlib import import_module
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import psycopg
import pytest
from safetensors.numpy import save_file

from tests.support.command import typed
from tests.support.ledger import altered, conversion, filled, node, postgres
from tests.support.postgres import new_database
from wherry.core import blank_values, forks
from wherry.core.forks import without_forks
from wherry.errors import StorageError, UnsupportedError, UsageError
from wherry.ledger import database, record
from wherry.ledger import schema as tables
from wherry.ledger.database import Sqlite, prepare_sqlite
from wherry.ledger.database import open_ledger as open_ledger_of_engine
from wherry.ledger.record import (
    check_chain,
    claim_registration,
    head,
    open_ledger,
    record_conversion,
    record_event,
    record_registration,
    record_verification,
)
from wherry.ledger.record import statements as statements_of_lost
from wherry.ledger.replay import LedgerState
from wherry.ledger.statements import statements

pytest_plugins = ["tests.support.ledger"]

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


# The connections to a ledger in SQLite: one stays open between transactions, none after the ledger is
# closed.


def opened(file):
    """How often this process has a file open."""
    found = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            found.append(descriptor.readlink())
    return found.count(file)


def test_one_connection_stays_open_until_the_ledger_is_closed(tmp_path):
    file = tmp_path / "ledger.db"
    with open_ledger_of_engine(f"sqlite:///{file}") as ledger:
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
    with open_ledger_of_engine(f"sqlite:///{tmp_path / 'ledger.db'}") as ledger:
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
        with open_ledger_of_engine("sqlite:///ledger.db") as ledger:
            record_event(ledger, "note", None, {"folder": name})
    for name in ("a", "b"):
        with open_ledger_of_engine(f"sqlite:///{tmp_path / name / 'ledger.db'}") as ledger:
            assert [one.body["folder"] for one in statements(ledger)] == [name]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_the_child_of_a_process_with_an_open_ledger_is_refused(tmp_path):
    """SQLite's list of file locks is inherited, so parent and child would write at the same time."""
    url = f"sqlite:///{tmp_path / 'ledger.db'}"
    with open_ledger_of_engine(url) as ledger:
        record_event(ledger, "note", None, {"by": "parent"})
        child = os.fork()
        if child == 0:
            code = 3
            try:
                with open_ledger_of_engine(url) as other:
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
    with open_ledger_of_engine(url) as outer:
        with open_ledger_of_engine(url) as inner:
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
    with open_ledger_of_engine(f"sqlite:///{tmp_path / 'ledger.db'}") as ledger:
        with pytest.raises(RuntimeError), ledger.write():
            raise RuntimeError
        record_event(ledger, "note", None, {"by": "the next transaction"})
        assert [one.body["by"] for one in statements(ledger)] == ["the next transaction"]


# Forks of a process whose threads use the ledger: the child gets no lock that is never given back.


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


# A server that ends in the middle of a transaction: the transaction is made again, and states nothing
# twice.


pytest.importorskip("psycopg")


__all__ = ["postgres"]

CALLS = {
    "conversion": lambda ledger: record_conversion(ledger, conversion("a", "b")),
    "verification": lambda ledger: record_verification(ledger, node("a"), {"ok": True}),
    "note": lambda ledger: record_event(ledger, "note", None, {"text": "a"}),
    "claim": lambda ledger: claim_registration(ledger, node("a"), "http://registry", "model"),
    "registration": lambda ledger: record_registration(ledger, node("a"), "http://registry", "model", "1"),
}


def end_connection(url, connection):
    number = connection.value("SELECT pg_backend_pid()")
    with psycopg.connect(url) as other:
        other.execute("SELECT pg_terminate_backend(%s, 10000)", (number,))


@pytest.mark.parametrize("committed", [False, True])
@pytest.mark.parametrize("kind", CALLS)
def test_a_transaction_whose_connection_is_lost_is_made_again(
    postgres, tmp_path, monkeypatch, kind, committed
):
    url = new_database(postgres, f"lost-{kind}-{committed}")
    real, lost = record.append, []

    def losing(connection, *what):
        if not lost:
            lost.append(1)
            end_connection(url, connection)
            if committed:  # as if only the answer had been lost
                with open_ledger(url) as ledger, ledger.write() as other:
                    real(other, *what)
        return real(connection, *what)

    with open_ledger(url) as ledger:
        record_event(ledger, "note", None, {"text": "a"})
        record_verification(ledger, node("a"), {"ok": True})
        before = [one.kind for one in statements_of_lost(ledger)]
        monkeypatch.setattr(record, "append", losing)
        number = CALLS[kind](ledger)
        assert [one.kind for one in statements_of_lost(ledger)] == [*before, kind]
        assert number in (3, None)


def test_one_that_is_lost_each_time_is_an_error_that_a_retry_can_help(postgres, monkeypatch):
    url = new_database(postgres, "lost-each-time")
    real = record.append

    def losing(connection, *what):
        end_connection(url, connection)
        return real(connection, *what)

    with open_ledger(url) as ledger:
        monkeypatch.setattr(record, "append", losing)
        with pytest.raises(StorageError) as raised:
            record_event(ledger, "note", None, {"text": "a"})
        assert raised.value.retryable
        assert list(statements_of_lost(ledger)) == []


# A ledger in PostgreSQL whose server is away for some seconds: what needs it waits, and says so.


_WAITED = " has not answered for "


def _pump(source, target):
    with suppress(OSError):
        while data := source.recv(65536):
            target.sendall(data)
    target.close()


class _Door:
    """A port of this machine that is closed until a wait was said, and then leads to a database."""

    def __init__(self, url, records):
        self.parts = urlsplit(url)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"postgresql://postgres@127.0.0.1:{self.port}{self.parts.path}"
        self.server = None
        self.opener = threading.Thread(target=self._open, args=(records,))
        self.opener.start()

    def _open(self, records):
        for _ in range(1200):
            if any(_WAITED in record.getMessage() for record in list(records)):
                break
            time.sleep(0.05)
        self.server = socket.create_server(("127.0.0.1", self.port))
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self):
        with suppress(OSError):
            while True:
                near = self.server.accept()[0]
                far = socket.create_connection((self.parts.hostname, self.parts.port))
                for ends in ((near, far), (far, near)):
                    threading.Thread(target=_pump, args=ends, daemon=True).start()

    def close(self):
        self.opener.join()
        self.server.close()


@pytest.mark.parametrize(
    "line", ["nightly --config HOME/wherry.toml", "convert HOME/runs/a/1 HOME/out/c --to dcp", "ls"]
)
def test_some_seconds_without_it_change_no_exit_code(line, postgres, tmp_path, monkeypatch, capfd, caplog):
    target = new_database(postgres, f"away {line.split()[0]}")
    (tmp_path / "runs" / "a" / "1").mkdir(parents=True)
    save_file({"w": np.ones(3, np.float32)}, tmp_path / "runs" / "a" / "1" / "model.safetensors")
    (tmp_path / "wherry.toml").write_text(
        '[routes.a]\nroot = "runs"\nselect = "all"\nmin_age = "0s"\n'
        '[[routes.a.targets]]\nformat = "dcp"\nuri = "out/{run}/{step}"\n'
    )
    door = _Door(target, caplog.records)
    monkeypatch.setenv("WHERRY_LEDGER", door.url)
    try:
        code, printed = typed(line, tmp_path, capfd)
    finally:
        door.close()
    assert code == 0, printed
    assert any(_WAITED in record.getMessage() for record in caplog.records)
    with open_ledger(target) as ledger:
        assert check_chain(ledger).altered is None
