"""Ledgers that older versions wrote stay readable: their statements as they are, their rows in today's tables."""

from __future__ import annotations

import sqlite3
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from tests.support import make_golden_ledger as golden
from wherry.errors import CorruptError
from wherry.ledger import schema as tables
from wherry.ledger.database import schema_of
from wherry.ledger.nodes import digest_at, nodes, present
from wherry.ledger.record import ancestors, check_chain, head, open_ledger, record_conversion, statements

FOLDER = Path(__file__).parents[1] / "golden"
KEPT = sorted(FOLDER.glob("ledger-*.sql"))


def restored(file, folder):
    database = folder / "ledger.db"
    with closing(sqlite3.connect(database)) as connection:
        connection.executescript(file.read_text())
    return f"sqlite:///{database}"


def rows(url, sql):
    with closing(sqlite3.connect(url.removeprefix("sqlite:///"))) as connection:
        return connection.execute(sql).fetchall()


@pytest.fixture(params=KEPT, ids=lambda file: file.stem)
def url(request, tmp_path):
    return restored(request.param, tmp_path)


def test_there_is_one_of_each_schema():
    assert {int(file.stem.rpartition("-")[2]) for file in KEPT} >= set(range(1, tables.SCHEMA + 1))


def test_it_opens_and_is_whole_and_its_statements_are_as_they_were(url):
    columns = "seq, prev, hash, kind, schema, content, body, time"
    before = rows(url, f"SELECT {columns} FROM statement ORDER BY seq")
    with open_ledger(url) as ledger:
        assert schema_of(ledger) == tables.SCHEMA
        chain = check_chain(ledger)
        assert chain.altered is None
        assert chain.statements >= len(before) > 0
    assert rows(url, f"SELECT {columns} FROM statement ORDER BY seq")[: len(before)] == before


def test_it_gives_the_answers_that_it_gave(url):
    run, orbax, hf = (golden.digest(name) for name in ("run/100", "run-orbax", "run-hf"))
    with open_ledger(url) as ledger:
        assert [(edge.source, edge.target, edge.lossless) for edge in ancestors(ledger, hf)] == [
            (run, orbax, True),
            (orbax, hf, False),
        ]
        found = nodes(ledger, [orbax, hf, golden.digest("only-verified")])
        assert {place.uri for place in found[orbax].places} == {
            "/checkpoints/run-orbax",
            "/archive/run-orbax",
        }
        assert found[orbax].registrations[0].state == "pending"
        assert found[hf].registrations[0].version == "1"
        assert found[hf].verified is not None
        assert found[hf].verified.verdict == "altered"
        assert found[golden.digest("only-verified")].registrations == ()
        assert found[golden.digest("only-verified")].places[0].uri == "/checkpoints/only-verified"
        assert digest_at(ledger, "/checkpoints/run/100") == run, "the first run was seen there last"
        made = present(ledger).by_source["/checkpoints/run/100"].values()
        assert [row.format for rows in made for row in rows] == ["orbax", "huggingface"]


def test_it_goes_on(url):
    with open_ledger(url) as ledger:
        count = head(ledger).seq
        made = golden.conversion(golden.node("new", "t5x"), golden.node("newer", "orbax"), 50)
        assert record_conversion(ledger, made) == count + 1
        assert check_chain(ledger).altered is None


def test_migrating_states_what_no_statement_told(tmp_path):
    url = restored(FOLDER / "ledger-1.sql", tmp_path)
    with open_ledger(url) as ledger:
        [told] = statements(ledger, kinds=["migration"])
        assert (told.body["from"], told.body["to"], told.schema) == (1, tables.SCHEMA, tables.SCHEMA)
        assert [row["checkpoint_digest"] for row in told.body["checkpoints"]] == [
            golden.digest("only-verified")
        ]
        assert [row["name"] for row in told.body["claims"]] == ["model"]
    with open_ledger(url) as ledger:
        assert len(list(statements(ledger, kinds=["migration"]))) == 1, "once is enough"


def test_several_openers_migrate_once(tmp_path):
    url = restored(FOLDER / "ledger-1.sql", tmp_path)

    def count(_number):
        with open_ledger(url) as ledger:
            return head(ledger).seq

    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(count, range(4))) == {9}


def test_what_was_altered_before_the_migration_is_found_after_it(tmp_path):
    url = restored(FOLDER / "ledger-1.sql", tmp_path)
    with closing(sqlite3.connect(url.removeprefix("sqlite:///"))) as connection:
        connection.execute("UPDATE checkpoint SET format = 'paxml' WHERE format = 'orbax'")
        connection.commit()
    with open_ledger(url) as ledger:
        assert "checkpoint" in (check_chain(ledger).altered or "")


def test_a_migration_that_fails_leaves_the_old_ledger(tmp_path):
    url = restored(FOLDER / "ledger-1.sql", tmp_path)
    with closing(sqlite3.connect(url.removeprefix("sqlite:///"))) as connection:
        connection.execute("DROP TRIGGER statement_no_update")
        connection.execute("UPDATE statement SET body = '{}' WHERE seq = 3")
        connection.commit()
    before = rows(url, "SELECT * FROM location")
    with pytest.raises(CorruptError, match="invalid statement 3"), open_ledger(url):
        pass
    assert rows(url, "SELECT * FROM location") == before
    assert rows(url, "PRAGMA user_version") == [(1,)]
