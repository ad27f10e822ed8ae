"""Tensors that are carried in boxes: workers exchange the values of chunks, and read nothing twice for a digest."""

from __future__ import annotations

import base64
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import wherry
from tests.support.families import LLAMA as CONFIG
from tests.support.families import SIZES, made
from tests.support.jobs import Killed, as_dead, changed, killed, proofs, put_row, receipts, worker_named
from tests.support.worker_pools import SeparatePool
from wherry import kernels
from wherry.converter import job as jobs
from wherry.core.keypath import parse
from wherry.core.request import TargetRequest, convert_request
from wherry.errors import CorruptError, IncompleteError, MismatchError, WherryError
from wherry.families import load_family
from wherry.mover import read as reading
from wherry.mover import readback
from wherry.mover.move import SMALL
from wherry.store.local_store import locate
from wherry.workers import commit as committing
from wherry.workers.commit import commit
from wherry.workers.job import split
from wherry.workers.records import job_records
from wherry.workers.unit import plan_for_workers
from wherry.workers.work import carry_with_pool, work

OPTIONS = {"data_file_size": "1MB"}
SMALL_FILES = {"data_file_size": "100KB"}
UNIT = MB = 1_000_000
SLACK = 150_000  # bytes of headers and of small tensors


@pytest.fixture(autouse=True)
def boxes(monkeypatch):
    """Tensors above 16 KiB go in boxes, and are read back by themselves in a store of objects, too."""
    if kernels.load() is None:
        pytest.skip("no C compiler")
    monkeypatch.setattr("wherry.mover.move.LARGEST_BAND", 1 << 14)
    monkeypatch.setattr("wherry.transform.view._BAND", 1 << 18)  # chunks of 256 KiB
    monkeypatch.setattr(jobs, "LARGEST", 2)


@pytest.fixture
def small_chunks(monkeypatch):
    """Chunks of 8 KiB, so that runs are short."""
    monkeypatch.setattr("wherry.transform.view._BAND", 1 << 13)


@pytest.fixture
def short(small_chunks, monkeypatch):
    """Runs are hashed however short they are, so that leaves have edges."""
    monkeypatch.setattr("wherry.core.digest.SHORTEST_RUN", 1)
    monkeypatch.setattr("wherry.core.digest._LEAST_TOGETHER", 1)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A Hugging Face Llama of 8 MB; a row of its matrices has 1 KiB and more."""
    return saved(tmp_path_factory.mktemp("llama") / "hf", embed=256, ffn=512)


@pytest.fixture(scope="module")
def narrow(tmp_path_factory):
    """One of 0.6 MB whose rows are shorter."""
    return saved(tmp_path_factory.mktemp("narrow") / "hf", embed=72, ffn=100)


def saved(folder, embed, ffn):
    """Save a Llama with four layers."""
    folder.mkdir()
    sizes = {**SIZES, "embed": embed, "ffn": ffn, "layer": 4, "pair": 8}  # heads of 16: MaxText scales by 4
    tensors = made(load_family("llama"), "huggingface", {}, sizes=sizes).tensors
    named = {path[0]: array for path, array in tensors.items()}
    save_file(named, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        **CONFIG,
        "hidden_size": embed,
        "intermediate_size": ffn,
        "num_hidden_layers": 4,
        "head_dim": 16,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def read(monkeypatch):
    """Bytes of tensors that are read from files, by the name of the file; small tensors are read in batches."""
    found = Counter()
    real = reading.fill_range

    def counted(location, offset, buffer, spec, **more):
        found[location.path.rpartition("/")[2]] += len(buffer)
        real(location, offset, buffer, spec, **more)

    monkeypatch.setattr(reading, "fill_range", counted)
    return found


@pytest.fixture
def read_by_reader(monkeypatch):
    """Bytes of tensors that are read through the reader of the finished target."""
    found = [0]
    real = reading.fill_from_chunks

    def counted(spec, chunks, place, region, out):
        found[0] += len(out)
        real(spec, chunks, place, region, out)

    monkeypatch.setattr(reading, "fill_from_chunks", counted)
    return found


def requested(source, target, to="maxtext", options=None):
    targets = [TargetRequest(target, to, OPTIONS if options is None else options)]
    return convert_request(str(source), targets, lineage=False)


def job_of(source, target):
    return split(requested(source, target), UNIT)


def narrow_job(source, target):
    return split(requested(source, target, options=SMALL_FILES), 100_000)


def read_of_source(read):
    return read["model.safetensors"]


def read_of_target(read, job):
    names = {file.name.rpartition("/")[2] for unit in job.units for file in unit.files}
    return sum(nbytes for name, nbytes in read.items() if name in names)


def made_by(target, name, units=None):
    """A worker makes units, and leaves after so many of them."""
    done = []

    def leave(unit, _receipt):
        done.append(unit)
        if len(done) == units:
            raise KeyboardInterrupt

    with worker_named(name):
        if units is None:
            return work(target)
        with pytest.raises(KeyboardInterrupt):
            work(target, on_unit=leave)
    return None


def require_same(target, source, tmp_path, options=None):
    """Commit; the digests are those of one process."""
    [receipt] = commit(target).receipts
    require_digests(receipt, source, tmp_path, options)
    assert wherry.verify(target, level="digest").ok
    assert wherry.verify(target, level="roundtrip", against=str(source)).ok
    return receipt


def require_digests(receipt, source, tmp_path, options=None, to="maxtext"):
    one = wherry.convert(source, tmp_path / "one", to=to, options=options or OPTIONS, lineage=False)
    assert receipt.target.checkpoint_digest == one.target.checkpoint_digest
    assert receipt.source.checkpoint_digest == one.source.checkpoint_digest


def in_boxes(job):
    """The tensors that are carried in boxes, but for small ones: key path in the source of the moves → bytes."""
    from wherry.converter.plan import joint_moves

    moves, tensors = joint_moves([job.job.plan]), job.job.plan.manifest.tensors
    pairs = job.job.plan.pairs.items()
    found = {source: tensors[path].nbytes for path, source in pairs if moves.are_boxes(source)}
    return {source: nbytes for source, nbytes in found.items() if nbytes > SMALL}


def test_three_workers_one_of_which_is_killed_read_nothing_twice(llama, target, tmp_path, read, monkeypatch):
    """The source is read once, the target only to be read back, and the commit reads no tensor at all."""
    wherry.convert(llama, tmp_path / "first", to="maxtext", options=OPTIONS, lineage=False)
    alone = read_of_source(read)  # with the gaps between runs
    read.clear()
    job = job_of(llama, target)
    whole, boxed = job.job.plan.nbytes_out, in_boxes(job)
    assert len(job.units) > 5
    assert sum(boxed.values()) > 6 * MB
    with monkeypatch.context() as patch, worker_named("one"):
        as_dead(patch)
        killed(target, patch, "finish", 2)
    made_by(target, "two", units=2)
    made_by(target, "three")
    lost = job.units[1].nbytes
    assert alone <= read_of_source(read) <= alone + 2 * lost
    assert read_of_target(read, job) <= whole * 0.9, "what the third worker could prove of the others"
    for name in ("one", "two"):
        made_by(target, name)
    assert len(proofs(target)) == len(job.units)
    assert read_of_target(read, job) <= whole
    assert read_of_source(read) <= alone + 2 * lost
    rows = receipts(target).values()
    assert {parse(path) for row in rows for path in row["boxes"]} >= set(boxed)
    assert sum(len(json.dumps([row["boxes"], row["sources"]])) for row in rows) < whole * 0.07
    read.clear()
    [receipt] = commit(target).receipts
    assert read_of_source(read) == 0
    assert read_of_target(read, job) < SLACK
    assert receipt.verification["bytes_by_workers"] >= sum(boxed.values())
    assert receipt.verification["tensors"] == len(job.job.plan.pairs)
    require_digests(receipt, llama, tmp_path)
    assert wherry.verify(target, level="digest").ok
    assert wherry.verify(target, level="roundtrip", against=str(llama)).ok


def test_workers_that_put_leaves_aside_exchange_the_same(llama, target, tmp_path, read, monkeypatch):
    """As they do where their open leaves would take too much memory."""
    monkeypatch.setattr("wherry.mover.decode._MOST_OPEN", -1)
    job_of(llama, target)
    made_by(target, "one", units=3)
    made_by(target, "two")
    read.clear()
    [receipt] = commit(target).receipts
    assert read_of_source(read) == 0
    require_digests(receipt, llama, tmp_path)


def test_a_worker_alone_leaves_boxes_to_the_read_back_of_the_commit(
    llama, target, tmp_path, read, read_by_reader
):
    """They are read once, as they are stored: not through the reader, and not for their digests."""
    job = job_of(llama, target)
    made_by(target, "one")
    read.clear()
    [receipt] = commit(target).receipts
    assert "bytes_by_workers" not in receipt.verification
    assert read_by_reader[0] < SLACK
    assert read_of_source(read) == 0
    assert read_of_target(read, job) <= job.job.plan.nbytes_out + SLACK
    require_digests(receipt, llama, tmp_path)


def test_boxes_of_a_unit_without_a_proof_are_read_by_the_commit(
    llama, target, tmp_path, read, read_by_reader
):
    job = job_of(llama, target)
    made_by(target, "one")
    made_by(target, "two")
    boxed = in_boxes(job)
    unit = next(unit for unit in job.units if unit.parts[0].source in boxed)
    lost = next(name for name, row in proofs(target).items() if row["unit"] == unit.number)
    job_records(locate(target)).remove(lost)
    read.clear()
    [receipt] = commit(target).receipts
    assert read_of_target(read, job) <= unit.nbytes + SLACK
    assert read_by_reader[0] < SLACK
    require_digests(receipt, llama, tmp_path)
    assert receipt.verification["bytes_by_workers"] >= sum(boxed.values()) - unit.nbytes


def test_a_bit_that_storage_flips_in_a_unit_without_a_proof_is_found(llama, target):
    job = job_of(llama, target)
    made_by(target, "one")
    made_by(target, "two")
    name, at = box_file(job)
    number = next(unit.number for unit in job.units if unit.files[0].name == name)
    lost = next(name for name, row in proofs(target).items() if row["unit"] == number)
    job_records(locate(target)).remove(lost)
    overwritten(target, name, at)
    with pytest.raises(MismatchError, match="differs"):
        commit(target)
    assert not locate(target).join("wherry.json").exists()


def test_two_receipts_that_differ_are_refused(llama, target):
    """Both say that they have a whole leaf of a tensor of the source."""
    job_of(llama, target)
    made_by(target, "one")
    name, row = next((name, row) for name, row in sorted(receipts(target).items()) if row["sources"])
    path = next(iter(row["sources"]))
    other = next(one for one in receipts(target) if one != name)
    for record, byte in ((name, bytes(32)), (other, bytes([1] * 32))):
        rows = receipts(target)[record]["sources"]
        changed(target, record, sources={**rows, path: [[0], base64.b64encode(byte).decode(), []]})
    with pytest.raises(MismatchError, match="differ from those of another receipt"):
        commit(target)


@pytest.mark.parametrize("kind", ["short", "no kernels", "one without kernels"])
def test_what_workers_cannot_exchange_is_read_by_the_commit(
    llama, narrow, target, tmp_path, kind, read_by_reader, monkeypatch
):
    source, job = llama, None
    if kind == "short":
        monkeypatch.setattr("wherry.transform.view._BAND", 1 << 13)
        source, job = narrow, narrow_job(narrow, target)
    job = job or job_of(source, target)
    if kind != "short":
        with monkeypatch.context() as patch:
            patch.setattr("wherry.kernels.load", lambda: None)
            made_by(target, "one", units=None if kind == "no kernels" else 1)
    made_by(target, "two")
    made_by(target, "three")
    boxed = in_boxes(job)
    names = {parse(path) for row in receipts(target).values() for path in row["boxes"]}
    assert kind == "one without kernels" or not names >= set(boxed)
    assert names or kind != "one without kernels"
    read_by_reader[0] = 0
    require_same(target, source, tmp_path, SMALL_FILES if kind == "short" else None)
    assert read_by_reader[0] >= min(boxed.values())


def test_short_runs_have_edges_that_are_exchanged_too(narrow, target, tmp_path, short):
    job = narrow_job(narrow, target)
    made_by(target, "one", units=3)
    made_by(target, "two")
    made_by(target, "one")
    rows = [row["boxes"] for row in receipts(target).values()]
    assert {parse(path) for row in rows for path in row} >= set(in_boxes(job))
    [receipt] = commit(target).receipts
    require_digests(receipt, narrow, tmp_path, SMALL_FILES)
    assert receipt.verification["bytes_by_workers"] >= sum(in_boxes(job).values())


def first_boxes(target, field="boxes"):
    """The name of a receipt with values, and a copy of them."""
    name, row = next((name, row) for name, row in sorted(receipts(target).items()) if row[field])
    return name, json.loads(json.dumps(row[field]))


def flipped(text):
    """Base64 of the same bytes, but for a bit of the last."""
    raw = bytearray(base64.b64decode(text))
    raw[-1] ^= 1
    return base64.b64encode(raw).decode()


def wrong(values):
    """Values of which one is another."""
    numbers, leaves, parts = values
    if numbers:
        return [numbers, flipped(leaves), parts]
    return [numbers, leaves, [[parts[0][0], flipped(parts[0][1])], *parts[1:]]]


@pytest.mark.parametrize("is_proved", [True, False])
def test_a_maker_that_lies_about_boxes_is_not_believed(llama, target, is_proved):
    job_of(llama, target)
    made_by(target, "one")
    if is_proved:
        made_by(target, "two")
    name, boxes = first_boxes(target)
    path = next(iter(boxes))
    changed(target, name, boxes={**boxes, path: wrong(boxes[path])})
    with pytest.raises((IncompleteError, MismatchError), match=r"read back other bytes|differs|differ from"):
        commit(target)
    assert not locate(target).join("wherry.json").exists()


def test_a_maker_that_lies_about_the_source_is_not_believed_where_its_digests_are_recorded(
    llama, target, tmp_path
):
    source = tmp_path / "source"
    import shutil

    shutil.copytree(llama, source)
    wherry.inspect(source, digest=True, write=True)
    job_of(source, target)
    made_by(target, "one")
    name, sources = first_boxes(target, "sources")
    path = next(iter(sources))
    changed(target, name, sources={**sources, path: wrong(sources[path])})
    with pytest.raises(MismatchError):
        commit(target)
    assert not locate(target).join("wherry.json").exists()


def test_a_prover_that_lies_about_boxes_only_costs_time(llama, target, tmp_path):
    """The unit is made again, and nothing is committed before."""
    job_of(llama, target)
    made_by(target, "one")
    made_by(target, "two")
    name, row = next((name, row) for name, row in proofs(target).items() if row["boxes_read"])
    path, digest = next(iter(row["boxes_read"].items()))
    changed(target, name, boxes_read={**row["boxes_read"], path: digest[::-1]})
    with pytest.raises(IncompleteError, match="read back other bytes than"):
        commit(target)
    assert len(made_by(target, "one").made) == 1
    require_same(target, llama, tmp_path)


def entry(chunk, level, data=bytes(32)):
    return chunk.to_bytes(2, "little") + bytes([level]) + data


def values_of(raw, leaf=0):
    return [[], "", [[leaf, base64.b64encode(raw).decode()]]]


MALFORMED = [
    [[0], "", []],
    [[0], base64.b64encode(bytes(31)).decode(), []],
    [[0, 0], base64.b64encode(bytes(64)).decode(), []],
    [[0], base64.b64encode(bytes(32)).decode(), [[0, "AAAA"]]],
    [[-1], base64.b64encode(bytes(32)).decode(), []],
    [[], "", [[True, "AAAA"]]],
    [[], "", [["0", "AAAA"]]],
    [[], "", [[0, "AAAA", 1]]],
    [[], "", [[0, ""]]],
    [[], "", [[0, "?"]]],
    values_of(bytes((128 << 10) + 1)),
    ["", "", []],
    [[], ""],
]
# No values of the first leaf, which has 512 chunks at most here, or of a tensor that has such a leaf.
INVALID = [
    values_of(b"a"),
    values_of(entry(0, 0)[:-1]),
    values_of(entry(4095, 0)),
    values_of(entry(0, 12)),
    values_of(entry(0, 200)),
    values_of(entry(1, 1)),
    values_of(entry(2, 0) + entry(1, 0)),
    values_of(entry(0, 255, bytes([0, 0, 255, 255]) + bytes(65535))),
    values_of(entry(0, 0), leaf=1),
    values_of(entry(0, 0), leaf=1 << 62),
    [[7], base64.b64encode(bytes(32)).decode(), []],
]


@pytest.mark.parametrize("field", ["boxes", "sources"])
def test_hostile_values_in_a_receipt_are_refused(llama, target, field):
    job_of(llama, target)
    made_by(target, "one")
    name, held = first_boxes(target, field)
    path, row = next(iter(held)), receipts(target)[name]

    def put(values):
        put_row(job_records(locate(target)), name, {**row, field: values})

    for values in MALFORMED:
        put({**held, path: values})
        with pytest.raises(CorruptError, match="invalid"):
            commit(target)
    for values in INVALID:
        put({**held, path: values})
        with pytest.raises(MismatchError, match=f"the receipt {name} by one has values of a tensor"):
            commit(target)
    put({**held, "absent": held[path]})
    with pytest.raises(MismatchError, match=r"does not cover the unit|has values of a tensor"):
        commit(target)
    assert not locate(target).join("wherry.json").exists()
    put(held)
    assert commit(target).receipts


def box_file(job):
    """The name of a file with chunks of a box, and an offset in it."""
    boxed = in_boxes(job)
    unit = next(unit for unit in job.units if all(part.source in boxed for part in unit.parts))
    return unit.files[0].name, unit.files[0].nbytes // 2


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
    made_by(target, "a maker")
    overwritten(target, *box_file(job))
    made_by(target, "one")
    with pytest.raises(IncompleteError, match="read back other bytes"):
        commit(target)
    assert not locate(target).join("wherry.json").exists()


def test_a_bit_that_storage_flips_is_found_without_workers_too(llama, target):
    job = job_of(llama, target)
    made_by(target, "a maker")
    overwritten(target, *box_file(job))
    with pytest.raises(MismatchError, match=r"read-back differs from what was written .*leaf"):
        commit(target)
    assert not locate(target).join("wherry.json").exists()


def test_a_unit_that_is_made_again_has_new_values(llama, target, tmp_path):
    job = job_of(llama, target)
    made_by(target, "one")
    made_by(target, "two")
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
    assert len(made_by(target, "three").made) == 1
    require_same(target, llama, tmp_path)


def test_a_file_that_changes_while_the_commit_runs_is_read_again(llama, target, monkeypatch):
    job = job_of(llama, target)
    made_by(target, "one")
    made_by(target, "two")
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
            store = locate(target).store
            found = store.head(place.path)
            store.remove_object(place.path, found.mark)
            store.put_object(place.path, [memoryview(bytes(data))], found.run)
        return watched

    monkeypatch.setattr(committing, "watch_files", then_replaced)
    with pytest.raises(WherryError, match="differs"):
        commit(target)
    assert not locate(target).join("wherry.json").exists()


def test_metadata_that_name_other_places_are_not_believed(llama, target, monkeypatch, read_by_reader):
    job = job_of(llama, target)
    made_by(target, "one")
    made_by(target, "two")
    real = readback.region_bytes
    monkeypatch.setattr(readback, "region_bytes", lambda spec, box: real(spec, box) - 1)
    read_by_reader[0] = 0
    commit(target)
    assert read_by_reader[0] >= max(in_boxes(job).values())
    assert wherry.verify(target, level="digest").ok


def test_a_prover_that_was_killed_is_replaced(llama, target, tmp_path, monkeypatch):
    from wherry.workers import tasks

    job = job_of(llama, target)
    made_by(target, "a maker")
    real, calls = tasks.prove_unit, []

    def stopped(*arguments, **more):
        calls.append(arguments)
        if len(calls) == 3:
            raise Killed
        return real(*arguments, **more)

    with monkeypatch.context() as patch, worker_named("one"):
        as_dead(patch)
        patch.setattr(tasks, "prove_unit", stopped)
        with pytest.raises(Killed):
            work(target)
    assert len(proofs(target)) == 2
    made_by(target, "two")
    assert len(proofs(target)) == len(job.units)
    receipt = require_same(target, llama, tmp_path)
    assert receipt.verification["bytes_by_workers"] >= sum(in_boxes(job).values())


def test_a_coordinator_has_boxes_read_back_by_others(llama, target, tmp_path):
    job = job_of(llama, target)
    names = list(carry_with_pool(job, SeparatePool("abc")))
    assert sum(name.startswith("proof") for name in names) == len(job.units)
    receipt = require_same(target, llama, tmp_path)
    assert receipt.verification["bytes_by_workers"] >= sum(in_boxes(job).values())


def test_the_same_tensors_in_other_chunks_are_hashed_in_the_pass_that_moves_them(
    target, tmp_path, read, read_by_reader
):
    """Without a layout in between, the leaves of the target are those of the source."""
    random = np.random.default_rng(0)
    source = tmp_path / "model.safetensors"
    save_file({f"layer.{n}.w": random.random((512, 1024), "f4") for n in range(3)}, source)
    options = {**OPTIONS, "chunks": "1x4"}
    wherry.convert(source, tmp_path / "first", to="orbax", options=options, lineage=False)
    alone = read_of_source(read)  # with the gaps between runs
    read.clear()
    job = split(requested(source, target, "orbax", options), UNIT)
    assert len(in_boxes(job)) == 3
    made_by(target, "one", units=2)
    made_by(target, "two")
    made_by(target, "one")
    assert read_of_source(read) <= alone
    assert read_of_target(read, job) <= 6 * (1 << 20)
    read_by_reader[0] = 0
    read.clear()
    [receipt] = commit(target).receipts
    assert read_by_reader[0] == 0
    assert read_of_source(read) + read_of_target(read, job) < SLACK
    require_digests(receipt, source, tmp_path, options, "orbax")
    assert receipt.verification["bytes_by_workers"] == 3 * 512 * 1024 * 4


def test_a_plan_counts_what_the_commit_reads_of_boxes(llama, target):
    _plan, hashed = plan_for_workers(requested(llama, target), 4, UNIT, MB)
    assert hashed.commit_bytes == 0


def test_a_plan_counts_boxes_with_short_runs_twice(narrow, target, small_chunks):
    _plan, short = plan_for_workers(requested(narrow, target, options=SMALL_FILES), 4, 100_000, MB)
    boxed = sum(in_boxes(narrow_job(narrow, target)).values())
    assert 2 * boxed <= short.commit_bytes <= 2 * (boxed + 2 * SLACK)
