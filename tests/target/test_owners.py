"""Who may use what is left: `clean` asks leases, claims and named processes, a clock only where nobody answers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest

from tests.support.jobs import put_row
from wherry.store.local_store import locate
from wherry.target import lease as leases
from wherry.target import leftovers
from wherry.target.clean import clean
from wherry.target.lease import judge_all, this_process
from wherry.target.leftovers import owners_of_export, owners_of_job
from wherry.workers.records import Claim, ClaimRecord, job_records

FOREVER = 1e12  # seconds; everything is younger


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(leftovers, "CLAIM_SECONDS", 0.2)
    monkeypatch.setattr(leases, "EXPIRY_SECONDS", 0.2)


@pytest.fixture(params=["disk", "memory"])
def target(request, tmp_path):
    return locate(f"memory://owners{tmp_path}/out" if request.param == "memory" else str(tmp_path / "out"))


def owner(kind):
    """An owner that is at work, has ended, or is on another machine."""
    living = this_process("aaaaaaaa")
    if kind == "dead":
        process = subprocess.Popen([sys.executable, "-c", ""])
        process.wait()
        return replace(living, pid=process.pid, process_start=1)
    return replace(living, host="elsewhere") if kind == "away" else living


def claim_of(target, unit, kind, token="aaaaaaaa"):
    """A worker's claim in the records of a job."""
    records = job_records(target)
    records.begin()
    row = ClaimRecord(token, json.dumps(owner(kind).to_json()), 0)
    records.create(Claim(f"receipt-{unit:05d}", 0, token).name, row, token)
    return records


def cleaned(target, **options):
    return {(row.removed, row.reason) for row in clean(target.parent.uri, **options)}


YOUNG, STALE = (False, "changed within the hour; may be in use"), (True, "stale")


@pytest.mark.parametrize(
    ("kinds", "kept", "young"),
    [
        (["alive"], True, None),
        (["dead", "alive"], True, None),
        (["dead"], False, STALE),
        (["dead", "away"], False, YOUNG),
        (["away"], False, YOUNG),
        ([], False, YOUNG),
    ],
)
def test_a_job_is_left_to_its_workers(target, kinds, kept, young):
    records = job_records(target)
    records.begin()
    put_row(records, "job.json", {})
    for unit, kind in enumerate(kinds):
        claim_of(target, unit, kind)
    ((removed, _reason),) = cleaned(target, dry_run=True)
    assert not removed
    if young is not None:
        assert cleaned(target, min_age=FOREVER) == {young}
    if young != STALE:
        assert {removed for removed, _reason in cleaned(target, min_age=0)} == {not kept}
    assert (records.names() == []) != kept


def test_a_claim_that_is_renewed_elsewhere_is_alive_and_one_on_a_unit_that_is_made_is_over(
    target, monkeypatch
):
    records = claim_of(target, 0, "away", "00000000")
    claim_of(target, 1, "away", "11111111")
    put_row(records, "receipt-00000-00000000", {})
    found = owners_of_job(records.folder)
    assert [watch.path[-1:] for watch in found.processes] == ["0"]
    assert "claim-receipt-00001" in found.processes[0].path
    beats, real = iter(range(100)), leftovers._claim
    monkeypatch.setattr(leftovers, "_claim", lambda place: {**real(place), "beat": str(next(beats))})
    judged = judge_all(list(found.watches))
    assert found.live(judged)
    assert not found.ended(judged)


@pytest.mark.parametrize("text", [b"", b"{}", b"[]", b'{"token": "a", "owner": 3, "beat": "x"}', b"\xff"])
def test_what_is_no_claim_holds_nothing(target, text):
    records = job_records(target)
    records.begin()
    folder = records.folder
    folder.join("claim-receipt-00000-0").put(text)
    found = owners_of_job(folder)
    assert not found.live(judge_all(list(found.watches)))


@pytest.fixture
def spool(tmp_path):
    folder = tmp_path / ".wherry-step.0123abcd.spool"
    (folder / "part-0").mkdir(parents=True)
    return folder


@pytest.mark.parametrize(
    ("ranks", "reason"),
    [
        (["alive"], "a running job holds its lease"),
        (["dead", "alive"], "a running job holds its lease"),
        (["dead", "dead"], "stale"),
        (["dead", "away"], "changed within the hour; may be in use"),
        ([], "changed within the hour; may be in use"),
    ],
)
def test_the_folder_of_an_export_is_left_to_its_processes(spool, tmp_path, ranks, reason):
    for rank, kind in enumerate(ranks):
        (spool / f"here-{rank}.json").write_text(json.dumps(owner(kind).to_json()))
    assert [row.reason for row in clean(tmp_path, min_age=FOREVER)] == [reason]
    assert spool.exists() == (reason != "stale")


def test_the_lease_of_an_export_holds_its_folder(spool):
    (spool / "writer.lease").write_text(json.dumps(this_process("aaaaaaaa").to_json()))
    found = owners_of_export(spool)
    assert found.live(judge_all(list(found.watches)))


@pytest.mark.parametrize("lease", ["none", "dead", "away"])
def test_an_area_whose_owner_has_ended_is_removed_whatever_its_age(tmp_path, lease):
    area = tmp_path / ".wherry-out.0123abcd-89abcdef"
    area.mkdir()
    (area / "out").write_text("data")
    if lease != "none":
        (tmp_path / ".wherry-out.lease").write_text(json.dumps(owner(lease).to_json()))
    assert {row.reason for row in clean(tmp_path, min_age=FOREVER)} == {"stale"}
    assert os.listdir(tmp_path) == []


def test_the_area_of_a_job_is_left_to_its_workers(tmp_path):
    """Workers make units in it without the lease of the target."""
    target = locate(str(tmp_path / "out"))
    claim_of(target, 0, "alive")
    area = tmp_path / ".wherry-out.0123abcd"
    area.mkdir()
    (area / "out").write_text("data")
    assert {row.reason for row in clean(tmp_path, min_age=0)} == {"a running job holds its lease"}
    assert area.exists()


def test_a_temporary_folder_has_no_owner_that_can_be_checked(tmp_path):
    (tmp_path / ".wherry-audit-abcdefgh").mkdir()
    assert [row.reason for row in clean(tmp_path)] == ["changed within the hour; may be in use"]
    assert [row.reason for row in clean(tmp_path, min_age=0)] == ["stale"]


def test_no_owner_is_neither_at_work_nor_unknown():
    nobody = leftovers.Owners()
    assert nobody.ended({})
    assert not nobody.live({})
    assert not leftovers.Owners(unnamed=True).ended({})
