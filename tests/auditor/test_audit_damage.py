"""The audit over time: damage that is remembered, proofs that count, and what proves nothing."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import wherry
from tests.support import audit as support
from wherry.auditor import bytes as audit_bytes
from wherry.auditor.audit import audit
from wherry.auditor.markdown import markdown
from wherry.auditor.report import summary
from wherry.errors import NotFoundError, StorageError, UnsupportedError, missing_extra
from wherry.ledger.record import open_ledger, statements
from wherry.mover.hashing import Failure
from wherry.verifier.native import NoAnswerError
from wherry.verifier.verify import Verification


def only(report, kind):
    [found] = [one for one in report.findings if one.kind == kind]
    return found


@pytest.mark.parametrize(
    "error",
    [
        missing_extra("jax", "jax", "native"),
        UnsupportedError("native libraries can load a checkpoint only from a local file system"),
        NoAnswerError("the native check exited with code -9", retryable=True),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_cannot_be_loaded_here_is_no_damage(tmp_path, monkeypatch, error):
    support.converted(tmp_path)

    def refuse(*_, **__):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(audit_bytes, "verify", refuse)
        report = audit(native_sample=1)
    assert only(report, "native-not-run").what == error.what
    assert (report.ok, report.counts["loaded"]) == (True, 0)
    assert verifications() == []
    assert support.kinds(audit()) == set()


def test_a_format_that_no_library_is_known_for(tmp_path, monkeypatch):
    source, target = support.source(tmp_path), tmp_path / "target"
    wherry.convert(source, target, to="t5x-legacy", options={"rename": "{rest*} -> target/{rest*}"})
    report = audit([target], native_sample=1)
    assert "no native library is known for format t5x-legacy" in only(report, "native-not-run").what
    assert (report.exit_code, report.counts["loaded"]) == (0, 0)
    assert verifications() == []
    assert support.kinds(audit()) == set()
    loaded = []
    monkeypatch.setattr(audit_bytes, "verify", lambda uri, **_: loaded.append(uri) or good(uri))
    for count in (1, 2):
        audit(native_sample=count)
    assert loaded == [str(source), str(source), str(target)], (
        "a sample is of what can be loaded, first of all"
    )


def good(uri):
    return Verification(uri, "native", "ok", checked=1, failed=())


def verifications():
    """The outcomes of verifications that the ledger records."""
    with open_ledger() as ledger:
        return [one.body["verification"] for one in statements(ledger) if one.kind == "verification"]


def test_what_a_library_finds_is_reported(tmp_path, monkeypatch):
    support.converted(tmp_path)
    bad = Verification("u", "native", "altered", checked=1, failed=(Failure("a", "differs"),))
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
    [outcome] = verifications()
    assert outcome["devices"] == report.to_json()["checkpoints"][0]["devices"] == row.devices
    assert f"native: {row.devices}" in markdown(report)
    assert f"1 loaded natively ({row.devices})" in dict(summary(report))["bytes read"]
    assert row.devices


def test_a_changed_source_says_how_to_convert_it_again(tmp_path):
    support.converted(tmp_path)
    support.source(tmp_path, seed=5)
    cure = only(audit(), "source-changed").cure
    support.carried_out(cure)
    assert not only_changed(audit())


def only_changed(report):
    return [one for one in report.findings if one.kind == "source-changed"]


def test_the_same_weights_in_another_container_are_a_cure(tmp_path):
    receipt = support.converted(tmp_path)
    wherry.convert(receipt.target.uri, tmp_path / "tree", to="orbax")
    Path(receipt.source.uri).unlink()
    support.flip(Path(receipt.target.uri))
    cure = only(audit(level="digest"), "altered").cure
    assert f" && wherry convert {tmp_path / 'tree'} {receipt.target.uri} " in cure
    support.carried_out(cure)
    assert wherry.verify(receipt.target.uri, level="digest").ok


def test_the_cure_says_the_options_with_which_it_was_made(tmp_path):
    made = wherry.convert(
        support.source(tmp_path), tmp_path / "a tree", to="orbax",
        options={"split": ".", "ocdbt": "false"}, meta={"team": "audit"},
    )  # fmt: skip
    chunk = next(path for path in Path(made.target.uri).iterdir() if path.name.startswith("layer"))
    shutil.rmtree(chunk)
    cure = audit().findings[0].cure
    for words in ("--set split=. ", "--set ocdbt=false", "--meta team=audit", f"'{tmp_path}/a tree'"):
        assert words in cure, cure
    support.carried_out(cure)
    with wherry.open(made.target.uri) as again:
        assert ("layer", "w") in again.manifest.tensors
    assert audit().ok


def test_the_cure_of_a_lost_copy_cures(tmp_path):
    receipt = support.converted(tmp_path)
    shutil.copytree(wherry.convert(receipt.source.uri, tmp_path / "a", to="orbax").target.uri, tmp_path / "b")
    wherry.convert(tmp_path / "b", tmp_path / "c.npz", to="npz")  # so the ledger has seen the copy
    shutil.rmtree(tmp_path / "a")
    [lost] = [one for one in audit().findings if one.kind == "gone"]
    assert lost.cure == f"fetch the intact copy: wherry fetch {tmp_path / 'b'} {tmp_path / 'a'}"
    wherry.fetch(tmp_path / "b", tmp_path / "a")
    assert audit(level="digest").ok


@pytest.fixture
def keys(tmp_path):
    """Private and public keys by name."""
    pytest.importorskip("cryptography")
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    def make(name):
        private, public = tmp_path / f"{name}.pem", tmp_path / f"{name}.pub"
        key = ec.generate_private_key(ec.SECP256R1())
        private.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        public.write_bytes(
            key.public_key().public_bytes(
                serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
            )
        )
        return str(private), str(public)

    return make


def test_signatures_are_checked_where_there_are_some(tmp_path, keys, monkeypatch):
    from wherry.integrations import signing

    private, public = keys("release")
    other, _ = keys("other")
    signed = wherry.convert(support.source(tmp_path), tmp_path / "signed", to="orbax", sign=private)
    support.converted(tmp_path, "plain", seed=1)
    assert audit(key=public).ok
    assert audit(key=public, level="digest").ok

    (Path(signed.target.uri) / "notes.txt").write_text("added later")
    found = only(audit(key=public), "added")  # from names alone
    assert (found.uri, found.path) == (signed.target.uri, "notes.txt")
    found = only(audit(key=public, level="digest"), "signature")
    assert (found.uri, found.path) == (signed.target.uri, "notes.txt")
    (Path(signed.target.uri) / "notes.txt").unlink()

    signing.sign(signed.target.uri, other)
    assert audit().ok, "without a key signatures are not looked at"
    (tmp_path / "wherry.toml").write_text('[audit]\nkey = "release.pub"\n')
    monkeypatch.setenv("WHERRY_CONFIG", str(tmp_path / "wherry.toml"))
    report = audit()
    assert only(report, "signature").cure
    assert report.exit_code == 9
    with pytest.raises(NotFoundError, match="file not found"):
        audit(key=str(tmp_path / "none.pub"))


def test_a_signature_of_another_checkpoint_is_found(tmp_path, keys):
    private, public = keys("release")
    places = [
        wherry.convert(
            support.source(tmp_path, name, seed), tmp_path / name, to="orbax", sign=private
        ).target.uri
        for seed, name in enumerate(("one", "two"))
    ]
    shutil.copy(Path(places[0]) / "wherry.sig", Path(places[1]) / "wherry.sig")
    found = only(audit(key=public), "signature")
    assert found.uri == places[1]
    assert "signature mismatch: it is for checkpoint " in found.what
