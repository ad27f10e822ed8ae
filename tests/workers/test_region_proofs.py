"""Regions of one file are read back by others than their makers, once all of them are written."""

from __future__ import annotations

from pathlib import Path

import pytest

import wherry
from tests.support.jobs import changed, lie_about_checksum, made_and_proved, proofs, worker_named
from tests.support.large_files import MB, alone, job_of, large_file
from tests.support.object_stores import small_parts
from wherry.core.request import LayoutRequest, TargetRequest, convert_request
from wherry.errors import CorruptError, IncompleteError, MismatchError
from wherry.storage import direct
from wherry.workers import commit as committing
from wherry.workers.commit import commit
from wherry.workers.job import opened_job, split
from wherry.workers.make import shared_file as begun
from wherry.workers.work import work

LARGE = 20_202_000  # bytes of the tensors that are large enough to be read back by themselves


@pytest.fixture
def target(tmp_path):
    """A target on a file system."""
    return str(tmp_path / "out")


@pytest.fixture
def read_bytes(monkeypatch):
    """Bytes that are read past the page cache, as read-back does."""
    found = [0]
    real = direct.readinto

    def counted(path, offset, buffer, **more):
        found[0] += len(buffer)
        return real(path, offset, buffer, **more)

    monkeypatch.setattr("wherry.mover.read.readinto", counted)
    return found


def shared_file(target):
    """The preallocated file of a job."""
    with opened_job(target) as job:
        return large_file(Path(job.records.folder.path) / f"made-{begun(job, job.units[0]).token}")


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
