"""Quantised blocks of GGUF files mean what the `gguf` package says they mean."""

from __future__ import annotations

import hashlib
import json
import struct
import subprocess
from functools import partial

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

import wherry
from tests.support.generations import old_python
from wherry.errors import UnrepresentableError, UsageError
from wherry.quantized import ggml_view

convert = partial(wherry.convert, lineage=False)
# type → its number in a file, elements and bytes of a block.
KINDS = {
    "Q4_0": (2, 32, 18),
    "Q8_0": (8, 32, 34),
    "Q4_K": (12, 256, 144),
    "Q6_K": (14, 256, 210),
    "MXFP4": (39, 32, 17),
}
HALVES = {"Q4_0": (0,), "Q8_0": (0,), "Q4_K": (0, 2), "Q6_K": (208,), "MXFP4": ()}  # places of half floats
SHAPE = (6, 512)
# SHA-256 of what gguf 0.19.0 makes of `blocks(kind)`, float32; the slow test computes them again.
BY_GGUF = {
    "Q4_0": "b588b95b5b5565c01b420b72243dc0a109c19e42b215374126a49fdd1321ac90",
    "Q8_0": "6d54c0cc2fe0850699418191b274381f51c45b9bb2438db0f94f6e1bc71e1330",
    "Q4_K": "cc317c8fb24b1d71d83127b9135b6601e5f177e11365895b97a4ee48cb1fd439",
    "Q6_K": "76c54b3ec2af09e6fa36424fd64442a66daf6ab0fa4dcaaeaa966d51753227b2",
    "MXFP4": "a0f17764bb2eab0b18e086ac8a4feeacb4e71cb802011af8fec02acdfa434a33",
}
JUDGE = """
import hashlib, json, sys
import numpy as np
from gguf import GGUFReader, dequantize
made = {}
for one in GGUFReader(sys.argv[1]).tensors:
    if one.name != "norm":
        values = np.ascontiguousarray(dequantize(one.data, one.tensor_type), "f4")
        made[one.name] = hashlib.sha256(values.tobytes()).hexdigest()
print(json.dumps(made))
"""


def blocks(kind):
    """All bytes of a tensor of SHAPE in blocks, drawn; half floats are finite."""
    _number, elements, size = KINDS[kind]
    count = SHAPE[0] * SHAPE[1] // elements
    draw = np.random.default_rng(list(kind.encode()))
    held = draw.integers(0, 256, (count, size)).astype("u1")
    for at in HALVES[kind]:
        held[:, at : at + 2] = draw.normal(size=count).astype("<f2").view("u1").reshape(count, 2)
    if kind == "MXFP4":
        held[:, 0] = draw.integers(0, 250, count)
    return held


def text(value):
    return struct.pack("<Q", len(value)) + value.encode()


def save_gguf(file, rows):
    """A file of version 3 with tensors name → (number of the type, shape, bytes), and one plain vector."""
    rows = {**rows, "norm": (0, (4,), np.arange(4, dtype="<f4").tobytes())}
    head, end = b"GGUF" + struct.pack("<IQQ", 3, len(rows), 1), 0
    head += text("general.architecture") + struct.pack("<I", 8) + text("llama")
    for name, (number, shape, data) in rows.items():
        head += text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape[::-1], number, end)
        end += -(-len(data) // 32) * 32
    head += b"\0" * (-len(head) % 32)
    file.write_bytes(
        head + b"".join(data + b"\0" * (-len(data) % 32) for _number, _shape, data in rows.values())
    )
    return file


@pytest.fixture
def model(tmp_path):
    return save_gguf(
        tmp_path / "model.gguf", {kind: (KINDS[kind][0], SHAPE, blocks(kind).tobytes()) for kind in KINDS}
    )


def digests(folder):
    return {
        name: hashlib.sha256(one.tobytes()).hexdigest()
        for name, one in load_file(folder).items()
        if name != "norm"
    }


def test_blocks_are_what_gguf_makes_of_them(model, tmp_path):
    receipt = convert(model, tmp_path / "a.safetensors", to="safetensors", options={"dequantize": "float32"})
    assert digests(tmp_path / "a.safetensors") == BY_GGUF
    assert not receipt.lossless  # a difference of products is rounded
    np.testing.assert_array_equal(load_file(tmp_path / "a.safetensors")["norm"], np.arange(4, dtype="f4"))
    assert wherry.verify(tmp_path / "a.safetensors", level="roundtrip", against=str(model)).ok
    convert(model, tmp_path / "b.safetensors", to="safetensors", options={"dequantize": "bfloat16"})
    wide, narrow = (load_file(tmp_path / f"{name}.safetensors") for name in "ab")
    for kind in KINDS:
        assert narrow[kind].dtype == ml_dtypes.bfloat16
        np.testing.assert_array_equal(narrow[kind], wide[kind].astype(ml_dtypes.bfloat16))


@pytest.mark.slow
def test_gguf_itself_says_so(model):
    run = subprocess.run(
        [str(old_python("gguf")), "-c", JUDGE, str(model)], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr[-2000:]
    assert json.loads(run.stdout) == BY_GGUF


def test_any_region_is_that_part_of_the_whole(model, monkeypatch):
    monkeypatch.setattr(ggml_view, "_BAND", 1024)
    draw = np.random.default_rng(0)
    with wherry.open(model) as source:
        view = ggml_view.without_blocks(source, "float32")
        for kind in KINDS:
            whole = view.read((kind,))
            for _round in range(8):
                ends = [sorted(draw.integers(0, extent + 1, 2)) for extent in SHAPE]
                region = tuple(slice(int(start), int(stop)) for start, stop in ends)
                np.testing.assert_array_equal(view.read((kind,), region), whole[region])


def test_exact_blocks_are_lossless(tmp_path):
    file = save_gguf(tmp_path / "m.gguf", {"MXFP4": (39, SHAPE, blocks("MXFP4").tobytes())})
    done = convert(file, tmp_path / "a.safetensors", to="safetensors", options={"dequantize": "bfloat16"})
    assert done.lossless


def test_other_blocks_are_refused_by_name(tmp_path):
    file = save_gguf(tmp_path / "m.gguf", {"x": (10, (1, 256), b"\0" * 84)})
    with pytest.raises(UnrepresentableError, match="unsupported block type Q2_K; supported types: Q4_0"):
        convert(file, tmp_path / "a.safetensors", to="safetensors", options={"dequantize": "float32"})
    assert not (tmp_path / "a.safetensors").exists()
    plain = save_gguf(tmp_path / "plain.gguf", {})
    with pytest.raises(UsageError, match="no quantised blocks"):
        convert(plain, tmp_path / "a.safetensors", to="safetensors", options={"dequantize": "float32"})


@pytest.mark.parametrize("dtype", ["int8", "x", "", "float64", "Q4_0"])
def test_a_forged_record_of_the_element_type_is_refused(dtype, model, tmp_path):
    convert(model, tmp_path / "a.safetensors", to="safetensors", options={"dequantize": "float32"})
    file = tmp_path / "a.safetensors.wherry.json"
    data = json.loads(file.read_text())
    data["manifest"]["origin"]["dequantized"] = {"dtype": dtype}
    file.write_text(json.dumps(data))
    with pytest.raises(UsageError, match="cannot dequantise to"):
        wherry.verify(tmp_path / "a.safetensors", level="roundtrip", against=str(model))
