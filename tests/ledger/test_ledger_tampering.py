"""Tampering with the ledger, on SQLite and on PostgreSQL: refused by triggers, and past them found and named."""

from __future__ import annotations

import pytest

from tests.support.ledger import REGISTRY, altered, conversion, digest, filled
from wherry.core.units import short
from wherry.errors import StorageError
from wherry.ledger import schema as tables
from wherry.ledger.record import Anchor, check_chain, head, open_ledger, record_conversion, record_event

pytest_plugins = ["tests.support.ledger"]  # its fixtures


@pytest.mark.parametrize(
    "sql",
    [
        "UPDATE {}statement SET body = '{{}}'",
        "DELETE FROM {}edge",
        "DELETE FROM {}statement",
        "TRUNCATE {}statement CASCADE",
        (
            "INSERT INTO {0}statement SELECT seq + 7, hash, 'h', kind, schema, content, body, time, storage_time"
            " FROM {0}statement"
        ),
        (
            "INSERT INTO {0}statement SELECT seq + 1, prev, 'h', kind, schema, content, body, time, storage_time"
            " FROM {0}statement"
        ),
        "INSERT OR REPLACE INTO statement SELECT * FROM statement",
    ],
)
def test_triggers_abort(url, sql):
    postgres = url.startswith("postgresql")
    if ("REPLACE" in sql and postgres) or ("TRUNCATE" in sql and not postgres):
        pytest.skip("the other database has no such statement")
    with open_ledger(url) as ledger:
        record_conversion(ledger, conversion("a", "b"))
        with pytest.raises(StorageError, match="append-only") as refusal, ledger.write() as connection:
            connection.change(sql.format("wherry." if postgres else ""))
        assert not refusal.value.retryable
        assert check_chain(ledger).altered is None


@pytest.mark.parametrize("name", ["statement_no_update", "edge_no_delete", "statement_continues"])
@pytest.mark.parametrize("replaced", [False, True])
def test_a_ledger_without_its_triggers_is_named(tmp_path, name, replaced):
    url = f"sqlite:///{tmp_path / 'ledger.db'}"
    with open_ledger(url) as ledger:
        record_conversion(ledger, conversion("a", "b"))
        assert check_chain(ledger).altered is None
        with ledger.write() as connection:
            connection.change(f"DROP TRIGGER {name}")
            if replaced:
                connection.change(f"CREATE TRIGGER {name} BEFORE UPDATE ON location BEGIN SELECT 1; END")
        assert check_chain(ledger).altered == (
            f"all rows match, but triggers that refuse changes are missing or altered: {name}"
        )


ZERO = "0" * 64


TAMPERINGS = {
    "UPDATE statement SET body = replace(body, 'orbax', 'paxml') WHERE seq = 2": "statement 2: its contents",
    "UPDATE statement SET time = '1999' WHERE seq = 3": "statement 3: its contents",
    "UPDATE statement SET kind = 'note' WHERE seq = 4": "statement 4: its contents",
    "DELETE FROM statement WHERE seq = 2": "statement 3: statement 2 is missing",
    f"UPDATE edge SET source = '{digest('c')}' WHERE statement = 1": "edge",
    "UPDATE edge SET statement = 2 WHERE statement = 1": "edge",
    "DELETE FROM edge WHERE statement = 3": f"edge {short(digest('c'))} → {short(digest('d'))}: the row is missing",
    "UPDATE checkpoint SET nbytes = 1": "checkpoint",
    f"DELETE FROM checkpoint WHERE checkpoint_digest = '{digest('b')}'": "checkpoint",
    f"INSERT INTO checkpoint VALUES ('{ZERO}', '{ZERO}', 'npz', NULL, 'params', 1, 1, 1, 1)": "no statement records it",
    "UPDATE location SET fingerprint = 'another' WHERE uri = '/checkpoints/c'": "/checkpoints/c: the row differs",
    "UPDATE location SET uri = '/moved' WHERE uri = '/checkpoints/c'": "/moved: no statement records it",
    "DELETE FROM location WHERE uri = '/elsewhere'": "/elsewhere: the row is missing",
    "UPDATE conversion SET target_uri = '/moved' WHERE statement = 2": "conversion 2: the row differs",
    "DELETE FROM conversion WHERE statement = 2": "conversion 2: the row is missing",
    "UPDATE verification SET level = 'native'": "verification",
    "DELETE FROM verification": "verification",
    "UPDATE registration SET version = '7' WHERE version = '1'": "registration",
    "UPDATE registration SET state = 'released' WHERE state = 'pending'": "registration",
    "DELETE FROM registration WHERE state = 'pending'": f"{REGISTRY} model: the row is missing",
    "DELETE FROM tombstone": "tombstone",
    "UPDATE tombstone SET time = '1999'": "tombstone",
    "UPDATE projection SET delivered = 99": "projection openlineage: its contents",
}


@pytest.mark.parametrize(("sql", "named"), TAMPERINGS.items())
def test_an_altered_row_of_any_table_is_named(url, sql, named):
    filled(url)
    with open_ledger(url) as ledger:
        assert check_chain(ledger).altered is None
    altered(url, sql)
    with open_ledger(url) as ledger:
        assert named in (check_chain(ledger).altered or "")


def test_every_table_is_tampered_with():
    assert {table for table in tables.NAMES if any(table in sql for sql in TAMPERINGS)} == tables.NAMES


def test_an_anchor_finds_what_the_chain_alone_does_not(url):
    filled(url)
    with open_ledger(url) as ledger:
        kept = head(ledger)
        anchor = Anchor(kept.hash, kept.seq)
        record_event(ledger, "note", None, {"text": "afterwards"})
        chain = check_chain(ledger, anchor)
        assert (chain.anchored, chain.statements) == (kept.seq, kept.seq + 1)
        assert check_chain(ledger, Anchor(kept.hash[:16])).anchored == kept.seq
        assert check_chain(ledger, Anchor(kept.hash, kept.seq - 1)).anchored is None
    last = f"(SELECT max(seq) FROM statement) - {1}"
    altered(
        url, f"DELETE FROM statement WHERE seq >= {last}", "DELETE FROM location WHERE uri = '/elsewhere'"
    )
    altered(url, f"DELETE FROM conversion WHERE statement > {kept.seq - 1}")
    with open_ledger(url) as ledger:
        assert check_chain(ledger, anchor).anchored is None


@pytest.mark.parametrize(
    "sql",
    [
        "DROP TRIGGER edge_no_change ON wherry.edge",
        "ALTER TABLE wherry.edge DISABLE TRIGGER edge_no_change",
        "ALTER TABLE wherry.edge ENABLE REPLICA TRIGGER edge_no_change",  # fires in no ordinary session
        (
            "CREATE OR REPLACE TRIGGER edge_no_change BEFORE DELETE ON wherry.edge FOR EACH ROW "
            "EXECUTE FUNCTION wherry.refuse_change()"
        ),
        (
            "CREATE OR REPLACE TRIGGER edge_no_change BEFORE UPDATE OR DELETE ON wherry.edge FOR EACH ROW "
            "WHEN (false) EXECUTE FUNCTION wherry.refuse_change()"
        ),
        (
            "CREATE OR REPLACE FUNCTION wherry.refuse_change() RETURNS trigger LANGUAGE plpgsql "
            "AS $$ BEGIN RETURN NEW; END $$"
        ),
    ],
)
@pytest.mark.parametrize("url", ["postgresql"], indirect=True)
def test_a_trigger_that_refuses_nothing_more_is_named_on_postgresql(url, sql):
    with open_ledger(url) as ledger:
        record_conversion(ledger, conversion("a", "b"))
        assert check_chain(ledger).altered is None
        with ledger.write() as connection:
            connection.change(sql)
        assert "triggers that refuse changes are missing or altered: " in (check_chain(ledger).altered or "")
        assert "edge_no_change" in (check_chain(ledger).altered or "")


def test_a_number_with_the_same_hash_is_another_number(url):
    """Python's hash of an integer has no key, and is its rest by 2^61 - 1."""
    with open_ledger(url) as ledger:
        record_conversion(ledger, conversion("a", "b"))
        assert check_chain(ledger).altered is None
    altered(url, "UPDATE checkpoint SET nbytes = nbytes + 2305843009213693951")
    with open_ledger(url) as ledger:
        assert "the row differs from its statement" in (check_chain(ledger).altered or "")
