"""Files and rows that somebody else wrote in the place of a ledger: refused or read, and never a bug."""

from __future__ import annotations

import os
import sqlite3
import time
import tracemalloc
from contextlib import closing, nullcontext
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.support.ledger import altered, conversion, run_sql
from wherry.cli import cli
from wherry.config.settings import digest_choice
from wherry.core.receipt import CheckpointRef
from wherry.errors import CorruptError, HostileError, StorageError, WherryError
from wherry.ledger import database
from wherry.ledger import schema as tables
from wherry.ledger import statements as statements_room
from wherry.ledger.record import check_chain, open_ledger, record_conversion, record_event, record_sighting
from wherry.ledger.replay import replay
from wherry.ledger.statements import statements, statements_of, stored_table
from wherry.nightly.metrics import ledger_samples
from wherry.prove.records import entry_at
from wherry.store.home import irregular_sqlite_file, sqlite_to_read

pytest_plugins = ["tests.support.ledger"]

ENDLESS = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT {} FROM c"
LONG = "SELECT {} FROM (SELECT printf('%.*c', 900000000, 'x') AS x)"


@pytest.fixture
def file(tmp_path):
    """An empty file with the version of a ledger."""
    path = tmp_path / "ledger.db"
    run_sql(path, f"PRAGMA user_version = {tables.SCHEMA}")
    return path


def require_refusal(path, what):
    with pytest.raises(HostileError, match=what), open_ledger(f"sqlite:///{path}"):
        pytest.fail("it was opened")


@pytest.mark.parametrize("view", [ENDLESS, LONG], ids=["endless", "long"])
def test_views_in_the_place_of_tables_are_refused(file, view):
    for name, table in {table.name: table for table in tables.TABLES}.items():
        columns = ", ".join(f'x AS "{column}"' for column in table.columns)
        run_sql(file, f'CREATE VIEW "{name}" AS {view.format(columns)}')
    started = time.process_time()
    command = ["ledger", "check", "--ledger", f"sqlite:///{file}"]
    done = CliRunner().invoke(cli, command, standalone_mode=False)
    assert isinstance(done.exception, HostileError)
    assert time.process_time() - started < 5


def test_an_endless_view_is_named(file):
    run_sql(file, f'CREATE VIEW "statement" AS {ENDLESS.format("x AS seq")}')
    require_refusal(file, "a view that wherry does not create: 'statement'")


def test_a_table_of_another_program_is_named(tmp_path):
    path = tmp_path / "ledger.db"
    with open_ledger(f"sqlite:///{path}"):
        pass
    run_sql(path, "CREATE TABLE other (x)")
    require_refusal(path, "a table that wherry does not create: 'other'")


def test_a_trigger_that_drops_statements_is_refused(tmp_path):
    """A record that is lost without an error: `RAISE(IGNORE)` leaves the row out."""
    path = tmp_path / "ledger.db"
    with open_ledger(f"sqlite:///{path}") as ledger:
        record_event(ledger, "note", None, {"text": "kept"})
    run_sql(
        path,
        "CREATE TRIGGER quiet BEFORE INSERT ON statement WHEN NEW.kind = 'note' BEGIN SELECT RAISE(IGNORE); END",
    )
    require_refusal(path, "a trigger that wherry does not create: 'quiet'")


def test_a_trigger_that_appears_while_it_is_open_is_found(tmp_path):
    path = tmp_path / "ledger.db"
    with open_ledger(f"sqlite:///{path}") as ledger:
        record_event(ledger, "note", None, {"text": "kept"})
        run_sql(path, "CREATE TRIGGER quiet BEFORE INSERT ON edge BEGIN SELECT RAISE(IGNORE); END")
        assert "does not create these triggers: quiet" in (check_chain(ledger).altered or "")


def test_a_replaced_statement_fires_the_triggers(tmp_path):
    path = tmp_path / "ledger.db"
    with open_ledger(f"sqlite:///{path}") as ledger:
        record_event(ledger, "note", None, {"text": "first"})
        record_event(ledger, "note", None, {"text": "second"})
        again = (
            "INSERT OR REPLACE INTO statement SELECT seq + 1, hash, (SELECT hash FROM statement WHERE seq = 1), kind, "
            "schema, content, body, time, storage_time FROM statement WHERE seq = 2"
        )
        with pytest.raises(StorageError), ledger.write() as connection:
            connection.change(again)
        assert check_chain(ledger).altered is None


def test_a_value_of_gigabytes_is_refused_before_it_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(database, "_LONGEST_VALUE", 1 << 20)
    path = tmp_path / "ledger.db"
    with open_ledger(f"sqlite:///{path}") as ledger:
        record_event(ledger, "note", None, {"text": "first"})
    with closing(sqlite3.connect(path)) as connection:
        for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'trigger'").fetchall():
            connection.execute(f"DROP TRIGGER {name}")
        connection.execute("UPDATE statement SET body = printf('%.*c', 4000000, 'x')")
        connection.commit()
    with pytest.raises(StorageError, match="too big"), open_ledger(f"sqlite:///{path}") as ledger:
        check_chain(ledger)


@pytest.mark.parametrize("words", [["metrics"], ["du", "--by", "age"]], ids=" ".join)
def test_a_time_of_another_form_is_damage_not_a_bug(url, words, monkeypatch):
    monkeypatch.setenv("WHERRY_LEDGER", url)
    with open_ledger(url) as ledger:
        record_conversion(ledger, conversion("a", "b"))
    altered(url, "UPDATE statement SET time = 'zzz'", "UPDATE location SET seen = 'zzz'")
    with pytest.raises(CorruptError, match="the ledger holds invalid times: 'zzz'"):
        CliRunner().invoke(cli, words, catch_exceptions=False)


@pytest.mark.parametrize(
    "change", ["storage_time = NULL", "time = NULL", "body = NULL", "schema = 3", "schema = 5"]
)
def test_a_statement_that_the_tables_of_wherry_would_not_take_is_damage(tmp_path, change):
    """A file may have tables of the same names without their constraints."""
    path = tmp_path / "ledger.db"
    with open_ledger(f"sqlite:///{path}") as ledger:
        record_event(ledger, "note", None, {"text": "kept"})
    run_sql(
        path,
        "CREATE TABLE projection_of AS SELECT * FROM statement",
        "DROP TABLE statement",
        "CREATE TABLE statement AS SELECT * FROM projection_of",
        "DROP TABLE projection_of",
        f"UPDATE statement SET {change}",
    )
    with open_ledger(f"sqlite:///{path}") as ledger:
        for read in (lambda: list(statements(ledger)), lambda: list(statements_of(ledger, [1]))):
            with pytest.raises(
                CorruptError, match=r"invalid values: statement 1|statement 1: schema [35], expected 4"
            ):
                read()
        assert (check_chain(ledger).altered or "").startswith("statement 1: ")


@pytest.mark.parametrize("how", ["VIRTUAL", "STORED"])
def test_a_generated_column_is_refused(tmp_path, how):
    path = tmp_path / "ledger.db"
    with open_ledger(f"sqlite:///{path}"):
        pass
    columns = ", ".join(name for name in tables.location.columns if name != "seen")
    run_sql(
        path,
        "DROP TABLE location",
        f"CREATE TABLE location ({columns}, seen AS (printf('%.*c', 9, 'x')) {how})",
    )
    require_refusal(path, "a generated column that wherry does not create, in 'location'")


LONG_NUMBER = "1" + "0" * 400
# Kind and body of a statement, and who cannot read it; a note without a field that wherry writes says nothing.
BODIES = [
    ("conversion", "{}", {"metrics", "replay"}),
    ("conversion", '{"target": 7, "source": []}', {"metrics", "replay"}),
    ("verification", "{}", {"metrics", "replay"}),
    ("verification", '{"verification": "ok"}', {"metrics", "replay"}),
    ("audit", '{"ok": true, "counts": {"errors": "many"}}', {"metrics"}),
    ("note", '{"about": "run", "flow": "f", "ok": true, "counts": {"x": {}}}', {"metrics"}),
    ("note", f'{{"about": "run", "flow": "f", "ok": true, "counts": {{"x": {LONG_NUMBER}}}}}', {"metrics"}),
    ("note", '{"about": "route", "route": "r", "target": "/t"}', set()),
    ("note", '{"about": "route", "route": [], "target": "/t", "request": "r"}', {"replay"}),
    ("note", '{"about": "route", "route": "r", "target": "/t", "request": "r", "score": "best"}', {"replay"}),
    ("note", f'{{"about": "route", "route": "r", "target": "/t", "request": "r", "score": {LONG_NUMBER}}}', {"replay"}),
    ("note", '{"about": "failure", "source": 1, "fingerprint": 2, "wherry": 3, "requests": [], "error": 5, "kind": 6}',
     {"replay"}),
]  # fmt: skip


@pytest.mark.parametrize("read", [ledger_samples, replay], ids=["metrics", "replay"])
@pytest.mark.parametrize(("kind", "body", "refusing"), BODIES)
def test_a_statement_of_another_form_is_damage(tmp_path, kind, body, refusing, read):
    url = f"sqlite:///{tmp_path / 'ledger.db'}"
    with open_ledger(url) as ledger:
        record_event(ledger, "note", None, {"text": "first"})
    altered(url, f"UPDATE statement SET kind = '{kind}', body = '{body}'")
    refused = pytest.raises(CorruptError, match="the ledger holds invalid statement 1: ")
    name = "replay" if read is replay else "metrics"
    with open_ledger(url) as ledger, refused if name in refusing else nullcontext():
        read(ledger)


def test_numbers_of_a_conversion_are_numbers(tmp_path):
    url = f"sqlite:///{tmp_path / 'ledger.db'}"
    with open_ledger(url) as ledger:
        record_conversion(ledger, conversion("a", "b"))
    altered(url, """UPDATE statement SET body = json_set(body, '$.seconds', 'long', '$.bytes_read', 7)""")
    for read in (ledger_samples, replay):
        with (
            open_ledger(url) as ledger,
            pytest.raises(CorruptError, match=r"statement 1: .*expected a number"),
        ):
            read(ledger)


@pytest.mark.parametrize("suffix", ["", "-wal", "-shm", "-journal"])
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir], ids=["pipe", "folder"])
def test_a_pipe_in_the_place_of_a_file_does_not_hang(tmp_path, suffix, make):
    make(tmp_path / f"ledger.db{suffix}")
    refused = pytest.raises(StorageError, match="the ledger cannot be used: not a regular file")
    with refused, open_ledger(f"sqlite:///{tmp_path / 'ledger.db'}"):
        pytest.fail("it was opened")


@pytest.mark.parametrize("most", [1, 200, 10**9])
def test_pages_of_statements_hold_so_much_text_and_every_statement_comes_once(tmp_path, monkeypatch, most):
    monkeypatch.setattr(statements_room, "_PAGE", 7)
    monkeypatch.setattr(statements_room, "_PAGE_TEXT", most)
    with open_ledger(f"sqlite:///{tmp_path / 'ledger.db'}") as ledger:
        for number in range(14):
            record_event(ledger, "note", None, {"text": f"{number:060}"})
        reads = []
        monkeypatch.setattr(ledger, "read", lambda: reads.append(1) or type(ledger).read(ledger))
        assert [one.seq for one in statements_room.statements(ledger)] == [*range(1, 15)]
        expected = {1: 15, 200: 8, 10**9: 3}[most]
        assert len(reads) == expected
        assert [one.seq for one in statements_of(ledger, [99, *range(14, 0, -1)])] == [*range(1, 15)]
        assert len(reads) == 2 * expected


def test_a_long_time_is_never_kept(tmp_path):
    url = f"sqlite:///{tmp_path / 'ledger.db'}"
    with open_ledger(url) as ledger:
        record_conversion(ledger, conversion("a", "b"))
    altered(url, f"UPDATE statement SET time = '{'9' * 1000}'")
    with open_ledger(url) as ledger, pytest.raises(CorruptError, match=r"invalid times: '9{40}' goes on"):
        replay(ledger)


def test_long_statements_are_read_one_by_one(tmp_path):
    """20 statements of 8 MB: neither the check nor a replay holds more than a few."""
    path = tmp_path / "ledger.db"
    with open_ledger(f"sqlite:///{path}") as ledger:
        for number in range(20):
            record_event(ledger, "note", None, {"text": f"{number}" * (8 << 20)})
    for read in (check_chain, replay):
        with open_ledger(f"sqlite:///{path}") as ledger:
            tracemalloc.start()
            read(ledger)
            assert tracemalloc.get_traced_memory()[1] < 100 << 20
            tracemalloc.stop()


# A hostile ledger where it is read as a file, before the ledger itself is opened and refused.


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
def file_of_reads(tmp_path, monkeypatch):
    """A ledger with one place."""
    path = tmp_path / "ledger.db"
    monkeypatch.setenv("WHERRY_LEDGER", f"sqlite:///{path}")
    with open_ledger() as ledger:
        record_sighting(ledger, NODE)
    return path


def test_a_sound_ledger_has_its_entry(file_of_reads):
    assert entry_at(URI).node == NODE
    assert irregular_sqlite_file(file_of_reads) is None


def test_a_log_that_sqlite_removes_while_it_is_looked_at_is_no_irregular_file(file_of_reads, monkeypatch):
    """The last connection that another thread closes removes it: a conversion of a night was not recorded then."""
    log, real = file_of_reads.with_name(f"{file_of_reads.name}-wal"), Path.stat
    log.touch()

    def stat(path, **how):
        found = real(path, **how)
        if path == log:
            log.unlink()
        return found

    monkeypatch.setattr(Path, "stat", stat)
    assert irregular_sqlite_file(file_of_reads) is None
    assert not log.exists()


@pytest.mark.parametrize("table", ["location", "checkpoint", "tombstone", "conversion"])
@pytest.mark.parametrize("kind", VIEWS)
def test_a_view_in_the_place_of_a_table_is_never_read(file_of_reads, table, kind):
    with closing(sqlite3.connect(file_of_reads)) as connection:
        names = [row[1] for row in connection.execute(f"PRAGMA table_info({table})")]
    columns = ", ".join(f'x AS "{name}"' for name in names)
    run_sql(file_of_reads, f"DROP TABLE {table}", f"CREATE VIEW {table} AS {VIEWS[kind].format(columns)}")
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
def test_what_is_computed_is_never_read(file_of_reads, table):
    run_sql(file_of_reads, "DROP TABLE location", f"CREATE {table}")
    with pytest.raises(sqlite3.Error, match="computes"), sqlite_to_read(file_of_reads, ["location"]):
        pytest.fail("it was opened")


@pytest.mark.parametrize(("table", "column"), [("location", "fingerprint"), ("checkpoint", "weights_digest")])
def test_a_value_of_another_type_is_no_bug(file_of_reads, table, column):
    run_sql(file_of_reads, f"UPDATE {table} SET {column} = x'00'")
    assert "invalid values" in (entry_at(URI).unread or "")


@pytest.mark.parametrize("suffix", ["", "-journal", "-wal", "-shm"])
def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(file_of_reads, suffix):
    place = file_of_reads.with_name(f"ledger.db{suffix}")
    place.unlink(missing_ok=True)
    os.mkfifo(place)
    assert irregular_sqlite_file(file_of_reads) == place
    with pytest.raises(sqlite3.Error, match="not a regular file"), sqlite_to_read(file_of_reads, []):
        pytest.fail("it was opened")
    assert "not a regular file" in (entry_at(URI).unread or "")


# Ledgers that somebody else wrote: whatever text stands in a column, each verb has an answer or an error
# of wherry.


GOLDEN = Path(__file__).parents[1] / "golden" / "ledger-4.sql"
TEXTS = ("", "[]", "null", "{", "{}", '{"requested":', '{"verification": 7}', "[" * 9000, b"\0")
COLUMNS = ("statement.body", "conversion.options")
VERBS = (
    "audit all --no-record --quiet",
    "audit all --level digest --no-record --quiet",
    "lineage stale",
    "lineage why {digest}",
    "lineage impact {digest}",
    "lineage show {digest}",
    "ls",
    "du",
    "ledger check",
)


@pytest.fixture
def altered_of_malformed(tmp_path, monkeypatch):
    """A function that makes a ledger with another text in every row of a column; the first digest of the ledger."""
    monkeypatch.setenv("WHERRY_LEDGER", f"sqlite:///{tmp_path / 'ledger.db'}")

    def make(column, text):
        table, name = column.split(".")
        with closing(sqlite3.connect(tmp_path / "ledger.db")) as connection:
            connection.executescript(GOLDEN.read_text())
            for (trigger,) in connection.execute(
                "SELECT name FROM sqlite_master WHERE type = 'trigger'"
            ).fetchall():
                connection.execute(f'DROP TRIGGER "{trigger}"')
            connection.execute(f'UPDATE "{table}" SET "{name}" = ?', (text,))
            connection.commit()
            return connection.execute("SELECT checkpoint_digest FROM checkpoint").fetchone()[0]

    return make


@pytest.mark.parametrize("text", TEXTS, ids=lambda text: repr(text)[:12])
@pytest.mark.parametrize("column", COLUMNS)
def test_every_verb_has_an_answer_or_an_error_of_wherry(altered_of_malformed, column, text):
    digest, refused = altered_of_malformed(column, text), 0
    for verb in VERBS:
        done = CliRunner().invoke(cli, verb.format(digest=digest).split())
        error = done.exception
        assert error is None or isinstance(error, (WherryError, SystemExit)), f"{verb}: {error!r}"
        refused += done.exit_code != 0
    assert refused >= (column == "statement.body"), "at least `ledger check` sees it"


@pytest.mark.parametrize("text", ["", "[]", "7", "{", "[" * 9000])
def test_text_that_is_no_table_is_named(text):
    with pytest.raises(CorruptError, match="invalid JSON") as caught:
        stored_table(text)
    assert "ledger check" in caught.value.cure
