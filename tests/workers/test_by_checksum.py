"""Jobs with `--verify store`: the commit reads nothing back, so what it trusts are the checksums in the receipts."""

from __future__ import annotations

import pytest
from safetensors.numpy import load, load_file

import wherry
from tests.support.jobs import changed, committed, made_job, receipts, row_of, undisturbed
from wherry.errors import IncompleteError, MismatchError
from wherry.storage.stores import locate
from wherry.workers.commit import commit
from wherry.workers.records import job_records
from wherry.workers.work import work


@pytest.fixture
def target(tmp_path):
    """A target in a store that computes checksums."""
    return f"memory://bucket{tmp_path}/out"


@pytest.mark.parametrize("to", ["hf", "dcp", "orbax", "safetensors"])
def test_the_commit_keeps_what_the_workers_made(source, target, tmp_path, to):
    made_job(source, target, to, verify="store")
    work(target)
    receipt = committed(target)
    assert receipt.target.checkpoint_digest == undisturbed(source, tmp_path, to).checkpoint_digest
    assert receipt.resumed_bytes == receipt.bytes_written  # the commit has moved no byte itself
    assert receipt.verification == {"level": "store", "ok": True, "tensors": 12, "checksum": "crc32c"}
    assert wherry.verify(target, level="digest").ok


@pytest.mark.parametrize("count", [1, None])
def test_a_unit_whose_object_is_gone_is_made_again(source, target, count):
    job = made_job(source, target, "dcp", verify="store")
    work(target)
    store = locate(target).store
    names = [file.name for unit in job.units for file in unit.files][:count]
    for path in (locate(target).join(name).path for name in names):
        store.remove_object(path, store.head(path).mark)
    with pytest.raises(IncompleteError, match="are not written"):
        commit(target)
    work(target)
    committed(target)
    assert wherry.verify(target, level="digest").ok


def test_objects_without_checksums_are_made_again_and_never_zeros(source, target):
    made_job(source, target, "dcp", verify="store")
    work(target)
    for name in receipts(target):
        changed(target, name, parts=[])
    receipt = committed(target)
    assert receipt.resumed_bytes == 0
    assert wherry.verify(target, level="digest").ok


def test_the_library_of_safetensors_finds_the_bytes_of_the_source(source, target):
    made_job(source, target, "hf", verify="store")
    work(target)
    committed(target)
    written: dict[str, bytes] = {}
    for entry in locate(target).entries():
        if entry.name.endswith(".safetensors"):
            tensors = load(locate(target).join(entry.name).read_whole(1 << 24))
            written |= {name: array.tobytes() for name, array in tensors.items()}
    stored = {
        name: array.tobytes()
        for file in source.glob("*.safetensors")
        for name, array in load_file(file).items()
    }
    assert len(stored) == 12
    assert written == stored


def test_a_receipt_with_other_checksums_proves_nothing(source, target):
    made_job(source, target, "dcp", verify="store")
    work(target)
    name = next(iter(receipts(target)))
    rows = row_of(job_records(locate(target)), name)["parts"]
    changed(target, name, parts=[[path, {**part, "checksum": "crc32c:00000000"}] for path, part in rows])
    with pytest.raises(MismatchError, match="has not confirmed the checksum"):
        commit(target)
    assert not locate(target).join(".metadata").exists()
