"""A reader says once per tensor how its bytes can be read, and a plug-in's reader overrides what it does better."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
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
from wherry.formats.format import Opened
from wherry.formats.reader import Absent, Access, Block, Extent, Reader
from wherry.mover.decode import DecodedReader
from wherry.mover.hashing import hash_checkpoint
from wherry.mover.pool import Pool
from wherry.mover.source import Source
from wherry.mover.spill import Spill
from wherry.storage.stores import locate

SHAPE = (1000, 2200)  # 8.8 MB: more than is decoded at once in the smallest budget
VALUES = np.random.default_rng(0).normal(size=SHAPE).astype(np.float32)
WHOLE = tuple(slice(0, extent) for extent in SHAPE)


class Plain(Reader):
    """A plug-in's reader, which notes its calls."""

    def __init__(self, inner):
        self._inner = inner
        self.calls = []

    def read(self, spec, region):
        self.calls.append("read")
        return self._inner.read(spec, region).copy()

    def companion(self, name):
        return self._inner.companion(name)

    def members(self):
        return self._inner.members()

    def close(self):
        self.calls.append("close")


class Raw(Plain):
    def extents(self, spec):
        return self._inner.extents(spec)


class Streaming(Plain):
    def access(self, _spec):
        return Access("stream")

    def held(self, _spec, _cell):
        return 1000

    def stream(self, spec, cell):
        self.calls.append("stream")
        yield Block(cell, iter([memoryview(self._inner.read(spec, cell).tobytes())]))


class Filling(Plain):
    def access(self, _spec):
        return Access("regions", computes=True)

    def fill(self, spec, region, buffer):
        self.calls.append("fill")
        buffer[:] = self._inner.read(spec, region).tobytes()

    def overhead(self, _spec, _region):
        return 4000

    def shortfall(self):
        return "half of it"


@pytest.fixture
def source(tmp_path):
    save_file({"w": VALUES}, tmp_path / "a.safetensors")
    with wherry.open(tmp_path / "a.safetensors") as checkpoint:
        yield checkpoint


def seen(source, kind):
    reader = kind(source.reader)
    return reader, Checkpoint(Opened(source.detection, source.manifest, reader))


KINDS = {"read": Plain, "extents": Raw, "stream": Streaming, "fill": Filling}


@pytest.mark.parametrize("call", KINDS)
def test_a_reader_is_hashed_by_what_it_declares(source, call):
    plain, checkpoint = seen(source, KINDS[call])
    assert (
        hash_checkpoint(checkpoint, BLAKE3, memory=16 << 20).digests
        == hash_checkpoint(source, BLAKE3, memory=16 << 20).digests
    )
    assert set(plain.calls) <= {call, "read"}
    checkpoint.close()
    assert plain.calls[-1] == "close"


@pytest.mark.parametrize("call", KINDS)
def test_what_a_reader_does_not_override_follows_from_the_rest(source, call):
    plain, checkpoint = seen(source, KINDS[call])
    reader, spec = checkpoint.reader, checkpoint.spec("w")
    region = (slice(3, 7), slice(5, 1000))
    buffer = memoryview(bytearray(VALUES[region].nbytes))
    reader.fill(spec, region, buffer)
    assert bytes(buffer) == VALUES[region].tobytes()
    blocks = list(reader.stream(spec, WHOLE))
    assert [block.region for block in blocks] == [WHOLE]
    assert reader.held(spec, WHOLE) == (1000 if call == "stream" else None)
    assert reader.overhead(spec, region) == (4000 if call == "fill" else 0)
    assert reader.shortfall() == ("half of it" if call == "fill" else None)
    assert reader is plain


@pytest.fixture
def plug_in(monkeypatch):
    """Makes a format of an entry point, whose readers are of one kind."""

    def make(kind):
        own = registry.find_format("safetensors")

        def detect(glimpse):
            found = own.detect(glimpse)
            return found and replace(found, format="mine")

        def opened(location, detection):
            found = own.open(location, detection)
            (spec,) = found.manifest.tensors.values()
            manifest = replace(found.manifest, tensors={spec.path: replace(spec, chunks=(100, 1700))})
            return Opened(found.detection, manifest, kind(found.reader))

        row = replace(own, name="mine", aliases=(), refines=("safetensors",), detect=detect, open=opened)
        entry = SimpleNamespace(load=lambda: row)
        monkeypatch.setattr(registry, "entry_points", lambda group: [entry])
        registry.formats.cache_clear()

    yield make
    registry.formats.cache_clear()


@pytest.mark.parametrize("kind", KINDS.values())
@pytest.mark.parametrize("options", [{}, {"chunks": "3x7"}], ids=["spans", "chunks"])
def test_a_plug_in_is_converted(source, plug_in, kind, options, tmp_path):
    plug_in(kind)
    to = "orbax" if options else "npz"
    done = wherry.convert(tmp_path / "a.safetensors", tmp_path / "out", to=to, options=options, lineage=False)
    assert done.source.format == "mine"
    with wherry.open(tmp_path / "out") as made:
        assert np.array_equal(made.read("w"), VALUES)


def test_a_reader_of_whole_tensors_needs_three_methods(source):
    class Own(Reader):
        companion, members = source.reader.companion, source.reader.members

        def read(self, spec, region):
            return source.reader.read(spec, region)

    own = Own()
    opened = Opened(source.detection, source.manifest, own)
    assert opened.reader is own
    spec = source.spec("w")
    assert own.access(spec).kind == "whole"
    assert own.read_bytes(spec) == VALUES.tobytes()
    assert list(own.absent()) == []
    assert own.shortfall() is None


def test_a_tensor_is_asked_for_once(source):
    asked = []

    class Counting(Reader):
        read, companion, members = source.reader.read, source.reader.companion, source.reader.members

        def access(self, spec):
            asked.append(spec.path)
            return source.reader.access(spec)

    spec = source.spec("w")
    with Source(Counting(), Pool(16 << 20)) as read:
        for _again in range(3):
            assert read.way(spec).access == read.access(spec)
            assert read.way(spec).spans
    assert asked == [("w",)]


def test_the_nouns_are_where_plug_ins_import_them():
    from wherry.formats import format as door

    assert (door.Extent, door.Absent, door.Block, door.Reader) == (Extent, Absent, Block, Reader)
    assert Extent(locate("/a"), 0, 1).crc32 is None


class FillingStream(Filling):
    held, stream = Streaming.held, Streaming.stream


def test_what_can_be_filled_and_streamed_is_streamed_where_a_chunk_is_too_large(source):
    plain, checkpoint = seen(source, FillingStream)
    spec = replace(checkpoint.spec("w"), chunks=SHAPE)
    manifest = replace(source.manifest, tensors={spec.path: spec})
    checkpoint = Checkpoint(Opened(source.detection, manifest, plain))
    small = hash_checkpoint(checkpoint, BLAKE3, memory=16 << 20)
    assert small.digests == hash_checkpoint(source, BLAKE3, memory=16 << 20).digests
    assert "stream" in plain.calls


def test_bytes_that_lie_raw_are_in_no_chunks(source):
    spec = replace(source.spec("w"), chunks=SHAPE)

    class Default(Raw):
        def access(self, spec):
            return Access("raw", self.extents(spec))

    reader = Default(source.reader)
    manifest = replace(source.manifest, tensors={spec.path: spec})
    checkpoint = Checkpoint(Opened(source.detection, manifest, reader))
    assert not reader.access(spec).gridded
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
    class Half(Reader):
        def read(self, spec, region):
            return None

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
