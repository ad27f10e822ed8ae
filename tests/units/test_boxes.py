"""Tensors that are carried in boxes are read back by workers: each leaf by two of them."""

from __future__ import annotations

import base64
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import wherry
from tests.support.families import LLAMA as CONFIG
from tests.support.families import SIZES, made
from tests.support.jobs import Killed, as_dead, changed, receipts, worker_named
from tests.support.worker_pools import SeparatePool
from wherry.carriers.coordinator import carry_with_pool
from wherry.core.request import TargetRequest, convert_request
from wherry.errors import IncompleteError, MismatchError, WherryError
from wherry.families import load_family
from wherry.formats.reader import Extent
from wherry.integrations.containers.zarr.reader import ArrayReader
from wherry.objects.stores import object_store
from wherry.readings.box_check import valid_records
from wherry.records.box_record import box_record_from, box_records_in, receipts_state
from wherry.records.records import records_beside
from wherry.records.unit_receipt import receipt_from
from wherry.storage.stores import locate
from wherry.units import commit as committing
from wherry.units import read_boxes
from wherry.units.commit import commit
from wherry.units.estimate import plan_for_workers
from wherry.units.split_job import opened_job, split
from wherry.units.work import work

OPTIONS = {"data_file_size": "100KB"}
MB = 1_000_000


@pytest.fixture(autouse=True)
def boxes(monkeypatch):
    """Tensors above 16 KiB go in boxes."""
    monkeypatch.setattr("wherry.mover.move.LARGEST_BAND", 1 << 14)
    monkeypatch.setattr("wherry.view.view._BAND", 1 << 13)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A Hugging Face Llama whose matrices are above 16 KiB."""
    folder = tmp_path_factory.mktemp("llama") / "hf"
    folder.mkdir()
    sizes = {**SIZES, "embed": 64, "ffn": 96, "layer": 4, "pair": 8}  # heads of 16: MaxText scales by 4
    tensors = made(load_family("llama"), "huggingface", {}, sizes=sizes).tensors
    named = {path[0]: array for path, array in tensors.items()}
    save_file(named, folder / "model.safetensors", metadata={"format": "pt"})
    config = {**CONFIG, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "head_dim": 16}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def read_alone(monkeypatch):
    """Bytes of boxes that are read through the reader of the finished target: by the commit."""
    found = [0]
    real = ArrayReader.fill

    def counted(self, spec, region, buffer):
        found[0] += len(buffer)
        real(self, spec, region, buffer)

    monkeypatch.setattr(ArrayReader, "fill", counted)
    return found


def requested(source, target):
    return convert_request(str(source), [TargetRequest(target, "maxtext", OPTIONS)], lineage=False)


def job_of(source, target):
    return split(requested(source, target), 100_000)


def read_by(target, *workers):
    """One worker makes the units, others read back; returns their reports."""
    with worker_named("a maker"):
        assert work(target).readings == 0
    reports = []
    for name in workers:
        with worker_named(name):
            reports.append(work(target))
    return reports


def records(target):
    """Name → contents of the records of readings."""
    place = records_beside(locate(target))
    names = place.names()
    rows = box_records_in(names, receipts_state(names))
    return {name: place.read(name) for one in rows.values() for name in one}


def require_same(target, source, tmp_path):
    [receipt] = commit(target).receipts
    one = wherry.convert(source, tmp_path / "one", to="maxtext", options=OPTIONS, lineage=False)
    assert receipt.target.checkpoint_digest == one.target.checkpoint_digest
    assert receipt.source.checkpoint_digest == one.source.checkpoint_digest
    assert wherry.verify(target, level="digest").ok
    assert wherry.verify(target, level="roundtrip", against=str(source)).ok
    return receipt


def bytes_of(job):
    """Bytes of the tensors that are carried in boxes."""
    return sum(job.job.plan.manifest.tensors[path].nbytes for path in job.boxes.pairs)


def test_the_commit_does_not_read_boxes_that_two_workers_have_read(llama, target, tmp_path, read_alone):
    job = job_of(llama, target)
    assert len(job.boxes.pairs) == 7
    assert bytes_of(job) > 400_000
    first, second = read_by(target, "one", "another")
    assert first.readings == second.readings == len(job.boxes.readings) / 2
    read_alone[0] = 0
    [receipt] = commit(target).receipts
    assert read_alone[0] == 0
    assert receipt.verification["bytes_by_workers"] >= bytes_of(job)
    assert receipt.verification["tensors"] == len(job.job.plan.pairs)
    one = wherry.convert(llama, tmp_path / "one", to="maxtext", options=OPTIONS, lineage=False)
    assert receipt.target.checkpoint_digest == one.target.checkpoint_digest
    assert receipt.source.checkpoint_digest == one.source.checkpoint_digest
    assert wherry.verify(target, level="digest").ok
    assert wherry.verify(target, level="roundtrip", against=str(llama)).ok


def test_what_one_worker_has_read_alone_does_not_count(llama, target, read_alone):
    job = job_of(llama, target)
    [report] = read_by(target, "one")
    assert report.readings == len(job.boxes.readings) / 2
    read_alone[0] = 0
    [receipt] = commit(target).receipts
    assert read_alone[0] >= 2 * bytes_of(job)
    assert receipt.verification.get("bytes_by_workers", 0) <= job.job.plan.nbytes_out - bytes_of(job)


def test_readings_by_one_worker_under_two_numbers_do_not_confirm_each_other(llama, target, read_alone):
    job = job_of(llama, target)
    read_by(target, "one", "another")
    for name in records(target):
        changed(target, name, worker="one")
    read_alone[0] = 0
    commit(target)
    assert read_alone[0] >= 2 * bytes_of(job)


def lied(row):
    """The hashes of a record, the first of which is another one."""
    raw = bytearray(base64.b64decode(row["hashes"][0]))
    raw[0] ^= 1
    return [base64.b64encode(raw).decode(), *row["hashes"][1:]]


@pytest.mark.parametrize(("of_target", "liars"), [(True, 1), (False, 1), (False, 2)])
def test_a_reader_that_lies_is_not_believed(llama, target, tmp_path, of_target, liars):
    """One is found by the other; what two say of the origin is compared with the source."""
    job = job_of(llama, target)
    read_by(target, "one", "another")
    first = next(one for one in job.boxes.readings if one.of_target is of_target)
    for name, row in records(target).items():
        if row["reading"] in (first.number, first.twin)[-liars:]:
            changed(target, name, hashes=lied(row))
    require_same(target, llama, tmp_path)


def test_a_record_that_does_not_fit_is_not_believed(llama, target):
    job_of(llama, target)
    read_by(target, "one", "another")
    with opened_job(target) as opened:
        boxes, algorithm = opened.boxes, opened.algorithms[0]
        made_ = [receipt_from(row, target) for row in receipts(target).values()]
        found = [box_record_from(row, target) for row in records(target).values()]
        assert sum(map(len, valid_records(boxes, algorithm, made_, found).values())) == len(
            opened.boxes.readings
        )
        for fields in (
            {"version": "0.0.1"},
            {"algorithm": "sha256"},
            {"digest": "00"},
            {"receipts": "00"},
            {"hashes": ()},
            {"hashes": ((),)},
            {"reading": 99},
            {"reading": -1},
        ):
            assert valid_records(boxes, algorithm, made_, [replace(one, **fields) for one in found]) == {}
        assert valid_records(boxes, algorithm, made_[1:], found) == {}


def box_file(job):
    """The name of a file with chunks of a box, and an offset in it."""
    return next(file.name for unit in job.units for file in unit.files if file.nbytes > 50_000), 20_000


def overwritten(target, name, at, *, before=True):
    """Flip a bit of a file of a unit, as storage may do: its size, its time and its ETag stay."""
    if target.startswith("/"):
        import os

        pattern = (
            f".wherry-*.job/made-*/**/{Path(name).name}" if before else f".wherry-*/**/{Path(name).name}"
        )
        path = next(one for one in Path(target).parent.glob(pattern) if str(one).endswith(name))
        times, data = path.stat(), bytearray(path.read_bytes())
        data[at] ^= 1
        path.write_bytes(data)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
        return
    place = locate(target).join(name)
    file = place.store.fs.store[f"/{place.path}"]
    file.seek(at)
    byte = file.read(1)
    file.seek(at)
    file.write(bytes([byte[0] ^ 1]))


def test_a_bit_that_storage_flips_in_a_box_is_found(llama, target):
    job = job_of(llama, target)
    with worker_named("a maker"):
        work(target)
    overwritten(target, *box_file(job))
    for name in ("one", "another"):
        with worker_named(name):
            work(target)
    with pytest.raises((MismatchError, IncompleteError)):
        commit(target)
    assert not locate(target).join("wherry.json").exists()


def test_a_unit_that_is_made_again_makes_readings_void(llama, target, read_alone):
    job = job_of(llama, target)
    read_by(target, "one", "another")
    name, _at = box_file(job)
    if target.startswith("/"):
        [path] = list(Path(target).parent.glob(f".wherry-*.job/made-*/**/{Path(name).name}"))
        path.write_bytes(bytes(path.stat().st_size))
    else:
        place = locate(target).join(name)
        place.store.fs.pipe_file(place.path, bytes(place.stat().size))
    with pytest.raises(IncompleteError):
        commit(target)
    if not target.startswith("/"):
        locate(target).store.fs.rm(locate(target).join(name).path)
    with worker_named("a maker"):
        assert len(work(target).made) == 1
    assert records(target) == {}
    read_alone[0] = 0
    commit(target)
    assert read_alone[0] >= 2 * bytes_of(job)
    assert wherry.verify(target, level="digest").ok


def test_a_file_that_changes_while_the_commit_runs_is_read_again(llama, target, monkeypatch):
    job = job_of(llama, target)
    read_by(target, "one", "another")
    name, at = box_file(job)
    real = committing.watch_files

    def then_replaced(split_, receipts_, staged, shared):
        watched = real(split_, receipts_, staged, shared)
        place = staged.join(name)
        data = bytearray(place.read_whole(1 << 24))
        data[at] ^= 1
        if target.startswith("/"):
            other = Path(place.path).with_name("other")
            other.write_bytes(data)  # before the old one goes, whose inode it might get
            other.replace(place.path)
        else:
            store = object_store(locate(target).store)
            found = store.head(place.path)
            store.remove_object(place.path, found.mark)
            store.put_object(place.path, [memoryview(bytes(data))], found.run)
        return watched

    monkeypatch.setattr(committing, "watch_files", then_replaced)
    with pytest.raises(WherryError, match="differs"):
        commit(target)
    assert not locate(target).join("wherry.json").exists()


def test_metadata_that_name_other_places_are_not_believed(llama, target, monkeypatch, read_alone):
    job = job_of(llama, target)
    read_by(target, "one", "another")
    real = ArrayReader.chunk

    def elsewhere(self, spec, cell):
        found = real(self, spec, cell)
        return Extent(found.location, found.offset + 1, found.length)

    monkeypatch.setattr(ArrayReader, "chunk", elsewhere)
    read_alone[0] = 0
    commit(target)
    assert read_alone[0] >= 2 * bytes_of(job)
    assert wherry.verify(target, level="digest").ok


def test_the_readings_of_a_worker_that_was_killed_are_made_by_another(llama, target, tmp_path, monkeypatch):
    job = job_of(llama, target)
    with worker_named("a maker"):
        work(target)
    real, calls = read_boxes.hash_leaves, []

    def stopped(*arguments, **more):
        calls.append(arguments)
        if len(calls) == 3:
            raise Killed
        return real(*arguments, **more)

    with monkeypatch.context() as patch, worker_named("one"):
        as_dead(patch)
        patch.setattr(read_boxes, "hash_leaves", stopped)
        with pytest.raises(Killed):
            work(target)
    assert len(records(target)) == 2
    for name in ("two", "three"):
        with worker_named(name):
            work(target)
    assert len(records(target)) == len(job.boxes.readings)
    receipt = require_same(target, llama, tmp_path)
    assert receipt.verification["bytes_by_workers"] >= bytes_of(job)


def test_leaves_that_nobody_has_confirmed_are_read_by_the_commit(llama, target, tmp_path, read_alone):
    job = job_of(llama, target)
    read_by(target, "one", "another")
    place = records_beside(locate(target))
    name = next(name for name, row in records(target).items() if row["reading"] == 0)
    place.remove(name)
    read_alone[0] = 0
    [receipt] = commit(target).receipts
    assert 0 < read_alone[0] <= 150_000
    assert receipt.verification["bytes_by_workers"] >= bytes_of(job) - 150_000


def test_a_coordinator_has_boxes_read_by_two_workers(llama, target, tmp_path, read_alone):
    job = job_of(llama, target)
    names = list(carry_with_pool(job, SeparatePool("abc")))
    assert sum(name.startswith("box") for name in names) == len(job.boxes.readings)
    by = {row["reading"]: row["worker"] for row in records(target).values()}
    assert all(by[one.number] != by[one.twin] for one in job.boxes.readings)
    read_alone[0] = 0
    receipt = require_same(target, llama, tmp_path)
    assert receipt.verification["bytes_by_workers"] >= bytes_of(job)


def test_a_coordinator_with_one_worker_leaves_boxes_to_the_commit(llama, target, tmp_path):
    job = job_of(llama, target)
    names = list(carry_with_pool(job, SeparatePool("a")))
    assert not any(name.startswith("box") for name in names)
    require_same(target, llama, tmp_path)


@pytest.mark.parametrize("lie", [False, True])
def test_the_same_tensors_in_other_chunks_are_compared_with_the_source(target, tmp_path, read_alone, lie):
    """Without a layout in between, what is read a second time is the source."""
    random = np.random.default_rng(0)
    source = tmp_path / "model.safetensors"
    save_file({f"layer.{n}.w": random.random((128, 256), "f4") for n in range(3)}, source)
    options = {**OPTIONS, "chunks": "1x4"}
    request = convert_request(str(source), [TargetRequest(target, "orbax", options)], lineage=False)
    job = split(request, 100_000)
    assert len(job.boxes.pairs) == 3
    read_by(target, "one", "another")
    origin = {one.number for one in job.boxes.readings if not one.of_target}
    for name, row in records(target).items():
        if lie and row["reading"] in origin:
            changed(target, name, hashes=lied(row))
    read_alone[0] = 0
    [receipt] = commit(target).receipts
    assert read_alone[0] == 0
    one = wherry.convert(source, tmp_path / "one", to="orbax", options=options, lineage=False)
    assert receipt.target.checkpoint_digest == one.target.checkpoint_digest
    assert receipt.verification["bytes_by_workers"] == 3 * 128 * 256 * 4


def test_a_plan_counts_what_workers_read_of_boxes(llama, target):
    plan, alone = plan_for_workers(requested(llama, target), 1, 100_000, MB)
    _plan, shared = plan_for_workers(requested(llama, target), 4, 100_000, MB)
    assert alone.commit_bytes == 2 * bytes_of(job_of(llama, target))
    assert shared.commit_bytes == 0
    assert plan.nbytes_out < 2 * bytes_of(job_of(llama, target))
    assert shared.seconds < alone.seconds
