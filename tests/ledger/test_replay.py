"""The replay of the chain says what the tables say, at every moment that the ledger has been through."""

from __future__ import annotations

import inspect
import sqlite3
from contextlib import closing
from dataclasses import asdict, fields, replace
from pathlib import Path

import pytest

from tests.support.ledger import REGISTRY, conversion, digest, filled, node, postgres
from tests.support.postgres import new_database
from wherry.ledger import check, deliver, record
from wherry.ledger import nodes as queries
from wherry.ledger import replay as fold
from wherry.ledger import statements as chain
from wherry.ledger.nodes import conversions, digest_at, nodes, present
from wherry.ledger.record import (
    claim_registration,
    drop_claim,
    head,
    open_ledger,
    record_conversion,
    record_event,
    record_sighting,
    record_verification,
)
from wherry.ledger.replay import (
    FAILURE,
    PRODUCT,
    READ,
    SEEN,
    WRITTEN,
    CheckpointRecord,
    FailureRecord,
    replay,
)
from wherry.ledger.statements import ClockReadings

__all__ = ["postgres"]

GOLDEN = sorted((Path(__file__).parents[1] / "golden").glob("ledger-*.sql"))
_FAILED = {
    "about": FAILURE, "source": "/s", "fingerprint": "f", "requests": ["q", "p"], "error": "e", "kind": "k",
    "wherry": "1",
}  # fmt: skip


def lived(url):
    """A ledger in which places change hands, die and come back, and damage is found and mended."""
    filled(url)
    with open_ledger(url) as ledger:
        record_sighting(ledger, node("d"))  # it was deleted
        record_sighting(ledger, replace(node("x"), uri="/checkpoints/a"))
        record_verification(ledger, node("b"), outcome("b", ok=False, failed=[{"path": "w", "leaf": 3}]))
        record_verification(ledger, node("c"), outcome("c", ok=False))
        record_verification(ledger, node("c"), outcome("c", ok=True))
        record_conversion(ledger, conversion("a", "c", requested={"to": "orbax"}, options={"split": "."}))
        record_conversion(ledger, conversion("c", "a", seconds=2.0, bytes_read=300, lossless=False))
        claim_registration(ledger, node("a"), REGISTRY, "model")
        drop_claim(ledger, node("a"), REGISTRY, "model")
        for request in ("old", "new"):
            record_event(ledger, "note", None, made("r", "/checkpoints/b", request))
        record_event(ledger, "note", None, made("s", "/checkpoints/b", "last"))
        for error in ("e", "later"):
            record_event(ledger, "note", None, {**_FAILED, "error": error})
        record_event(ledger, "note", None, {"about": PRODUCT, "words": "of somebody else"})
        record_event(ledger, "note", None, {"about": FAILURE, "source": "/x"})
        record_event(ledger, "deletion", node("b"), {"reason": "keep_last"})


def outcome(name, *, ok, failed=()):
    verdict = "ok" if ok else "altered"
    return {
        "uri": f"/checkpoints/{name}", "level": "digest", "verdict": verdict, "ok": ok,
        "tensors": {"checked": 1, "failed": list(failed)},
    }  # fmt: skip


def made(route, target, request):
    return {
        "about": PRODUCT, "route": route, "request": request, "target": target, "committed": target, "source": "/s",
        "run": "a", "step": 7, "format": "orbax", "score": None,
    }  # fmt: skip


@pytest.fixture(params=["lived", *GOLDEN], ids=lambda param: getattr(param, "stem", param))
def ledger(request, tmp_path):
    database = tmp_path / "ledger.db"
    if request.param == "lived":
        lived(f"sqlite:///{database}")
    else:
        with closing(sqlite3.connect(database)) as connection:
            connection.executescript(request.param.read_text())
    with open_ledger(f"sqlite:///{database}") as opened:
        yield opened


@pytest.fixture
def state(tmp_path):
    lived(f"sqlite:///{tmp_path / 'ledger.db'}")
    with open_ledger(f"sqlite:///{tmp_path / 'ledger.db'}") as opened:
        return replay(opened)


def test_it_says_what_the_tables_say(ledger):
    state, last = replay(ledger), head(ledger)
    known = nodes(ledger, state.checkpoints)
    assert (state.statements, state.head, state.time) == (last.seq, last.hash, last.time)
    assert {*known} == {*state.checkpoints}
    for one, node_ in known.items():
        own = {field.name: getattr(node_, field.name) for field in fields(CheckpointRecord)}
        assert asdict(state.checkpoints[one]) == own
        replayed = [row for row in state.registrations.get(one, []) if row.state != "released"]
        assert sorted(replayed, key=str) == sorted(node_.registrations, key=str)
        there = {row.uri for row in node_.places if row.gone is None and digest_at(ledger, row.uri) == one}
        assert {row.uri for row in state.living(one)} == there
        for row in node_.places:
            if row.uri in there:
                assert replace(state.places[row.uri], role=SEEN) == row
    bare = [replace(one, request={}, seconds=0.0, bytes_read=0) for one in state.conversions]
    assert tuple(bare) == conversions(ledger)
    now = present(ledger)
    assert (now.requests, now.products, now.failures) == (state.requests, state.products, state.failures)
    assert now.rate == state.rate


def test_as_of_a_moment_it_says_what_it_said_then(tmp_path, monkeypatch):
    """Replaying a beginning of the chain is replaying the ledger as it was."""
    ticks = (f"2026-11-02T00:{n // 60:02}:{n % 60:02}.000+00:00" for n in range(3600))
    monkeypatch.setattr(
        "wherry.ledger.statements.plausible_clocks", lambda _connection: ClockReadings(*[next(ticks)] * 2)
    )
    url, then = f"sqlite:///{tmp_path / 'ledger.db'}", {}
    for number in range(6):
        with open_ledger(url) as ledger:
            record_conversion(ledger, conversion("a", f"t{number}"))
            record_verification(ledger, node("a"), outcome("a", ok=number % 2 == 0))
            record_event(ledger, "deletion", node(f"t{number // 2}"), {})
            then[head(ledger).time] = replay(ledger)
    with open_ledger(url) as ledger:
        for moment, state in then.items():
            assert replay(ledger, until=moment) == state


def test_a_place_has_the_role_of_what_was_done_there(tmp_path):
    with open_ledger(f"sqlite:///{tmp_path / 'ledger.db'}") as ledger:
        record_conversion(ledger, conversion("a", "b"))
        record_conversion(ledger, conversion("b", "c"))
        record_sighting(ledger, replace(node("x"), uri="/checkpoints/c"))
        record_verification(ledger, node("z"), outcome("z", ok=True))
        roles = {
            uri.removeprefix("/checkpoints/"): place.role for uri, place in replay(ledger).places.items()
        }
    assert roles == {"a": READ, "b": WRITTEN, "c": SEEN, "z": SEEN}, "what was written and then read stays so"


def test_damage_is_remembered_until_its_bytes_are_proved(state):
    assert {*state.damaged} == {(digest("b"), "/checkpoints/b")}
    [damage] = state.damaged.values()
    assert (damage.verdict, damage.reason, damage.path, damage.leaf) == (
        "altered",
        "verification failed",
        "w",
        3,
    )
    assert {digest("b"), digest("c")} == {*state.proved}


def test_the_last_note_of_a_target_counts_and_other_notes_do_not(state):
    assert state.requests == {"/checkpoints/b": "last"}
    assert {key: note.request for key, note in state.products.items()} == {
        ("r", "/checkpoints/b"): "new",
        ("s", "/checkpoints/b"): "last",
    }
    assert state.failures == {("/s", "f", "1"): dict.fromkeys("qp", FailureRecord("later", "k"))}


def test_conversions_are_found_from_both_ends(state):
    last = state.between[digest("a"), digest("c")]
    assert (last.request, last.options, last.lossless) == ({"to": "orbax"}, {"split": "."}, True)
    assert state.children[digest("a")] == [digest("b"), digest("c")]
    assert state.parents[digest("c")] == [digest("b"), digest("a")]
    assert digest("a") not in state.children[digest("a")], "a copy is the same checkpoint"
    assert state.by_target["/checkpoints/b"].gone is not None
    assert state.by_target["/checkpoints/d"].gone is None, "it was seen again"
    assert state.rate == 150


def test_a_string_that_occurs_again_is_held_once(state):
    first, second = (one for one in state.conversions if one.target_digest == digest("c"))
    assert first.target_digest is second.target_digest
    assert first.target_uri is state.places[first.target_uri].uri
    assert state.conversions[0].options is state.conversions[1].options


SOME = [digest(name) for name in "abcdx"]
QUERIES = {
    "ancestors": lambda ledger: record.ancestors(ledger, digest("c")),
    "check_chain": check.check_chain,
    "conversions": conversions,
    "conversions_to": lambda ledger: record.conversions_to(ledger, digest("c")),
    "current_conversions": lambda ledger: [
        queries.current_conversions(ledger, some) for some in (None, SOME[:2], [])
    ],
    "cursors": lambda ledger: [(one.name, one.delivered, one.behind) for one in deliver.cursors(ledger)],
    "descendants": lambda ledger: record.descendants(ledger, digest("a")),
    "digest_at": lambda ledger: [digest_at(ledger, f"/checkpoints/{name}") for name in "abcdxyz"],
    "digests_starting": lambda ledger: queries.digests_starting(ledger, digest("w")[:10]),
    "every_digest": lambda ledger: sorted(queries.every_digest(ledger)),
    "families_and_read_backs": queries.families_and_read_backs,
    "has_conversion": lambda ledger: record.has_conversion(ledger, conversion("a", "b")),
    "head": head,
    "nodes": lambda ledger: nodes(ledger, SOME),
    "notable": lambda ledger: queries.notable(ledger, SOME),
    "statements_of": lambda ledger: list(chain.statements_of(ledger, [1, 3, 4, 10**6])),
    "pending": lambda ledger: list(deliver.pending(ledger, "openlineage", kinds=["note"])),
    "present": present,
    "referenced_nodes": lambda ledger: queries.referenced_nodes(ledger, SOME),
    "replay": replay,
    "require_agreement": check.require_agreement,
    "standing": lambda ledger: queries.standing(ledger, SOME),
    "statements": lambda ledger: list(chain.statements(ledger, after=2, kinds=["note", "conversion"])),
    "verifications": lambda ledger: queries.verifications(ledger, digest("b")),
    "versions_in": lambda ledger: record.versions_in(ledger, "model", REGISTRY),
}
WRITING = ("record_", "claim_", "drop_", "rewind")


def test_each_query_says_the_same_on_both_databases(postgres, tmp_path, monkeypatch):
    urls, said = (f"sqlite:///{tmp_path / 'ledger.db'}", new_database(postgres, "queries")), []
    for url in urls:
        ticks = (f"2025-11-02T00:{n // 60:02}:{n % 60:02}.000+00:00" for n in range(3600))
        with monkeypatch.context() as patch:
            patch.setattr(chain, "plausible_clocks", lambda _, now=ticks: ClockReadings(*[next(now)] * 2))
            lived(url)
            with open_ledger(url) as ledger:
                family = conversion("c", "e", family="llama", verification={"level": "digest", "ok": True})
                record_conversion(ledger, family)
        with open_ledger(url) as ledger:
            said.append({name: query(ledger) for name, query in QUERIES.items()})
    assert {name for name, answer in said[0].items() if answer in (None, [], {}, 0)} <= {"require_agreement"}
    assert said[0]["check_chain"].altered is None
    assert said[0]["families_and_read_backs"][0] == dict.fromkeys((digest("c"), digest("e")), "llama")
    assert {*said[0]["families_and_read_backs"][1]} == {(digest("e"), "/checkpoints/e")}
    for name in said[0]:
        assert said[0][name] == said[1][name], name


def test_every_query_of_the_ledger_is_compared():
    found = {
        name
        for module in (check, deliver, queries, record, fold, chain)
        for name, one in vars(module).items()
        if inspect.isfunction(one)
        and one.__module__ == module.__name__
        and not name.startswith(("_", *WRITING))
        and next(iter(inspect.signature(one).parameters), "") == "ledger"
    }
    assert found == {*QUERIES}
