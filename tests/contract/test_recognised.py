"""GGUF, Equinox and TensorFlow bundles: distinguished with evidence and read; damage is named."""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import struct

import ml_dtypes
import numpy as np
import pytest

import wherry
from tests.support.formats import CORPUS, canonical, cases, opened
from wherry.errors import CorruptError, HostileError, UnrepresentableError, UnsupportedError, UsageError
from wherry.formats.registry import find_format
from wherry.mover.read import read_array
from wherry.testing import readers

NAMES = ("equinox", "ocdbt", "tf-bundle")


@pytest.mark.parametrize("name", NAMES)
def test_none_of_them_is_written(name, tmp_path):
    assert not find_format(name).is_written
    np.savez(tmp_path / "a.npz", w=np.ones(3))
    with pytest.raises((UsageError, UnsupportedError)):
        wherry.convert(tmp_path / "a.npz", tmp_path / "out", to=name, lineage=False)


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def gguf(tensors, pairs=(), *, version=3, alignment=32) -> bytes:
    """A GGUF file; tensors are (name, shape, type number, bytes), pairs (key, type number, packed value)."""
    pairs = [*pairs, ("general.alignment", 4, struct.pack("<I", alignment))]
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(pairs))
    head += b"".join(text(key) + struct.pack("<I", kind) + value for key, kind, value in pairs)
    data = b""
    for name, shape, kind, raw in tensors:
        data += b"\0" * (-len(data) % alignment)
        head += text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape[::-1], kind, len(data))
        data += raw
    return head + b"\0" * (-len(head) % alignment) + data


def test_gguf_types_blocks_and_metadata(tmp_path):
    plain = {0: "float32", 1: "float16", 30: "bfloat16", 28: "float64", 24: "int8", 27: "int64"}
    arrays = {
        name: np.arange(6).reshape(2, 3).astype(getattr(ml_dtypes, name, name)) for name in plain.values()
    }
    blocks = np.random.default_rng(0).bytes(2 * 144)
    pairs = [
        ("general.architecture", 8, text("llama")),
        ("tokenizer.ggml.tokens", 9, struct.pack("<IQ", 8, 2) + text("a") + text("b")),
        ("nested", 9, struct.pack("<IQ", 9, 1) + struct.pack("<IQ3i", 5, 3, 1, 2, 3)),
        ("flag", 7, b"\1"),
    ]
    rows = [(name, (2, 3), kind, arrays[name].tobytes()) for kind, name in plain.items()]
    (tmp_path / "a.gguf").write_bytes(gguf([*rows, ("q", (2, 256), 12, blocks)], pairs, alignment=64))
    found = opened(tmp_path / "a.gguf", "gguf")
    assert found.detection.format_version == "GGUF v3, F32, F16, Q4_K, I8, I64, F64 and BF16"
    assert (found.detection.family, found.manifest.custom["flag"]) == ("llama", True)
    left = {entry.name: entry.what for entry in found.ignored}
    assert left == dict.fromkeys(("tokenizer.ggml.tokens", "nested"), "list or long text")
    assert {one.file for one in found.detection.evidence if "not converted" in one.seen} == set(left)
    for name, array in arrays.items():
        spec = found.manifest.tensors[name,]
        assert np.array_equal(read_array(found.reader, spec, spec.whole), array)
    assert found.manifest.tensors["q",].dtype == "ggml:Q4_K"
    assert canonical(found, ("q",)) == blocks
    assert wherry.inspect(tmp_path / "a.gguf", sha256=True).sha256["q",] == hashlib.sha256(blocks).hexdigest()
    readers.check_reader(found)
    with pytest.raises(UnrepresentableError, match="ggml:Q4_K"):
        wherry.convert(tmp_path / "a.gguf", tmp_path / "out.safetensors", to="safetensors", lineage=False)


def test_plain_gguf_converts(tmp_path):
    array = np.random.default_rng(0).random((5, 32), "f4")
    (tmp_path / "a.gguf").write_bytes(gguf([("w", (5, 32), 0, array.tobytes())]))
    wherry.convert(tmp_path / "a.gguf", tmp_path / "a.npz", to="npz", lineage=False)
    assert np.array_equal(np.load(tmp_path / "a.npz")["w"], array)


@pytest.mark.parametrize(
    ("data", "error", "word"),
    [
        (gguf([("w", (5,), 0, b"\0" * 12)]), CorruptError, "truncated in tensor 'w': expected"),
        (gguf([("w", (2, 33), 2, b"\0" * 100)]), CorruptError, "whole blocks"),
        (gguf([("w", (2,), 99, b"\0" * 100)]), UnsupportedError, "type 99"),
        (gguf([("w", (1,), 0, b"\0" * 4), ("w", (1,), 0, b"\0" * 4)]), HostileError, "duplicated"),
        (gguf([], version=9), UnsupportedError, "version 9"),
        (gguf([], version=3 << 24), UnsupportedError, "big-endian"),
        (gguf([("w", (1 << 40, 1 << 40), 0, b"")]), CorruptError, "is too large"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 0), HostileError, "exceeds the limit"),
        (gguf([], [("split.count", 2, struct.pack("<H", 3))]), UnsupportedError, "one of 3 files"),
        (gguf([], [("a", 13, b"")]), CorruptError, "unknown metadata type 13"),
        (gguf([], [("a", 9, struct.pack("<IQ", 8, 1 << 50))]), CorruptError, "entries exceed the size"),
        (gguf([], [("a", 9, struct.pack("<IQ", 5, 1 << 61))]), CorruptError, "truncated header"),
    ],
)
def test_gguf_that_lies(tmp_path, data, error, word):
    (tmp_path / "a.gguf").write_bytes(data)
    with pytest.raises(error, match=word):
        wherry.open(tmp_path / "a.gguf")
    found = wherry.detect(tmp_path / "a.gguf")
    assert (found.format, found.verdict) == ("gguf", error.verdict)


def equinox(path, leaves, hyper=None) -> None:
    with path.open("wb") as file:
        if hyper is not None:
            file.write(json.dumps(hyper).encode() + b"\n")
        for leaf in leaves:
            np.save(file, leaf)


LEAVES = [
    np.ones((3, 4), "f4"), np.float64(2), np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    np.zeros(4, ml_dtypes.bfloat16), np.zeros((0, 2), "i4"), np.bool_(1),
]  # fmt: skip


@pytest.mark.parametrize("hyper", [None, {"width": 8, "name": "größe"}])
def test_equinox_records(tmp_path, hyper):
    equinox(tmp_path / "model", LEAVES, hyper)
    found = opened(tmp_path / "model", "equinox")
    assert dict(found.manifest.custom) == (hyper or {})
    for number, leaf in enumerate(LEAVES):
        spec = found.manifest.tensors[str(number),]
        assert np.array_equal(read_array(found.reader, spec, spec.whole), leaf)
    readers.check_reader(found)


def test_one_npy_file_is_no_checkpoint_unless_it_says_so(tmp_path):
    np.save(tmp_path / "a.npy", np.ones(3))
    assert wherry.detect(tmp_path / "a.npy").verdict == "not-a-checkpoint"
    shutil.copy(tmp_path / "a.npy", tmp_path / "a.eqx")
    assert wherry.detect(tmp_path / "a.eqx").format == "equinox"


def test_equinox_damage(tmp_path):
    equinox(tmp_path / "a.eqx", LEAVES[:3])
    data = (tmp_path / "a.eqx").read_bytes()
    (tmp_path / "cut.eqx").write_bytes(data[:-7])
    (tmp_path / "more.eqx").write_bytes(data + b"rest")
    (tmp_path / "line.eqx").write_bytes(b"{not json\n" + data)
    for name in ("cut", "more", "line"):
        assert wherry.detect(tmp_path / f"{name}.eqx").verdict == "corrupt", name
    out = io.BytesIO(data)
    out.seek(0, 2)
    np.save(out, np.array([{}]), allow_pickle=True)
    (tmp_path / "object.eqx").write_bytes(out.getvalue())
    assert wherry.detect(tmp_path / "object.eqx").verdict == "unsupported"


@pytest.fixture
def bundle(tmp_path):
    found = cases("tf-bundle")
    if not found:
        pytest.skip("the corpus is not here; set WHERRY_CORPUS to its folder")
    shutil.copytree(CORPUS / found[0] / "checkpoint" / "variables", tmp_path / "ckpt")
    return tmp_path / "ckpt"


def test_bundle_damage(bundle):
    index, data = bundle / "variables.index", bundle / "variables.data-00000-of-00001"
    whole = index.read_bytes()
    changed = bytearray(whole)
    changed[len(whole) // 3] ^= 1
    index.write_bytes(changed)
    assert wherry.detect(bundle).verdict == "corrupt"
    index.write_bytes(whole)
    size = data.stat().st_size
    with data.open("r+b") as file:
        file.truncate(size - 1)
    assert wherry.detect(bundle).verdict == "corrupt"
    data.unlink()
    found = wherry.detect(bundle)
    assert (found.verdict, found.format) == ("incomplete", "tf-bundle")
    assert "file not found: variables.data-00000-of-00001" in (found.reason or "")


def test_bundles_among_other_files_are_found_one_by_one(bundle):
    for number in (1, 2):
        for file in sorted(bundle.glob("variables.*")):
            shutil.copy(file, bundle / file.name.replace("variables", f"ckpt-{number}"))
    (bundle / "checkpoint").write_text('model_checkpoint_path: "ckpt-2"\n')
    found = list(wherry.discover(bundle))
    assert [(one.format, one.step) for one in found] == [
        ("tf-bundle", 1),
        ("tf-bundle", 2),
        ("tf-bundle", None),
    ]
    assert wherry.detect(bundle / "ckpt-2").step == 2
