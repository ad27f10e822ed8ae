"""The ledger: idempotent, append-only, chained, and whole under several processes."""

from __future__ import annotations

import hashlib
import sqlite3
import subprocess
import sys
from dataclasses import replace

import pytest

from wherry.errors import CorruptError, StorageError, UnsupportedError
from wherry.ledger import (
    GENESIS,
    ancestors,
    check_chain,
    claim_registration,
    descendants,
    open_ledger,
    record_conversion,
    record_registration,
    record_verification,
)
from wherry.receipt import CheckpointRef, Receipt


def digest(text):
    return hashlib.sha256(text.encode()).hexdigest()


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
        source=node(source), target=node(target), plan_digest=digest(f"{source}{target}"), **fields
    )


@pytest.fixture
def url(tmp_path):
    return f"sqlite:///{tmp_path / 'ledger.db'}"


def altered(url, statement):
    """Run SQL past the triggers, as somebody with the file would."""
    with sqlite3.connect(url.removeprefix("sqlite:///")) as connection:
        for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'trigger'").fetchall():
            connection.execute(f"DROP TRIGGER {row[0]}")
        connection.execute(statement)
    connection.close()


def test_same_receipt_twice_is_one_statement_and_one_edge(url):
    receipt = conversion("a", "b", seconds=1.5)
    with open_ledger(url) as ledger:
        first = record_conversion(ledger, receipt)
        again = record_conversion(ledger, replace(receipt, already=True, lineage="recorded"))
        assert first == again == 1
        assert [edge.target for edge in descendants(ledger, digest("a"))] == [digest("b")]
        assert check_chain(ledger).statements == 1


def test_a_second_run_of_one_plan_is_a_statement_but_no_second_edge(url):
    with open_ledger(url) as ledger:
        record_conversion(ledger, conversion("a", "b", started="2026-01-01"))
        record_conversion(ledger, conversion("a", "b", started="2026-01-02"))
        assert check_chain(ledger).statements == 2
        assert len(ancestors(ledger, digest("b"))) == 1


def test_up_and_down(url):
    with open_ledger(url) as ledger:
        for source, target in (("a", "b"), ("b", "c"), ("b", "d"), ("x", "d")):
            record_conversion(ledger, conversion(source, target, lossless=source != "x"))
        up = {(edge.source, edge.target): edge.lossless for edge in ancestors(ledger, digest("d"))}
        assert up == {
            (digest("a"), digest("b")): True,
            (digest("b"), digest("d")): True,
            (digest("x"), digest("d")): False,
        }
        assert [edge.target for edge in descendants(ledger, digest("a"))] == [digest(n) for n in "bcd"]
        assert descendants(ledger, digest("c")) == []


def test_round_trip_of_digests_ends(url):
    with open_ledger(url) as ledger:
        record_conversion(ledger, conversion("a", "b"))
        record_conversion(ledger, conversion("b", "a"))
        assert len(ancestors(ledger, digest("a"))) == 2
        assert len(descendants(ledger, digest("a"))) == 2


def test_a_copy_is_a_place_not_an_edge(url):
    with open_ledger(url) as ledger:
        receipt = replace(conversion("a", "a"), target=replace(node("a"), uri="/elsewhere"))
        record_conversion(ledger, receipt)
        assert ancestors(ledger, digest("a")) == []
        assert check_chain(ledger).altered is None


@pytest.mark.parametrize(
    "verb", ["UPDATE statement SET body = '{}'", "DELETE FROM edge", "DELETE FROM statement"]
)
def test_triggers_abort(url, verb):
    with open_ledger(url) as ledger:
        record_conversion(ledger, conversion("a", "b"))
        with pytest.raises(StorageError, match="append-only"), ledger.write() as connection:
            connection.exec_driver_sql(verb)
        assert check_chain(ledger).altered is None


@pytest.mark.parametrize(
    ("statement", "named"),
    [
        (
            "UPDATE statement SET body = replace(body, 'orbax', 'paxml') WHERE seq = 2",
            "statement 2: its contents",
        ),
        ("UPDATE statement SET time = '1999' WHERE seq = 3", "statement 3: its contents"),
        ("DELETE FROM statement WHERE seq = 2", "statement 3: statement 2 before it is gone"),
        (f"UPDATE edge SET source = '{digest('c')}' WHERE statement = 1", "edge"),
        ("DELETE FROM edge WHERE statement = 3", "it is gone"),
    ],
)
def test_an_altered_row_is_named(url, statement, named):
    with open_ledger(url) as ledger:
        for source, target in (("a", "b"), ("b", "c"), ("c", "d")):
            record_conversion(ledger, conversion(source, target))
        assert check_chain(ledger).altered is None
    altered(url, statement)
    with open_ledger(url) as ledger:
        assert named in (check_chain(ledger).altered or "")


def test_verification_and_registration(url):
    with open_ledger(url) as ledger:
        record_conversion(ledger, conversion("a", "b"))
        record_verification(ledger, node("b"), {"level": "digest", "ok": True})
        claim_registration(ledger, node("b"), "sqlite:///m.db", "model")
        first = record_registration(ledger, node("b"), "sqlite:///m.db", "model", "1")
        assert record_registration(ledger, node("b"), "sqlite:///m.db", "model", "1") == first == 3
        with ledger.read() as connection:
            rows = connection.exec_driver_sql("SELECT state, version FROM registration").fetchall()
        assert rows == [("registered", "1")]
        chain = check_chain(ledger)
        assert (chain.statements, chain.altered) == (3, None)
        assert chain.head != GENESIS


APPEND = """
import sys
sys.path.insert(0, {tests!r})
from wherry.ledger import open_ledger, record_verification
from wherry.receipt import CheckpointRef
subject = CheckpointRef("/c", "npz", None, "c" * 64, "d" * 64, "mark")
for number in range(20):
    with open_ledger({url!r}) as ledger:
        record_verification(ledger, subject, {{"worker": sys.argv[1], "number": number}})
"""


def test_several_processes_keep_one_chain(url, tmp_path):
    script = APPEND.format(url=url, tests=str(tmp_path))
    workers = [subprocess.Popen([sys.executable, "-c", script, str(number)]) for number in range(4)]
    assert [worker.wait(timeout=300) for worker in workers] == [0] * 4
    with open_ledger(url) as ledger:
        chain = check_chain(ledger)
        assert (chain.statements, chain.altered) == (80, None)


def test_commits_are_durable(url):
    with open_ledger(url) as ledger, ledger.read() as connection:
        assert connection.exec_driver_sql("PRAGMA journal_mode").scalar() == "wal"
        assert connection.exec_driver_sql("PRAGMA synchronous").scalar() == 2


def test_what_cannot_be_a_ledger_is_refused(tmp_path):
    with (
        pytest.raises(UnsupportedError, match="SQLite") as refusal,
        open_ledger("postgresql://u:secret@h/db"),
    ):
        pass
    assert "secret" not in str(refusal.value)
    (tmp_path / "text.db").write_text("not a database, but long enough to be read as one" * 20)
    with pytest.raises(StorageError, match="ledger"), open_ledger(f"sqlite:///{tmp_path / 'text.db'}"):
        pass
    newer = f"sqlite:///{tmp_path / 'newer.db'}"
    with open_ledger(newer) as ledger, ledger.write() as connection:
        connection.exec_driver_sql("PRAGMA user_version = 99")
    with pytest.raises(CorruptError, match="schema 99"), open_ledger(newer):
        pass
