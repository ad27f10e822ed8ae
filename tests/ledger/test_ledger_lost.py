"""A server that ends in the middle of a transaction: the transaction is made again, and states nothing twice."""

from __future__ import annotations

import pytest

pytest.importorskip("psycopg")

import psycopg

from tests.support.ledger import conversion, node, postgres
from tests.support.postgres import new_database
from wherry.errors import StorageError
from wherry.ledger import record
from wherry.ledger.record import (
    claim_registration,
    open_ledger,
    record_conversion,
    record_event,
    record_registration,
    record_verification,
    statements,
)

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
        before = [one.kind for one in statements(ledger)]
        monkeypatch.setattr(record, "append", losing)
        number = CALLS[kind](ledger)
        assert [one.kind for one in statements(ledger)] == [*before, kind]
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
        assert list(statements(ledger)) == []
