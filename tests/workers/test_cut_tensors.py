"""Tensors of which each chunk is a file: units of their own, which other workers read back, in buckets too."""

from __future__ import annotations

import hashlib
import os
import zlib
from pathlib import Path

import pytest

import wherry
from tests.support.jobs import (
    as_dead,
    killed,
    lie_about_checksum,
    made_and_proved,
    proofs,
    receipts,
    worker_named,
)
from tests.support.large_files import MB
from tests.support.made_twice import twice
from tests.support.object_stores import small_parts
from wherry.core.request import TargetRequest, convert_request
from wherry.errors import CorruptError, IncompleteError, MismatchError
from wherry.storage.stores import locate
from wherry.workers.commit import commit
from wherry.workers.estimate import plan_for_workers
from wherry.workers.job import split
from wherry.workers.work import work

OPTIONS = {"shard_size": "4MB"}  # the largest tensor has 18 MB
LARGE = 18_000_000


def request(source, target, **more):
    return convert_request(str(source), [TargetRequest(str(target), "dcp", OPTIONS)], lineage=False, **more)


def job_of(source, target, unit=5 * MB, **more):
    """A job whose units are files, which are smaller than a unit may be."""
    return split(request(source, target, **more), unit)


def files_of(target):
    """Name → hash of the files of a target, without its sidecar."""
    place = locate(target)
    names = [entry.name for entry in place.entries() if not entry.is_dir and entry.name != "wherry.json"]
    return {name: hashlib.sha256(place.join(name).read_whole(1 << 30)).hexdigest() for name in names}


def require_same(target, source, tmp_path):
    """Commit, and compare with what one process makes; returns the receipt."""
    [receipt] = commit(target).receipts
    one = wherry.convert(source, tmp_path / "alone", to="dcp", options=OPTIONS, lineage=False)
    assert receipt.target.checkpoint_digest == one.target.checkpoint_digest
    assert receipt.resumed_bytes == receipt.bytes_written  # the commit has moved no byte of a tensor
    assert files_of(target) == files_of(str(tmp_path / "alone"))
    assert wherry.verify(target, level="digest").ok
    return receipt


def test_each_file_with_chunks_is_a_unit_that_another_worker_reads_back(model, target, tmp_path):
    job = job_of(model, target)
    assert all(unit.region is None for unit in job.units)
    having = [unit for unit in job.units if any("a.big" in "/".join(part.source) for part in unit.parts)]
    assert len(having) == 5
    assert len({file.name for unit in having for file in unit.files}) == 5
    report = made_and_proved(target)
    assert report.proved == tuple(unit.name for unit in job.units)
    assert require_same(target, model, tmp_path).verification["bytes_by_workers"] > LARGE


def test_a_unit_reads_little_more_of_a_cut_tensor_than_it_writes(model, target):
    """The moves at the ends of its chunk, which the next unit makes too, and the rest of a leaf."""
    job, move = job_of(model, target), 8 << 20
    for unit in job.units:
        own = [part for part in unit.parts if "a.big" in "/".join(part.source)]
        also_read = [part for part in unit.also_read if "a.big" in "/".join(part.source)]
        read = sum(part.nbytes for part in (*own, *also_read))
        assert read <= 2 * move
        assert all(part.start % move == 0 for part in (*own, *also_read))
    assert sum(unit.nbytes_in for unit in job.units) > LARGE


def test_the_plan_lets_no_byte_be_read_back_by_the_commit_alone(model, tmp_path):
    target = f"memory://bucket{tmp_path}/out"
    _plan, cut = plan_for_workers(request(model, target), 4, 5 * MB, MB)
    whole = convert_request(str(model), [TargetRequest(target, "dcp", {})], lineage=False)
    _plan, regions = plan_for_workers(whole, 4, 5 * MB, MB)
    assert (cut.commit_bytes, cut.large, cut.whole) == (0, "", "")
    assert regions.commit_bytes > LARGE
    assert cut.seconds < regions.seconds


def test_every_unit_is_the_same_in_other_processes(model, tmp_path):
    first, second = twice(lambda target: job_of(model, target), tmp_path)
    assert len(first) > 5
    assert first == second
    require_same(str(tmp_path / "one" / "out"), model, tmp_path)


def test_files_of_chunks_may_have_regions(model, tmp_path):
    """On a file system a smaller `--unit` cuts them: workers read back each region too."""
    target = str(tmp_path / "out")
    job = job_of(model, target, 2 * MB)
    assert sum(unit.region is not None for unit in job.units) > 8
    report = made_and_proved(target)
    assert report.proved == tuple(unit.name for unit in job.units)
    assert require_same(target, model, tmp_path).verification["bytes_by_workers"] > LARGE


def test_files_of_chunks_may_be_open_uploads(model, tmp_path):
    """In a bucket a smaller `--unit` makes parts of them, whose checksums only the commit knows."""
    target = f"memory://bucket{tmp_path}/out"
    with small_parts(256 << 10):
        job = job_of(model, target, 2 * MB)
        assert sum(unit.region is not None for unit in job.units) > 8
        work(target)
        commit(target)
    wherry.convert(model, tmp_path / "alone", to="dcp", options=OPTIONS, lineage=False)
    assert files_of(target) == files_of(str(tmp_path / "alone"))
    assert wherry.verify(target, level="digest").ok


@pytest.mark.parametrize("verify", ["store", "none"])
def test_without_read_back_the_files_are_the_same(model, tmp_path, verify):
    target = f"memory://bucket{tmp_path}/out"
    job_of(model, target, verify=verify)
    work(target)
    commit(target)
    wherry.convert(model, tmp_path / "alone", to="dcp", options=OPTIONS, lineage=False)
    assert files_of(target) == files_of(str(tmp_path / "alone"))


def test_torch_loads_what_units_have_made(model, arrays, tmp_path):
    torch = pytest.importorskip("torch")
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    target = str(tmp_path / "out")
    job_of(model, target)
    made_and_proved(target)
    commit(target)
    found = {name: torch.zeros(one.shape) for name, one in arrays.items()}
    dcp.load(found, checkpoint_id=target, no_dist=True)
    assert all(found[name].numpy().tobytes() == one.tobytes() for name, one in arrays.items())


def test_a_receipt_that_lies_about_the_checksum_of_a_chunk_is_refused(model, tmp_path):
    """No hash of the tensor shows it: the archive would have a CRC-32 that torch refuses."""
    target = str(tmp_path / "out")
    job_of(model, target)
    made_and_proved(target)
    lie_about_checksum(target, "a.big")
    with pytest.raises((CorruptError, MismatchError), match="checksum mismatch"):
        commit(target)
    assert not Path(target).exists()


def test_receipts_and_proofs_have_the_checksum_of_each_piece_of_a_chunk(model, arrays, tmp_path):
    """So no tensor is read again by the format's reader, which a wrong checksum would ask for."""
    target, data = f"memory://bucket{tmp_path}/out", arrays["a.big"].tobytes()
    job_of(model, target)
    made_and_proved(target)
    for records in (receipts(target), proofs(target)):
        rows = [move for row in records.values() for move in row["moves"] if move[0].startswith("a.big")]
        pieces = {tuple(piece) for move in rows for piece in move[5]}
        assert sum(last - first for first, last, _crc in pieces) >= len(data)
        assert all(zlib.crc32(data[first:last]) == crc for first, last, crc in pieces)
    [receipt] = commit(target).receipts
    assert receipt.verification["bytes_by_workers"] > LARGE


def test_a_bit_that_storage_flips_in_a_chunk_is_found_by_a_prover(model, tmp_path):
    target = str(tmp_path / "out")
    job = job_of(model, target)
    with worker_named("a maker"):
        work(target)
    [file] = job.units[2].files
    [made] = Path(tmp_path).rglob(file.name)
    stamp, data = made.stat(), bytearray(made.read_bytes())
    data[1_000_000] ^= 1
    with made.open("r+b") as opened:
        opened.write(data)
    os.utime(made, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    with worker_named("a prover"):
        work(target)
    with pytest.raises((IncompleteError, MismatchError, CorruptError)):
        commit(target)
    assert not Path(target).exists()


def test_a_unit_of_a_worker_that_was_killed_is_made_again(model, target, tmp_path, monkeypatch):
    job = job_of(model, target)
    with monkeypatch.context() as patch:
        as_dead(patch)
        killed(target, patch, "move", 2)
    assert job.units[1].name in work(target).made
    require_same(target, model, tmp_path)
