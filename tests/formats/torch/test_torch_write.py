"""Writing torch.save archives: what torch loads, CRCs of pieces in any order, resuming, reproducible bytes."""

from __future__ import annotations

import itertools
import random
import struct
import zipfile
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import wherry
from tests.support.formats import canonical, copy, create, opened
from tests.support.torch import as_bytes, every_dtype, same, torch
from wherry.core.manifest import Manifest
from wherry.core.tensorspec import Span, TensorSpec
from wherry.errors import UnrepresentableError, UnsupportedError, UsageError
from wherry.formats.registry import find_format
from wherry.integrations.containers.pickle.writer import PickleWriter
from wherry.mover import checksums
from wherry.store import content as crcs


def load(path):
    return torch.load(path, weights_only=True, mmap=True)


def test_torch_loads_every_dtype(tmp_path):
    tensors = every_dtype()
    torch.save(tensors, tmp_path / "a.pt")
    copy(opened(tmp_path / "a.pt", "torch-zip"), tmp_path / "b.pt", "torch-zip")
    assert same(load(tmp_path / "b.pt"), tensors)
    assert same(torch.load(tmp_path / "b.pt", weights_only=False), tensors)
    assert zipfile.ZipFile(tmp_path / "b.pt").testzip() is None


def test_trees_with_lists_and_values(tmp_path):
    value = {
        "model": {"0.weight": torch.randn(3, 4).T, "0.bias": torch.randn(3)},
        "groups": [{"lr": 0.1, "ids": [0, 1, 70000, -5, 1 << 40]}, {"name": "ü", "on": True, "no": None}],
        "tensors": [torch.ones(2), [torch.zeros(1)]],
        "nothing": {},
        "empty": [],
        "epoch": 7,
        **{str(index): index for index in range(12)},
    }
    torch.save(value, tmp_path / "a.pt")
    copy(opened(tmp_path / "a.pt", "torch-zip"), tmp_path / "b.pt", "torch-zip")
    found = load(tmp_path / "b.pt")
    assert torch.equal(found["model"]["0.weight"], value["model"]["0.weight"])
    assert torch.equal(found["tensors"][1][0], value["tensors"][1][0])
    assert found.keys() == value.keys()
    assert all(found[key] == value[key] for key in value if key not in ("model", "tensors"))


def test_a_bare_tensor_and_a_root_list(tmp_path):
    for value in (torch.arange(5), [torch.arange(5)]):
        torch.save(value, tmp_path / "a.pt")
        copy(opened(tmp_path / "a.pt", "torch-zip"), tmp_path / "b.pt", "torch-zip")
        found = load(tmp_path / "b.pt")
        assert type(found) is type(value)
        assert torch.equal(found[0] if isinstance(found, list) else found, torch.arange(5))


def test_the_layout_is_torch_s_own(tmp_path):
    """Same members at the same places, up to the root's name and the id that we leave out."""
    torch.save({"a": torch.ones(100), "b": torch.zeros(3)}, tmp_path / "archive.pt")
    copy(opened(tmp_path / "archive.pt", "torch-zip"), tmp_path / "b.pt", "torch-zip")
    copied, original = zipfile.ZipFile(tmp_path / "b.pt"), zipfile.ZipFile(tmp_path / "archive.pt")
    kept = [info for info in original.infolist() if not info.filename.endswith("serialization_id")]
    assert [info.filename for info in copied.infolist()] == [info.filename for info in kept]
    for member, source in zip(copied.infolist(), kept, strict=True):
        traits = (
            "flag_bits",
            "compress_type",
            "create_version",
            "extract_version",
            "date_time",
            "external_attr",
        )
        assert [getattr(member, one) for one in traits] == [getattr(source, one) for one in traits]
    data = (tmp_path / "b.pt").read_bytes()
    assert data.index(b"\0\0\x80?" * 100) % 64 == 0


def test_the_descriptor_behind_each_member_says_what_the_directory_says(tmp_path):
    """Readers of a stream have no directory yet: they go by the CRC and sizes behind the bytes."""
    torch.save({"a": torch.arange(100.0), "b": torch.zeros(3)}, tmp_path / "a.pt")
    copy(opened(tmp_path / "a.pt", "torch-zip"), tmp_path / "b.pt", "torch-zip")
    data = (tmp_path / "b.pt").read_bytes()
    for info in zipfile.ZipFile(tmp_path / "b.pt").infolist():
        names, extra = struct.unpack_from("<2H", data, info.header_offset + 26)
        start = info.header_offset + 30 + names + extra
        assert zlib.crc32(data[start : start + info.file_size]) == info.CRC
        found = struct.unpack_from("<4s3I", data, start + info.file_size)
        assert found == (b"PK\x07\x08", info.CRC, info.file_size, info.file_size)


def test_conversions_are_reproducible(tmp_path):
    torch.save(every_dtype(), tmp_path / "a.pt")
    for name in ("one.pt", "two.pt"):
        wherry.convert(tmp_path / "a.pt", tmp_path / name, to="torch-zip", lineage=False)
    assert (tmp_path / "one.pt").read_bytes() == (tmp_path / "two.pt").read_bytes()
    assert same(load(tmp_path / "one.pt"), every_dtype())


def test_what_no_dict_can_hold_is_refused(tmp_path):
    spec = TensorSpec(("a",), (2,), "int8")
    below = TensorSpec(("a", "b"), (2,), "int8")
    with pytest.raises(UnrepresentableError, match="leaf and a node"):
        create(tmp_path / "x.pt", "torch-zip", Manifest(tensors={spec.path: spec, below.path: below}))
    with pytest.raises(UnrepresentableError, match="gaps in its indices"):
        create(
            tmp_path / "x.pt", "torch-zip", Manifest(tensors={below.path: below}, lists=frozenset([("a",)]))
        )
    with pytest.raises(UnsupportedError):
        PickleWriter().value(b"bytes")
    with pytest.raises(UnsupportedError):
        PickleWriter().value(1 << 3000)


def test_what_no_dict_can_hold_is_refused_by_the_plan():
    """Before any byte moves: a plan prepares the manifest, and only then a writer is made."""
    specs = {path: TensorSpec(path, (2,), "int8") for path in (("a",), ("a", "b"))}
    with pytest.raises(UnrepresentableError, match="leaf and a node"):
        find_format("torch-zip").prepare(Manifest(tensors=specs), {})


BIG = TensorSpec(("w",), (9 << 20,), "uint8")
SMALL = TensorSpec(("s",), (3, 5), "float32")
MANIFEST = Manifest(tensors={spec.path: spec for spec in (BIG, SMALL)})


def contents():
    return {spec.path: random.Random(spec.path[0]).randbytes(spec.nbytes) for spec in (BIG, SMALL)}


def pieces(count=60):
    """Every byte at least once, at random cuts, some of them twice and differently cut."""
    for spec in (BIG, SMALL):
        for _ in range(2):
            cuts = sorted({0, spec.nbytes, *random.sample(range(spec.nbytes), min(count, spec.nbytes // 2))})
            yield from ((spec.path, Span(*pair)) for pair in itertools.pairwise(cuts))


def checked(path):
    assert zipfile.ZipFile(path).testzip() is None
    assert {(key,): as_bytes(tensor) for key, tensor in load(path).items()} == contents()


@pytest.mark.parametrize("format_name", ["torch-zip", "dcp"])
def test_any_order_from_several_threads_and_twice(tmp_path, format_name):
    data = contents()
    for name in ("a", "b"):
        writer = create(tmp_path / name, format_name, MANIFEST)
        jobs = list(pieces())
        random.shuffle(jobs)

        def put(job, writer=writer):
            path, span = job
            assert writer.grid(path) is None
            writer.write(path, span, memoryview(data[path])[span.start : span.stop])

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(put, jobs))
        writer.finish()
        writer.finish()
        writer.close()
    files = [p.relative_to(tmp_path / "a") for p in (tmp_path / "a").rglob("*")] or [Path()]
    for file in files:
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
    if format_name == "torch-zip":
        checked(tmp_path / "a")
    assert all(canonical(opened(tmp_path / "a", format_name), path) == data[path] for path in data)


@pytest.mark.parametrize("format_name", ["torch-zip", "dcp", "npz"])
def test_a_piece_that_was_written_again_in_part_counts_for_the_checksum(tmp_path, format_name):
    """The checksum of the rest is read from the file, where its last block may not be yet."""
    spec = TensorSpec(("x",), (100,), "uint8")
    data = bytes(range(100))
    writer = create(tmp_path / "a", format_name, Manifest(tensors={spec.path: spec}))
    for span in (Span(0, 100), Span(50, 100)):
        writer.write(spec.path, span, memoryview(data)[span.start : span.stop])
    writer.finish()
    writer.close()
    archives = [path for path in (tmp_path / "a", *(tmp_path / "a").rglob("*.distcp")) if path.is_file()]
    for path in archives:
        with zipfile.ZipFile(path) as archive:
            assert archive.testzip() is None
    assert archives
    assert canonical(opened(tmp_path / "a", format_name), spec.path) == data


@pytest.mark.parametrize("format_name", ["torch-zip", "dcp"])
def test_a_small_tensor_that_was_written_again_with_other_bytes_has_their_checksum(tmp_path, format_name):
    """The archive of a small tensor is written with its data, before a piece changes the data."""
    spec = TensorSpec(("x",), (100,), "uint8")
    writer = create(tmp_path / "a", format_name, Manifest(tensors={spec.path: spec}))
    writer.write(spec.path, Span(0, 100), memoryview(bytes(100)))
    writer.write(spec.path, Span(50, 100), memoryview(b"\1" * 50))
    writer.finish()
    writer.close()
    [archive] = [path for path in (tmp_path / "a", *(tmp_path / "a").rglob("*.distcp")) if path.is_file()]
    with zipfile.ZipFile(archive) as opened_archive:
        assert opened_archive.testzip() is None
    assert canonical(opened(tmp_path / "a", format_name), spec.path) == bytes(50) + b"\1" * 50


@pytest.mark.parametrize("done", [(), (Span(0, 1 << 20), Span(5 << 20, 6 << 20)), (Span(0, BIG.nbytes),)])
def test_a_resumed_writer_knows_the_crc_of_what_it_did_not_write(tmp_path, done):
    data = contents()
    whole = Span(0, BIG.nbytes)
    first = create(tmp_path / "a.pt", "torch-zip", MANIFEST)
    for span in done:
        first.write(BIG.path, span, memoryview(data[BIG.path])[span.start : span.stop])
    first.sync()
    first.close()
    second = create(tmp_path / "a.pt", "torch-zip", MANIFEST)
    marks = sorted({0, whole.stop, *(mark for span in done for mark in span)})
    for span in map(Span, marks, marks[1:]):
        if span not in done:
            second.write(BIG.path, span, memoryview(data[BIG.path])[span.start : span.stop])
    second.write(SMALL.path, Span(0, SMALL.nbytes), memoryview(data[SMALL.path]))
    second.finish()
    second.close()
    checked(tmp_path / "a.pt")


def test_spans_must_be_inside_and_agree(tmp_path):
    writer = create(tmp_path / "a.pt", "torch-zip", MANIFEST)
    for span, size in ((Span(0, 4), 3), (Span(58, 62), 4)):
        with pytest.raises(UsageError):
            writer.write(SMALL.path, span, memoryview(bytes(size)))
    writer.close()


@given(st.binary(max_size=300), st.data())
@settings(max_examples=200, deadline=None)
def test_crcs_of_pieces_combine(data, draw):
    cut = draw.draw(st.integers(0, len(data)))
    assert crcs.combine(zlib.crc32(data[:cut]), zlib.crc32(data[cut:]), len(data) - cut) == zlib.crc32(data)
    whole = checksums.PieceCrc(len(data))
    for _ in range(draw.draw(st.integers(0, 6))):
        start = draw.draw(st.integers(0, len(data)))
        stop = draw.draw(st.integers(start, len(data)))
        whole.update(start, memoryview(data)[start:stop])
    assert whole.value(lambda start, stop: memoryview(data)[start:stop]) == zlib.crc32(data)


def test_archives_beyond_32_bits(tmp_path, monkeypatch):
    """A sparse tensor of more than 4 GiB, and one that begins behind it; no byte of the first is written."""
    size = (1 << 32) + 100
    specs = [TensorSpec(("big",), (size,), "uint8"), TensorSpec(("after",), (3,), "int16")]
    monkeypatch.setattr("os.posix_fallocate", lambda *_args: None)
    monkeypatch.setattr(
        checksums.PieceCrc, "value", lambda crc, _read: 0x1234 if crc.size == size else 0x2E2D9C1A
    )
    writer = create(tmp_path / "a.pt", "torch-zip", Manifest(tensors={spec.path: spec for spec in specs}))
    writer.write(("after",), Span(0, 6), memoryview(b"\1\0\2\0\3\0"))
    writer.write(("big",), Span(size - 1, size), memoryview(b"\7"))
    writer.finish()
    writer.close()
    found = load(tmp_path / "a.pt")
    assert found["after"].tolist() == [1, 2, 3]
    assert (found["big"].shape[0], found["big"][-1].item()) == (size, 7)
    assert zipfile.ZipFile(tmp_path / "a.pt").getinfo("archive/data/0").file_size == size
    ours = opened(tmp_path / "a.pt", "torch-zip")
    assert canonical(ours, ("after",)) == b"\1\0\2\0\3\0"


def test_the_plan_lists_classes_and_keys_that_become_plain(tmp_path):
    state = {"weight": torch.ones(3), "optimizer": {0: torch.ones(2)}, "shape": (1, 2)}
    torch.save(state, tmp_path / "model.pt")
    to_orbax = wherry.plan(tmp_path / "model.pt", tmp_path / "out", to="orbax").ignored
    assert {(row.path, row.rule) for row in to_orbax} == {(("optimizer/0",), "types"), (("shape",), "types")}
    assert "the key 0" in next(row.reason for row in to_orbax if "optimizer" in row.path[0])
    assert not wherry.plan(tmp_path / "model.pt", tmp_path / "out.pt", to="torch-zip").ignored
