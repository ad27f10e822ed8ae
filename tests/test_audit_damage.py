"""The audit over time: damage that is remembered, proofs that count, and what proves nothing."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import wherry
from tests import audit_support as support
from wherry import audit_bytes
from wherry.audit import audit
from wherry.errors import StorageError, missing_extra
from wherry.hashing import Failure
from wherry.verify import Verification


def only(report, kind):
    [found] = [one for one in report.findings if one.kind == kind]
    return found


def test_loading_natively_says_when_it_cannot(tmp_path, monkeypatch):

    support.converted(tmp_path)

    def refuse(*_, **__):
        raise missing_extra("jax", "jax", "native")

    monkeypatch.setattr(audit_bytes, "verify", refuse)
    report = audit(native_sample=1)
    assert "needs the package jax" in only(report, "native-not-run").what
    assert report.ok
    bad = Verification("u", "native", "altered", ok=False, checked=1, failed=(Failure("a", "differs"),))
    monkeypatch.setattr(audit_bytes, "verify", lambda *_, **__: bad)
    report = audit(native_sample=1)
    assert only(report, "not-native").path == "a"
    assert report.counts["loaded"] == 1


def test_damage_is_remembered_until_the_bytes_are_proved_again(tmp_path):
    receipt = support.converted(tmp_path)
    path = Path(receipt.target.uri)
    support.flip(path)
    assert audit(level="digest").exit_code == 9
    remembered = only(audit(), "known-damage")
    assert (remembered.path, remembered.leaf) == ("step", 0)
    assert remembered.cure.startswith("move it away")
    again = audit(level="digest")
    assert [one.kind for one in again.findings if one.severity == "error"] == ["altered"]
    support.flip(path)
    assert not audit().ok, "only its bytes can clear it"
    assert audit(level="digest").ok
    assert support.kinds(audit()) == set()


def test_a_store_that_fails_while_reading_proves_nothing(tmp_path, monkeypatch):
    def fail(*_, **__):
        raise StorageError("storage failed: it went away", retryable=True)

    support.converted(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(audit_bytes, "verify", fail)
        assert "unreachable" in support.kinds(audit(level="digest"))
    assert audit().ok


def test_reading_back_at_the_conversion_counts_as_proof(tmp_path):
    support.converted(tmp_path)
    wherry.convert(tmp_path / "source.npz", tmp_path / "tree", to="orbax", verify="none")
    verified = {Path(row.uri).name: row.verified for row in audit().checkpoints}
    assert verified["source.out"]
    assert not verified["source.npz"]
    report = audit(level="digest", sample="1")
    assert [row.uri for row in report.checkpoints if row.level == "digest"] != [str(tmp_path / "source.out")]


def test_native_loading_for_real(tmp_path):
    pytest.importorskip("safetensors")
    receipt = support.converted(tmp_path)
    report = audit([Path(receipt.target.uri)], native_sample=1)
    [row] = report.checkpoints
    assert (row.level, row.verdict) == ("native", "ok"), report.findings


def test_the_same_weights_in_another_container_are_a_cure(tmp_path):
    receipt = support.converted(tmp_path)
    wherry.convert(receipt.target.uri, tmp_path / "tree", to="orbax")
    Path(receipt.source.uri).unlink()
    support.flip(Path(receipt.target.uri))
    cure = only(audit(level="digest"), "altered").cure
    assert cure.startswith(
        f"move it away and convert again: wherry convert {tmp_path / 'tree'} {receipt.target.uri} "
    )
    Path(receipt.target.uri).rename(tmp_path / "away")
    again = wherry.convert(tmp_path / "tree", receipt.target.uri, to="safetensors")
    assert again.target.weights_digest == receipt.target.weights_digest


def test_the_cure_of_a_lost_copy_cures(tmp_path):
    receipt = support.converted(tmp_path)
    shutil.copytree(wherry.convert(receipt.source.uri, tmp_path / "a", to="orbax").target.uri, tmp_path / "b")
    wherry.convert(tmp_path / "b", tmp_path / "c.npz", to="npz")  # so the ledger has seen the copy
    shutil.rmtree(tmp_path / "a")
    [lost] = [one for one in audit().findings if one.kind == "gone"]
    assert lost.cure == f"fetch the intact copy: wherry fetch {tmp_path / 'b'} {tmp_path / 'a'}"
    wherry.fetch(tmp_path / "b", tmp_path / "a")
    assert audit(level="digest").ok
