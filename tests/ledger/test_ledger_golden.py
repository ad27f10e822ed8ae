"""Ledgers that older versions wrote stay readable: their statements as they are, their rows in today's tables."""

from __future__ import annotations

import sqlite3
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from tests.support import make_golden_ledger as golden
from tests.support.postgres import new_database
from wherry.errors import CorruptError, UnsupportedError
from wherry.ledger import schema as tables
from wherry.ledger.database import schema_of
from wherry.ledger.nodes import digest_at, nodes, present
from wherry.ledger.record import ancestors, check_chain, head, open_ledger, record_conversion, statements

FOLDER = Path(__file__).parents[1] / "golden"
pytest_plugins = ["tests.support.ledger"]  # its server
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


@pytest.mark.parametrize(
    ("table", "change"),
    [
        ("checkpoint", "UPDATE checkpoint SET format = 'paxml' WHERE format = 'orbax'"),
        ("location", "UPDATE location SET uri = '/elsewhere' WHERE uri = '/archive/run-orbax'"),
        ("verification", "UPDATE verification SET verdict = 'ok'"),
        ("tombstone", "DELETE FROM tombstone"),
    ],
)
def test_what_was_altered_in_schema_2_is_found_after_it_too(table, change, tmp_path):
    url = restored(FOLDER / "ledger-2.sql", tmp_path)
    with closing(sqlite3.connect(url.removeprefix("sqlite:///"))) as connection:
        connection.execute(change)
        connection.commit()
    with open_ledger(url) as ledger:
        assert (check_chain(ledger).altered or "").startswith(table)


def test_digests_of_schema_2_get_their_algorithm_in_every_row(tmp_path):
    url = restored(FOLDER / "ledger-2.sql", tmp_path)
    with open_ledger(url) as ledger:
        assert [row.body["to"] for row in statements(ledger, kinds=["migration"])] == [tables.SCHEMA]
        for statement in statements(ledger):
            assert set(digests_in(statement.body)) <= set(labels(statement.body))
    for table in tables.KEYS:
        for column in set(tables.CHECKPOINT_DIGESTS) & {*table.c.keys()}:
            found = rows(url, f"SELECT {column} FROM {table.name}")
            assert found
            assert all(digest.startswith("sha256:") for (digest,) in found), f"{table.name}.{column}"


def digests_in(body):
    """The digests of checkpoints in a body, at any depth."""
    if isinstance(body, list):
        return [one for part in body for one in digests_in(part)]
    if not isinstance(body, dict):
        return []
    own = [body[name] for name in ("checkpoint_digest", "weights_digest") if body.get(name)]
    return own + [one for part in body.values() for one in digests_in(part)]


def labels(body):
    return [one for one in digests_in(body) if one.startswith("sha256:")]


def test_a_conversion_of_schema_2_is_not_recorded_again(tmp_path):
    url = restored(FOLDER / "ledger-2.sql", tmp_path)
    again = golden.conversion(golden.node("run/100", "t5x", step=100), golden.node("run-orbax", "orbax"), 10)
    with open_ledger(url) as ledger:
        assert record_conversion(ledger, again) == 1
        assert len(list(statements(ledger, kinds=["conversion"]))) == 4


def test_a_shared_ledger_of_schema_2_is_migrated_on_request(postgres, tmp_path):
    old = restored(FOLDER / "ledger-2.sql", tmp_path)
    url = new_database(postgres, "shared")
    in_schema_2(url, old)
    with pytest.raises(UnsupportedError, match="schema 2"), open_ledger(url):
        pass
    with open_ledger(url, migrating=True) as ledger:
        assert check_chain(ledger).altered is None
        orbax = golden.digest("run-orbax")
        assert {place.uri for place in nodes(ledger, [orbax])[orbax].places} == {
            "/checkpoints/run-orbax",
            "/archive/run-orbax",
        }
        made = golden.conversion(golden.node("new", "t5x"), golden.in_blake3("newer"), 50)
        record_conversion(ledger, made)
        assert check_chain(ledger).altered is None


def in_schema_2(url, old):
    """Fill a new database with the rows of an old ledger, in columns as wide as those of schema 2."""
    import psycopg

    with open_ledger(url):
        pass
    with psycopg.connect(url) as connection:
        connection.execute("SET search_path = wherry")
        for table in tables.metadata.sorted_tables:
            for column in set(tables.CHECKPOINT_DIGESTS) & {*table.c.keys()}:
                connection.execute(f"ALTER TABLE {table.name} ALTER COLUMN {column} TYPE varchar(64)")
        for table in tables.metadata.sorted_tables:
            columns = [name for name in table.c.keys() if name != "storage_time"]  # noqa: SIM118  columns
            for row in rows(old, f"SELECT {', '.join(columns)} FROM {table.name} ORDER BY rowid"):
                named = zip(columns, row, strict=True)
                values = [bool(one) if name == "lossless" else one for name, one in named]
                marks = ", ".join(["%s"] * len(row))
                connection.execute(
                    f"INSERT INTO {table.name} ({', '.join(columns)}) VALUES ({marks})", values
                )
        connection.execute("ALTER TABLE statement DROP COLUMN storage_time")
        connection.execute("COMMENT ON TABLE statement IS 'wherry ledger, schema 2'")


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
