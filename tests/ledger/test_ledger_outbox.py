"""The outbox: a projection takes statements in order, at least once, from where it stood."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.ledger import conversion, digest, filled, node, watched_queries
from wherry.ledger.deliver import cursors, pending, record_delivery, record_failure, rewind
from wherry.ledger.nodes import conversions, digest_at, digests_starting, nodes, present, verifications
from wherry.ledger.record import (
    ancestors,
    check_chain,
    claim_registration,
    descendants,
    head,
    open_ledger,
    record_conversion,
    record_event,
    record_registration,
    record_verification,
    statements,
)


@pytest.fixture
def ledger(tmp_path):
    with open_ledger(f"sqlite:///{tmp_path / 'ledger.db'}") as opened:
        yield opened


def numbers(ledger, name, **which):
    return [one.seq for one in pending(ledger, name, **which)]


def test_a_cursor_moves_forward_and_keeps_its_failure(ledger):
    for number in range(4):
        record_event(ledger, "note" if number else "audit", None, {"number": number})
    assert cursors(ledger) == []
    assert numbers(ledger, "events") == [1, 2, 3, 4]
    record_delivery(ledger, "events", 2)
    record_failure(ledger, "events", 3, "nobody listens " + "x" * 5000)
    assert numbers(ledger, "events") == [3, 4]
    [cursor] = cursors(ledger)
    assert (cursor.name, cursor.delivered, cursor.behind) == ("events", 2, 2)
    assert (cursor.failed or "").startswith("statement 3: nobody listens")
    assert len(cursor.failed or "") < 2500
    record_delivery(ledger, "events", 1)  # somebody slower
    assert numbers(ledger, "events") == [3, 4]
    record_delivery(ledger, "events", 4)
    assert cursors(ledger)[0].failed is None
    assert numbers(ledger, "events") == []
    rewind(ledger, "events")
    assert numbers(ledger, "events", kinds={"note"}) == [2, 3, 4]
    assert numbers(ledger, "another") == [1, 2, 3, 4]
    assert check_chain(ledger).altered is None


def test_a_failure_before_the_first_delivery(ledger):
    record_event(ledger, "note", None, {})
    record_failure(ledger, "events", 1, "down")
    assert numbers(ledger, "events") == [1]
    assert check_chain(ledger).altered is None


def test_no_statement_is_skipped_while_others_append(ledger):
    """What a bare counter in a database would get wrong: a number that becomes visible after a higher one."""

    def add(number):
        record_event(ledger, "note", None, {"number": number})

    met: list[int] = []
    with ThreadPoolExecutor(4) as pool:
        waiting = [pool.submit(add, number) for number in range(60)]
        while len(met) < 60:
            for one in pending(ledger, "events"):
                met.append(one.seq)
                record_delivery(ledger, "events", one.seq)
        for one in waiting:
            one.result()
    assert met == list(range(1, 61))


def test_what_a_source_became_is_found_by_place_and_mark(ledger):
    made = conversion(
        "a", "b", options={"scan_layers": True, "chunk": None}, software={"wherry": "9"}, finished="2026"
    )
    record_conversion(ledger, made)
    record_conversion(ledger, conversion("a", "c", lossless=False))
    record_conversion(ledger, conversion("x", "y"))
    state = present(ledger)
    first, second = state.by_source["/checkpoints/a"]["mark of a"]
    assert (first.target_uri, first.target_digest, first.format) == ("/checkpoints/b", digest("b"), "orbax")
    assert first.options == {"scan_layers": True, "chunk": None}
    assert (first.time, first.software, first.lossless, second.lossless) == ("2026", "9", True, False)
    assert [row.target_uri for row in state.conversions if row.source_digest == digest("x")] == [
        "/checkpoints/y"
    ]
    assert {uri: {*marks} for uri, marks in state.by_source.items()} == {
        "/checkpoints/a": {"mark of a"},
        "/checkpoints/x": {"mark of x"},
    }


def test_a_deleted_target_is_known_as_such(tmp_path):
    url = f"sqlite:///{tmp_path / 'filled.db'}"
    filled(url)
    with open_ledger(url) as ledger:
        gone = {row.target_uri: row.gone is not None for row in present(ledger).by_target.values()}
        assert gone == {
            "/checkpoints/b": False,
            "/checkpoints/c": False,
            "/checkpoints/d": True,
            "/elsewhere": False,
        }
        record_conversion(ledger, conversion("c", "d", started="again"))
        assert present(ledger).by_target["/checkpoints/d"].gone is None


QUESTIONS = {
    "append": lambda ledger: record_conversion(ledger, conversion("new", "newer")),
    "append again": lambda ledger: record_conversion(ledger, conversion("a", "b")),
    "verify": lambda ledger: record_verification(ledger, node("a"), {"level": "digest", "ok": True}),
    "claim": lambda ledger: claim_registration(ledger, node("a"), "registry", "model"),
    "register": lambda ledger: record_registration(ledger, node("a"), "registry", "model", "1"),
    "up": lambda ledger: ancestors(ledger, digest("b")),
    "down": lambda ledger: descendants(ledger, digest("a")),
    "nodes": lambda ledger: nodes(ledger, [digest("a"), digest("b")]),
    "place": lambda ledger: digest_at(ledger, "/checkpoints/a"),
    "prefix": lambda ledger: digests_starting(ledger, digest("a")[:8]),
    "verified": lambda ledger: verifications(ledger, digest("a")),
    "statements": lambda ledger: list(statements(ledger, after=1)),
    "some statements": lambda ledger: list(statements(ledger, after=1, kinds=["note", "audit"])),
    "pending": lambda ledger: list(pending(ledger, "events")),
    "delivered": lambda ledger: record_delivery(ledger, "events", 1),
    "head": head,
}


@pytest.mark.parametrize("question", QUESTIONS)
def test_no_question_reads_a_whole_table(ledger, question):
    """Every SELECT and UPDATE that a function sends is explained; only ledgers of a few rows may be scanned."""
    record_conversion(ledger, conversion("a", "b"))
    record_event(ledger, "note", node("a"), {})
    sent: list[tuple[str, object]] = []

    with watched_queries(lambda sql, values: sent.append((sql, values))):
        QUESTIONS[question](ledger)
    queries = [(sql, values) for sql, values in sent if sql.startswith(("SELECT", "WITH", "UPDATE"))]
    assert queries
    with ledger.read() as connection:
        for sql, values in queries:
            plan = connection.rows(f"EXPLAIN QUERY PLAN {sql}", **values)
            steps = [row[3] for row in plan]
            scans = [step for step in steps if step.startswith("SCAN") and not step.startswith("SCAN walk")]
            wide = [
                step for step in scans if "VIRTUAL TABLE" not in step
            ]  # the digests of the question itself
            # The head is the end of the primary key: such a scan stops at its first row.
            assert not wide or (wide == ["SCAN statement"] and sql.endswith("DESC LIMIT 1")), (
                sql,
                steps,
            )
            kinds = [step for step in steps if "statement_kind (kind=?)" in step]
            assert not kinds, "an index on the kind alone finds a third of all statements"


def test_asking_for_a_whole_night_is_one_query(ledger):
    for number in range(5):
        record_conversion(ledger, conversion(f"s{number}", f"t{number}"))
    sent: list[str] = []
    with watched_queries(lambda sql, _values: sent.append(sql)):
        assert len(conversions(ledger)) == 5
    assert len([sql for sql in sent if sql.startswith("SELECT")]) == 1
    assert not [sql for sql in sent if "statement.body" in sql]
