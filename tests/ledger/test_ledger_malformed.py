"""Ledgers that somebody else wrote: whatever text stands in a column, each verb has an answer or an error of wherry."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from click.testing import CliRunner

from wherry.cli import cli
from wherry.errors import CorruptError, WherryError
from wherry.ledger.statements import stored_table

GOLDEN = Path(__file__).parents[1] / "golden" / "ledger-4.sql"
TEXTS = ("", "[]", "null", "{", "{}", '{"asked":', '{"verification": 7}', "[" * 9000, b"\0")
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
def altered(tmp_path, monkeypatch):
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
def test_every_verb_has_an_answer_or_an_error_of_wherry(altered, column, text):
    digest, refused = altered(column, text), 0
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
