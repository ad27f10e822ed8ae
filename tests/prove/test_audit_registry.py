"""The registry against the ledger, also while a night registers."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

import wherry
from tests.support import audit as support
from tests.support.command import typed
from tests.support.ledger import postgres, url
from wherry.cli import cli
from wherry.config.settings import mlflow_registry_uri
from wherry.ledger.record import claim_registration, drop_claim, open_ledger, record_registration
from wherry.prove import registrations
from wherry.prove.audit import audit


def row(receipt, name="model", version="1", aliases=(), **tags):
    tags = {
        "wherry.checkpoint_digest": receipt.target.checkpoint_digest,
        "wherry.weights_digest": receipt.target.weights_digest,
        "wherry.uri": receipt.target.uri,
    } | {key.replace("_", ".", 1): value for key, value in tags.items()}
    return (name, version, tags, aliases)


def of(report, kind):
    return [one for one in report.findings if one.kind == kind]


def test_what_agrees_is_quiet(tmp_path, monkeypatch):
    receipt = support.converted(tmp_path)
    support.registered(receipt)
    support.fake_registry(monkeypatch, row(receipt, aliases=("champion",)))
    report = audit("registered", registry_uri=support.REGISTRY)
    assert support.kinds(report) == set()
    assert [one.uri for one in report.checkpoints] == [receipt.target.uri]
    assert (report.registry, report.versions) == (support.REGISTRY, 1)
    assert report.checkpoints[0].models == ("model version 1",)


def test_versions_without_bytes_and_bytes_without_versions(tmp_path, monkeypatch):
    lost, loose = support.converted(tmp_path, "lost"), support.converted(tmp_path, "loose", seed=1)
    support.registered(lost)
    Path(lost.target.uri).unlink()
    support.fake_registry(monkeypatch, row(lost, aliases=("champion", "prod")))
    report = audit(registry_uri=support.REGISTRY)
    [found] = of(report, "registration-without-bytes")
    assert "model version 1 (@champion, @prod)" in found.what
    [note] = of(report, "bytes-without-registration")
    assert (note.uri, note.severity) == (loose.target.uri, "note")
    [gone] = of(report, "gone")
    assert gone.models == ("model version 1",)
    pruned = row(lost, wherry_deleted="2026-11-21")
    support.fake_registry(monkeypatch, pruned)
    assert not of(audit(registry_uri=support.REGISTRY), "registration-without-bytes")


def test_altered_tags_and_versions_that_one_side_lacks(tmp_path, monkeypatch):
    one, other = support.converted(tmp_path), support.converted(tmp_path, "other", seed=1)
    support.registered(one)
    support.fake_registry(monkeypatch, row(one, wherry_weights_digest="0" * 64))
    assert "its weights digest" in of(audit(registry_uri=support.REGISTRY), "registration-altered")[0].what
    support.registered(one, "moved", "4")
    support.fake_registry(monkeypatch, row(one), row(other, "unheard", "2"))
    report = audit(registry_uri=support.REGISTRY)
    assert "unheard version 2" in of(report, "registration-unknown")[0].what
    support.fake_registry(monkeypatch, row(other))
    report = audit(registry_uri=support.REGISTRY)
    assert not report.ok
    foreign = ("x", "1", {"wherry.checkpoint_digest": "f" * 64}, ())
    support.fake_registry(monkeypatch, foreign)
    report = audit(registry_uri=support.REGISTRY)
    assert "which is not in the ledger" in of(report, "registration-unknown")[0].what
    assert {one.what.split(" is not")[0] for one in of(report, "registration-gone")} == {
        "model version 1",
        "moved version 4",
    }


def test_an_alias_on_a_version_that_the_ledger_has_not_registered_is_an_error(tmp_path, monkeypatch):
    one, other = support.converted(tmp_path), support.converted(tmp_path, "other", seed=1)
    support.registered(one)
    moved = row(other, "model", "2", aliases=("champion",))
    support.fake_registry(monkeypatch, row(one), moved)
    report = audit(registry_uri=support.REGISTRY)
    [found] = of(report, "alias-unregistered")
    assert "model version 2 (@champion)" in found.what
    assert "wherry promote" in found.cure
    assert (found.severity, report.exit_code) == ("error", 9)
    support.fake_registry(monkeypatch, row(one), row(other, "model", "2"))
    assert audit(registry_uri=support.REGISTRY).exit_code == 0  # without an alias, nothing is deployed

    swapped = row(other, "model", "1", aliases=("champion",))  # the version exists, with another checkpoint
    support.fake_registry(monkeypatch, swapped)
    assert of(audit(registry_uri=support.REGISTRY), "alias-unregistered")
    bare = (
        "model",
        "3",
        {},
        ("champion",),
    )  # a version without wherry's tags, of a model that the ledger knows
    support.fake_registry(monkeypatch, row(one), bare)
    assert "no checkpoint of wherry" in of(audit(registry_uri=support.REGISTRY), "alias-unregistered")[0].what
    strange = ("another", "3", {}, ("champion",))
    support.fake_registry(monkeypatch, row(one), strange)
    assert audit(registry_uri=support.REGISTRY).exit_code == 0


def test_a_policy_that_permits_unregistered_versions_permits_their_aliases(tmp_path, monkeypatch):
    from wherry.ledger.record import open_ledger, record_event

    one, other = support.converted(tmp_path), support.converted(tmp_path, "other", seed=1)
    support.registered(one)
    support.fake_registry(monkeypatch, row(one), row(other, "model", "2", aliases=("champion",)))

    def promoted(receipt, kind="promotion", **gates):
        body = {"registry": support.REGISTRY, "name": "model", "alias": "champion", "version": "2", **gates}
        with open_ledger() as ledger:
            record_event(ledger, kind, receipt.target, body)

    promoted(other, gates=[{"gate": "level"}, {"gate": "registered"}])
    promoted(one, gates=[{"gate": "level"}])  # of another checkpoint
    promoted(other, "rollback")
    assert of(audit(registry_uri=support.REGISTRY), "alias-unregistered")
    promoted(other, gates=[{"gate": "level"}])
    assert not of(audit(registry_uri=support.REGISTRY), "alias-unregistered")


def test_a_registry_that_cannot_be_queried_is_reported(tmp_path, monkeypatch):
    from wherry.errors import missing_extra
    from wherry.prove import registrations

    def missing(_name):
        raise missing_extra("mlflow", "mlflow", "mlflow")

    receipt = support.converted(tmp_path)
    support.registered(receipt)
    monkeypatch.setattr(registrations, "service", missing)
    report = audit(registry_uri=support.REGISTRY)
    assert "needs the package mlflow" in of(report, "registry-not-compared")[0].what
    Path(receipt.target.uri).unlink()
    assert of(audit(registry_uri=support.REGISTRY), "registration-without-bytes")


def test_a_claim_that_was_never_finished(tmp_path):
    from wherry.ledger.record import claim_registration, open_ledger

    receipt = support.converted(tmp_path)
    with open_ledger() as ledger:
        claim_registration(ledger, receipt.target, support.REGISTRY, "m")
    assert "did not finish" in of(audit(), "registration-pending")[0].what


def test_with_a_real_registry(tmp_path, tmp_path_factory, monkeypatch):
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    monkeypatch.delenv("MLFLOW_REGISTRY_URI", raising=False)
    receipt = support.converted(tmp_path)
    wherry.register(receipt, "m", alias="champion")
    report = audit("registered")
    assert support.kinds(report) == set()
    assert (report.versions, report.registry) == (1, mlflow_registry_uri())
    Path(receipt.target.uri).unlink()
    [found] = of(audit("registered"), "registration-without-bytes")
    assert "m version 1 (@champion)" in found.what


def test_a_moved_alias_of_a_real_registry(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    monkeypatch.delenv("MLFLOW_REGISTRY_URI", raising=False)
    wherry.register(support.converted(tmp_path), "m", alias="champion")
    client = mlflow.MlflowClient(uri, uri)
    forged = client.create_model_version("m", "wherry://elsewhere")
    client.set_registered_model_alias("m", "champion", forged.version)
    found = CliRunner().invoke(cli, ["audit", "--json"])
    assert (found.exit_code, "alias-unregistered" in found.output) == (9, True)


def test_a_thousand_registered_checkpoints_in_a_minute_of_a_processor(tmp_path, monkeypatch):
    nodes = support.many(tmp_path, 1000)
    tags = [
        {"wherry.checkpoint_digest": one.checkpoint_digest, "wherry.weights_digest": one.weights_digest}
        for one in nodes
    ]
    rows = [(f"model-{number % 50}", str(number), one, ()) for number, one in enumerate(tags)]
    support.fake_registry(monkeypatch, *rows)
    clock = time.process_time()
    report = audit("registered", registry_uri=support.REGISTRY, bundle=tmp_path / "evidence.zip")
    seconds = time.process_time() - clock
    assert (len(report.checkpoints), support.kinds(report)) == (1000, set())
    assert seconds < 60, f"{seconds:.1f} s for 1,000 checkpoints"


# An audit while a night registers: a registration in flight is not taken for one that nobody knows.


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
