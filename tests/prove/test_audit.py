"""The audit: what it finds, where, what it says to do about it, and what it remembers."""

from __future__ import annotations

import json
import shutil
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from safetensors.numpy import save_file

import wherry
from tests.support import audit as support
from tests.support.forms import names_for, options_for
from tests.support.registry import model_folder
from tests.support.variants import WRITTEN
from wherry.cli import cli
from wherry.core.receipt import utc_now
from wherry.errors import (
    IncompleteError,
    NotACheckpointError,
    NotFoundError,
    StorageError,
    TargetExistsError,
    UnsupportedError,
    UsageError,
    missing_extra,
)
from wherry.ledger.record import check_chain, open_ledger, record_event, statements
from wherry.mover.hashing import Failure
from wherry.prove import bytes as audit_bytes
from wherry.prove import markdown as module
from wherry.prove.audit import audit
from wherry.prove.markdown import markdown
from wherry.prove.native import NoAnswerError
from wherry.prove.report import AffectedCheckpoint, AuditReport, ChainProof, CheckpointAudit, Finding, summary
from wherry.prove.verify import Verification
from wherry.store.local_store import locate
from wherry.store.sidecar import sidecar_location


def only(report, kind):
    [found] = [one for one in report.findings if one.kind == kind]
    return found


def test_what_is_intact_is_fine_at_every_depth(tmp_path):
    support.converted(tmp_path)
    report = audit()
    assert (report.ok, support.kinds(report), report.exit_code) == (True, set(), 0)
    assert {(row.role, row.verdict, row.level) for row in report.checkpoints} == {
        ("read", "ok", "present"),
        ("written", "ok", "present"),
    }
    deep = audit(level="digest")
    assert {row.verdict for row in deep.checkpoints} == {"ok"}
    assert {row.level for row in deep.checkpoints} == {"digest"}
    assert deep.counts["read"] == 2


def test_a_flipped_bit_is_named_with_tensor_leaf_cure_and_what_was_made_of_it(tmp_path):
    first = support.converted(tmp_path)
    second = wherry.convert(first.target.uri, tmp_path / "second", to="orbax")
    support.registered(second, "derived", "7")
    support.flip(Path(first.target.uri))
    assert audit().ok, "metadata cannot see it: size and time are as they were"
    report = audit(level="digest")
    found = only(report, "altered")
    assert (found.uri, found.path, found.leaf) == (first.target.uri, "step", 0)
    assert "(first difference in leaf 0), in the 4 MiB from byte 0" in found.what
    target = first.target.uri
    sidecar = sidecar_location(locate(target)).path
    assert found.cure.startswith(
        f"move it away and convert again: mv {target} {target}.damaged && mv {sidecar} {sidecar}.damaged && "
        f"wherry convert {first.source.uri} {target} "
    )
    [affected] = found.affected
    assert affected.checkpoint_digest == second.target.checkpoint_digest
    assert affected.models == ("derived version 7",)
    assert affected.uris == (second.target.uri,)
    assert report.exit_code == 9
    with open_ledger() as ledger:
        [*_, outcome] = [
            one
            for one in statements(ledger)
            if one.kind == "verification" and not one.body["verification"]["ok"]
        ]
    assert outcome.body["verification"]["tensors"]["failed"][0]["path"] == "step"


def test_an_intact_copy_is_the_first_cure(tmp_path):
    receipt = support.converted(tmp_path)
    copy = tmp_path / "copy"
    shutil.copy(receipt.target.uri, copy)
    shutil.copy(sidecar_location(locate(receipt.target.uri)).path, sidecar_location(locate(copy)).path)
    wherry.convert(copy, tmp_path / "third", to="npz")  # so the ledger has seen the copy
    support.flip(Path(receipt.target.uri))
    found = only(audit(level="digest"), "altered")
    assert found.cure.startswith(
        f"move it away and fetch the intact copy: mv {receipt.target.uri} {receipt.target.uri}.damaged && "
    )
    assert found.cure.endswith(f" && wherry fetch {copy} {receipt.target.uri}")
    support.carried_out(found.cure)
    assert audit(level="digest").ok


def test_without_any_source_the_cure_is_a_backup(tmp_path):
    receipt = support.converted(tmp_path)
    Path(receipt.source.uri).unlink()
    Path(receipt.target.uri).unlink()
    report = audit()
    assert support.kinds(report) == {"gone", "source-gone"}
    assert "backup" in only(report, "gone").cure
    assert report.exit_code == 5


def test_a_source_that_was_converted_has_its_own_bytes_proved(tmp_path):
    save_file({"w": np.ones((4, 4))}, tmp_path / "plain.safetensors")
    receipt = wherry.convert(tmp_path / "plain.safetensors", tmp_path / "out", to="npz")
    support.flip(Path(receipt.source.uri))
    assert support.kinds(audit()) == set()
    report = audit(level="digest")
    assert "digest mismatch in its tensors: expected checkpoint " in only(report, "source-changed").what


def test_touched_files_are_settled_by_their_bytes(tmp_path):
    receipt = support.converted(tmp_path)
    Path(receipt.target.uri).touch()
    report = audit()
    assert support.kinds(report) == {"touched"}
    assert report.ok
    assert support.kinds(audit(level="digest")) == set()
    assert support.kinds(audit()) == set(), "the proof was recorded with the new times"


def test_missing_chunks_and_companions(tmp_path):
    receipt = support.converted(tmp_path, to="orbax")
    for chunk in [path for path in Path(receipt.target.uri).rglob("d/*") if path.is_file()]:
        chunk.unlink()
    report = audit()
    assert "incomplete" in support.kinds(report) or "corrupt" in support.kinds(report)
    assert report.exit_code == 5


def test_a_swapped_checkpoint_and_a_forged_sidecar(tmp_path):
    receipt = support.converted(tmp_path)
    other = support.converted(tmp_path, "other", seed=1)
    here, there = (sidecar_location(locate(one.target.uri)).path for one in (receipt, other))
    shutil.copy(other.target.uri, receipt.target.uri)
    shutil.copy(there, here)
    report = audit()
    assert only(report, "replaced").uri == receipt.target.uri
    data = json.loads(Path(here).read_text())
    data["checkpoint"]["checkpoint_digest"] = receipt.target.checkpoint_digest
    Path(here).write_text(json.dumps(data))
    assert only(audit(), "sidecar-altered").uri == receipt.target.uri
    Path(here).write_text("{")
    assert only(audit(), "sidecar-damaged").uri == receipt.target.uri
    Path(here).unlink()
    assert "sidecar-gone" in support.kinds(audit())


def test_tensors_that_were_not_recorded(tmp_path):
    receipt = support.converted(tmp_path)
    wherry.convert(
        support.source(tmp_path, "x", 3),
        tmp_path / "renamed",
        to="safetensors",
        options={"rename": "step -> stop"},
    )
    shutil.copy(tmp_path / "renamed", receipt.target.uri)
    found = {(one.path, one.what) for one in audit().findings if one.kind == "structure"}
    assert found == {("stop", "unrecorded tensor"), ("step", "missing tensor")}


def test_roots_list_what_was_never_converted_and_what_belongs_to_nothing(tmp_path):
    support.converted(tmp_path)
    support.source(tmp_path, "fresh", 2)
    (tmp_path / "notes.txt").write_text("x")
    (tmp_path / ".wherry-x.abc").mkdir()
    report = audit([tmp_path])
    assert only(report, "unconverted").uri == str(tmp_path / "fresh.npz")
    assert only(report, "unknown-file").uri == str(tmp_path / "notes.txt")
    assert "staging" in only(report, "passed-over").what
    assert len(report.checkpoints) == 2
    for one in report.checkpoints:  # a root may be a checkpoint itself
        assert [row.uri for row in audit([one.uri]).checkpoints] == [one.uri]
    save = tmp_path / "source.npz"
    support.source(tmp_path, "source", 9)
    assert {one.uri for one in audit([tmp_path]).findings if one.kind == "unconverted"} >= {str(save)}
    with pytest.raises(NotFoundError):
        audit([tmp_path / "nothing"])


def test_links_to_folders_are_not_entered(tmp_path):
    """`latest` leads to a checkpoint that is found where it lies, and `again` back to the root."""
    first = support.converted(tmp_path)
    wherry.convert(first.target.uri, tmp_path / "checkpoint_1000", to="orbax")
    (tmp_path / "latest").symlink_to("checkpoint_1000")
    (tmp_path / "again").symlink_to(".")
    report = audit([tmp_path])
    assert "unknown-file" not in support.kinds(report)
    assert {one.uri for one in report.findings if one.kind == "passed-over"} == {
        str(tmp_path / "latest"),
        str(tmp_path / "again"),
    }


def test_as_of_sees_the_ledger_as_it_was(tmp_path):
    first = support.converted(tmp_path)
    time.sleep(0.01)
    then = utc_now()
    time.sleep(0.01)
    support.converted(tmp_path, "later", seed=1)
    report = audit(as_of=then)
    assert {row.uri for row in report.checkpoints} == {first.source.uri, first.target.uri}
    assert report.chain.statements < audit().chain.statements
    assert audit(as_of="2001-01-01").checkpoints == ()
    with pytest.raises(UsageError):
        audit(as_of="yesterday")


def test_a_tombstone_is_no_loss(tmp_path):
    receipt = support.converted(tmp_path)
    Path(receipt.target.uri).unlink()
    with open_ledger() as ledger:
        record_event(ledger, "deletion", receipt.target, {"reason": "keep-last 1", "by": "prune"})
    report = audit()
    assert report.ok
    assert only(report, "deleted").what.startswith("keep-last 1 (")


def test_the_sample_takes_the_oldest_proof_first(tmp_path):
    for number in range(3):
        support.converted(tmp_path, f"s{number}", seed=number)
    seen = []
    for _ in range(3):
        report = audit(level="digest", sample="34%")
        seen += [row.uri for row in report.checkpoints if row.level == "digest"]
        assert report.sample.startswith("3 of 6")
    assert len(set(seen)) >= 6
    for bad in ("-1", "many", "nan%"):
        with pytest.raises(UsageError):
            audit(level="digest", sample=bad)
    with pytest.raises(UsageError):
        audit(sample="10%")


def test_the_ledger_itself_is_audited(tmp_path, wherry_home):
    support.converted(tmp_path)
    anchor = audit().chain.head
    assert audit(anchor=anchor).ok
    assert only(audit(anchor="f" * 64), "anchor-lost").severity == "error"
    import sqlite3

    with sqlite3.connect(wherry_home / "ledger.db") as database:
        names = [row[0] for row in database.execute("select name from sqlite_master where type='trigger'")]
        for name in names:
            database.execute(f"drop trigger {name}")
        database.execute("update statement set body = replace(body, 'lossless\":true', 'lossless\":false')")
    assert "statement 1" in only(audit(record=False), "chain-altered").what


def test_the_audit_is_stated_in_the_ledger(tmp_path):
    support.converted(tmp_path)
    report = audit(bundle=tmp_path / "evidence.zip")
    with open_ledger() as ledger:
        [*_, last] = statements(ledger)
        assert check_chain(ledger).altered is None
    assert (last.kind, last.body["ok"], last.body["head"]["hash"]) == ("audit", True, report.chain.head)
    with pytest.raises(TargetExistsError):
        audit(bundle=tmp_path / "evidence.zip")
    audit(record=False)
    with open_ledger() as ledger:
        assert [*statements(ledger)][-1] == last


def test_the_configuration_says_whether_audits_are_stated(tmp_path, monkeypatch):
    """For a login that may only read; `record` of the call has the last word."""
    support.converted(tmp_path)
    (tmp_path / "wherry.toml").write_text("[audit]\nrecord = false\n")
    monkeypatch.setenv("WHERRY_CONFIG", str(tmp_path / "wherry.toml"))

    def stated():
        with open_ledger() as ledger:
            return [one.kind for one in statements(ledger)].count("audit")

    audit()
    assert stated() == 0
    audit(record=True)
    assert stated() == 1
    monkeypatch.setenv("WHERRY_AUDIT_RECORD", "true")
    audit()
    assert stated() == 2
    monkeypatch.delenv("WHERRY_CONFIG")
    monkeypatch.setenv("WHERRY_AUDIT_RECORD", "False")
    audit()
    assert stated() == 2
    monkeypatch.setenv("WHERRY_AUDIT_RECORD", "perhaps")
    with pytest.raises(UsageError, match="expected true or false"):
        audit()


def test_an_unreadable_store_is_said_not_raised(tmp_path):
    from wherry.ledger.replay import CheckpointRecord, LedgerState, PlaceRecord
    from wherry.prove.places import look_at

    digest = "a" * 64
    record = CheckpointRecord(digest, digest, "npz", None, "params", None, 1, 1, 1)
    looked = look_at(PlaceRecord("nonsense://x/y", digest, "f", 1), LedgerState(checkpoints={digest: record}))
    assert [one.kind for one in looked.findings] == ["unreadable"]


# The audit over time: damage that is remembered, proofs that count, and what proves nothing.


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
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
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


# Files that were deleted while their sidecar stayed: they are named, and the audit's cure works as it is
# printed.


KEPT = ("wherry.json", "config.json", "tokenizer.json")


def emptied(folder):
    """Delete the weights of a checkpoint, but neither its sidecar nor its companions."""
    for path in sorted(Path(folder).rglob("*"), reverse=True):
        if path.is_file() and path.name not in KEPT:
            path.unlink()
        elif path.is_dir() and not any(path.iterdir()):
            path.rmdir()


def made(tmp_path, to):
    source = tmp_path / "plain.safetensors"
    others = {name: np.full(3, 2, "f4") for name in names_for(to)}
    save_file({"a": np.ones((2, 3), "f4"), "b": np.zeros(4, "f4"), **others}, source)
    source = model_folder(tmp_path / "model") if to == "huggingface" else source
    return Path(wherry.convert(source, tmp_path / "out", to=to, options=options_for(to)).target.uri)


def test_the_missing_file_is_named(tmp_path):
    out = made(tmp_path, "huggingface")
    emptied(out)
    reason = "model.safetensors is missing: wherry.json records a checkpoint of 2 tensors in format huggingface here"
    found = wherry.verify(out)
    assert (found.verdict, found.exit_code, found.failed[0].reason) == ("incomplete", 5, reason)
    assert (wherry.detect(out).verdict, wherry.detect(out).reason) == ("incomplete", reason)
    for verb in (
        ["inspect", out],
        ["convert", out, tmp_path / "x", "--to", "orbax"],
        ["detect", out, "--json"],
    ):
        done = CliRunner().invoke(cli, list(map(str, verb)))
        assert isinstance(done.exception, IncompleteError) or done.exit_code == 5
    with pytest.raises(UnsupportedError):
        wherry.verify(out, format="orbax")


def test_a_folder_without_a_sidecar_is_still_no_checkpoint(tmp_path):
    out = made(tmp_path, "huggingface")
    emptied(out)
    (out / "wherry.json").unlink()
    with pytest.raises(NotACheckpointError):
        wherry.verify(out)


@pytest.mark.parametrize(
    "to", [name for name in WRITTEN if not name.startswith(("lingua", "gguf", "vllm"))]
)  # these need a model
def test_the_cure_restores_it(tmp_path, to):
    out = made(tmp_path, to)
    single = out.is_file()
    out.unlink() if single else emptied(out)
    [finding] = [one for one in audit().findings if one.severity == "error"]
    assert finding.kind == ("gone" if single else "incomplete")
    support.carried_out(finding.cure)
    assert audit(level="digest").ok
    assert wherry.verify(out, level="digest").verdict == "ok"


def test_a_copy_without_a_sidecar_is_converted_and_not_fetched(tmp_path):
    """It has the same identity, but no sidecar states it; `wherry fetch` refuses it."""
    out = made(tmp_path, "safetensors")
    out.unlink()
    [finding] = [one for one in audit().findings if one.severity == "error"]
    assert "wherry fetch" not in finding.cure
    support.carried_out(finding.cure)
    assert audit().ok


def test_what_was_moved_away_before_is_kept(tmp_path):
    out = made(tmp_path, "orbax")
    for _ in range(2):
        emptied(out)
        [finding] = [one for one in audit().findings if one.severity == "error"]
        support.carried_out(finding.cure)
    assert sorted(path.name for path in tmp_path.glob("out*")) == ["out", "out.damaged", "out.damaged-1"]


# The report of an audit as a page: a block for each finding, in which names stay text.


MarkdownIt = pytest.importorskip("markdown_it").MarkdownIt
EVIL = "a|b`<img src=x>` **c** [d](http://e)\n# f\u202e"
TIME = "2026-11-23T00:00:00+00:00"
DIGEST = "blake3:" + "a" * 64


def report(*findings, checkpoints=()):
    chain = ChainProof("sqlite:///ledger.db", 7, "f" * 64, TIME, None)
    return AuditReport(
        ("all",), "digest", None, "", TIME, TIME, 1.0, "0.1", chain, tuple(checkpoints), findings
    )


def parsed(text):
    """The blocks of the page as (kind of block, text), as a reader of Markdown sees them."""
    tokens = MarkdownIt("commonmark").enable("table").parse(text)
    found = []
    for token, following in pairwise(tokens):
        if following.type == "inline":
            found.append((token.tag, "".join(child.content for child in following.children)))
            assert {child.type for child in following.children} <= {
                "text", "strong_open", "strong_close", "text_special"
            }, following.content  # fmt: skip
    return found


def test_each_finding_is_a_block_with_what_is_known():
    affected = AffectedCheckpoint(DIGEST, "orbax", ("/out/x",), ("m version 2",))
    one = Finding(
        "altered",
        "tensor w differs",
        "/data/run/7",
        DIGEST,
        "w",
        3,
        ("m version 1",),
        "convert again",
        (affected,),
    )
    other = Finding("altered", "tensor b differs", "/data/run/8", DIGEST, "b")
    note = Finding("deleted", "too old", "/data/run/1")
    blocks = parsed(markdown(report(one, other, note)))
    assert [text for tag, text in blocks if tag == "h2"] == ["Errors", "Notes"]
    assert [text for tag, text in blocks if tag == "h3"] == ["1. altered", "2. altered", "1. deleted"]
    first = blocks[blocks.index(("h3", "1. altered")) + 1 : blocks.index(("h3", "2. altered"))]
    assert [text for _, text in first] == [
        "tensor w differs",
        "Where: /data/run/7",
        "Tensor or file: w, leaf 3",
        f"Checkpoint: {DIGEST}",
        "Models: m version 1",
        "Cure: convert again",
        "Meaning: bytes that differ from the recorded ones",
        f"Affected: orbax {DIGEST[:19]}, /out/x, m version 2",
    ]


def test_names_stay_text():
    row = CheckpointAudit(EVIL, DIGEST, EVIL, "written", models=(EVIL,))
    text = markdown(report(Finding("altered", EVIL, EVIL, DIGEST, EVIL, cure=EVIL), checkpoints=[row]))
    blocks = parsed(text)
    shown = EVIL.replace("\n", " ").replace("\u202e", " ").strip()
    said = [one.strip() for tag, one in blocks if tag in ("p", "td")]
    assert said.count(shown) == 4, "the sentence, and three cells"
    assert f"Where: {shown}" in said
    assert [tag for tag, _ in blocks if tag == "h1"] == ["h1"]


def test_of_many_findings_the_first_are_shown(monkeypatch):
    monkeypatch.setattr(module, "LISTED", 3)
    rows = [CheckpointAudit(f"/{number}", DIGEST, "orbax", "written") for number in range(4)]
    text = markdown(report(*(Finding("altered", f"w{number}") for number in range(5)), checkpoints=rows))
    assert [one for tag, one in parsed(text) if tag == "h3"] == [f"{number}. altered" for number in (1, 2, 3)]
    assert "and 2 more; report.json lists all" in text
    assert "and 1 more; report.json lists all" in text
