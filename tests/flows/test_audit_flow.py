"""The audit flow against a real (temporary) Prefect server: report, evidence, message, and how it fails."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import audit as support
from wherry.errors import MismatchError, UsageError
from wherry.prove.bundle import check_bundle

pytest.importorskip("prefect")

from prefect.blocks.abstract import NotificationBlock
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId

from wherry.flows.audit import AuditSpec, audit, say
from wherry.nightly import notify
from wherry.nightly.ending import Ending
from wherry.tasks.notify import tell

pytestmark = [pytest.mark.server]
MESSAGES: list[tuple[str, str | None]] = []


class Megaphone(NotificationBlock):
    """A block that keeps the messages that it gets."""

    async def notify(self, body: str, subject: str | None = None) -> None:
        MESSAGES.append((body, subject))


@pytest.fixture
def team(server, monkeypatch):
    """A block through which every notification goes."""
    Megaphone().save("team", overwrite=True)
    monkeypatch.setenv("WHERRY_NOTIFY_BLOCK", "megaphone/team")
    MESSAGES.clear()


def artifacts(flow_run_id):
    with get_client(sync_client=True) as client:
        chosen = ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[flow_run_id]))
        return {row.key: row for row in client.read_artifacts(artifact_filter=chosen)}


def test_a_sound_store_and_then_a_flipped_bit(team, tmp_path):
    receipt = support.converted(tmp_path)
    evidence = tmp_path / "evidence"
    evidence.mkdir()
    state = audit(AuditSpec(level="digest", bundle=str(evidence)), return_state=True)
    assert state.is_completed(), state.message
    assert state.result()["counts"]["read"] == 2
    assert MESSAGES == [], "nothing is wrong, and notify.on is failure"
    [bundle] = evidence.iterdir()
    assert check_bundle(bundle).ok

    support.flip(Path(receipt.target.uri))
    state = audit(AuditSpec(scope="roots", roots=(str(tmp_path),), level="digest"), return_state=True)
    assert state.is_failed()
    error = state.result(raise_on_failure=False)
    assert isinstance(error, MismatchError)
    assert (error.path, error.uri) == ("step", receipt.target.uri)
    report = artifacts(state.state_details.flow_run_id)["wherry-audit-report"].data
    assert "### 1. altered\n" in report
    [(body, subject)] = MESSAGES
    assert subject == "wherry audit: 1 error and 0 warnings"
    assert "first error: " in body
    assert "cure: move it away and convert again" in body
    assert str(state.state_details.flow_run_id) in body, "the link to the run"


def test_an_audit_that_cannot_be_done_is_reported(team, tmp_path):
    state = audit(AuditSpec(scope="roots", roots=(str(tmp_path / "none"),)), return_state=True)
    assert state.is_failed()
    assert "failed to run" in MESSAGES[0][0]


def test_a_container_whose_ledger_dies_with_it_is_refused(team, monkeypatch):
    monkeypatch.setenv("WHERRY_WORKER", "kubernetes")
    state = audit(AuditSpec(), return_state=True)
    error = state.result(raise_on_failure=False)
    assert isinstance(error, UsageError)
    assert "not shared with the workers of a kubernetes pool: ledger sqlite" in error.what
    assert "WHERRY_LEDGER" in MESSAGES[0][0]


def test_other_blocks_are_refused(team):
    from prefect.blocks.system import Secret

    Secret(value="x").save("plain")
    answer = notify.send(notify.Channels(block="secret/plain"), notify.Notice("t", first_error="e"))
    assert "is not a notification block" in answer
    with pytest.raises(ValueError, match="nobody"):
        tell("megaphone/nobody", "t", "x")


def test_the_form_is_described_and_needs_nothing():
    schema = audit.parameters.model_dump()
    fields = schema["definitions"]["AuditSpec"]["properties"]
    assert [name for name, field in fields.items() if not field.get("description")] == []
    assert fields["level"]["enum"] == ["present", "digest"]
    assert schema["required"] == []
    with pytest.raises(ValueError, match="depth"):
        AuditSpec(depth=3)


def test_warnings_fail_it_if_requested():
    from wherry.flows.audit import _first

    row = {"kind": "touched", "severity": "warning", "what": "w", "uri": None, "path": None, "cure": "c"}
    report = {"findings": [row]}
    assert _first(report, "error") is None
    assert _first(report, "native-not-run") is None
    untried = {**row, "kind": "native-not-run"}
    assert _first({"findings": [row, untried]}, "native-not-run") == untried
    wrong = {**row, "kind": "altered", "severity": "error"}
    assert _first({"findings": [wrong, row, untried]}, "native-not-run") == wrong
    assert _first(report, "never") is None
    first = _first(report, "warning")
    counts = dict.fromkeys(("checkpoints", "ok", "errors", "warnings", "notes"), 1)
    bad, good = Ending("audit"), Ending("audit")
    say(bad, {**report, "counts": counts}, first)
    say(good, {**report, "counts": counts}, None)
    assert (bad.first_error, bad.cure, bad.title) == ("w", "c", "wherry audit: 1 error and 1 warning")
    assert (good.first_error, good.counts) == (None, counts)
