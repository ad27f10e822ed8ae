"""numpy's .npz: every version and order that numpy writes is read; what is written, numpy reads; the rest is named."""

from __future__ import annotations

import io
import struct
import zipfile
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import wherry
from tests.support.formats import assert_as_expected, cases, copy, create, expected, opened, place, write_all
from wherry.core.manifest import Manifest
from wherry.core.tensorspec import TensorSpec
from wherry.errors import CorruptError, HostileError, UnrepresentableError, UnsupportedError
from wherry.formats.registry import find_format
from wherry.mover.read import read_array
from wherry.testing import readers

OURS = [
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64",
    "complex64", "complex128", "bfloat16",
]  # fmt: skip


def values(dtype: str, shape=(3, 5, 7)) -> np.ndarray:
    raw = np.random.default_rng(0).integers(0, 2 if dtype == "bool" else 100, shape)
    return raw.astype(getattr(ml_dtypes, dtype, dtype))


def archive(path: Path, records: dict[str, bytes], method=zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path, "w", method) as out:
        for name, data in records.items():
            out.writestr(name, data)
    return path


def record(array, version=None) -> bytes:
    out = io.BytesIO()
    np.lib.format.write_array(out, array, version)
    return out.getvalue()


@pytest.mark.parametrize("case", cases("npz", verdicts=("unsupported",)))
def test_corpus_of_what_is_refused(case):
    found = wherry.detect(place(case))
    assert found.verdict in expected(case)["accepted_verdicts"]
    assert found.format == "npz"
    assert "object array" in (found.reason or "")


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed], ids=["stored", "deflated"])
def test_every_type_order_and_rank_that_numpy_writes(tmp_path, save):
    arrays = {name: values(name) for name in OURS}
    arrays |= {f"fortran {name}": np.asfortranarray(values(name)) for name in OURS}
    arrays |= {f"big {name}": values(name).astype(f">{np.dtype(name).str[1:]}") for name in OURS[1:-1]}
    arrays |= {
        "scalar": np.float32(3),
        "a/b": np.ones(3, "f4"),
        "none": np.zeros((3, 0)),
        "größe": np.arange(4),
    }
    arrays["big fortran"] = np.asfortranarray(values("float32").astype(">f4"))
    save(tmp_path / "a.npz", **arrays)
    with wherry.open(tmp_path / "a.npz") as checkpoint:
        assert set(checkpoint.manifest.tensors) == {(name,) for name in arrays}
        for name, array in arrays.items():
            got = checkpoint.read((name,))
            assert got.dtype == np.asarray(array).dtype.newbyteorder("<"), name
            assert np.array_equal(got, array), name
    found = opened(tmp_path / "a.npz", "npz")
    readers.check_reader(found)
    assert (found.reader.access(found.manifest.tensors["int32",]).extents is None) == (save is not np.savez)


@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
def test_versions_of_the_record(tmp_path, version):
    array = values("float32")
    path = archive(tmp_path / "a.npz", {"a.npy": record(array, version)})
    with wherry.open(path) as checkpoint:
        assert np.array_equal(checkpoint.read(("a",)), array)


def test_a_header_of_python_2(tmp_path):
    text = b"{'descr': '<f4', 'fortran_order': False, 'shape': (2L, 3L), }".ljust(69) + b"\n"
    data = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + values("float32", (2, 3)).tobytes()
    with wherry.open(archive(tmp_path / "a.npz", {"a.npy": data})) as checkpoint:
        assert np.array_equal(checkpoint.read(("a",)), values("float32", (2, 3)))


def test_single_strings_are_values(tmp_path):
    np.savez(
        tmp_path / "a.npz", name=np.array("größe"), tag=np.array(b"csr"), empty=np.array("x\0"), w=np.ones(2)
    )
    found = opened(tmp_path / "a.npz", "npz")
    assert dict(found.manifest.values) == {("name",): "größe", ("tag",): "csr", ("empty",): "x"}


def test_bfloat16_is_explained(tmp_path):
    np.savez(tmp_path / "a.npz", w=values("bfloat16"))
    seen = " ".join(one.seen for one in wherry.detect(tmp_path / "a.npz").evidence)
    assert "dtype '<V2' is read as bfloat16: numpy writes this ml_dtypes type so" in seen


@pytest.mark.parametrize(
    ("array", "word"),
    [
        (np.zeros(3, ml_dtypes.float8_e4m3fn), "any 8-bit float"),
        (np.zeros(3, [("a", "f4"), ("b", "i4")]), "structured array"),
        (np.array([{}, None]), "object array"),
        (np.array(["a", "b"]), "array of strings"),
        (np.array([b"a"]), "array of byte strings"),
        (np.zeros(2, "M8[D]"), "array of dates"),
        (np.zeros(2, "V3"), "untyped bytes"),
        (np.zeros(2, np.longdouble), "an unknown dtype"),
    ],
)
@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_what_is_not_read_is_named(tmp_path, array, word, save):
    save(tmp_path / "a.npz", fine=np.ones(2), odd=array)
    with pytest.raises(UnsupportedError, match=word) as caught:
        wherry.open(tmp_path / "a.npz")
    assert "odd.npy" in caught.value.what
    assert caught.value.cure
    assert wherry.detect(tmp_path / "a.npz").verdict == "unsupported"


def test_large_deflated_members_go_through_in_little_memory(tmp_path):
    arrays = {"c": values("float32", (1500, 1030)), "f": np.asfortranarray(values("float64", (700, 3, 500)))}
    np.savez_compressed(tmp_path / "a.npz", **arrays)
    found = opened(tmp_path / "a.npz", "npz")
    for name, array in arrays.items():
        spec = found.manifest.tensors[name,]
        assert spec.chunks == spec.shape
        decoder = found.reader.access(spec).decoder
        assert decoder.memory(spec.whole) < 4 << 20
        blocks = [b"".join(block.pieces) for block in decoder.decode(spec.whole)]
        assert len(blocks) > 4
        assert max(map(len, blocks)) <= 1 << 20
        assert np.array_equal(read_array(found.reader, spec, spec.whole), array)
    wherry.convert(
        tmp_path / "a.npz", tmp_path / "a.safetensors", to="safetensors", memory="16MiB", lineage=False
    )
    with wherry.open(tmp_path / "a.safetensors") as checkpoint:
        assert all(np.array_equal(checkpoint.read((name,)), array) for name, array in arrays.items())


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed], ids=["stored", "deflated"])
def test_a_flipped_bit_does_not_have_the_crc(tmp_path, save):
    path = tmp_path / "a.npz"
    save(path, w=np.random.default_rng(0).random(1000))
    data = bytearray(path.read_bytes())
    data[2000] ^= 4
    path.write_bytes(data)
    with wherry.open(path) as checkpoint, pytest.raises(CorruptError):
        checkpoint.read(("w",))
    with pytest.raises(CorruptError):
        wherry.convert(path, tmp_path / "out.safetensors", to="safetensors", lineage=False)
    assert not (tmp_path / "out.safetensors").exists()


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_bytes_that_decode_well_are_compared_with_the_crc(tmp_path, save):
    """A flipped bit mostly spoils deflate itself; here the stream is sound, and only the recorded CRC says another."""
    path = tmp_path / "a.npz"
    save(path, w=np.arange(1000.0))
    data = bytearray(path.read_bytes())
    data[data.rindex(b"PK\x01\x02") + 16] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptError, match="CRC"):
        wherry.convert(path, tmp_path / "out.safetensors", to="safetensors", lineage=False)


def test_every_cut_is_corrupt(tmp_path):
    path = tmp_path / "a.npz"
    np.savez(path, a=np.ones(100), b=np.ones(3))
    data = path.read_bytes()
    for length in (60, 200, len(data) // 2, len(data) - 30, len(data) - 1):
        (tmp_path / "cut.npz").write_bytes(data[:length])
        found = wherry.detect(tmp_path / "cut.npz")
        assert (found.format, found.verdict) == ("npz", "corrupt"), length


@pytest.mark.parametrize(
    "text",
    [
        b"{'descr': '<f4', 'fortran_order': False, 'shape': (4, -1), }",
        b"{'descr': '<f4', 'fortran_order': False, 'shape': (1 << 60,), }",
        b"{'descr': '<f4', 'fortran_order': False, 'shape': (99999999999999, 9999999), }",
        b"{'descr': '<f4', 'fortran_order': 1, 'shape': (1,), }",
        b"{'descr': '<f4', 'shape': (1,), }",
        b"(" * 5000,
        b"__import__('os').system('true')",
        b"\xff\xfe",
    ],
)
@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_headers_that_lie(tmp_path, text, method):
    data = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + b"\0" * 16
    with pytest.raises(CorruptError):
        wherry.open(archive(tmp_path / "a.npz", {"a.npy": data}, method))


def test_hostile_archives(tmp_path):
    archive(tmp_path / "a.npz", {"a.npy": record(np.zeros(100))}, zipfile.ZIP_DEFLATED)
    data = bytearray((tmp_path / "a.npz").read_bytes())
    at = data.rfind(b"PK\x01\x02")
    data[at + 24 : at + 28] = struct.pack("<I", 0xFFFFFFF0)  # the full size that the directory claims
    (tmp_path / "bomb.npz").write_bytes(data)
    with pytest.raises(HostileError, match="claims to decompress"):
        wherry.open(tmp_path / "bomb.npz")
    with zipfile.ZipFile(tmp_path / "twice.npz", "w") as out:
        out.writestr("a.npy", record(np.zeros(3)))
        with pytest.warns(UserWarning, match="Duplicate"):
            out.writestr("a.npy", record(np.ones(3)))
    with pytest.raises(HostileError, match="duplicate zip member"):
        wherry.open(tmp_path / "twice.npz")


def test_other_archives_are_left_alone(tmp_path):
    archive(tmp_path / "a.zip", {"a.npy": record(np.zeros(3)), "readme.txt": b"hello"})
    archive(tmp_path / "b.zip", {"readme.txt": b"hello"})
    np.save(tmp_path / "c.npy", np.zeros(3))
    assert list(wherry.discover(tmp_path)) == []


@pytest.mark.parametrize("count", [0, 3])
def test_numpy_reads_what_is_written(tmp_path, count):
    shapes = {"": (), "v": (7,), "m": (2, 3), "none": (0, 3)}
    arrays = (
        {f"{name}/{tag} ö": values(name, shape) for name in OURS for tag, shape in shapes.items()}
        if count
        else {}
    )
    manifest = Manifest({(name,): TensorSpec((name,), a.shape, a.dtype.name) for name, a in arrays.items()})
    write_all(
        create(tmp_path / "a.npz", "npz", manifest), {(name,): a.tobytes() for name, a in arrays.items()}
    )
    with np.load(tmp_path / "a.npz", allow_pickle=False) as loaded:
        assert set(loaded.files) == set(arrays)
        for name, array in arrays.items():
            got = loaded[name]
            assert got.shape == array.shape
            assert np.array_equal(got.view(array.dtype), array), name
    with zipfile.ZipFile(tmp_path / "a.npz") as checked:
        assert checked.testzip() is None
    found = opened(tmp_path / "a.npz", "npz")
    for spec in found.manifest.tensors.values():
        assert all(extent.offset % 64 == 0 for extent in found.reader.access(spec).extents)


def test_types_that_numpy_cannot_hold_are_refused_by_name(tmp_path):
    from safetensors.numpy import save_file

    save_file({"w": values("float8_e4m3fn", (4,))}, tmp_path / "a.safetensors")
    with pytest.raises(UnrepresentableError, match="float8_e4m3fn"):
        wherry.convert(tmp_path / "a.safetensors", tmp_path / "a.npz", to="npz", lineage=False)
    assert "float8_e5m2" not in find_format("npz").holds.dtypes


@pytest.mark.parametrize("case", cases("npz"))
def test_a_copy_is_bit_equal(tmp_path, case):
    copy(opened(place(case), "npz"), tmp_path / "copy.npz", "npz")
    assert_as_expected(opened(tmp_path / "copy.npz", "npz"), expected(case))
    with np.load(tmp_path / "copy.npz") as copied, np.load(place(case)) as original:
        assert all(np.array_equal(copied[name], original[name]) for name in original.files)


def _with_header(text: str) -> bytes:
    """A record of version 1.0 or 2.0 with a header of one's own."""
    data = text.encode()
    return b"\x93NUMPY\x02\x00" + struct.pack("<I", len(data)) + data


@pytest.mark.parametrize(
    ("shape", "descr", "fortran"),
    [
        (f"(0x{'f' * 9000},)", "'<f4'", "False"), (f"(-0x{'f' * 9000},)", "'<f4'", "False"),
        (f"(0x{'f' * 9000}, 2.5)", "'<f4'", "False"), ("(2,)", f"0x{'f' * 9000}", "False"),
        ("(2,)", "'<f4'", f"0x{'f' * 9000}"), ("()", f"'<U{'9' * 9000}'", "False"),
        ("()", f"'|V{'9' * 9000}'", "False"),
        ("(2,)", f"[('a', 0x{'f' * 9000})]", "False"), ("(9223372036854775808,)", "'<f4'", "False"),
    ],
)  # fmt: skip
def test_numbers_of_thousands_of_digits_are_refused(tmp_path, shape, descr, fortran):
    """Python converts none of more than 4,300 to text, nor from it."""
    header = f"{{'descr': {descr}, 'fortran_order': {fortran}, 'shape': {shape}}}"
    found = wherry.detect(archive(tmp_path / "a.npz", {"x.npy": _with_header(header)}))
    assert found.verdict in ("corrupt", "unsupported")
