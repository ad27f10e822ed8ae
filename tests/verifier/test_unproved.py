"""The verdict `read` is neither proof nor damage, for whoever asks the ledger about it."""

from __future__ import annotations

import numpy as np
import pytest
from safetensors.numpy import save_file

import wherry
from wherry.auditor.audit import audit
from wherry.errors import MismatchError
from wherry.integrations import openlineage
from wherry.ledger.nodes import verifications
from wherry.ledger.record import open_ledger, statements
from wherry.ledger.replay import has_failed, has_passed
from wherry.lineage.lineage import show
from wherry.lineage.page import totals
from wherry.lineage.text import render
from wherry.watch.metrics import measure


@pytest.fixture
def noted(tmp_path):
    """A file of another tool that was read once, with its outcome in the ledger."""
    file = tmp_path / "foreign.safetensors"
    save_file({"w": np.arange(64, dtype="f4")}, file)
    return wherry.verify(file, level="digest", record=True)


def test_it_is_recorded_as_what_it_is(noted):
    with open_ledger() as ledger:
        outcome = verifications(ledger, noted.subject.checkpoint_digest)["digest"]
    assert (outcome["verdict"], has_passed(outcome), has_failed(outcome)) == ("read", False, False)


def test_an_audit_goes_to_it_first_and_then_it_is_proved(noted, tmp_path):
    wherry.convert(noted.uri, tmp_path / "out", to="orbax")
    [row] = [one for one in audit().checkpoints if one.uri == noted.uri]
    assert (row.verdict, row.verified) == ("ok", None)
    chosen = audit(level="digest", sample="1")
    assert {row.level for row in chosen.checkpoints if row.uri == noted.uri} == {"digest"}
    [row] = [one for one in audit().checkpoints if one.uri == noted.uri]
    assert row.verified is not None


def test_a_policy_does_not_take_it_for_a_verification(noted):
    pytest.importorskip("mlflow")
    wherry.inspect(noted.uri, write=True)
    gates = {"level": "present", "recorded": ["digest"]}
    with pytest.raises(MismatchError, match="recorded: required digest, found read, but not proved"):
        wherry.promote(noted.uri, model="foreign", policy=gates, level="present")
    assert wherry.verify(noted.uri, level="digest", record=True).ok
    assert wherry.promote(noted.uri, model="foreign", policy=gates, level="digest").version == "1"


def test_a_promotion_refuses_a_checkpoint_whose_record_vanishes(noted, monkeypatch):
    from wherry.errors import NotFoundError
    from wherry.models import promote

    monkeypatch.setattr(promote, "verify", lambda *_uri, **_how: noted)
    pytest.importorskip("mlflow")
    wherry.inspect(noted.uri, write=True)
    with pytest.raises(NotFoundError, match="reading it proves nothing"):
        wherry.promote(noted.uri, model="vanishing")


def test_no_failure_is_counted_or_reported(noted):
    rows = [one for one in measure([]) if one.name == "wherry_failures_total"]
    assert {one.value for one in rows} == {0}
    with open_ledger() as ledger:
        events = [event for one in statements(ledger) for event in openlineage.events(one)]
    assert [event["eventType"] for event in events] == ["COMPLETE"]


def test_the_lineage_names_it_and_counts_no_failure(noted):
    tree = show(noted.uri)
    assert "verified at level digest: read" in render(tree)
    assert totals(tree)["failed"] == 0
