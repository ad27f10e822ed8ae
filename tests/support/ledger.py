"""Ledgers for tests: nodes and receipts by name, a ledger with rows in every table, and SQL past its triggers."""

from __future__ import annotations

import hashlib
import itertools
import sqlite3
from contextlib import closing, contextmanager
from dataclasses import replace

import pytest

from tests.support.postgres import new_database, postgres_server
from wherry.core.digest import digits_of
from wherry.core.receipt import CheckpointRef, Receipt
from wherry.ledger.database import LedgerConnection
from wherry.ledger.deliver import record_delivery
from wherry.ledger.record import (
    claim_registration,
    drop_claim,
    open_ledger,
    record_conversion,
    record_event,
    record_registration,
    record_verification,
)

REGISTRY = "https://models.example"
_numbers = itertools.count()


@contextmanager
def watched_queries(watch):
    """Call a function with the text and the parameters of each query that ledgers send while the block runs."""
    real = LedgerConnection.execute

    def execute(connection, query, values):
        watch(query.strip(), values)
        return real(connection, query, values)

    LedgerConnection.execute = execute
    try:
        yield
    finally:
        LedgerConnection.execute = real


def digest(text):
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def node(name, weights="w", **fields):
    return CheckpointRef(
        uri=f"/checkpoints/{name}",
        format="orbax",
        format_version="ocdbt zarr3",
        checkpoint_digest=digest(name),
        weights_digest=digest(weights),
        fingerprint=f"mark of {name}",
        **fields,
    )


def conversion(source, target, **fields):
    return Receipt(
        source=node(source), target=node(target), plan_digest=digits_of(digest(f"{source}{target}")), **fields
    )


def filled(url):
    """A row in every table, and every kind of statement that leaves one."""
    with open_ledger(url) as ledger:
        for source, target in (("a", "b"), ("b", "c"), ("c", "d")):
            record_conversion(ledger, conversion(source, target))
        record_verification(ledger, node("b"), {"level": "digest", "verdict": "ok", "ok": True})
        claim_registration(ledger, node("b"), REGISTRY, "model")
        record_registration(ledger, node("b"), REGISTRY, "model", "1")
        claim_registration(ledger, node("c"), REGISTRY, "model")
        claim_registration(ledger, node("d"), REGISTRY, "model")
        drop_claim(ledger, node("d"), REGISTRY, "model")
        record_event(ledger, "promotion", node("b"), {"name": "model", "version": "1", "alias": "champion"})
        record_event(ledger, "deletion", node("d"), {"reason": "keep_last", "by": "prune"})
        record_event(ledger, "note", None, {"text": "nothing in particular"})
        record_conversion(ledger, replace(conversion("a", "a"), target=replace(node("a"), uri="/elsewhere")))
        record_delivery(ledger, "openlineage", 3)


def run_sql(path, *statements):
    """Run SQL on a file of SQLite, as any program may."""
    with closing(sqlite3.connect(path)) as connection:
        for statement in statements:
            connection.execute(statement)
        connection.commit()


def altered(url, *statements):
    """Run SQL past the triggers, as somebody with the rights of the database's owner would, who puts them back."""
    if url.startswith("postgresql"):
        import psycopg

        with psycopg.connect(url) as connection:
            connection.execute("SET session_replication_role = replica")  # no triggers, no foreign keys
            connection.execute("SET search_path = wherry")
            for statement in statements:
                connection.execute(statement)
        return
    with closing(sqlite3.connect(url.removeprefix("sqlite:///"))) as connection:
        triggers = connection.execute("SELECT name, sql FROM sqlite_master WHERE type = 'trigger'").fetchall()
        for name, _sql in triggers:
            connection.execute(f"DROP TRIGGER {name}")
        for statement in statements:
            connection.execute(statement)
        for _name, sql in triggers:
            connection.execute(sql)
        connection.commit()


@pytest.fixture(scope="module")
def postgres():
    with postgres_server() as url:
        yield url


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request, tmp_path):
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'ledger.db'}"
    return new_database(request.getfixturevalue("postgres"), f"ledger{next(_numbers)}")
