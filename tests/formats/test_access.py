"""How bytes are read: access of a reader, parts of tensors, companions."""

from __future__ import annotations

import errno
import hashlib
import os
from contextlib import closing
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

import wherry
from tests.support.processes import open_descriptors
from wherry.core.digest import BLAKE3
from wherry.core.manifest import Companion
from wherry.core.tensorspec import Span
from wherry.errors import CorruptError, HostileError, MismatchError, NotFoundError, StorageError, UsageError
from wherry.formats import registry
from wherry.formats.checkpoint import Checkpoint
from wherry.formats.companions import CompanionsReader, copy_companion
from wherry.formats.format import (
    Absent,
    Block,
    ChunkDecoder,
    Chunked,
    Computed,
    Contents,
    Extent,
    ModelFiles,
    Opened,
    Stored,
)
from wherry.mover.decode import DecodedReader, Spill
from wherry.mover.hashing import hash_checkpoint
from wherry.mover.move import Way
from wherry.mover.pool import Pool
from wherry.mover.read import memory_for, read_array, read_region
from wherry.mover.source import Source
from wherry.store import location
from wherry.store.local_store import locate
from wherry.target import files

SHAPE = (1000, 2200)  # 8.8 MB: more than is decoded at once in the smallest budget
VALUES = np.random.default_rng(0).normal(size=SHAPE).astype(np.float32)
WHOLE = tuple(slice(0, extent) for extent in SHAPE)


class Own(Contents):
    """A plug-in's contents over those of a file; records the calls."""

    def __init__(self, inner):
        self._inner = inner
        self.calls = []

    def fill(self, spec, region, out):
        self.calls.append("fill")
        read_region(self._inner, spec, region, out)

    def companion(self, name):
        return self._inner.companion(name)

    def members(self):
        return self._inner.members()

    def close(self):
        self.calls.append("close")


class Raw(Own):
    def access(self, spec):
        return self._inner.access(spec)


class Whole(Own):
    def access(self, spec):
        return Chunked(spec.shape, ChunkDecoder(partial(self.fill, spec)))


class Streaming(Own):
    def access(self, spec):
        decoder = ChunkDecoder(
            partial(self.fill, spec), "own", lambda _cell: 1000, partial(self.decode, spec)
        )
        return Chunked(spec.chunks or spec.shape, decoder)

    def decode(self, spec, cell):
        self.calls.append("decode")
        yield Block(cell, iter([memoryview(read_array(self._inner, spec, cell).tobytes())]))


class Filling(Own):
    def access(self, spec):
        return Computed(partial(self.fill, spec), lambda _region: 4000, gridded=True)


@pytest.fixture
def source(tmp_path):
    save_file({"w": VALUES}, tmp_path / "a.safetensors")
    with wherry.open(tmp_path / "a.safetensors") as checkpoint:
        yield checkpoint


def seen(source, kind):
    reader = kind(source.reader)
    return reader, Checkpoint(Opened(source.detection, source.manifest, reader))


KINDS = {"stored": Raw, "whole": Whole, "chunked": Streaming, "computed": Filling}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_contents_are_hashed_by_what_they_declare(source, kind):
    own, checkpoint = seen(source, kind)
    assert (
        hash_checkpoint(checkpoint, BLAKE3, memory=16 << 20).digests
        == hash_checkpoint(source, BLAKE3, memory=16 << 20).digests
    )
    assert bool(own.calls) == (kind is not Raw)
    checkpoint.close()
    assert own.calls[-1] == "close"


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_region_is_read_by_any_access(source, kind):
    own, checkpoint = seen(source, kind)
    region = (slice(3, 7), slice(5, 1000))
    assert np.array_equal(read_array(own, checkpoint.spec("w"), region), VALUES[region])
    assert read_array(own, checkpoint.spec("w"), (slice(3, 3), slice(0, 5))).shape == (0, 5)
    assert checkpoint.read_bytes("w") == VALUES.tobytes()
    assert (list(own.absent()), own.shortfall(), own.model_files()) == ([], None, ModelFiles())


def test_memory_is_that_of_the_access(source):
    region = (slice(3, 7), slice(5, 1000))
    spec = source.spec("w")
    found = {name: memory_for(kind(source.reader).access(spec), spec, region) for name, kind in KINDS.items()}
    assert found == {
        "stored": 0,
        "whole": VALUES[region].nbytes,
        "chunked": VALUES[region].nbytes,
        "computed": 4000,
    }


@pytest.fixture
def plug_in(monkeypatch):
    """Makes a format of an entry point, whose readers are of one kind."""

    def make(kind):
        own = registry.find_format("safetensors")

        def detect(glimpse):
            found = own.detect(glimpse)
            return found and replace(found, format="custom")

        def opened(location, detection):
            found = own.open(location, detection)
            (spec,) = found.manifest.tensors.values()
            manifest = replace(found.manifest, tensors={spec.path: replace(spec, chunks=(100, 1700))})
            return Opened(found.detection, manifest, kind(found.reader))

        row = replace(own, name="custom", aliases=(), refines=("safetensors",), detect=detect, open=opened)
        monkeypatch.setattr(registry, "plug_ins", lambda: [row])
        registry.formats.cache_clear()

    yield make
    registry.formats.cache_clear()


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("options", [{}, {"chunks": "3x7"}], ids=["spans", "chunks"])
def test_a_plug_in_is_converted(source, plug_in, kind, options, tmp_path):
    plug_in(kind)
    to = "orbax" if options else "npz"
    done = wherry.convert(tmp_path / "a.safetensors", tmp_path / "out", to=to, options=options, lineage=False)
    assert done.source.format == "custom"
    with wherry.open(tmp_path / "out") as made:
        assert np.array_equal(made.read("w"), VALUES)


def test_a_tensor_is_requested_once(source):
    requested = []

    class Counting(Contents):
        companion, members = source.reader.companion, source.reader.members

        def access(self, spec):
            requested.append(spec.path)
            return source.reader.access(spec)

    spec = source.spec("w")
    with Source(Counting(), Pool(16 << 20)) as read:
        for _again in range(3):
            assert read.way(spec).extents == read.access(spec).extents
            assert read.way(spec).spans
    assert requested == [("w",)]


def test_the_nouns_are_where_plug_ins_import_them():
    from wherry.formats import format as door

    assert (door.Extent, door.Absent, door.Block, door.Contents) == (Extent, Absent, Block, Contents)
    assert Extent(locate("/a"), 0, 1).crc32 is None


def test_chunks_that_are_too_large_are_decoded_in_pieces(source):
    own, checkpoint = seen(source, Streaming)
    spec = replace(checkpoint.spec("w"), chunks=SHAPE)
    manifest = replace(source.manifest, tensors={spec.path: spec})
    checkpoint = Checkpoint(Opened(source.detection, manifest, own))
    small = hash_checkpoint(checkpoint, BLAKE3, memory=16 << 20)
    assert small.digests == hash_checkpoint(source, BLAKE3, memory=16 << 20).digests
    assert set(own.calls) == {"decode"}


def test_bytes_that_are_stored_raw_are_in_no_chunks(source):
    own, _checkpoint = seen(source, Raw)
    spec = replace(source.spec("w"), chunks=SHAPE)
    manifest = replace(source.manifest, tensors={spec.path: spec})
    checkpoint = Checkpoint(Opened(source.detection, manifest, own))
    assert not Way.of(own.access(spec)).gridded
    assert (
        hash_checkpoint(checkpoint, BLAKE3, memory=16 << 20).digests
        == hash_checkpoint(source, BLAKE3, memory=16 << 20).digests
    )


def test_a_spill_can_be_used_again_once_it_is_closed(tmp_path, monkeypatch):
    monkeypatch.setenv("WHERRY_SPILL", str(tmp_path))
    spill, span = Spill(), Span(0, 4)

    def decode(file, _cell):
        with spill.writing(file) as write:
            write(memoryview(b"abcd"), 0)

    for _ in range(2):
        with spill.using(("w", 0), span, lambda: iter([WHOLE]), decode) as file:
            assert file.path.read_bytes() == b"abcd"
            assert file.path.parent.stat().st_mode & 0o777 == 0o700
        spill.close()
        assert not file.path.parent.exists()


def test_a_reader_that_lacks_what_no_reader_can_do_without_is_not_made():
    class Half(Contents):
        def access(self, spec):
            return Stored(())

    with pytest.raises(TypeError, match=r"abstract methods? '?companion'?, '?members'?"):
        Half()


def test_a_decoded_source_lacks_what_the_source_lacks(source):
    gone = Absent(("w",), "0.0", "no such file")
    there = SimpleNamespace(
        absent=lambda: [gone], shortfall=lambda: "half of it", companion=source.reader.companion,
        members=source.reader.members,
    )  # fmt: skip
    with closing(DecodedReader(there)) as reader:
        assert list(reader.absent()) == [gone]
        assert reader.shortfall() == "half of it"
        assert list(reader.members()) == list(source.reader.members())
        with pytest.raises(NotFoundError):
            reader.companion("tokenizer.json")


# checkpoint["path"]: the same parts as NumPy's indexing, and only these are read.


ARRAY = np.arange(2 * 3 * 5, dtype="f4").reshape(2, 3, 5)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    place = tmp_path_factory.mktemp("tensor") / "a.safetensors"
    save_file({"a/w": ARRAY, "scalar": np.array(4, "i4")}, place)
    with wherry.open(place) as opened:
        yield opened


def _part(extent):
    bounds = st.one_of(st.none(), st.integers(-extent - 2, extent + 2))
    return st.one_of(st.integers(-extent, extent - 1), st.builds(slice, bounds, bounds))


INDICES = st.one_of(
    st.tuples(*map(_part, ARRAY.shape)),
    st.tuples(_part(2)),
    st.tuples(_part(2), st.just(...)),
    st.tuples(st.just(...), _part(5)),
    st.just((...,)),
    st.just(()),
)


@settings(deadline=None)
@given(index=INDICES)
def test_a_part_is_what_numpy_would_take(checkpoint, index):
    found, expected = checkpoint["a~1w"][index], ARRAY[index]
    assert found.shape == expected.shape
    assert np.array_equal(found, expected)


def test_only_the_part_is_read(checkpoint, monkeypatch):
    regions, read = [], type(checkpoint).read

    def seen(self, path, region=None):
        regions.append(region)
        return read(self, path, region)

    monkeypatch.setattr(type(checkpoint), "read", seen)
    assert checkpoint["a~1w"][1, :, -2:].shape == (3, 2)
    assert regions == [(slice(1, 2), slice(0, 3), slice(3, 5))]


def test_it_is_an_array_for_numpy_and_says_what_it_is(checkpoint):
    tensor = checkpoint["a~1w"]
    assert np.array_equal(np.asarray(tensor), ARRAY)
    assert np.asarray(tensor, dtype="f8").dtype == "f8"
    assert (tensor.shape, tensor.dtype, tensor.nbytes, len(tensor)) == ((2, 3, 5), "float32", 120, 2)
    assert repr(tensor) == "<LazyTensor 'a~1w' float32[2, 3, 5]>"
    assert checkpoint["scalar"][()] == 4


@pytest.mark.parametrize("index", [(0, 0, 0, 0), (5,), (..., 0, ...), (0, -4)])
def test_an_index_outside_the_tensor_is_an_index_error(checkpoint, index):
    with pytest.raises(IndexError):
        checkpoint["a~1w"][index]


def test_a_step_and_an_unknown_key_path_are_refused(checkpoint):
    with pytest.raises(UsageError, match="has a step"):
        checkpoint["a~1w"][::2]
    with pytest.raises(NotFoundError, match="tensor not found"):
        checkpoint["a/w"]


def test_a_checkpoint_is_a_collection_of_key_paths(checkpoint):
    assert sorted(checkpoint) == [("a/w",), ("scalar",)]
    assert "a~1w" in checkpoint
    assert ("scalar",) in checkpoint
    assert "b" not in checkpoint


# A companion is copied whole and durably, or refused; nothing stays open.


def copy(data, target, size=None):
    checkpoint = SimpleNamespace(reader=CompanionsReader(SimpleNamespace(), {"notes": data}))
    companion = Companion("notes", len(data) if size is None else size)
    return copy_companion(checkpoint, companion, locate(target))


@pytest.mark.parametrize("size", [0, 1, 4096, 70_001, (8 << 20) + 5])
def test_every_size_is_copied_whole_and_synced_in_place_of_a_longer_file(tmp_path, monkeypatch, size):
    synced, real = [], os.fdatasync

    def sync(descriptor):
        synced.append(os.fstat(descriptor).st_ino)
        real(descriptor)

    monkeypatch.setattr(os, "fdatasync", sync)
    data, target = bytes(i % 251 for i in range(251)) * (size // 251 + 1), tmp_path / "out" / "deep" / "notes"
    target.parent.mkdir(parents=True)
    target.write_bytes(b"x" * (size + 9000))
    assert copy(data[:size], target).sha256 == hashlib.sha256(data[:size]).hexdigest()
    assert target.read_bytes() == data[:size]
    assert target.stat().st_ino in synced


@pytest.mark.parametrize("planned", [50, 150, 9000])
def test_a_companion_of_another_size_than_planned_is_refused(tmp_path, planned):
    with pytest.raises(MismatchError, match=f"expected {planned} bytes, got 100"):
        copy(bytes(100), tmp_path / "notes", planned)


def test_one_that_is_too_large_is_refused_before_it_takes_space(tmp_path, monkeypatch):
    monkeypatch.setattr(location, "MOST_COMPANION", 100)
    with pytest.raises(HostileError):
        copy(bytes(101), tmp_path / "out" / "notes")
    assert not (tmp_path / "out").exists()


def test_a_disk_that_fails_leaves_nothing_open(tmp_path, monkeypatch):
    def full(*_arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files.os, "pwrite", full)
    before = open_descriptors()
    with pytest.raises(StorageError, match="No space"):
        copy(bytes(100_000), tmp_path / "notes")
    assert open_descriptors() == before


# A key path is that of one leaf: metadata that gives it two is corrupt, whichever kinds of leaves they
# are.


@pytest.mark.parametrize(
    "leaves",
    [
        {"values": {("w",): 1}},
        {"empties": {("w",): "none"}},
        {"values": {("v",): 1}, "empties": {("v",): "none"}},
    ],
    ids=["tensor-value", "tensor-empty", "value-empty"],
)
def test_two_leaves_of_one_path_are_corrupt(tmp_path, leaves):
    save_file({"w": np.ones(3, "f4")}, tmp_path / "a.safetensors")
    with wherry.open(tmp_path / "a.safetensors") as checkpoint:
        manifest = replace(checkpoint.manifest, **leaves)
        with pytest.raises(CorruptError, match=r"two leaves have the key path [wv]") as caught:
            Checkpoint(Opened(checkpoint.detection, manifest, checkpoint.reader))
    assert caught.value.uri == checkpoint.uri
