"""A reader says once per tensor how its bytes can be read, and a plug-in's reader overrides what it does better."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import save_file

import wherry
from wherry.core.algorithms import BLAKE3
from wherry.core.tensorspec import Span
from wherry.errors import NotFoundError
from wherry.formats import registry
from wherry.formats.checkpoint import Checkpoint
from wherry.formats.contents import (
    Absent,
    Block,
    ChunkDecoder,
    Chunked,
    Computed,
    Contents,
    Extent,
    Stored,
)
from wherry.formats.format import Opened
from wherry.formats.model_files import ModelFiles
from wherry.mover.decode import DecodedReader, Spill
from wherry.mover.hashing import hash_checkpoint
from wherry.mover.move import Way
from wherry.mover.pool import Pool
from wherry.mover.read import memory_for, read_array, read_region
from wherry.mover.source import Source
from wherry.storage.stores import locate

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
        entry = SimpleNamespace(load=lambda: row)
        monkeypatch.setattr(registry, "entry_points", lambda group: [entry])
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
