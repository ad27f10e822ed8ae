"""A conversion by several processes without an engine: what comes out is what one process makes, or nothing."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from safetensors.numpy import load, load_file

import wherry
from tests.support.command import command
from tests.support.jobs import (
    SIZES,
    Killed,
    as_dead,
    as_elsewhere,
    by_two,
    changed,
    claimed,
    committed,
    killed,
    made_and_proved,
    made_job,
    proofs,
    put_row,
    receipts,
    record_from,
    requested,
    row_of,
    slow_worker,
    undisturbed,
)
from tests.support.object_stores import leftover_names, uploads_below
from tests.support.waits import waits_reported_at_once
from wherry.core.digest import sha256_of
from wherry.core.request import TargetRequest, convert_request
from wherry.errors import (
    CorruptError,
    HostileError,
    IncompleteError,
    MismatchError,
    NotFoundError,
    StorageError,
    TargetExistsError,
    TargetInUseError,
    UnsupportedError,
)
from wherry.store.local_store import locate
from wherry.target.clean import clean
from wherry.target.leftovers import JOB
from wherry.workers import commit as committing
from wherry.workers import job as job_module
from wherry.workers import tasks
from wherry.workers import work as working
from wherry.workers.commit import commit
from wherry.workers.job import opened_job, split
from wherry.workers.records import Claims, SharedFile, decode, encode, job_records
from wherry.workers.work import work


@pytest.mark.parametrize("to", ["hf", "dcp", "orbax", "safetensors", "npz", "torch-zip"])
def test_units_make_what_one_process_makes(source, target, tmp_path, to):
    job = made_job(source, target, to)
    report = work(target)
    assert report.made == tuple(unit.name for unit in job.units)
    receipt = committed(target)
    expected = undisturbed(source, tmp_path, to)
    assert receipt.target.checkpoint_digest == expected.checkpoint_digest
    if target.startswith("/") or to not in ("npz", "torch-zip"):  # of these, `test_shared_uploads` has more
        assert receipt.resumed_bytes == receipt.bytes_written  # the commit has moved no byte itself
    assert receipt.verification["level"] == "digest"
    assert wherry.verify(target, level="digest").ok
    assert leftover_names(target) == [
        name for name in leftover_names(target) if name.startswith("undisturbed")
    ]
    if not target.startswith("/"):
        assert uploads_below(target) == []


def test_the_files_are_the_same_bytes(source, tmp_path):
    made_job(source, tmp_path / "out", "dcp")
    work(str(tmp_path / "out"))
    commit(str(tmp_path / "out"))
    undisturbed(source, tmp_path, "dcp")
    for one in (tmp_path / "undisturbed").iterdir():
        if one.name != "wherry.json":
            assert (tmp_path / "out" / one.name).read_bytes() == one.read_bytes(), one.name


def test_workers_share_the_units(source, target, tmp_path):
    job = made_job(source, target)
    made = []
    threads = [threading.Thread(target=lambda: made.extend(work(target).made)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(made) == sorted(unit.name for unit in job.units)  # each was made once
    assert committed(target).target.checkpoint_digest == undisturbed(source, tmp_path).checkpoint_digest


@pytest.mark.parametrize("step", ["move", "finish", "_describe_file", "this_worker"])
def test_a_unit_of_a_worker_that_was_killed_is_made_again(source, target, tmp_path, monkeypatch, step):
    job = made_job(source, target)
    with monkeypatch.context() as patch:
        as_dead(patch)
        killed(target, patch, step, 2)
    report = work(target)
    assert 0 < len(report.made) < len(job.units) + 1
    assert job.units[1].name in report.made or step == "_describe_file"
    assert committed(target).target.checkpoint_digest == undisturbed(source, tmp_path).checkpoint_digest
    assert uploads_below(target) == [] if not target.startswith("/") else True


def test_a_claim_of_another_machine_expires_when_it_is_not_renewed(source, target, tmp_path, monkeypatch):
    made_job(source, target)
    with monkeypatch.context() as patch:
        as_elsewhere(patch)
        killed(target, patch, "finish", 1)
    begun = time.monotonic()
    with waits_reported_at_once(monkeypatch) as lines:
        report = work(target, expiry=3.0)  # longer than its own units take, also at load
    assert time.monotonic() - begun > 3.0
    assert set(lines) == {f"{report.job}: waiting for units that other workers make"}
    assert committed(target).target.checkpoint_digest == undisturbed(source, tmp_path).checkpoint_digest


@pytest.mark.parametrize("call", ["wherry.workers.work.run_task", "wherry.workers.records.Claims.renewed"])
def test_a_worker_that_is_interrupted_between_its_claim_and_its_unit_gives_it_back(
    source, target, monkeypatch, call
):
    """Its machine is taken away at that moment; others need not wait until the claim expires."""
    made_job(source, target)

    def interrupt(*_arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(call, interrupt)
        with pytest.raises(KeyboardInterrupt):
            work(target)
    assert claimed(target) == []
    assert len(work(target).made) == 6


@pytest.mark.parametrize("hours", [-30, 30])
def test_a_worker_whose_clock_is_wrong_waits_as_long_as_others(source, target, tmp_path, monkeypatch, hours):
    """It neither takes a claim for an old one, nor waits for the time that its clock is behind."""
    made_job(source, target)
    with monkeypatch.context() as patch:
        as_elsewhere(patch)
        killed(target, patch, "finish", 1)
    real, begun = time.time, time.monotonic()
    monkeypatch.setattr(time, "time", lambda: real() + hours * 3600)
    work(target, expiry=0.3)
    assert time.monotonic() - begun > 0.3
    monkeypatch.setattr(time, "time", real)
    assert committed(target).target.checkpoint_digest == undisturbed(source, tmp_path).checkpoint_digest


def test_a_slow_worker_whose_claim_has_expired_changes_nothing(source, target, tmp_path, monkeypatch):
    """It comes back from the dead after its unit was made by another, with the same bytes."""
    made_job(source, target)
    with slow_worker(target, monkeypatch):
        work(target, expiry=0.3)
    assert committed(target).target.checkpoint_digest == undisturbed(source, tmp_path).checkpoint_digest
    assert wherry.verify(target, level="digest").ok


def test_nothing_is_committed_while_a_unit_is_missing(source, target):
    made_job(source, target)
    with pytest.raises(IncompleteError, match=r"6 of 6 units are not written: 00000-\w{8}, .*") as caught:
        commit(target)
    assert "wherry work" in caught.value.cure
    assert not locate(target).exists()


def test_a_receipt_that_lies_about_hashes_is_refused(source, target):
    made_job(source, target)
    work(target)
    name, row = next(iter(receipts(target).items()))
    moves = [list(move) for move in row["moves"]]
    moves[0][4] = _other(moves[0][4])
    changed(target, name, moves=moves)
    with pytest.raises(MismatchError, match="read-back differs"):
        commit(target)
    assert _not_committed(target)


def _other(hashes):
    """Hashes in base64, of which the first differs."""
    return ("B" if hashes[0] == "A" else "A") + hashes[1:]


def _not_committed(target):
    place = locate(target)
    return not place.exists() or not place.join("model.safetensors.index.json").exists()


@pytest.mark.parametrize("field", ["files", "moves", "digest"])
def test_a_receipt_that_does_not_cover_its_unit_is_refused(source, target, field):
    made_job(source, target)
    work(target)
    name, row = next(iter(receipts(target).items()))
    changed(target, name, **{field: "0" * 64 if field == "digest" else row[field][1:]})
    with pytest.raises(
        MismatchError, match=r"the receipt of unit 00000-\w{8} by process \d+ on .* does not cover"
    ):
        commit(target)
    assert _not_committed(target)


def test_a_file_that_was_changed_after_its_receipt_is_made_again(source, tmp_path):
    target = str(tmp_path / "out")
    made_job(source, target)
    work(target)
    [file, *_] = sorted(Path(f"{tmp_path}/.wherry-out.job").rglob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    with pytest.raises(IncompleteError, match=r"1 of 6 units are not written"):
        commit(target)
    assert len(work(target).made) == 1
    assert committed(target).target.checkpoint_digest == undisturbed(source, tmp_path).checkpoint_digest


def test_a_unit_that_was_made_again_since_a_commit_has_looked_stays(source, target, tmp_path, monkeypatch):
    """Another commit and a worker were faster: what the worker has made may be part of the target by now."""
    made_job(source, target)
    work(target)
    name, row = next(iter(receipts(target).items()))
    changed(target, name, files=[[*file[:2], "another state"] for file in row["files"]])
    real = committing._make_again

    def late(*arguments):
        real(*arguments)
        assert len(work(target).made) == 1
        real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(committing, "_make_again", late)
        with pytest.raises(IncompleteError, match=r"1 of 6 units are not written"):
            commit(target)
    assert len(receipts(target)) == 6
    assert work(target).made == ()
    assert committed(target).target.checkpoint_digest == undisturbed(source, tmp_path).checkpoint_digest


def test_two_receipts_of_one_unit_must_agree(source, target):
    made_job(source, target)
    work(target)
    name, row = next(iter(receipts(target).items()))
    other = json.loads(json.dumps(row))
    other["token"], other["moves"][0][4] = "00000000", _other(other["moves"][0][4])
    put_row(job_records(locate(target)), f"{name[:-8]}00000000", other)
    with pytest.raises(MismatchError, match="two workers made different bytes of unit 0"):
        commit(target)
    assert _not_committed(target)


def test_a_worker_with_another_wherry_is_named_and_left_out(source, target, monkeypatch):
    made_job(source, target)
    with monkeypatch.context() as patch:
        patch.setattr(job_module, "__version__", "0.0.1")
        with pytest.raises(
            MismatchError, match=r"the job was made by wherry .*; this process has wherry 0\.0\.1"
        ):
            work(target)
    work(target)
    name, _row = next(iter(receipts(target).items()))
    changed(target, name, version="0.0.1")
    with pytest.raises(MismatchError, match=r"unit 0 was made with wherry 0\.0\.1 by process"):
        commit(target)


def test_a_worker_that_sees_another_source_is_left_out(source, target, tmp_path, monkeypatch):
    made_job(source, target)
    row = row_of(job_records(locate(target)), JOB)
    header = {**row["header"], "source": sha256_of("source", "another")}
    changed(target, JOB, header=header)
    with pytest.raises(
        MismatchError, match="this process sees another source than the one that made the job"
    ):
        work(target)


def test_records_of_another_key_are_not_believed(source, target, monkeypatch):
    made_job(source, target)
    monkeypatch.setenv("WHERRY_KEY", "a key of somebody else")
    with pytest.raises(
        HostileError, match=r"the record job\.json was altered, or signed with another key"
    ) as caught:
        work(target)
    assert "WHERRY_KEY" in caught.value.cure


def test_two_coordinators_make_one_job_and_one_target(source, target, tmp_path):
    first, second = made_job(source, target), made_job(source, target)
    assert [unit.digest for unit in first.units] == [unit.digest for unit in second.units]
    work(target)
    done_ones, _failed = by_two(
        lambda: commit(target).receipts[0],
        (TargetInUseError, NotFoundError, TargetExistsError, IncompleteError),
    )
    assert done_ones
    assert wherry.verify(target, level="digest").ok
    expected = undisturbed(source, tmp_path).checkpoint_digest
    assert {one.target.checkpoint_digest for one in done_ones} == {expected}


def test_a_commit_that_was_interrupted_is_taken_up(source, target, tmp_path, monkeypatch):
    made_job(source, target)
    work(target)
    with monkeypatch.context() as patch:
        patch.setattr("wherry.converter.job.complete", _interrupted)
        with pytest.raises(KeyboardInterrupt):
            commit(target)
    receipt = committed(target)
    assert receipt.target.checkpoint_digest == undisturbed(source, tmp_path).checkpoint_digest
    assert receipt.resumed_bytes == receipt.bytes_written


def _interrupted(*_args):
    raise KeyboardInterrupt


def test_a_commit_that_was_killed_before_it_removed_the_job(source, target, monkeypatch):
    made_job(source, target)
    work(target)
    with monkeypatch.context() as patch:
        patch.setattr("wherry.workers.records.Records.end", _interrupted)
        with pytest.raises(KeyboardInterrupt):
            commit(target)
    assert committed(target).already
    with pytest.raises(NotFoundError, match="no job found"):
        commit(target)
    assert leftover_names(target) == []


def test_another_conversion_to_the_same_target_is_refused(source, target):
    made_job(source, target)
    with pytest.raises(TargetInUseError, match="a job of another conversion to this target exists"):
        made_job(source, target, unit=500_000)
    with pytest.raises(TargetInUseError, match="with another plan"):
        made_job(source, target, "dcp")


def test_a_target_that_exists_is_refused(source, target):
    request = requested(source, target)
    wherry.convert(source, target, to="hf", options=request.targets[0].options, lineage=False)
    with pytest.raises(TargetExistsError, match="is the result of this conversion"):
        split(request, 300_000)


def test_a_format_that_one_process_writes_is_refused(source, tmp_path):
    """Compressed chunks are appended as they come, so their places cannot be known."""
    target = TargetRequest(str(tmp_path / "out"), "orbax", {"compression": "zstd"})
    request = convert_request(str(source), [target], lineage=False)
    with pytest.raises(
        UnsupportedError, match="orbax cannot be written by several processes here: the sizes"
    ):
        split(request, 300_000)


def test_a_worker_tries_again_after_an_error_that_a_retry_can_fix(source, target, monkeypatch):
    job = made_job(source, target)
    failure = StorageError("the storage does not answer", retryable=True)
    monkeypatch.setattr(tasks, "finish", _failing(tasks.finish, [failure, failure]))
    assert len(work(target).made) == len(job.units)


def test_a_worker_gives_up_after_several_errors_and_leaves_its_unit_to_others(source, target, monkeypatch):
    job = made_job(source, target)
    failure = StorageError("the storage does not answer", retryable=True)
    with monkeypatch.context() as patch:
        patch.setattr(tasks, "finish", _failing(tasks.finish, [failure] * 9))
        with pytest.raises(StorageError, match="does not answer"):
            work(target)
    assert claimed(target) == []
    assert len(work(target).made) == len(job.units)


def _failing(real, errors):
    waiting = list(errors)

    def call(writer):
        if waiting:
            raise waiting.pop()
        real(writer)

    return call


def test_a_worker_ends_when_the_job_was_committed(source, target, monkeypatch):
    made_job(source, target)
    work(target)
    with opened_job(target) as opened:
        commit(target)
        worker = working._Worker(opened, Claims(opened.records), None)
        assert worker.run().ended


def test_a_receipt_is_what_it_was_after_its_record(source, target):
    made_job(source, target)
    work(target)
    for row in receipts(target).values():
        receipt = record_from(row)
        assert json.loads(json.dumps(encode(receipt)))["boxes"] == row["boxes"]
        assert len(receipt.moves) == len(row["moves"])
        assert re.fullmatch(r"process \d+ on .+", receipt.worker)


# `wherry clean` knows each leftover of a job: of one that was only split, half made, or made and never
# committed.


def everything_below(target):
    return sorted(entry.name for entry in locate(target).parent.walk())


def stopped(*_arguments):
    raise Killed


def aged(target):
    """Make everything look two hours old."""
    if target.startswith("/"):
        for path in Path(target).parent.rglob("*"):
            os.utime(path, (time.time() - 7200,) * 2)


@pytest.mark.parametrize("state", ["split", "killed", "made", "committing"])
def test_clean_removes_a_job_that_nobody_works_on(source, target, monkeypatch, state):
    made_job(source, target)
    if state == "killed":
        with monkeypatch.context() as patch:
            as_dead(patch)
            killed(target, patch, "_describe_file", 2)
    if state in ("made", "committing"):
        work(target)
    if state == "committing":
        with monkeypatch.context() as patch:
            patch.setattr("wherry.converter.job.complete", stopped)
            with pytest.raises(Killed):
                commit(target)
    aged(target)
    before = everything_below(target)
    assert any(name.startswith(".wherry-out.job/") for name in before)
    reports = clean(locate(target).parent.uri, min_age=0)
    assert reports
    assert all(report.removed for report in reports)
    assert everything_below(target) == []
    assert uploads_below(target) == [] if not target.startswith("/") else True


def test_clean_leaves_a_job_that_somebody_works_on(source, target):
    made_job(source, target)
    work(target)
    before = everything_below(target)
    [report] = clean(locate(target).parent.uri)
    assert not report.removed
    assert report.reason == "changed within the hour; may be in use"
    assert everything_below(target) == before


# Records of a job that are signed, but have another form than their kind: an error that names record and
# field.


REQUESTS = [
    ("source", 1),
    ("source", {"path": "a"}),
    ("targets", [{"uri": "a", "to": 5}]),
    ("targets", "a"),
    ("memory", None),
    ("forged", "x"),
]
FIELDS = [
    ("header", []),
    ("header", {"version": 1}),
    ("unit_bytes", "1"),
    ("unit_bytes", 0),
    ("units", [None]),
    ("members", "ab"),
    ("request", 0.5),
]
RECEIPTS = [("files", [["a", "1", "m"]]), ("moves", {}), ("hashed", {"blake3": 1}), ("parts", [["a", {}]])]
PROOFS = [("of", [["a"]]), ("blocks", [["a", "b", -1, 0, ""]]), ("seconds", True)]


@pytest.fixture
def job(tmp_path, source):
    target = str(tmp_path / "out")
    made_job(source, target)
    made_and_proved(target)
    return target


@pytest.mark.parametrize(("name", "value"), REQUESTS)
def test_a_request_of_another_form_is_refused_by_every_process(job, name, value):
    row = row_of(job_records(locate(job)), JOB)["request"]
    changed(job, JOB, request={**row, name: value})
    for run in (work, commit):
        with pytest.raises(CorruptError, match=rf"the record job\.json is invalid at request\.{name}"):
            run(job)


@pytest.mark.parametrize(("name", "value"), FIELDS)
def test_a_job_of_another_form_is_refused(job, name, value):
    changed(job, JOB, **{name: value})
    with pytest.raises(CorruptError, match=rf"the record job\.json is invalid at {name}"):
        work(job)


@pytest.mark.parametrize(("name", "value"), RECEIPTS)
def test_a_receipt_of_another_form_is_refused(job, name, value):
    record = next(iter(receipts(job)))
    changed(job, record, **{name: value})
    with pytest.raises(CorruptError, match=rf"the record {record} is invalid at {name}"):
        commit(job)


@pytest.mark.parametrize(("name", "value"), PROOFS)
def test_a_proof_of_another_form_is_refused(job, name, value):
    record = next(iter(proofs(job)))
    changed(job, record, **{name: value})
    with pytest.raises(CorruptError, match=rf"the record {record} is invalid at {name}"):
        commit(job)


@pytest.mark.parametrize(
    ("at", "value", "said"), [(1, "0", "counted by integers"), (3, [7], "a leaf is outside the bytes")]
)
def test_a_move_that_is_none_is_refused(job, at, value, said):
    record, row = next(iter(receipts(job).items()))
    move = list(row["moves"][0])
    move[at] = value
    changed(job, record, moves=[move])
    with pytest.raises(CorruptError, match=said):
        commit(job)


def test_a_job_of_a_former_schema_is_refused(job):
    changed(job, JOB, schema=1)
    for run in (work, commit):
        with pytest.raises(CorruptError, match="the job has schema 1, but this wherry requires 3") as caught:
            run(job)
        assert "use the wherry that wrote it, or remove " in caught.value.cure


@pytest.mark.parametrize("row", [{}, {"token": "00", "upload": {"path": "a", "key": "b", "run": "c"}}])
def test_a_shared_file_has_a_token_or_an_upload(row):
    with pytest.raises(CorruptError, match="either a token or an upload"):
        decode(SharedFile, json.dumps(row).encode(), "shared-0011", "job")


# The commands: `split`, `work` and `commit`, and `convert --on`, also when a worker is killed.


WORDS = ["--to", "hf", "--set", "max_shard_size=250KB", "--no-lineage"]


def worker(target, *more):
    line = [sys.executable, "-m", "wherry.cli", "work", target, *more]
    return subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_the_commands_with_a_worker_that_is_killed(source, tmp_path):
    """Three workers, one of which is stopped in a unit and then killed; the others make its unit."""
    target = str(tmp_path / "out")
    data = json.loads(command("split", source, target, *WORDS, "--unit", "300KB", "--json").stdout)
    assert data["job"] == str(tmp_path / ".wherry-out.job")
    assert len(data["units"]) == 6
    text = command("commit", target)
    assert text.returncode == 5
    assert "6 of 6 units are not written" in text.stderr
    first = worker(target)
    while not job_records(locate(target)).names()[0].startswith("claim"):
        time.sleep(0.005)
    first.send_signal(signal.SIGSTOP)
    rest = [worker(target, "--json") for _ in range(2)]
    time.sleep(1)
    first.kill()
    first.communicate()
    reports = [json.loads(one.communicate(timeout=60)[0]) for one in rest]
    made = [name for report in reports for name in report["made"]]
    assert len(made) == len(set(made))
    assert {report["units"] for report in reports} == {6}
    receipt = json.loads(command("commit", target, "--json").stdout)
    assert receipt["target"]["checkpoint_digest"] == undisturbed(source, tmp_path).checkpoint_digest
    assert wherry.verify(target, level="digest").ok


def test_the_last_worker_can_commit(source, tmp_path):
    target = str(tmp_path / "out")
    text = command("split", source, target, *WORDS, "--unit", "300KB").stdout
    assert re.search(r"^next: +wherry work /\S+/out", text, re.MULTILINE)
    text = command("work", target, "--commit")
    assert "unit 00000-" in text.stderr
    assert wherry.verify(target, level="digest").ok


def test_convert_takes_an_engine(source, tmp_path):
    shards = [f"{name}={value}" for name, value in SIZES["hf"].items()]
    target = str(tmp_path / "out")
    done_ = command("convert", source, target, "--to", "hf", "--set", *shards, "--no-lineage", "--json",
                    "--on", "processes:2", "--unit", "300KB")  # fmt: skip
    assert done_.returncode == 0, done_.stderr
    assert json.loads(done_.stdout)["resumed_bytes"] > 0
    two = command(
        "convert", source, f"{target}-1", f"{target}-2", "--to", "hf", "--to", "hf", "--on", "processes:2"
    )
    assert two.returncode == 2


# Jobs with `--verify store`: the commit reads nothing back, so what it trusts are the checksums in the
# receipts.


@pytest.fixture
def checked_target(tmp_path):
    """A target in a store that computes checksums."""
    return f"memory://bucket{tmp_path}/out"


@pytest.mark.parametrize("to", ["hf", "dcp", "orbax", "safetensors"])
def test_the_commit_keeps_what_the_workers_made(source, checked_target, tmp_path, to):
    made_job(source, checked_target, to, verify="store")
    work(checked_target)
    receipt = committed(checked_target)
    assert receipt.target.checkpoint_digest == undisturbed(source, tmp_path, to).checkpoint_digest
    assert receipt.resumed_bytes == receipt.bytes_written  # the commit has moved no byte itself
    assert receipt.verification == {"level": "store", "ok": True, "tensors": 12, "checksum": "crc32c"}
    assert wherry.verify(checked_target, level="digest").ok


@pytest.mark.parametrize("count", [1, None])
def test_a_unit_whose_object_is_gone_is_made_again(source, checked_target, count):
    job = made_job(source, checked_target, "dcp", verify="store")
    work(checked_target)
    store = locate(checked_target).store
    names = [file.name for unit in job.units for file in unit.files][:count]
    for path in (locate(checked_target).join(name).path for name in names):
        store.remove_object(path, store.head(path).mark)
    with pytest.raises(IncompleteError, match="are not written"):
        commit(checked_target)
    work(checked_target)
    committed(checked_target)
    assert wherry.verify(checked_target, level="digest").ok


def test_objects_without_checksums_are_made_again_and_never_zeros(source, checked_target):
    made_job(source, checked_target, "dcp", verify="store")
    work(checked_target)
    for name in receipts(checked_target):
        changed(checked_target, name, parts=[])
    receipt = committed(checked_target)
    assert receipt.resumed_bytes == 0
    assert wherry.verify(checked_target, level="digest").ok


def test_the_library_of_safetensors_finds_the_bytes_of_the_source(source, checked_target):
    made_job(source, checked_target, "hf", verify="store")
    work(checked_target)
    committed(checked_target)
    written: dict[str, bytes] = {}
    for entry in locate(checked_target).entries():
        if entry.name.endswith(".safetensors"):
            tensors = load(locate(checked_target).join(entry.name).read_whole(1 << 24))
            written |= {name: array.tobytes() for name, array in tensors.items()}
    stored = {
        name: array.tobytes()
        for file in source.glob("*.safetensors")
        for name, array in load_file(file).items()
    }
    assert len(stored) == 12
    assert written == stored


def test_a_receipt_with_other_checksums_proves_nothing(source, checked_target):
    made_job(source, checked_target, "dcp", verify="store")
    work(checked_target)
    name = next(iter(receipts(checked_target)))
    rows = row_of(job_records(locate(checked_target)), name)["parts"]
    changed(
        checked_target, name, parts=[[path, {**part, "checksum": "crc32c:00000000"}] for path, part in rows]
    )
    with pytest.raises(MismatchError, match="has not confirmed the checksum"):
        commit(checked_target)
    assert not locate(checked_target).join(".metadata").exists()
