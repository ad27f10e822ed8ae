"""The golden ledger, as this schema is written: a change of the code that reads it otherwise is a change of schema."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from tests.support import make_golden_ledger as golden
from wherry.ledger import schema as tables
from wherry.ledger.nodes import digest_at, nodes, present
from wherry.ledger.record import ancestors, check_chain, head, open_ledger, record_conversion, statements

FILE = Path(__file__).parents[1] / "golden" / f"ledger-{tables.SCHEMA}.sql"


def restored(file, database):
    with closing(sqlite3.connect(database)) as connection:
        connection.executescript(file.read_text())
        return connection.execute("SELECT * FROM statement ORDER BY seq").fetchall()


@pytest.fixture
def url(tmp_path):
    restored(FILE, tmp_path / "ledger.db")
    return f"sqlite:///{tmp_path / 'ledger.db'}"


def test_it_opens_and_is_whole(url):
    with open_ledger(url) as ledger:
        chain = check_chain(ledger)
        assert (chain.altered, chain.statements) == (None, head(ledger).seq)


def test_the_code_states_the_same(tmp_path):
    golden.main(tmp_path)
    again = restored(tmp_path / FILE.name, tmp_path / "again.db")
    assert again == restored(FILE, tmp_path / "kept.db")
    assert len(again) > 10


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


def test_a_recorded_conversion_is_not_recorded_again(url):
    again = golden.conversion(golden.node("run/100", "t5x", step=100), golden.node("run-orbax", "orbax"), 10)
    with open_ledger(url) as ledger:
        before = len(list(statements(ledger, kinds=["conversion"])))
        assert record_conversion(ledger, again) == 1
        assert len(list(statements(ledger, kinds=["conversion"]))) == before
