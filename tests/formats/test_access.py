"""A reader says once per tensor how its bytes can be had; a plug-in's reader that says nothing is read as before."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from importlib import import_module
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
from wherry.formats.reader import Absent, Access, BaseReader, Block, Extent, Reader
from wherry.mover.decode import DecodedReader
from wherry.mover.hashing import hash_checkpoint
from wherry.mover.pool import Pool
from wherry.mover.source import Source
from wherry.mover.spill import Spill
from wherry.storage.stores import locate

SHAPE = (1000, 2200)  # 8.8 MB: more than is decoded at once in the smallest budget
VALUES = np.random.default_rng(0).normal(size=SHAPE).astype(np.float32)
WHOLE = tuple(slice(0, extent) for extent in SHAPE)


class Plain:
    """What a plug-in's reader had to have before there was `access`, and nothing else."""

    def __init__(self, inner):
        self._inner = inner
        self.calls = []

    def read(self, spec, region):
        self.calls.append("read")
        return self._inner.read(spec, region).copy()

    def read_bytes(self, spec):
        return self._inner.read_bytes(spec)

    def extents(self, _spec):
        return None

    def absent(self):
        return ()

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
    def held(self, _spec, _cell):
        return 1000

    def stream(self, spec, cell):
        self.calls.append("stream")
        yield Block(cell, iter([memoryview(self._inner.read(spec, cell).tobytes())]))


class ByRegion(Streaming):
    def cheap(self, _spec):
        return True

    def region(self, spec, region, buffer):
        self.calls.append("region")
        buffer[:] = self._inner.read(spec, region).tobytes()


class Filling(Plain):
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


PLAIN = [
    (Plain, "whole", True, False, "read"),
    (Raw, "raw", False, False, None),
    (Streaming, "stream", True, False, None),
    (ByRegion, "regions", False, False, "region"),
    (Filling, "regions", True, True, "fill"),
]


@pytest.mark.parametrize(("kind", "expected", "gridded", "computes", "call"), PLAIN)
def test_a_plug_in_without_access_is_read_as_it_can_be(source, kind, expected, gridded, computes, call):
    plain, checkpoint = seen(source, kind)
    spec = checkpoint.spec("w")
    access = checkpoint.reader.access(spec)
    assert (access.kind, access.gridded, access.computes) == (expected, gridded, computes)
    assert (
        hash_checkpoint(checkpoint, BLAKE3, memory=16 << 20).digests
        == hash_checkpoint(source, BLAKE3, memory=16 << 20).digests
    )
    assert call is None or set(plain.calls) == {call}
    checkpoint.close()
    assert plain.calls[-1] == "close"


@pytest.mark.parametrize("kind", [row[0] for row in PLAIN])
def test_whatever_a_plug_in_lacks_is_there(source, kind):
    plain, checkpoint = seen(source, kind)
    reader, spec = checkpoint.reader, checkpoint.spec("w")
    region = (slice(3, 7), slice(5, 1000))
    buffer = memoryview(bytearray(VALUES[region].nbytes))
    reader.fill(spec, region, buffer)
    assert bytes(buffer) == VALUES[region].tobytes()
    blocks = list(reader.stream(spec, WHOLE))
    assert [block.region for block in blocks] == [WHOLE]
    assert reader.held(spec, WHOLE) == (1000 if hasattr(plain, "held") else None)
    assert reader.overhead(spec, region) == (4000 if kind is Filling else 0)
    assert reader.shortfall() == ("half of it" if kind is Filling else None)
    assert reader.calls is plain.calls, "its own attributes are its own"
    with pytest.raises(AttributeError):
        reader.no_such_attribute  # noqa: B018


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


@pytest.mark.parametrize("kind", [row[0] for row in PLAIN])
@pytest.mark.parametrize("options", [{}, {"chunks": "3x7"}], ids=["spans", "chunks"])
def test_a_plug_in_is_converted(source, plug_in, kind, options, tmp_path):
    plug_in(kind)
    to = "orbax" if options else "npz"
    done = wherry.convert(tmp_path / "a.safetensors", tmp_path / "out", to=to, options=options, lineage=False)
    assert done.source.format == "mine"
    with wherry.open(tmp_path / "out") as made:
        assert np.array_equal(made.read("w"), VALUES)


def test_a_reader_with_access_is_taken_as_it_is(source):
    class Own(BaseReader):
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


def test_every_reader_of_ours_declares_access():
    """No reader of an integration is adapted; what is adapted belongs to plug-ins."""
    import ast
    from pathlib import Path

    root = Path(wherry.__file__).parent.parent
    without = []
    for path in [*(root / "integrations").rglob("*.py"), *(root / "wherry").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                methods = {one.name for one in node.body if isinstance(one, ast.FunctionDef)}
                if {"read", "extents"} <= methods and not node.bases and node.name != "BaseReader":
                    without.append(f"{path.name}:{node.name}")
    assert without == []


def test_a_tensor_is_asked_for_once(source):
    asked = []

    class Counting(BaseReader):
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

    assert (door.Extent, door.Absent, door.Block, door.BaseReader) == (Extent, Absent, Block, BaseReader)
    assert Extent(locate("/a"), 0, 1).crc32 is None


class Named(Reader):
    """A plug-in's reader that names the protocol as its base."""

    read, read_bytes, extents = Plain.read, Plain.read_bytes, Plain.extents
    absent, companion, members, close = Plain.absent, Plain.companion, Plain.members, Plain.close

    def __init__(self, inner):
        Plain.__init__(self, inner)


class FillingStream(Filling):
    held, stream = Streaming.held, Streaming.stream


def test_a_plug_in_that_names_the_protocol_as_its_base_inherits_no_empty_method(source):
    plain, checkpoint = seen(source, Named)
    assert checkpoint.reader.access(checkpoint.spec("w")).kind == "whole"
    assert (
        hash_checkpoint(checkpoint, BLAKE3, memory=16 << 20).digests
        == hash_checkpoint(source, BLAKE3, memory=16 << 20).digests
    )
    assert set(plain.calls) == {"read"}


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


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("wherry.formats.format", "StreamingReader"), ("wherry.formats.reader", "FillingReader"),
        ("wherry.formats.reader", "RegionReader"), ("wherry.formats.reader", "PlacingWriter"),
        ("wherry.formats.detect", "ReckoningReader"),
    ],
)  # fmt: skip
def test_protocols_of_earlier_releases_can_still_be_imported(module, name, source):
    found = getattr(import_module(module), name)
    assert isinstance(Streaming(source.reader), found) is (name == "StreamingReader")
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        import_module(module).Nothing  # noqa: B018


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
    class Half(BaseReader):
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
