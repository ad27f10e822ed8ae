"""An audit while a night registers: a registration in flight is not taken for one that nobody knows."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from tests.support import audit as support
from tests.support.command import typed
from tests.support.ledger import postgres, url
from wherry.auditor import registrations
from wherry.ledger.record import claim_registration, drop_claim, open_ledger, record_registration

__all__ = ["postgres", "url"]

AUDIT = f"audit --registry-uri {support.REGISTRY} --json"


@pytest.fixture
def night(tmp_path, monkeypatch, url, capfd):
    """A night and an audit that meet: `meet(during)` runs the audit, and gives its exit code and findings."""
    monkeypatch.setenv("WHERRY_LEDGER", url)
    versions = []

    def query(during):
        during()  # the audit has read the ledger; the registry answers now
        return list(versions)

    def create(receipt):
        tags = {
            "wherry.checkpoint_digest": receipt.target.checkpoint_digest,
            "wherry.weights_digest": receipt.target.weights_digest,
        }
        versions.append(("model", str(len(versions) + 1), tags, ()))

    def meet(during):
        service = SimpleNamespace(
            registered_versions=lambda *_, **__: query(during), mark_version=lambda *_, **__: None
        )
        monkeypatch.setattr(registrations, "service", lambda _name: service)
        code, printed = typed(AUDIT, tmp_path, capfd)
        return code, {row["kind"] for row in json.loads(printed)["findings"] if row["severity"] != "note"}

    def convert(name="a"):
        return support.converted(tmp_path, name, seed=ord(name))

    return SimpleNamespace(create=create, meet=meet, convert=convert)


def claim(receipt):
    with open_ledger() as ledger:
        claim_registration(ledger, receipt.target, support.REGISTRY, "model")


def record(receipt, version="1"):
    with open_ledger() as ledger:
        record_registration(ledger, receipt.target, support.REGISTRY, "model", version)


def release(receipt):
    with open_ledger() as ledger:
        drop_claim(ledger, receipt.target, support.REGISTRY, "model")


def test_a_checkpoint_that_is_registered_after_the_ledger_was_read_is_no_finding(night):
    receipt = night.convert()

    def register():
        claim(receipt)
        night.create(receipt)
        record(receipt)

    assert night.meet(register) == (0, set())


def test_a_checkpoint_that_is_converted_and_registered_after_the_ledger_was_read_is_no_finding(night):
    night.convert()

    def convert():
        receipt = night.convert("b")
        claim(receipt)
        night.create(receipt)
        record(receipt)

    assert night.meet(convert) == (0, set())


def test_a_version_whose_registration_is_not_yet_recorded_is_no_finding(night):
    receipt = night.convert()

    def begin():
        claim(receipt)
        night.create(receipt)

    assert night.meet(begin) == (0, set())
    code, kinds = night.meet(lambda: None)  # it never went on: one finding says so, not two
    assert (code, kinds) == (0, {"registration-pending"})


def test_a_registration_that_had_begun_and_is_recorded_meanwhile_is_no_finding(night):
    receipt = night.convert()
    claim(receipt)
    night.create(receipt)
    assert night.meet(lambda: record(receipt)) == (0, set())


def test_a_version_that_is_withdrawn_meanwhile_is_no_finding(night):
    receipt = night.convert()
    claim(receipt)
    night.create(receipt)
    assert night.meet(lambda: release(receipt)) == (0, set())


def test_a_version_that_nobody_claims_is_found(night):
    receipt = night.convert()
    night.create(receipt)
    assert night.meet(lambda: None) == (0, {"registration-unknown"})
    assert night.meet(lambda: claim(night.convert("b"))) == (0, {"registration-unknown"})
