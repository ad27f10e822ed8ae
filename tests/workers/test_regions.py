"""One large file made by several workers: each writes a region of it, which others read back."""

from __future__ import annotations

import threading
import time
import zipfile
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import wherry
from tests.support.jobs import (
    Killed,
    as_dead,
    as_elsewhere,
    changed,
    killed,
    lie_about_checksum,
    made_and_proved,
    proofs,
    receipts,
    worker_named,
)
from tests.support.large_files import MB, alone, job_of, large_file, read_back
from tests.support.object_stores import leftover_names, small_parts
from wherry.core.request import LayoutRequest, TargetRequest, convert_request
from wherry.errors import (
    CorruptError,
    IncompleteError,
    MismatchError,
    StorageError,
    TargetExistsError,
    WherryError,
)
from wherry.store import open_file
from wherry.target.clean import clean
from wherry.target.files import SharedFiles
from wherry.workers import commit as committing
from wherry.workers import records, tasks
from wherry.workers.commit import commit
from wherry.workers.job import opened_job, split
from wherry.workers.tasks import shared_file as begun
from wherry.workers.unit import regions_of
from wherry.workers.work import work

FORMATS = ["safetensors", "npz", "torch-zip", "flax-msgpack", "dcp", "hf"]


@pytest.fixture
def target(tmp_path):
    """A target on a file system."""
    return str(tmp_path / "out")


def shared_file(target):
    """The preallocated file of a job."""
    with opened_job(target) as job:
        return large_file(Path(job.records.folder.path) / f"made-{begun(job, job.units[0]).token}")


def require_same(target, source, tmp_path, to="safetensors"):
    """Commit, and compare with what one process makes."""
    [receipt] = commit(target).receipts
    one, file = alone(source, tmp_path, to)
    assert receipt.target.checkpoint_digest == one.target.checkpoint_digest
    assert receipt.resumed_bytes == receipt.bytes_written  # the commit has moved no byte of a tensor
    assert large_file(target).read_bytes() == file.read_bytes()
    assert wherry.verify(target, level="digest").ok
    assert leftover_names(target) == [name for name in leftover_names(target) if name.startswith("alone")]


@pytest.mark.parametrize("to", FORMATS)
def test_regions_of_one_file_make_what_one_process_makes(model, target, tmp_path, to):
    job = job_of(model, target, to)
    regions = [unit.region for unit in job.units]
    assert len(regions) > 4
    assert [one.start for one in regions[1:]] == [one.stop for one in regions[:-1]]  # no gap, no overlap
    assert all(one.start % (64 << 10) == 0 for one in regions)
    assert sum("a.big" in "/".join(part.source) for unit in job.units for part in unit.parts) > 4
    report = work(target)
    assert report.made == tuple(unit.name for unit in job.units)
    assert report.nbytes == shared_file(target).stat().st_size
    require_same(target, model, tmp_path, to)


@pytest.mark.parametrize("to", FORMATS[:4])
def test_the_format_s_own_library_reads_what_regions_have_made(model, arrays, target, to):
    job_of(model, target, to)
    work(target)
    commit(target)
    if to in ("npz", "torch-zip"):
        assert zipfile.ZipFile(target).testzip() is None  # every CRC-32, combined from those of the regions
    found = read_back(target, to)
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        assert np.asarray(found[name]).tobytes() == array.tobytes(), name


@pytest.mark.parametrize("step", ["move", "finish_region", "_describe_file"])
def test_a_region_of_a_worker_that_was_killed_is_made_again(model, target, tmp_path, monkeypatch, step):
    job = job_of(model, target, "torch-zip")
    with monkeypatch.context() as patch:
        as_dead(patch)
        killed(target, patch, step, 2)
    assert job.units[1].name in work(target).made
    require_same(target, model, tmp_path, "torch-zip")


def test_a_region_is_written_by_its_unit_alone(model, target):
    job = job_of(model, target, "npz")
    with opened_job(target) as opened:
        claim = records.Claims(opened.records).take(opened.tasks[2], opened.records.names())
        tasks.make_unit(opened, opened.units[2], claim)
    data, region = shared_file(target).read_bytes(), job.units[2].region
    assert any(data[region.start : region.stop])
    assert not any(data[: region.start])
    assert not any(data[region.stop :])


@pytest.mark.parametrize("guarded", [True, False])
def test_a_worker_that_comes_back_after_the_commit_changes_no_byte(
    model, target, tmp_path, monkeypatch, guarded
):
    """It stops where it can see that its unit was made; where it cannot, it writes what is there."""
    job_of(model, target, "torch-zip")
    real, begin, back, late, ended = SharedFiles._write, SharedFiles.__init__, threading.Event(), [], []

    def beginning(self, *args):
        late.append(self)
        begin(self, *args)

    def slow(self, name, offset, view, *, direct=False):
        if self is late[0]:
            assert back.wait(60)
        real(self, name, offset, view, direct=direct)

    def come_back():
        with opened_job(target) as opened:
            unit = opened.units[1]
            claim = records.Claims(opened.records).take(opened.tasks[unit.number], opened.records.names())
            try:
                ended.append(tasks.make_unit(opened, unit, claim))
            except WherryError as error:
                ended.append(error)

    if not guarded:
        monkeypatch.setattr(tasks, "late_guard", lambda _split, _unit: lambda: None)
    monkeypatch.setattr(SharedFiles, "_write", slow)
    monkeypatch.setattr(SharedFiles, "__init__", beginning)
    with monkeypatch.context() as patch:
        as_elsewhere(patch)
        thread = threading.Thread(target=come_back)
        thread.start()
        while not late:
            time.sleep(0.02)
    work(target, expiry=0.3)
    require_same(target, model, tmp_path, "torch-zip")
    before = Path(target).read_bytes()
    back.set()
    thread.join()
    assert isinstance(ended[0], WherryError)  # the job has ended
    assert Path(target).read_bytes() == before
    assert wherry.verify(target, level="digest").ok


def test_a_worker_whose_unit_was_made_by_another_stops(model, target):
    job_of(model, target)
    work(target)
    with opened_job(target) as opened:
        for name in (name for name in opened.records.names() if name.startswith("claim-receipt-00001")):
            opened.records.remove(name)
        claim = records.Claims(opened.records).take(opened.tasks[1], opened.records.names())
        with pytest.raises(TargetExistsError, match=r"unit 00001-\w{8} was made by another worker"):
            tasks.make_unit(opened, opened.units[1], claim)


def test_a_file_that_is_lost_is_made_again(model, target, tmp_path):
    job = job_of(model, target)
    work(target)
    shared_file(target).unlink()
    with pytest.raises(IncompleteError, match=rf"{len(job.units)} of {len(job.units)} units are not written"):
        commit(target)
    work(target)
    require_same(target, model, tmp_path)


def test_a_receipt_of_a_region_in_another_file_is_not_believed(model, target, tmp_path):
    """A file was lost, and a new one begun, before the receipt of an old worker came."""
    job = job_of(model, target)
    work(target)
    name, row = next((name, row) for name, row in receipts(target).items() if row["unit"] == 1)
    folder = Path(shared_file(target)).parent
    changed(target, name, files=[[*row["files"][0][:2], "00000000"]])
    other = folder.with_name("made-00000000")
    other.mkdir()
    (other / "out").write_bytes(bytes((folder / "out").stat().st_size))
    with pytest.raises(IncompleteError, match=rf"1 of {len(job.units)} units"):
        commit(target)


@pytest.mark.parametrize("to", ["safetensors", "torch-zip"])
def test_a_region_that_was_changed_after_its_receipt_is_found_and_made_again(model, target, tmp_path, to):
    job = job_of(model, target, to)
    work(target)
    file = shared_file(target)
    with file.open("r+b") as opened:
        opened.seek(job.units[2].region.start + 5000)
        byte = opened.read(1)
        opened.seek(-1, 1)
        opened.write(bytes([byte[0] ^ 1]))
    with pytest.raises(MismatchError, match="read-back differs"):
        commit(target)
    assert not Path(target).exists()
    with pytest.raises(IncompleteError):
        commit(target)
    work(target)
    require_same(target, model, tmp_path, to)


@pytest.mark.parametrize("to", ["npz", "torch-zip"])
def test_a_receipt_that_lies_about_the_checksum_of_a_member_is_refused(model, target, to):
    """The archive would have a CRC-32 that is not that of its bytes, which no hash of the tensor shows."""
    job_of(model, target, to)
    work(target)
    lie_about_checksum(target, "a.big")
    with pytest.raises((CorruptError, MismatchError), match="checksum mismatch"):
        commit(target)
    assert not Path(target).exists()


def test_clean_names_the_preallocated_file_of_a_job(model, target, monkeypatch):
    job = job_of(model, target)
    with monkeypatch.context() as patch:
        as_dead(patch)
        killed(target, patch, "finish_region", 1)
    size = job.units[-1].region.stop
    assert shared_file(target).stat().st_size == size
    [report] = clean(Path(target).parent, min_age=0)
    assert report.removed
    assert report.uri.endswith(".wherry-out.job")
    assert report.nbytes >= size
    assert not list(Path(target).parent.iterdir())


def test_two_commits_of_regions_make_one_target(model, target, tmp_path, monkeypatch):
    job_of(model, target)
    work(target)
    with monkeypatch.context() as patch:
        patch.setattr("wherry.converter.job.complete", _killed)
        with suppress(Killed):
            commit(target)
    require_same(target, model, tmp_path)


def _killed(*_args):
    raise Killed


def test_a_shared_file_keeps_what_others_have_written(tmp_path):
    first, second = (SharedFiles(tmp_path, {"file": 300_000}) for _ in range(2))
    first.write("file", 10, b"one")
    first.sync()
    second.write("file", 200_001, bytes(range(256)) * 300)
    second.finish()
    third = SharedFiles(tmp_path, {"file": 300_000})
    third.finish()
    data = (tmp_path / "file").read_bytes()
    assert len(data) == 300_000
    assert data[10:13] == b"one"
    assert data[200_001:276_801] == bytes(range(256)) * 300
    assert not any(data[13:200_001])
    with pytest.raises(StorageError, match="has 300,000 bytes instead of 400,000"):
        SharedFiles(tmp_path, {"file": 400_000})
    for one in (first, second, third):
        one.close()


@settings(deadline=None)  # the machine may be loaded
@given(st.integers(0, 1 << 42), st.integers(1, 1 << 33), st.sampled_from([0, 1, 1 << 16, 8 << 20]))
def test_regions_cover_a_file_once_and_begin_at_steps(size, unit, step):
    regions = regions_of("file", size, max(unit, size // 5000), step)
    if not regions:
        assert not step or size <= max(unit, step, size // 5000)
        return
    assert regions[0].span.start == 0
    assert regions[-1].span.stop == size
    for one, other in pairwise(regions):
        assert one.span.stop == other.span.start
    for one in regions:
        assert one.span.start % step == 0
        assert 0 < one.span.nbytes <= max(unit, step, size // 5000)


# Regions of one file are read back by others than their makers, once all of them are written.


LARGE = 20_202_000  # bytes of the tensors that are large enough to be read back by themselves


@pytest.fixture
def read_bytes(monkeypatch):
    """Bytes that are read past the page cache, as read-back does."""
    found = [0]
    real = open_file.readinto

    def counted(path, offset, buffer, **more):
        found[0] += len(buffer)
        return real(path, offset, buffer, **more)

    monkeypatch.setattr("wherry.mover.read.readinto", counted)
    return found


def overwritten(path, at):
    """Flip a bit of a file."""
    with path.open("r+b") as opened:
        opened.seek(at)
        byte = opened.read(1)
        opened.seek(at)
        opened.write(bytes([byte[0] ^ 1]))


@pytest.mark.parametrize("to", ["safetensors", "torch-zip"])
def test_the_commit_does_not_read_regions_again_that_were_proved(model, target, tmp_path, read_bytes, to):
    job = job_of(model, target, to)
    report = made_and_proved(target)
    assert report.proved == tuple(unit.name for unit in job.units)
    read_bytes[0] = 0
    [receipt] = commit(target).receipts
    assert receipt.verification["bytes_by_workers"] > LARGE - MB
    assert read_bytes[0] < MB  # blocks that the commit writes again, and small tensors
    one, file = alone(model, tmp_path, to)
    assert receipt.target.checkpoint_digest == one.target.checkpoint_digest
    assert Path(target).read_bytes() == file.read_bytes()
    assert wherry.verify(target, level="digest").ok


def test_a_worker_does_not_prove_its_own_regions(model, target):
    job_of(model, target)
    assert work(target).proved == ()
    [receipt] = commit(target).receipts
    assert "bytes_by_workers" not in receipt.verification


def test_a_bit_that_storage_flips_in_a_region_is_found_by_a_prover(model, target):
    job = job_of(model, target)
    with worker_named("a maker"):
        work(target)
    overwritten(shared_file(target), job.units[2].region.start + 5000)
    with worker_named("a prover"):
        work(target)
    with pytest.raises(IncompleteError, match=f"unit {job.units[2].name}: a prover read back other bytes"):
        commit(target)
    assert not Path(target).exists()
    with worker_named("a maker"):
        assert job.units[2].name in work(target).made  # and the units that share moves with it
    with worker_named("a prover"):  # the state of the file is another one, so all of it is read again
        assert len(work(target).proved) == len(job.units)
    [receipt] = commit(target).receipts
    assert receipt.verification["bytes_by_workers"] > LARGE - MB
    assert wherry.verify(target, level="digest").ok


def test_a_region_that_is_changed_after_its_proof_is_read_by_the_commit(model, target):
    job = job_of(model, target)
    made_and_proved(target)
    overwritten(shared_file(target), job.units[2].region.start + 5000)
    with pytest.raises(MismatchError, match="read-back differs"):
        commit(target)
    assert not Path(target).exists()


def test_zeros_in_place_of_a_shared_file_that_vanished_are_found(model, target, monkeypatch):
    """It vanishes after the commit has looked at it; the writer of the format makes one of the same size."""
    job_of(model, target, "dcp")
    made_and_proved(target)
    real = committing.convert_all

    def first_removed(*arguments, **more):
        [area] = Path(target).parent.glob(".wherry-out.*/out")
        large_file(area).unlink()
        return real(*arguments, **more)

    monkeypatch.setattr(committing, "convert_all", first_removed)
    with pytest.raises((MismatchError, CorruptError)):
        commit(target)
    assert not Path(target).exists()


@pytest.mark.parametrize(
    "fields", [{"files": []}, {"files": [[".", 1, "another state"]]}], ids=["none", "other"]
)
def test_a_proof_of_a_region_says_which_state_of_the_file_it_has_read(model, target, fields):
    job_of(model, target)
    made_and_proved(target)
    for name in proofs(target):
        changed(target, name, **fields)
    [receipt] = commit(target).receipts
    assert "bytes_by_workers" not in receipt.verification


@pytest.mark.parametrize("unit", [4 * MB, 64 * MB], ids=["regions", "one unit"])
def test_a_receipt_that_lies_about_a_checksum_is_refused_though_the_bytes_were_proved(model, target, unit):
    """No hash of the tensor shows it: the archive would have a CRC-32 that its own library refuses."""
    job_of(model, target, "npz", unit)
    made_and_proved(target)
    lie_about_checksum(target, "a.big")
    with pytest.raises((CorruptError, MismatchError), match="checksum mismatch"):
        commit(target)
    assert not Path(target).exists()


def mixed(model, target):
    """A job of shards of which one is larger than a unit."""
    options = {"max_shard_size": "1MB"}
    request = convert_request(
        str(model), [TargetRequest(target, "hf", options, layout=LayoutRequest("none"))], lineage=False
    )
    return split(request, 4 * MB)


@pytest.mark.parametrize("place", ["files", "objects"])
def test_units_of_whole_files_are_proved_among_regions(model, tmp_path, place):
    """A region of an object cannot be read before its upload is complete: that is left to the commit."""
    target = str(tmp_path / "out") if place == "files" else f"memory://bucket{tmp_path}/out"
    with small_parts(256 << 10):
        job = mixed(model, target)
        whole = [unit for unit in job.units if unit.region is None]
        assert 0 < len(whole) < len(job.units) - 1
        report = made_and_proved(target)
        wanted = job.units if place == "files" else whole
        assert report.proved == tuple(unit.name for unit in wanted)
        [receipt] = commit(target).receipts
        one = wherry.convert(
            model, tmp_path / "one", to="hf", family="none", options={"max_shard_size": "1MB"}, lineage=False
        )
        assert receipt.target.checkpoint_digest == one.target.checkpoint_digest
        assert wherry.verify(target, level="digest").ok
