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
from tests.support.ggml_values import k_values
from wherry.core.dtypes import block_elements, numpy_dtype
from wherry.errors import UnrepresentableError, UsageError
from wherry.transform import ggml, ggml_view

convert = partial(wherry.convert, lineage=False)
# type → its number in a file, elements and bytes of a block, places of half floats.
KINDS = {
    "Q4_0": (2, 32, 18, (0,)),
    "Q4_1": (3, 32, 20, (0, 2)),
    "Q5_0": (6, 32, 22, (0,)),
    "Q5_1": (7, 32, 24, (0, 2)),
    "Q8_0": (8, 32, 34, (0,)),
    "Q2_K": (10, 256, 84, (80, 82)),
    "Q3_K": (11, 256, 110, (108,)),
    "Q4_K": (12, 256, 144, (0, 2)),
    "Q5_K": (13, 256, 176, (0, 2)),
    "Q6_K": (14, 256, 210, (208,)),
    "IQ2_XXS": (16, 256, 66, (0,)),
    "IQ2_XS": (17, 256, 74, (0,)),
    "IQ3_XXS": (18, 256, 98, (0,)),
    "IQ1_S": (19, 256, 50, (0,)),
    "IQ4_NL": (20, 32, 18, (0,)),
    "IQ3_S": (21, 256, 110, (0,)),
    "IQ2_S": (22, 256, 82, (0,)),
    "IQ4_XS": (23, 256, 136, (0,)),
    "IQ1_M": (29, 256, 56, ()),
    "TQ1_0": (34, 256, 54, (52,)),
    "TQ2_0": (35, 256, 66, (64,)),
    "MXFP4": (39, 32, 17, ()),
    "NVFP4": (40, 64, 36, ()),
}
SHAPE = (24, 512)
# SHA-256 of what gguf 0.19.0 makes of `blocks(kind)`, float32; the slow test computes them again.
BY_GGUF = {
    "Q4_0": "550ed173aebe551a610951576f24700ba985d3f0cb879458fb4332873c86328e",
    "Q4_1": "d080e576109b5648fb97d1d0035c290a0824c677d22cea0acf598be6644812c0",
    "Q5_0": "60dacdad85608df338811c2b7cc56ad172e2fc29cb61dbfd1417755c0bacf0de",
    "Q5_1": "5916f4a33f9f7ae3b75343e08ee416b71a16d2e93573f8719b7514a4d4cdb61c",
    "Q8_0": "47074c6b4de4de00eede54a62bd0bc15256e13325138dcf90771c41e524176c5",
    "Q2_K": "5f8fdcb390a0a95479274c2624650ed2846c3c828c04a02f90d285905ba5a5c1",
    "Q3_K": "71e5b277b7668d572558eba3881e1f31400062146d86fe8649ba81640a605053",
    "Q4_K": "6ae737f3a3d40f34b1f6deaa39213c482c222fcefd63af25315758fb5aed6d8c",
    "Q5_K": "c6cc3a58e1891a26eb25a743c2a42e749ac91c5d1b898d91b94099a779fe82b5",
    "Q6_K": "3f202247b47930a730c8fa4cae22ac9ca30d6221fe26c0f1810d24486d4c6ddd",
    "IQ2_XXS": "4f7e2bf7030224b48b98439e6869952ddc29c62f82521b0ad16fa9ee85b136b2",
    "IQ2_XS": "c001bb3f64244da113dc816a2298b49b79c4baef2450ee48dfb93639dc9346d2",
    "IQ3_XXS": "a2ed49106f193dd2c85f9f216884c2388dd662b8c485db4d8907429288039568",
    "IQ1_S": "1821562a8fa7e0d5fed0db2625e18063bb8eadac3d5083ce86ee9d8adda662e1",
    "IQ4_NL": "c797c9326f8935235c1bd21898c44a2bace2080ba670236424248f6e59ef3360",
    "IQ3_S": "282366daf81e8bca3844cfdc131bb670dbaae4e39d778a60685738179bf08760",
    "IQ2_S": "3171bb3af6dbfed9c4e319a319a443594a453f5c1799eed731498ea0032621b5",
    "IQ4_XS": "232fb30ba643c4f82c6232c722fd8469b9998167cb517f0c5769b021c2b00e4d",
    "IQ1_M": "f4cf529ecb95dc47985073785ebe713a141cf2443951e68cdfa9038a7a6fa641",
    "TQ1_0": "f3e6ba88570aaff171fcd8f4556324edf4549c007ad92703c2f41cad9e34e1f3",
    "TQ2_0": "bdf8e9400be401f90fa7ef99ad5dd42cad534d5b91598a423a410938d0a449aa",
    "MXFP4": "5cf77e54207a67ec234efb2edc82df09cb2e7f7560a91767f0b96509b8afc3c9",
    "NVFP4": "cbaf5ed137ddb7d9be127dba3649b3bc592b414bcc77edc19625f568f4b9899d",
}
# SHA-256 of the blocks that ggml's quantize_row_q4_K_ref and quantize_row_q6_K_ref make of `k_values()`, in the
# llama.cpp of llama-cpp-python 0.3.36, built without fused operations: tests/oracles/test_gguf_llama_cpp.py makes them
# again.
BY_GGML = {
    "Q4_K": "319f2b8ed9d8f2986c9b2a8c25b4a97ef28276884f2230143ff73b6a00195434",
    "Q6_K": "163f68c79f20cf06ffe0633050e1229580b633e31efee3c2483dd10f0fd78ce0",
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
    _number, elements, size, halves = KINDS[kind]
    count = SHAPE[0] * SHAPE[1] // elements
    draw = np.random.default_rng(list(kind.encode()))
    held = draw.integers(0, 256, (count, size)).astype("u1")
    for at in halves:
        held[:, at : at + 2] = draw.normal(size=count).astype("<f2").view("u1").reshape(count, 2)
    if kind == "MXFP4":
        held[:, 0] = draw.integers(0, 250, count)
    if kind == "IQ1_M":
        held[:, 55] &= (
            0xBF  # the upper half of a byte of the exponent of its half float, which four words share
        )
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


def test_any_region_is_that_part_of_the_whole(model, tmp_path):
    draw = np.random.default_rng(0)
    tall = (1200, 512)  # more elements than are computed at a time
    data = draw.integers(0, 100, (tall[0] * 2, 144)).astype("u1").tobytes()
    for file, names, shape in (
        (model, KINDS, SHAPE),
        (save_gguf(tmp_path / "tall.gguf", {"Q4_K": (12, tall, data)}), ["Q4_K"], tall),
    ):
        with wherry.open(file) as source:
            view = ggml_view.without_blocks(source, "float32")
            for kind in names:
                whole = view.read((kind,))
                for _round in range(8):
                    ends = [sorted(draw.integers(0, extent + 1, 2)) for extent in shape]
                    region = tuple(slice(int(start), int(stop)) for start, stop in ends)
                    np.testing.assert_array_equal(view.read((kind,), region), whole[region])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_type_that_is_called_exact_is_never_rounded(kind, dtype):
    values = ggml.values_of(blocks(kind), f"ggml:{kind}")
    with np.errstate(over="ignore"):
        same = np.array_equal(values, values.astype(numpy_dtype(dtype)).astype("f4"))
    assert same or not ggml.exact(f"ggml:{kind}", dtype)


def test_exact_blocks_are_lossless(tmp_path):
    file = save_gguf(tmp_path / "m.gguf", {"MXFP4": (39, SHAPE, blocks("MXFP4").tobytes())})
    done = convert(file, tmp_path / "a.safetensors", to="safetensors", options={"dequantize": "bfloat16"})
    assert done.lossless


def test_other_blocks_are_refused_by_name(tmp_path):
    file = save_gguf(tmp_path / "m.gguf", {"x": (15, (1, 256), b"\0" * 292)})
    with pytest.raises(UnrepresentableError, match="unsupported block type Q8_K; supported types: IQ1_M, "):
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


@pytest.mark.parametrize("kind", BY_GGML)
def test_k_blocks_have_the_bits_of_ggml_s_reference_and_mean_what_gguf_says(kind):
    gguf = pytest.importorskip("gguf")
    values = k_values()
    blocks = ggml.encode_blocks(values, f"ggml:{kind}")
    assert hashlib.sha256(blocks.tobytes()).hexdigest() == BY_GGML[kind]
    meant = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[kind])
    assert np.array_equal(meant, ggml.values_of(blocks, f"ggml:{kind}"))
    bound, largest = ggml.BOUNDS[f"ggml:{kind}"], np.abs(values).max(axis=1, keepdims=True)
    assert (np.abs(meant - values) <= bound.block * largest + bound.absolute).all()


@pytest.mark.parametrize("kind", sorted(ggml.BOUNDS))
@pytest.mark.parametrize("count", [1, 3])
def test_values_stay_as_they_are(kind, count):
    values = np.random.default_rng(0).normal(size=(count, block_elements(kind))).astype("f4")
    before = values.copy()
    alone = [ggml.encode_blocks(values[row : row + 1], kind) for row in range(count)]
    assert np.array_equal(ggml.encode_blocks(values, kind), np.concatenate(alone))
    assert np.array_equal(values, before)


@pytest.mark.parametrize("kind", BY_GGML)
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan, 3e38])
def test_a_block_that_is_not_finite_has_no_effect_on_others(kind, value):
    values = k_values()
    values[3, 7] = value
    made, wanted = (ggml.encode_blocks(one, f"ggml:{kind}") for one in (values, k_values()))
    assert np.array_equal(np.delete(made, 3, axis=0), np.delete(wanted, 3, axis=0))
