"""The audit: what it finds, where, what it says to do about it, and what it keeps quiet about."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import wherry
from tests.support import audit as support
from wherry.auditor.audit import audit
from wherry.core.receipt import utc_now
from wherry.errors import NotFoundError, TargetExistsError, UsageError
from wherry.ledger.record import check_chain, open_ledger, record_event, statements
from wherry.storage.sidecar import sidecar_location
from wherry.storage.stores import locate


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
    from wherry.flows.audit import AuditSpec, _choose_options

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
    assert [_choose_options(AuditSpec(record=value))["record"] for value in (None, False)] == [None, False]


def test_an_unreadable_store_is_said_not_raised(tmp_path):
    from wherry.auditor.places import look_at
    from wherry.ledger.replay import CheckpointRecord, LedgerState, PlaceRecord

    digest = "a" * 64
    record = CheckpointRecord(digest, digest, "npz", None, "params", None, 1, 1, 1)
    looked = look_at(PlaceRecord("nonsense://x/y", digest, "f", 1), LedgerState(checkpoints={digest: record}))
    assert [one.kind for one in looked.findings] == ["unreadable"]
