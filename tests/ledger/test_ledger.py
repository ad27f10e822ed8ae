"""The ledger, on SQLite and on PostgreSQL: idempotent, append-only, chained, and whole under several processes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.ledger import REGISTRY, conversion, digest, node
from wherry.errors import UsageError
from wherry.ledger.nodes import (
    current_conversions,
    digest_at,
    digests_starting,
    nodes,
    notable,
    standing,
    verifications,
)
from wherry.ledger.record import (
    GENESIS,
    ancestors,
    check_chain,
    claim_registration,
    descendants,
    drop_claim,
    head,
    open_ledger,
    record_conversion,
    record_event,
    record_registration,
    record_sighting,
    record_verification,
    statements,
)
from wherry.ledger.statements import ClockReadings

pytest_plugins = ["tests.support.ledger"]  # its fixtures


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
        assert {place.uri for place in nodes(ledger, [digest("a")])[digest("a")].places} == {
            "/checkpoints/a",
            "/elsewhere",
        }
        assert check_chain(ledger).altered is None


def test_verification_and_registration(url):
    with open_ledger(url) as ledger:
        record_conversion(ledger, conversion("a", "b"))
        record_verification(ledger, node("b"), {"level": "digest", "verdict": "altered", "ok": False})
        record_verification(ledger, node("b"), {"level": "present", "verdict": "ok", "ok": True})
        claim_registration(ledger, node("b"), REGISTRY, "model")
        claim_registration(ledger, node("b"), REGISTRY, "model")
        first = record_registration(ledger, node("b"), REGISTRY, "model", "1")
        assert record_registration(ledger, node("b"), REGISTRY, "model", "1") == first == 5
        claim_registration(ledger, node("b"), REGISTRY, "model")
        drop_claim(ledger, node("b"), REGISTRY, "model")  # it is registered: there is no claim to drop
        [found] = nodes(ledger, [digest("b")]).values()
        [row] = found.registrations
        assert (row.name, row.version, row.state) == ("model", "1", "registered")
        assert found.verified is not None
        assert (found.verified.level, found.verified.verdict) == ("present", "ok")
        assert [(level, one["verdict"]) for level, one in verifications(ledger, digest("b")).items()] == [
            ("digest", "altered"),
            ("present", "ok"),
        ]
        chain = check_chain(ledger)
        assert (chain.statements, chain.altered) == (5, None)
        assert chain.head != GENESIS


def test_a_dropped_claim_is_gone_and_can_be_made_again(url):
    with open_ledger(url) as ledger:
        for _attempt in range(2):
            claim_registration(ledger, node("b"), REGISTRY, "model")
            assert nodes(ledger, [digest("b")])[digest("b")].registrations[0].state == "pending"
            drop_claim(ledger, node("b"), REGISTRY, "model")
            assert nodes(ledger, [digest("b")])[digest("b")].registrations == ()
        assert [one.kind for one in statements(ledger)] == ["claim", "release"] * 2


def test_each_event_is_a_statement_and_a_deletion_marks_the_place(url):
    with open_ledger(url) as ledger:
        record_conversion(ledger, conversion("a", "b"))
        first = record_event(ledger, "audit", None, {"checked": 1})
        assert record_event(ledger, "audit", None, {"checked": 1}) == first + 1
        record_event(ledger, "deletion", node("b"), {"reason": "keep_days", "by": "prune"})
        [place] = nodes(ledger, [digest("b")])[digest("b")].places
        assert place.gone
        assert digest_at(ledger, "/checkpoints/b") == digest("b")
        assert record_sighting(ledger, node("b")) is not None
        assert record_sighting(ledger, node("b")) is None
        [place] = nodes(ledger, [digest("b")])[digest("b")].places
        assert place.gone is None
        [deletion] = statements(ledger, kinds=["deletion"])
        assert deletion.body["uri"] == "/checkpoints/b"
        assert (deletion.body["checkpoint_digest"], deletion.body["reason"]) == (digest("b"), "keep_days")
        record_event(ledger, "deletion", None, {"checkpoint_digest": "0" * 64, "uri": "/never/seen"})
        assert check_chain(ledger).altered is None


def test_an_event_that_says_too_little_is_refused(url):
    with open_ledger(url) as ledger:
        with pytest.raises(UsageError, match="conversion"):
            record_event(ledger, "conversion", node("a"), {})
        with pytest.raises(UsageError, match="must name the deleted checkpoint"):
            record_event(ledger, "deletion", None, {"uri": "/somewhere"})
        assert head(ledger).seq == 0


def test_what_was_seen_last_at_a_place_counts(url):
    with open_ledger(url) as ledger:
        first = conversion("a", "b")
        record_conversion(ledger, first)
        record_conversion(
            ledger, replace(conversion("x", "y"), source=replace(node("x"), uri="/checkpoints/a"))
        )
        assert digest_at(ledger, "/checkpoints/a") == digest("x")
        record_conversion(ledger, first)  # the first run is there again
        assert digest_at(ledger, "/checkpoints/a") == digest("a")
        assert [one.kind for one in statements(ledger)] == ["conversion", "conversion", "sighting"]
        assert check_chain(ledger).altered is None


def test_statements_in_order_by_kind_and_up_to_a_moment(url, monkeypatch):
    ticks = (f"2026-01-0{day}T12:00:00.000+00:00" for day in (1, 2, 5, 4))
    machine = "2026-01-03T12:00:00.000+00:00"
    monkeypatch.setattr(
        "wherry.ledger.statements.plausible_clocks", lambda _connection: ClockReadings(machine, next(ticks))
    )
    with open_ledger(url) as ledger:
        for number in range(4):
            record_event(ledger, "note" if number % 2 else "audit", None, {"number": number})
        every = list(statements(ledger))
        assert [one.seq for one in every] == [1, 2, 3, 4]
        assert [one.storage_time[:10] for one in every[2:]] == ["2026-01-05", "2026-01-04"], "each as it was"
        assert {one.time for one in every} == {machine}
        assert [one.prev for one in every[1:]] == [one.hash for one in every[:-1]]
        assert [one.body["number"] for one in statements(ledger, after=1, kinds={"note"})] == [1, 3]
        assert [one.seq for one in statements(ledger, until="2026-01-02")] == [1, 2]
        assert [one.seq for one in statements(ledger, until="2026-01-02T13:00:00+02:00")] == [1]
        with pytest.raises(UsageError, match="yesterday"):
            list(statements(ledger, until="yesterday"))


def test_statements_come_page_by_page_and_meet_what_is_appended(url, monkeypatch):
    monkeypatch.setattr("wherry.ledger.statements._PAGE", 2)
    with open_ledger(url) as ledger:
        for number in range(5):
            record_event(ledger, "note", None, {"number": number})
        seen = []
        for one in statements(ledger):
            seen.append(one.body["number"])
            if one.seq == 3:
                record_event(ledger, "note", None, {"number": 5})
        assert seen == [0, 1, 2, 3, 4, 5]


def test_digests_are_found_by_their_beginning(url):
    with open_ledger(url) as ledger:
        record_conversion(ledger, conversion("a", "b"))
        assert digests_starting(ledger, digest("a")[:8]) == [digest("a")]
        assert digests_starting(ledger, digest("w")[:8]) == sorted([digest("a"), digest("b")])
        assert digests_starting(ledger, digest("nothing")[:8]) == []


def test_more_nodes_than_one_query_takes(url, monkeypatch):
    monkeypatch.setattr("wherry.ledger.nodes._AT_ONCE", 2)
    with open_ledger(url) as ledger:
        for number in range(3):
            record_conversion(ledger, conversion(f"s{number}", f"t{number}"))
        wanted = {digest(f"{end}{number}") for end in "st" for number in range(3)}
        assert set(nodes(ledger, {*wanted, "0" * 64})) == wanted


def test_the_tables_answer_about_some_checkpoints(url):
    request = {"to": "orbax", "options": {"compression": "zstd", "note": '"requested":{}'}}
    with open_ledger(url) as ledger:
        for number in range(4):
            more = {"requested": request} if number else {}
            record_conversion(ledger, conversion("s", f"t{number}", **more))
        record_registration(ledger, node("t1"), REGISTRY, "model", "1")
        claim_registration(ledger, node("t0"), REGISTRY, "other")
        record_verification(ledger, node("t2"), {"level": "digest", "verdict": "altered", "ok": False})
        record_verification(ledger, node("t3"), {"level": "digest", "verdict": "ok", "ok": True})
        some = {digest(f"t{number}") for number in range(4)} | {digest("unknown")}
        assert notable(ledger, some) == {digest("t1"), digest("t2")}
        places, registrations = standing(ledger, some)
        assert sorted(place.uri for place in places) == [f"/checkpoints/t{number}" for number in range(4)]
        assert sorted((row.name, row.version) for row in registrations) == [("model", "1"), ("other", None)]
        rows = current_conversions(ledger, some)
        assert [(row.target_uri, row.request) for row in rows] == [
            ("/checkpoints/t0", {}),
            *((f"/checkpoints/t{number}", request) for number in (1, 2, 3)),
        ]
        assert rows == current_conversions(ledger)
        assert notable(ledger, set()) == set()
