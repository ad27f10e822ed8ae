"""One large object made by several workers: each sends the parts of its region to one upload; a commit completes it."""

from __future__ import annotations

import zipfile

import numpy as np
import pytest

import wherry
from tests.support.jobs import as_dead, changed, killed, receipts
from tests.support.large_files import alone, job_of, read_back
from tests.support.object_stores import leftover_names, small_parts, uploads_below
from wherry.errors import IncompleteError, StorageError
from wherry.store.local_store import locate
from wherry.store.memory import MemoryStore
from wherry.target.clean import clean
from wherry.workers import records, tasks
from wherry.workers.commit import commit
from wherry.workers.job import opened_job
from wherry.workers.tasks import shared_file
from wherry.workers.work import work

PART = 256 << 10
FORMATS = ["safetensors", "npz", "torch-zip", "flax-msgpack", "dcp", "hf"]
COMPLETE = ("safetensors", "flax-msgpack", "hf")  # formats of which units know every byte of their regions


@pytest.fixture
def target(tmp_path):
    """A target in a store of objects, with parts of 256 KiB."""
    with small_parts(PART):
        yield f"memory://bucket{tmp_path}/out"


def copied(target, folder):
    """The largest object of a target, as a local file."""
    place = locate(target)
    names = [entry.name for entry in place.walk()] if place.entry.is_dir else [""]
    data = max(((place.join(name) if name else place).read_whole(1 << 30) for name in names), key=len)
    (folder / "copy").write_bytes(data)
    return folder / "copy"


def require_same(target, source, tmp_path, to="safetensors"):
    """Commit, and compare with what one process makes; returns the bytes that the commit has not moved itself."""
    [receipt] = commit(target).receipts
    one, file = alone(source, tmp_path, to)
    assert receipt.target.checkpoint_digest == one.target.checkpoint_digest
    assert copied(target, tmp_path).read_bytes() == file.read_bytes()
    assert wherry.verify(target, level="digest").ok
    assert leftover_names(target) == []
    assert uploads_below(target) == []
    return receipt.resumed_bytes / receipt.bytes_written


@pytest.mark.parametrize("to", FORMATS)
def test_regions_of_one_upload_make_what_one_process_makes(model, arrays, target, tmp_path, to):
    job = job_of(model, target, to)
    assert len(job.units) > 4
    assert all(unit.region.start % PART == 0 for unit in job.units)
    work(target)
    [upload] = uploads_below(target)
    assert {row["files"][0][2] for row in receipts(target).values()} == {upload.key}
    kept = require_same(target, model, tmp_path, to)
    assert kept == 1 if to in COMPLETE else 0.3 < kept < 1
    if to in FORMATS[:4]:
        if to in ("npz", "torch-zip"):
            assert zipfile.ZipFile(tmp_path / "copy").testzip() is None
        found = read_back(tmp_path / "copy", to)
        assert all(np.asarray(found[name]).tobytes() == array.tobytes() for name, array in arrays.items())


@pytest.mark.parametrize("to", ["safetensors", "torch-zip"])
def test_checksums_of_the_parts_of_all_workers_prove_the_object(model, target, tmp_path, to):
    job_of(model, target, to, verify="store")
    work(target)
    require_same(target, model, tmp_path, to)


@pytest.mark.parametrize("step", ["move", "finish_region", "_describe_file"])
def test_a_region_of_a_worker_that_was_killed_is_sent_again(model, target, tmp_path, monkeypatch, step):
    job = job_of(model, target, "npz")
    with monkeypatch.context() as patch:
        as_dead(patch)
        killed(target, patch, step, 2)
    assert job.units[1].name in work(target).made
    require_same(target, model, tmp_path, "npz")


def test_a_failing_worker_leaves_the_upload_to_the_others(model, target, tmp_path, monkeypatch):
    job_of(model, target)
    with monkeypatch.context() as patch, pytest.raises(StorageError):
        patch.setattr(tasks, "finish_region", _failing)
        work(target)
    assert len(uploads_below(target)) == 1
    work(target)
    require_same(target, model, tmp_path)


def _failing(*_arguments):
    raise StorageError("the storage failed", uri="memory://")


def made_late(target, number):
    """A worker comes back from the dead, and sends the parts of a unit again."""
    with opened_job(target) as opened:
        for name in (
            name for name in opened.records.names() if name.startswith(f"claim-receipt-{number:05d}")
        ):
            opened.records.remove(name)
        claim = records.Claims(opened.records).take(opened.tasks[number], opened.records.names())
        receipt = tasks.make_unit(opened, opened.units[number], claim)
        opened.records.remove(claim.name)
        return receipt


def test_parts_that_a_late_worker_sends_again_change_nothing(model, target, tmp_path):
    job_of(model, target)
    work(target)
    made_late(target, 1)  # in this store, a part that is sent again has another mark
    assert require_same(target, model, tmp_path) == 1


def test_a_part_with_other_bytes_than_a_receipt_says_is_made_again(model, target, tmp_path):
    job = job_of(model, target)
    work(target)
    with opened_job(target) as opened:
        unit = opened.units[2]
        upload = shared_file(opened, unit).upload
        number = unit.region.start // PART
        locate(target).store.put_part(upload, number, [memoryview(bytes(PART))])
    with pytest.raises(IncompleteError, match=rf"1 of {len(job.units)} units are not written: 00002"):
        commit(target)
    assert work(target).made == (job.units[2].name,)
    require_same(target, model, tmp_path)


def test_an_upload_that_is_gone_is_made_again(model, target, tmp_path):
    job = job_of(model, target)
    work(target)
    [upload] = uploads_below(target)
    locate(target).store.abort(upload)
    with pytest.raises(IncompleteError, match=rf"{len(job.units)} of {len(job.units)} units"):
        commit(target)
    work(target)
    require_same(target, model, tmp_path)


@pytest.mark.parametrize("verify", ["digest", "store"])
def test_moves_of_parts_that_no_receipt_names_are_never_zeros(model, target, tmp_path, verify):
    job_of(model, target, verify=verify)
    work(target)
    name, row = next((name, row) for name, row in receipts(target).items() if row["unit"] == 1)
    changed(target, name, parts=row["parts"][3:])
    assert require_same(target, model, tmp_path) < 1


@pytest.mark.parametrize("to", ["safetensors", "torch-zip"])
def test_a_commit_that_was_killed_after_it_completed_the_object_is_taken_up(
    model, target, tmp_path, monkeypatch, to
):
    job_of(model, target, to)
    work(target)
    with monkeypatch.context() as patch:
        patch.setattr("wherry.converter.job._verify", _interrupted)
        with pytest.raises(KeyboardInterrupt):
            commit(target)
    assert uploads_below(target) == []
    require_same(target, model, tmp_path, to)


def _interrupted(*_arguments):
    raise KeyboardInterrupt


def test_two_workers_begin_one_upload(model, target, tmp_path, monkeypatch):
    """Both see no record; the slower one removes its own upload and sends to that of the other."""
    job_of(model, target)
    real, calls = MemoryStore.begin, []

    def begin(self, path, run):
        calls.append(path)
        if len(calls) == 1:
            made_late(target, 3)
        return real(self, path, run)

    with monkeypatch.context() as patch:
        patch.setattr(MemoryStore, "begin", begin)
        work(target)
    assert len(calls) == 2
    assert len(uploads_below(target)) == 1
    require_same(target, model, tmp_path)


def test_clean_removes_the_upload_of_a_job(model, target, monkeypatch):
    job_of(model, target)
    with monkeypatch.context() as patch:
        as_dead(patch)
        killed(target, patch, "finish_region", 2)
    assert len(uploads_below(target)) == 1
    [report] = clean(locate(target).parent.uri, min_age=0)
    assert report.removed
    assert uploads_below(target) == []
    assert list(locate(target).parent.walk()) == []
