"""Arrays in chunks (zarr, OCDBT, of every system) in a store: nothing on a local disk, killed anywhere, resumed."""

import builtins
import os
from contextlib import contextmanager
from functools import cache

import pytest

import wherry
from tests.support.object_stores import (
    Killed,
    leftover_names,
    model,
    release,
    small_parts,
    uploads_below,
    watched,
)
from wherry.store.local_store import locate
from wherry.store.memory import MemoryStore
from wherry.target.journal import Journal

pytest_plugins = ("tests.support.crash_fixtures",)
KIB = 1 << 10
ZSTD, FILES = {"compression": "zstd"}, {"ocdbt": False}
PACKED = {**ZSTD, "data_file_size": "128KiB"}
CASES = {
    "database": ("orbax", {}),
    "packed": ("orbax", PACKED),
    "objects": ("orbax", FILES),
    "compressed-objects": ("orbax", FILES | ZSTD | {"zarr": "3"}),
}
each = pytest.mark.parametrize(("to", "options"), CASES.values(), ids=list(CASES))
PUTS = ("put_part", "put_object")


@pytest.fixture(autouse=True)
def parts():
    with small_parts(16 * KIB), pytest.MonkeyPatch.context() as patch:
        patch.setattr("wherry.mover.output._GROUP_BYTES", 1)
        patch.setattr("wherry.mover.move.SMALL", 1 * KIB)
        patch.setattr("wherry.mover.carrier.SMALL", 1 * KIB)
        patch.setattr("wherry.target.parts.HELD_BYTES", 128 * KIB)
        yield


@pytest.fixture(scope="module")
def source(tmp_path_factory, key):
    return model(tmp_path_factory.mktemp("source") / "model", rows=30, count=40)


@pytest.fixture
def target(tmp_path):
    return f"memory://arrays{tmp_path}/out"


def convert(source, target, to, options, **more):
    return wherry.convert(source, target, to=to, options=options, lineage=False, **more)


@pytest.fixture(scope="module")
def whole(source, tmp_path_factory):
    """The checkpoint digest of a target on a disk."""
    folder = tmp_path_factory.mktemp("whole")

    @cache
    def digest_of(to, options):
        place = folder / "-".join([to, *(str(value) for _name, value in options)])
        return convert(source, place, to, dict(options)).target.checkpoint_digest

    return lambda to, options: digest_of(to, tuple(options.items()))


@contextmanager
def files_written():
    """The files that are opened to be written on a local disk."""
    found, opened, built_in = [], os.open, builtins.open

    def seen(path, flags, *args, **kwargs):
        if flags & (os.O_WRONLY | os.O_RDWR):
            found.append(path)
        return opened(path, flags, *args, **kwargs)

    def seen_too(file, mode="r", *args, **kwargs):
        if set(mode) & set("wax+"):
            found.append(file)
        return built_in(file, mode, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "open", seen)
        patch.setattr(builtins, "open", seen_too)
        yield found


def sizes_of(uri):
    return {entry.name: entry.size for entry in locate(uri).walk()}


@each
def test_nothing_of_a_target_lies_on_a_local_disk(source, target, to, options, whole):
    digest = whole(to, options)
    with files_written() as written, watched() as calls:
        receipt = convert(source, target, to, options)
    assert written == []
    assert receipt.target.checkpoint_digest == digest
    assert [name for name, _ in calls].count("put_part") > 50
    assert leftover_names(target) == []
    assert uploads_below(target) == []
    assert wherry.verify(target, level="digest", against=source).ok


def test_what_is_written_on_a_disk_is_seen(source, tmp_path):
    with files_written() as written:
        convert(source, tmp_path / "out", "orbax", {})
    assert written


@each
def test_killed_at_calls_of_the_store_then_run_again(source, target, to, options, whole):
    with watched() as calls:
        convert(source, target, to, options)
    total = len(calls)
    for point in sorted({3, total - 2, total - 1, total, *range(5, total, max(total // 4, 1))}):
        again = f"{target}-at-{point}"
        for fatal in (point, point // 2):
            try:
                with watched(fatal=fatal):
                    convert(source, again, to, options)
            except Killed:
                pass
            release(again)
            if locate(again).exists() and wherry.detect(again).verdict == "ok":
                assert wherry.verify(again, level="digest").ok
        receipt = convert(source, again, to, options)
        assert receipt.target.checkpoint_digest == whole(to, options)
        assert wherry.verify(again, level="digest", against=source).ok
        assert uploads_below(again) == []
        assert [name for name in leftover_names(again) if name.startswith(f".wherry-out-at-{point}.")] == []


@each
def test_a_killed_run_sends_only_what_it_had_not_sent(tmp_path, target, to, options):
    source = model(tmp_path / "model", rows=30, count=200)
    with watched(only=("put_part",)) as calls:
        convert(source, f"{target}-whole", to, options)
    total = len(calls)
    assert total > 300
    with watched(fatal=total * 2 // 3, only=("put_part",)), pytest.raises(Killed):
        convert(source, target, to, options)
    release(target)
    with watched(only=("put_part",)) as calls:
        receipt = convert(source, target, to, options)
    in_flight = (
        8 + 2 * 4 + 2 * 8
    )  # what may be held, twice the senders, and the chunks of which the rest is there
    assert len(calls) <= total - total * 2 // 3 + 1 + in_flight + total * 2 // 100
    assert 0 < receipt.resumed_bytes < receipt.bytes_written


RELATIVES = [
    ("maxtext", PACKED),
    ("paxml", {"version": "1.2", **PACKED}),
    ("paxml", {"version": "1.1", **ZSTD}),
    ("t5x-legacy", {"inline": "none", "compression": "gzip"}),
    ("t5x-orbax", FILES),
    ("penzai", FILES),
]


@pytest.mark.parametrize(("to", "options"), RELATIVES)
def test_relatives_of_orbax_are_resumed(sources, tmp_path, target, to, options):
    made = convert(sources[to], tmp_path / "out", to, options).target.checkpoint_digest
    with watched(only=PUTS) as calls:
        convert(sources[to], f"memory://whole{tmp_path}/out", to, options)
    for share in (3, 2):
        with watched(fatal=len(calls) // share, only=PUTS), pytest.raises(Killed):
            convert(sources[to], target, to, options)
        release(target)
    assert convert(sources[to], target, to, options).target.checkpoint_digest == made
    assert wherry.verify(target, level="digest", against=sources[to]).ok
    assert leftover_names(target) == []
    assert uploads_below(target) == []


def test_packed_chunks_fill_several_data_files(source, target):
    convert(source, target, "orbax", PACKED)
    data = {name: size for name, size in sizes_of(target).items() if name.startswith("d/0000000000000000")}
    assert len(data) > 5
    assert max(data.values()) <= 128 * KIB
    assert sum(data.values()) <= 1_300_000


def test_no_data_file_of_a_killed_run_is_left_unused(source, target, monkeypatch):
    real_part, recorded, fatal = Journal.part, set(), 30

    def part(self, upload, sent):
        real_part(self, upload, sent)
        self.flush()
        recorded.add(upload.key)

    monkeypatch.setattr(Journal, "part", part)
    # Which uploads are open depends on the threads.
    while not any(upload.key in recorded for upload in uploads_below(target)):
        with watched(fatal=fatal, only=("put_part",)), pytest.raises(Killed):
            convert(source, target, "orbax", PACKED)
        release(target)
        fatal = 4
    monkeypatch.setattr(MemoryStore, "parts", lambda _self, _upload: [])
    receipt = convert(source, target, "orbax", PACKED)
    assert "no longer has all parts" in receipt.note
    total = sum(size for name, size in sizes_of(target).items() if name.startswith("d/"))
    assert total <= 1_300_000
    assert wherry.verify(target, level="digest", against=source).ok
    assert uploads_below(target) == []


@each
def test_the_checksums_of_the_store_are_a_proof_without_reading(source, target, monkeypatch, to, options):
    monkeypatch.setattr("wherry.converter.job.read_back", None)
    receipt = convert(source, target, to, options, verify="store")
    assert receipt.verification == {"level": "store", "ok": True, "tensors": 40, "checksum": "crc32c"}
    monkeypatch.undo()
    assert wherry.verify(target, level="digest").ok


def large(folder):
    """A file of 400 MB that has no bytes on the disk; only its header is read."""
    header = b'{"w":{"dtype":"F32","shape":[100000,1000],"data_offsets":[0,400000000]}}'
    with (folder / "m.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + 400_000_000)
    return folder / "m.safetensors"


@pytest.mark.parametrize(
    ("options", "most"), [({}, 8), (FILES, 32), (FILES | {"chunks": "4"}, 4), ({"chunks": "store"}, 32)]
)
def test_chunks_that_are_objects_are_larger(tmp_path, options, most):
    planned = wherry.plan(large(tmp_path), "memory://arrays/large", to="orbax", options=options)
    (spec,) = planned.manifest.tensors.values()
    rows, columns = spec.chunks
    assert most * 15 / 16 <= rows * columns * 4 / (1 << 20) <= most


def test_chunks_on_a_disk_stay_small(tmp_path):
    planned = wherry.plan(large(tmp_path), tmp_path / "out", to="orbax", options=FILES)
    (spec,) = planned.manifest.tensors.values()
    assert spec.chunks[0] * 4000 <= 8 << 20


def test_a_step_is_committed_after_its_item(source, tmp_path):
    run = f"memory://arrays{tmp_path}/run"
    with watched(fatal=1, only=("copy_object",)), pytest.raises(Killed):
        wherry.convert(source, run, to="orbax", into=True, as_step=7, lineage=False)
    assert locate(run).join("7/default/commit_success.txt").exists()
    assert not locate(run).join("7/commit_success.txt").exists()
