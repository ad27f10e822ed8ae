"""Proofs: units that are read back by others than their makers, and what the commit does with that: no wrong byte."""

from __future__ import annotations

import base64
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import wherry
from tests.support.jobs import (
    Killed,
    as_dead,
    changed,
    committed,
    made_and_proved,
    made_job,
    proofs,
    put_row,
    read_back_bytes,
    receipts,
    record_from,
    undisturbed,
    worker_named,
)
from wherry.converter import job as jobs
from wherry.core.keypath import render
from wherry.core.request import TargetRequest, convert_request
from wherry.errors import HostileError, IncompleteError, MismatchError
from wherry.store import open_file
from wherry.store.local_store import locate
from wherry.store.remote_store import FsspecStore
from wherry.workers import commit as committing
from wherry.workers import tasks
from wherry.workers.commit import commit, evidence_of, valid_proofs
from wherry.workers.job import opened_job, split
from wherry.workers.records import Task, TaskKind, job_records
from wherry.workers.work import work

SUFFIXES = (".safetensors", ".distcp", "/d/", "__0_0")


@pytest.fixture(autouse=True)
def every_tensor(monkeypatch):
    """Tensors of a store of objects are read back by themselves, however small they are."""
    monkeypatch.setattr(jobs, "LARGEST", 2)


@pytest.fixture
def traffic(monkeypatch):
    """Bytes that are read, by the name of the file of the target."""
    found = Counter()
    real_fill, real_read, real_local = FsspecStore.readinto, FsspecStore.read, open_file.readinto

    def fill(self, path, start, buffer, mark=""):
        found[path.rpartition("/")[2]] += len(buffer)
        return real_fill(self, path, start, buffer, mark)

    def read(self, path, start, stop):
        found[path.rpartition("/")[2]] += stop - start
        return real_read(self, path, start, stop)

    def local(path, offset, buffer, **more):
        found[Path(path).name] += len(buffer)
        return real_local(path, offset, buffer, **more)

    monkeypatch.setattr(FsspecStore, "readinto", fill)
    monkeypatch.setattr(FsspecStore, "read", read)
    for module in ("wherry.mover.read", "wherry.store.local_store"):
        monkeypatch.setattr(f"{module}.readinto", local, raising=False)
    return found


def files_of(job):
    return {file.name.rpartition("/")[2]: file.nbytes for unit in job.units for file in unit.files}


def read_from(traffic, job):
    """Bytes that were read from the files of units."""
    return sum(nbytes for name, nbytes in traffic.items() if name in files_of(job))


def overwritten(target, name, at=-1):
    """Flip a bit of a file of a unit, as storage may do: its size, its time and its ETag stay."""
    if target.startswith("/"):
        [path] = Path(target).parent.glob(f".wherry-*.job/made-*/out/{name}")
        times = path.stat()
        data = bytearray(path.read_bytes())
        data[at] ^= 1
        path.write_bytes(data)
        import os

        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
        return
    place = locate(target).join(name)
    file = place.store.fs.store[f"/{place.path}"]
    file.seek(at, 2 if at < 0 else 0)
    byte = file.read(1)
    file.seek(at, 2 if at < 0 else 0)
    file.write(bytes([byte[0] ^ 1]))


@pytest.mark.parametrize("to", ["hf", "dcp", "orbax"])
def test_the_commit_does_not_read_again_what_was_proved(source, target, tmp_path, traffic, to):
    job = made_job(source, target, to)
    report = made_and_proved(target)
    assert (report.made, report.proved) == ((), tuple(unit.name for unit in job.units))
    whole = sum(map(read_back_bytes, proofs(target).values()))
    assert whole == 1_200_000
    traffic.clear()
    receipt = committed(target)
    assert read_from(traffic, job) < 0.5 * whole  # headers and the like
    assert receipt.verification["bytes_by_workers"] == whole
    assert receipt.verification["tensors"] == 12
    assert receipt.target.checkpoint_digest == undisturbed(source, tmp_path, to).checkpoint_digest
    assert wherry.verify(target, level="digest").ok


@pytest.mark.parametrize("to", ["hf", "dcp", "orbax"])
def test_a_commit_without_proofs_reads_everything(source, target, traffic, to):
    job = made_job(source, target, to)
    report = work(target)
    assert report.proved == ()  # nobody proves what he has made
    assert proofs(target) == {}
    traffic.clear()
    receipt = committed(target)
    assert read_from(traffic, job) >= 1_200_000
    assert "bytes_by_workers" not in receipt.verification


@pytest.mark.parametrize("verify", ["none", "store"])
def test_nothing_is_proved_where_nothing_is_read_back(source, tmp_path, verify):
    target = f"memory://bucket{tmp_path}/out"
    made_job(source, target, verify=verify)
    assert made_and_proved(target).proved == ()
    assert proofs(target) == {}
    committed(target)


def test_leaves_that_cross_units_are_read_whole(tmp_path, traffic):
    """Chunks that end within leaves, in files of 4 MB."""
    random = np.random.default_rng(0)
    save_file({"big.w": random.random((4000, 1500), "f4")}, tmp_path / "m.safetensors")
    options = {"data_file_size": "5MB", "chunks": "3"}
    target = str(tmp_path / "out")
    job = split(
        convert_request(
            str(tmp_path / "m.safetensors"), [TargetRequest(target, "orbax", options)], lineage=False
        ),
        5_000_000,
    )
    assert len(job.units) > 3
    made_and_proved(target)
    for row in proofs(target).values():
        assert len(row["of"]) > 1
    one = next(name for name, row in proofs(target).items() if row["unit"] == 1)
    job_records(locate(target)).remove(one)
    traffic.clear()
    receipt = committed(target)
    proved = receipt.verification["bytes_by_workers"]
    assert 24_000_000 - 3 * 5_000_000 < proved < 24_000_000 - job.units[1].nbytes + 1
    assert 24_000_000 - proved <= read_from(traffic, job) < 24_000_000 - proved + 200_000
    assert wherry.verify(target, level="digest").ok


@pytest.mark.parametrize("moment", ["before the proof", "after the receipt of the proof"])
@pytest.mark.parametrize("to", ["hf", "dcp"])
def test_a_bit_that_storage_flips_is_found(source, target, tmp_path, to, moment):
    job = made_job(source, target, to)
    odd = job.units[1].files[0].name
    at = job.units[1].files[0].nbytes // 4
    with worker_named("a maker"):
        work(target)
    if moment == "before the proof":
        overwritten(target, odd, at)
    with worker_named("a prover"):
        work(target)
    if moment == "before the proof":
        with pytest.raises(
            IncompleteError,
            match=f"unit {job.units[1].name}: a prover read back other bytes of leaf 0 than a maker",
        ):
            commit(target)
        assert not locate(target).join("wherry.json").exists()
        assert work(target).made == (job.units[1].name,)
    receipt = committed(target)
    assert receipt.target.checkpoint_digest == undisturbed(source, tmp_path, to).checkpoint_digest
    assert wherry.verify(target, level="digest").ok


def leaf_changed(row):
    """The moves of a record, of which one has another leaf."""
    moves = [list(move) for move in row["moves"]]
    raw = bytearray(base64.b64decode(moves[0][4]))
    raw[0] ^= 1
    moves[0][4] = base64.b64encode(raw).decode()
    return moves


@pytest.mark.parametrize("liar", ["maker", "prover"])
def test_where_maker_and_prover_disagree_the_unit_is_made_again(source, target, tmp_path, liar):
    job = made_job(source, target)
    made_and_proved(target)
    rows = receipts(target) if liar == "maker" else proofs(target)
    name, row = next((name, row) for name, row in rows.items() if row["unit"] == 2)
    changed(target, name, moves=leaf_changed(row))
    with pytest.raises(IncompleteError, match=f"unit {job.units[2].name}: a prover read back other bytes"):
        commit(target)
    assert work(target).made == (job.units[2].name,)
    with worker_named("a prover"):
        assert work(target).proved == (job.units[2].name,)
    receipt = committed(target)
    assert receipt.target.checkpoint_digest == undisturbed(source, tmp_path).checkpoint_digest
    assert receipt.verification["bytes_by_workers"] == 1_200_000


@pytest.mark.parametrize(
    "fields",
    [
        {"worker": "a maker"},
        {"version": "0.0.1"},
        {"algorithm": "sha256"},
        {"digest": "sha256:00"},
        {"unit": 99},
        {"of": []},
        {"of": ["receipt-00000-00000000"]},
    ],
    ids=lambda fields: "-".join(map(str, next(iter(fields.items()))))[:24],
)
def test_a_proof_that_does_not_fit_is_not_believed(source, target, traffic, fields):
    job = made_job(source, target)
    made_and_proved(target)
    for name in proofs(target):
        changed(target, name, **fields)
    traffic.clear()
    receipt = committed(target)
    assert read_from(traffic, job) >= 1_200_000
    assert "bytes_by_workers" not in receipt.verification


def test_a_proof_of_files_that_were_made_anew_is_not_believed(source, target):
    """It has also read a file of another unit, of which another attempt counts now."""
    made_job(source, target)
    made_and_proved(target)
    for name, row in proofs(target).items():
        changed(target, name, of=[*row["of"], "receipt-00000-00000000"])
    assert "bytes_by_workers" not in committed(target).verification


def test_a_proof_of_another_key_is_refused(source, target, monkeypatch):
    made_job(source, target)
    made_and_proved(target)
    name, row = next(iter(proofs(target).items()))
    records = job_records(locate(target))
    with monkeypatch.context() as patch:
        patch.setenv("WHERRY_KEY", "a key of somebody else")
        put_row(records, name, row)
    with pytest.raises(HostileError, match=f"the record {name} was altered, or signed with another key"):
        commit(target)


def test_a_file_that_was_replaced_after_its_proof_is_made_again(source, target):
    job = made_job(source, target)
    made_and_proved(target)
    file = job.units[1].files[0]
    if target.startswith("/"):
        [path] = Path(target).parent.glob(f".wherry-*.job/made-*/out/{file.name}")
        path.write_bytes(bytes(file.nbytes))
    else:
        place = locate(target).join(file.name)
        place.store.fs.pipe_file(place.path, bytes(file.nbytes))
    with pytest.raises(IncompleteError, match=f"not written: {job.units[1].name}"):
        commit(target)
    if not target.startswith("/"):
        locate(target).store.fs.rm(locate(target).join(file.name).path)
    assert work(target).made == (job.units[1].name,)
    assert len(proofs(target)) == len(job.units) - 1
    committed(target)
    assert wherry.verify(target, level="digest").ok


def test_a_file_that_changes_while_the_commit_runs_is_read_again(source, target, monkeypatch):
    """The proof is of a state that is gone: what is there now is read, and found to be wrong."""
    job = made_job(source, target)
    made_and_proved(target)
    file = job.units[1].files[0]
    real = committing.watch_files

    def then_replaced(split_, receipts_, staged, shared):
        watched = real(split_, receipts_, staged, shared)
        if target.startswith("/"):
            path = Path(staged.join(file.name).path)
            data = bytearray(path.read_bytes())
            data[-1] ^= 1
            path.unlink()
            path.write_bytes(data)
        else:
            place = locate(target).join(file.name)
            found = place.store.head(place.path)
            data = bytearray(place.read_whole(1 << 24))
            data[-1] ^= 1
            place.store.remove_object(place.path, found.mark)
            place.store.put_object(place.path, [memoryview(bytes(data))], found.run)
        return watched

    monkeypatch.setattr(committing, "watch_files", then_replaced)
    with pytest.raises(MismatchError, match="read-back differs"):
        commit(target)
    assert not locate(target).join("wherry.json").exists()


def test_zeros_in_place_of_a_file_that_vanished_are_found(source, target, monkeypatch):
    """It vanishes after the commit has looked at it; the writer of the format fills a file that nobody writes."""
    job = made_job(source, target)
    made_and_proved(target)
    file, real = job.units[1].files[0], committing.convert_all

    def first_removed(*arguments, **more):
        if target.startswith("/"):
            [path] = Path(target).parent.glob(f".wherry-out.*/out/{file.name}")
            path.unlink()
        else:
            place = locate(target).join(file.name)
            store = place.store
            store.remove_object(place.path, store.head(place.path).mark)
        return real(*arguments, **more)

    monkeypatch.setattr(committing, "convert_all", first_removed)
    with pytest.raises(MismatchError, match="read-back differs"):
        commit(target)
    assert not locate(target).join("wherry.json").exists()


@pytest.mark.parametrize("count", [1, 3])
def test_a_prover_that_is_killed_is_replaced_by_another_or_by_the_commit(
    source, target, tmp_path, monkeypatch, count
):
    job = made_job(source, target)
    with worker_named("a maker"):
        work(target)
    real, calls = tasks._read, []

    def read(*arguments):
        calls.append(arguments)
        if len(calls) == count:
            raise Killed
        real(*arguments)

    with monkeypatch.context() as patch, worker_named("a prover"):
        as_dead(patch)
        patch.setattr(tasks, "_read", read)
        with pytest.raises(Killed):
            work(target)
    assert len(proofs(target)) == count - 1
    before = proofs(target)
    with worker_named("another prover"):
        assert len(work(target).proved) == len(job.units) - len(before)
    assert before.items() <= proofs(target).items()
    receipt = committed(target)
    assert receipt.verification["bytes_by_workers"] == 1_200_000
    assert receipt.target.checkpoint_digest == undisturbed(source, tmp_path).checkpoint_digest


def test_a_commit_that_was_killed_keeps_the_proofs(source, tmp_path, monkeypatch, traffic):
    target = f"memory://bucket{tmp_path}/out"
    job = made_job(source, target)
    made_and_proved(target)
    with monkeypatch.context() as patch:
        patch.setattr(committing, "convert_all", lambda *_a, **_k: (_ for _ in ()).throw(Killed))
        with pytest.raises(Killed):
            commit(target)
    traffic.clear()
    assert committed(target).verification["bytes_by_workers"] == 1_200_000
    assert read_from(traffic, job) < 200_000


def test_a_unit_that_changed_before_its_proof_is_left_to_the_commit(source, target, caplog):
    job = made_job(source, target)
    with worker_named("a maker"):
        work(target)
    for name, row in receipts(target).items():
        if row["unit"] == 1:
            changed(target, name, files=[[one[0], one[1], "another mark"] for one in row["files"]])
    with worker_named("a prover"):
        report = work(target)
    assert job.units[1].name not in report.proved
    assert len(report.proved) == len(job.units) - 1
    assert (
        f"unit {job.units[1].name} was not read back: unit {job.units[1].name} is no longer as" in caplog.text
    )


def test_a_proof_says_what_it_has_read(source, target):
    job = made_job(source, target)
    made_and_proved(target)
    assert job.tasks == tuple(Task(kind, unit) for kind in TaskKind for unit in job.units)
    for row in proofs(target).values():
        [own] = [one for one in receipts(target).values() if one["unit"] == row["unit"]]
        assert row["worker"] == "a prover"
        assert own["worker"] == "a maker"
        read = {tuple(move[:3]): base64.b64decode(move[4]) for move in row["moves"]}
        wrote = {tuple(move[:3]): base64.b64decode(move[4]) for move in own["moves"]}
        assert read == {key: raw[:32] for key, raw in wrote.items()}
    assert tasks.this_worker().startswith("process ")


def test_a_move_counts_if_all_of_its_units_have_proved_it(tmp_path):
    """Two chunks of one move lie in the files of two units, whose makers differ."""
    random = np.random.default_rng(0)
    save_file({"big.w": random.random((4000, 1500), "f4")}, tmp_path / "m.safetensors")
    options = {"data_file_size": "10MB", "chunks": "3"}
    target = str(tmp_path / "out")
    job = split(
        convert_request(
            str(tmp_path / "m.safetensors"), [TargetRequest(target, "orbax", options)], lineage=False
        ),
        10_000_000,
    )
    made_and_proved(target)
    by_unit = {row["unit"]: (name, row) for name, row in proofs(target).items()}
    first, second = ({tuple(move[:3]) for move in by_unit[unit][1]["moves"]} for unit in (0, 1))
    assert first & second
    assert second - first
    name, row = by_unit[1]
    changed(target, name, moves=[move for move in row["moves"] if tuple(move[:3]) not in first])
    with opened_job(target) as opened:
        made = list(map(record_from, receipts(target).values()))
        found = list(map(record_from, proofs(target).values()))
        valid = valid_proofs(opened, made, found, {})
        assert len(valid) == len(job.units)
        before = evidence_of(valid, made, {}, opened.job.target)
    spans = {(render(source), *span) for source, span in before.moves}
    assert spans
    assert not spans & first & second
