"""Reconciliation: what lies there minus what the ledger has, for every kind of selection and every reason not to."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import save_file

import wherry
from wherry.config.schema import Route
from wherry.ledger.nodes import present
from wherry.ledger.record import open_ledger
from wherry.ledger.replay import ConversionRecord, FailureRecord, LedgerState, ProductNote
from wherry.nightly.night import plan_night
from wherry.nightly.reconcile import estimate, hours, todo
from wherry.nightly.scores import score
from wherry.nightly.survey import survey
from wherry.store.local_store import locate
from wherry.version import __version__


def route(root, out="/out", **fields):
    rule = {"format": "safetensors", "uri": f"{out}/{{name}}.safetensors"}
    targets = fields.pop("targets", [rule])
    return Route(name="r", root=str(root), min_age=0, targets=targets, **fields)


def checkpoint(folder, run, step, **metrics):
    place = folder / run / f"checkpoint-{step}"
    place.mkdir(parents=True)
    save_file({"w": np.ones((8, 4), np.float32)}, place / "model.safetensors")
    if metrics:
        history = [{"loss": 9.0}, metrics]
        (place / "trainer_state.json").write_text(json.dumps({"log_history": history}))
    return place


def taken(where, passed=None):
    omissions = [] if passed is None else passed
    return [(one.where.run, one.where.step) for one in survey(where, on_pass=omissions.append)]


@pytest.fixture
def runs(tmp_path):
    root = tmp_path / "runs"
    for run in ("team/a", "b"):
        for step, loss in ((100, 3.0), (200, 1.0), (300, 2.0)):
            checkpoint(root, run, step, loss=loss, accuracy=step)
    return root


def test_selections(runs):
    assert taken(route(runs)) == [("b", 300), ("team/a", 300)]
    assert taken(route(runs, select="best(loss)")) == [("b", 200), ("team/a", 200)]
    assert taken(route(runs, select="best(accuracy, max)")) == [("b", 300), ("team/a", 300)]
    assert taken(route(runs, select="every 200")) == [("b", 200), ("team/a", 200)]
    assert len(taken(route(runs, select="all"))) == 6
    assert taken(route(runs, runs=["team/*"])) == [("team/a", 300)]
    assert taken(route(runs, formats=["orbax"])) == []
    for place in runs.glob("b/*/*"):
        os.utime(place, (time.time() - 10 * 86400,) * 2)
    since = time.strftime("%Y-%m-%d", time.gmtime(time.time() - 2 * 86400))
    assert {run for run, _step in taken(route(runs, select=f"since {since}"))} == {"team/a"}


def test_the_newest_of_each_run_alone_bears_an_alias(runs):
    newest = [(one.where.run, one.where.step) for one in survey(route(runs, select="all")) if one.newest]
    assert newest == [("b", 300), ("team/a", 300)]
    assert all(one.newest for one in survey(route(runs, select="best(loss)")))


def test_a_target_store_out_of_reach_stops_no_other_route(runs, tmp_path, monkeypatch):
    from wherry.errors import StorageError
    from wherry.nightly import night

    there = night._exists

    def exists(uri):
        if uri.startswith("/far"):
            raise StorageError("it does not answer", uri=uri, retryable=True)
        return there(uri)

    monkeypatch.setattr(night, "_exists", exists)
    far, near = plan_night([route(runs, out="/far"), route(runs, out=str(tmp_path / "near"))], go=True)
    assert far.error.what == "it does not answer"
    assert len(near.works) == 2


def test_a_broken_score_that_only_retention_asks_for_stops_nothing(runs, caplog):
    (runs / "b" / "checkpoint-300" / "trainer_state.json").write_text("[" * 100_000)
    where = route(runs, retention={"keep_best": 1, "metric": "loss"})
    assert {one.where.run: one.score for one in survey(where)} == {"b": None, "team/a": 2.0}
    assert "trainer_state.json exceeds the limit of 200 nested arrays and objects" in caplog.text
    passed = []
    assert taken(route(runs, select="best(loss)"), passed) == [("b", 200), ("team/a", 200)]
    assert [one.why for one in passed if "exceeds the limit" in one.reason] == ["no score"]


def test_what_a_run_states_as_a_whole_is_no_score_of_a_step(runs):
    (runs / "b" / "trainer_state.json").write_text(json.dumps({"log_history": [{"loss": 0.5, "late": 1}]}))
    for step in (100, 200, 300):
        assert score(locate(runs / "b" / f"checkpoint-{step}"), "late") is None
    file = runs / "b" / "step_400.safetensors"
    save_file({"w": np.ones(2, np.float32)}, file)
    assert score(locate(file), "late") is None, "other steps may be next to it"
    (runs / "b" / "checkpoint-100" / "metrics.json").write_text(json.dumps({"huge": 10**400}))
    assert score(locate(runs / "b" / "checkpoint-100"), "huge") is None


def test_omissions_are_reported(runs):
    (runs / "b" / "checkpoint-300" / "model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{}")
    checkpoint(runs, "c", 1)
    passed = []
    assert taken(route(runs, select="best(loss)"), passed)
    reasons = {(one.why, one.uri.removeprefix(str(runs))) for one in passed}
    assert ("no score", "/c/checkpoint-1") in reasons
    assert ("not taken", "/team/a/checkpoint-100") in reasons
    assert any(uri == "/b/checkpoint-300" for _why, uri in reasons)


def test_what_training_exported_is_a_source_and_what_was_converted_is_none(tmp_path):
    """An event may get lost: then the night is all that finds an exported checkpoint."""
    runs, state = tmp_path / "runs", {"w": np.ones((8, 4), np.float32)}
    wherry.export(state, runs / "a" / "checkpoint-7.safetensors", to="safetensors", step=7).result()
    wherry.convert(runs / "a" / "checkpoint-7.safetensors", runs / "b" / "made", to="orbax")
    (plan,) = plan_night([route(runs, out=str(tmp_path / "out"), select="all")], go=True)
    assert [work.source.found.uri for work in plan.works] == [str(runs / "a" / "checkpoint-7.safetensors")]
    assert ("ours", str(runs / "b" / "made")) in [(one.why, one.uri) for one in plan.todo.passed]


def test_scores(tmp_path, corpus):
    place = checkpoint(tmp_path, "r", 1, loss=2.5, eval={"acc": 1})
    assert score(locate(place), "loss") == 2.5
    assert score(locate(place), "eval/acc") == 1.0
    assert score(locate(place), "none") is None
    orbax = corpus / "orbax-0128-manager-best" / "checkpoint" / "run" / "3"
    assert score(locate(orbax / "default"), "loss") == score(locate(orbax), "loss") == 2.0


def converted(candidate, place, **fields):
    row = ConversionRecord(
        target_uri=place, format="safetensors", target_digest="t", plan_digest="p", options={}, time="2026",
        source_uri=candidate.found.uri, source_fingerprint=candidate.fingerprint, source_digest="s", statement=1,
        lossless=True, software="", gone=None,
    )  # fmt: skip
    return replace(row, **fields)


def knowing(*rows, requests=None, **fields):
    notes = {("r", uri): product(uri, request) for uri, request in (requests or {}).items()}
    return LedgerState(conversions=rows, products=notes, **fields)


def product(uri, request="q"):
    return ProductNote(1, "r", uri, request, committed=uri, run="a", step=1, score=None)


@pytest.fixture
def one(tmp_path):
    checkpoint(tmp_path / "runs", "a", 1)
    way = route(tmp_path / "runs")
    (found,) = survey(way)
    return way, found, "/out/a/checkpoint-1.safetensors"


def standing(way, found, facts, *, there=True, **fields):
    rest = todo(way, [found], facts, exists=lambda _uri: there, **fields)
    return [work.reasons[0] for work in rest.works] or [row.why for row in rest.passed]


def test_every_standing_of_a_target(one):
    way, found, place = one
    done = converted(found, place)
    assert standing(way, found, LedgerState(), there=False) == ["new"]
    assert standing(way, found, knowing(done, requests={place: _request(way)})) == ["done"]
    (unfinished,) = standing(way, found, knowing(done))
    assert "did not finish" in unfinished, "made, but never verified and registered"
    assert standing(way, found, knowing(done), there=False) == ["its target no longer exists"]
    assert standing(way, found, knowing(replace(done, gone="2026")), there=False) == ["pruned"]
    assert standing(way, found, knowing(replace(done, source_fingerprint="old"))) == ["stale"]
    assert standing(way, found, knowing(done, requests={place: "another"})) == ["stale"]
    failed = {
        (found.found.uri, found.fingerprint, __version__): {
            _request(way): FailureRecord("it is full of holes", "CorruptError")
        }
    }
    assert standing(way, found, LedgerState(failures=failed), there=False) == ["failed"]
    assert standing(way, found, LedgerState(failures=failed), there=False, retry_failed=True) == ["new"]
    nameless = replace(found, where=replace(found.where, step=None))
    blocked = route(way.root, targets=[{"format": "safetensors", "uri": "/out/{step}"}])
    assert standing(blocked, nameless, LedgerState()) == ["blocked"]


def _request(way):
    from wherry.nightly.routes import request_of

    return request_of(way, way.targets[0])


def test_a_request_changes_with_what_decides_and_not_with_the_place(one):
    way, _found, _place = one
    base = way.targets[0]
    assert _request(way) != _request(
        way.model_copy(update={"targets": (base.model_copy(update={"dtype": "bfloat16"}),)})
    )
    assert _request(way) == _request(
        way.model_copy(update={"targets": (base.model_copy(update={"uri": "/x/{name}"}),)})
    )


def test_limits_and_estimates(tmp_path):
    for step in range(1, 6):
        checkpoint(tmp_path / "runs", "a", step)
    way = route(tmp_path / "runs", select="all", max_items=2, first_night_items=3)
    found = survey(way)
    rest = todo(way, found, LedgerState(), exists=lambda _uri: False)
    assert [work.source.where.step for work in rest.works] == [5, 4]
    assert (rest.count, len(rest.waiting)) == (5, 3)
    assert rest.nbytes == sum(one.nbytes for one in found)
    assert "5 checkpoints are waiting" in estimate(rest, LedgerState(), way)
    assert estimate(rest, knowing(requests={"/t": "q"}), way) is not None, "`first` was decided by todo"
    assert estimate(replace(rest, first=False), LedgerState(), way) is None
    assert estimate(rest, LedgerState(), way.model_copy(update={"first_night": "convert"})) is None
    assert hours(rest, LedgerState(rate=rest.nbytes / 3600), way) == pytest.approx(0.5)
    small = way.model_copy(update={"max_items": None, "max_bytes": "1B"})
    assert len(todo(small, found, LedgerState(), exists=lambda _uri: False).works) == 1, (
        "one larger than a night goes alone"
    )
    pair = way.model_copy(update={"max_items": None, "max_bytes": f"{2 * found[0].nbytes}B"})
    assert len({one.nbytes for one in found}) == 1
    assert len(todo(pair, found, LedgerState(), exists=lambda _uri: False).works) == 2


def test_a_night_of_ten_thousand_is_subtracted_quickly(one):
    way, found, _place = one
    many = [replace(found, fingerprint=str(number)) for number in range(10_000)]
    rows = [converted(item, "/out/a/checkpoint-1.safetensors") for item in many]
    start = time.process_time()
    noted = {"/out/a/checkpoint-1.safetensors": _request(way)}
    rest = todo(way, many, knowing(*rows, requests=noted), exists=lambda _uri: True)
    assert not rest.works
    assert time.process_time() - start < 10


def test_known_reads_notes_of_the_ledger():
    from wherry.ledger.record import record_event

    made = {"about": "route", "route": "r", "request": "q", "target": "/t"}
    failed = {
        "about": "failure", "route": "r", "source": "/s", "fingerprint": "f", "requests": ["q"], "error": "e",
        "kind": "CorruptError", "wherry": __version__,
    }  # fmt: skip
    with open_ledger() as ledger:
        for body in (made, failed, {**failed, "fingerprint": "g", "wherry": "0.0.1"}, {"text": "somebody's"}):
            record_event(ledger, "note", None, body)
        facts = present(ledger)
    assert facts.requests == {"/t": "q"}
    assert [name for name, _target in facts.products] == ["r"]
    assert facts.failures == {
        ("/s", "f", __version__): {"q": FailureRecord("e", "CorruptError")},
        ("/s", "g", "0.0.1"): {"q": FailureRecord("e", "CorruptError")},
    }, "each by the version that failed"
    assert facts.rate is None
