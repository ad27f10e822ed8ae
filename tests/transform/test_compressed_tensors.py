"""compressed-tensors judges what its codes mean: it compresses random weights itself, in an environment of its own.

Each format × strategy × bits × symmetry × element type of the scales is a case. The bits of what wherry dequantises are
those of `decompress`, or, where that raises, wherry refuses by name. The arithmetic of zero points is judged in every
run too, in torch, as it is documented.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

import wherry
from tests.support.command import typed
from tests.support.generations import ROOT, old_python
from tests.support.tiny_models import save_tiny
from tests.support.torch import as_bytes, torch
from wherry.errors import WherryError

JUDGE = ROOT / "tests" / "support" / "oracles" / "compressed_tensors_judge.py"
DTYPES = ("bfloat16", "float16", "float32")
SHAPES = [[24, 64], [21, 64], [64, 64]]  # rows that fill no word of zero points, too
GROUP, BLOCK = {"strategy": "group", "group_size": 16}, {"strategy": "block", "block_structure": [16, 32]}
WEIGHTS = {
    "tensor": {"strategy": "tensor"},
    "channel": {"strategy": "channel"},
    "group": GROUP,
    "block": BLOCK,
}


def scheme(dtype, symmetric=True, bits=8, kind="int", **weights):
    """A case of the judge."""
    stated = {"num_bits": bits, "type": kind, "symmetric": symmetric, "dynamic": False, **weights}
    return {"scheme": {"targets": ["Linear"], "weights": stated}, "dtype": dtype, "shapes": SHAPES}


def cases():
    """Name → case: all that wherry reads."""
    found = {}
    for bits, strategy, symmetric, dtype in product((4, 8), ("group", "channel"), (True, False), DTYPES):
        case = scheme(dtype, symmetric, bits, **WEIGHTS[strategy])
        found[f"pack-{bits}-{strategy}-{symmetric}-{dtype}"] = {**case, "format": "pack-quantized"}
    for bits, strategy, symmetric, dtype in product((4, 8), WEIGHTS, (True, False), DTYPES):
        case = scheme(dtype, symmetric, bits, **WEIGHTS[strategy])
        found[f"int-{bits}-{strategy}-{symmetric}-{dtype}"] = {**case, "format": "int-quantized"}
    for strategy, dtype in product(WEIGHTS, DTYPES):
        case = {**scheme(dtype, kind="float", **WEIGHTS[strategy]), "format": "float-quantized"}
        found[f"float-{strategy}-{dtype}"] = case
        found[f"mixed-{strategy}-{dtype}"] = mixed(case)
    for case in ("pack-4-group-False-bfloat16", "int-8-channel-False-float32"):
        found[f"mixed-{case}"] = mixed(found[case])
    experts = {**found["pack-4-group-False-bfloat16"], "shapes": [[3, 24, 64], [2, 21, 32]]}
    return {**found, "pack-experts": experts, "pack-experts-symmetric": {**experts, **symmetric_of(experts)}}


def mixed(case):
    """The same with `mixed-precision` as its format; the one config group states its own."""
    own = {**case["scheme"], "format": case["format"]}
    return {**case, "stated": "mixed-precision", "scheme": own}


def symmetric_of(case):
    weights = {**case["scheme"]["weights"], "symmetric": True}
    return {"scheme": {**case["scheme"], "weights": weights}}


PACK = {**scheme("bfloat16", False, 4, **GROUP), "format": "pack-quantized"}
WHOLE = {**scheme("bfloat16", False, 8, **GROUP), "format": "int-quantized"}
# Name → case that compressed-tensors does not read, and words of wherry's refusal.
REFUSED = {
    "no-zeros": ({**PACK, "change": {"weight_zero_point": None}}, "missing zero points m.0.weight_zero_point"),
    "plain-zeros": ({**PACK, "change": {"weight_zero_point": "int8"}}, "unsupported element type int8 of the zero"),
    "wrong-zeros": ({**PACK, "change": {"weight_zero_point": [2, 5]}}, r"zero points m.0.weight_zero_point of shape"),
    "packed-zeros-of-bytes": ({**WHOLE, "change": {"weight_zero_point": [3, 4]}}, "do not fit scales of shape"),
    "no-scale": ({**PACK, "change": {"weight_scale": None}}, "missing scale m.0.weight_scale"),
    "ragged": ({**PACK, "change": {"weight_packed": [24, 7], "weight_scale": [24, 4], "weight_shape": [2]}}, "whole"),
}  # fmt: skip


def judged(folder, rows, judge=JUDGE):
    """The judge's answer: name → None, or why it refuses."""
    job = folder / "job.json"
    job.write_text(json.dumps({"folder": str(folder), "cases": rows}))
    env = {"PATH": os.environ["PATH"], "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [str(old_python("quantized")), str(judge), str(job)], capture_output=True, text=True, check=False, env=env
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(job.with_suffix(".answer.json").read_text())


def dequantized(source, target, dtype):
    wherry.convert(source, target, to="huggingface", options={"dequantize": dtype}, lineage=False)
    return load_file(target / "model.safetensors")


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_codes_are_what_compressed_tensors_makes_of_them(tmp_path):
    rows = cases()
    answer = judged(tmp_path, rows)
    assert set(answer.values()) == {None}, answer
    for name, case in rows.items():
        made = dequantized(tmp_path / name, tmp_path / f"{name}-plain", case["dtype"])
        wanted = load_file(tmp_path / f"{name}.safetensors")
        assert made.keys() == wanted.keys(), name
        for key, tensor in wanted.items():
            assert (made[key].dtype, made[key].shape) == (tensor.dtype, tensor.shape), (name, key)
            assert as_bytes(made[key]) == as_bytes(tensor), (name, key)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_what_compressed_tensors_does_not_read_is_refused_by_name(tmp_path):
    answer = judged(tmp_path, {name: case for name, (case, _words) in REFUSED.items()})
    assert None not in answer.values(), answer
    for name, (_case, words) in REFUSED.items():
        with pytest.raises(WherryError, match=words):
            dequantized(tmp_path / name, tmp_path / f"{name}-plain", "bfloat16")
        assert not (tmp_path / f"{name}-plain").exists()


def test_the_page_states_what_is_judged():
    text = " ".join((ROOT / "docs" / "reference" / "judged.md").read_text().split())
    rows = cases()
    asymmetric = [one for one in rows.values() if not one["scheme"]["weights"]["symmetric"]]
    in_groups = [one for one in rows.values() if "stated" in one]
    equal = f"{len(rows)} cases are equal bit by bit, of which {len(asymmetric)} have zero points and {len(in_groups)}"
    stated = f"{equal} `mixed-precision` with one group; {len(REFUSED)} are refused by name"
    assert stated in text, stated
    assert f"{len(WRITTEN) * len(DTYPES)} cases. The scales are those of its observer" in text


WRITES = ROOT / "tests" / "support" / "oracles" / "compressed_tensors_writes.py"
WRITTEN = {"fp8-channel": {}, "int8": {}, "int8-32": {"group_size": 32}, "nvfp4": {}, "mxfp4-packed": {}}
TINY = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
LEAST = {
    "bfloat16": 0.85,
    "float16": 0.97,
    "float32": 1,
}  # share of the codes that it has without a kernel, too


def written(folder, scheme, dtype):
    """A small model with blocks of zeros, of small and of large numbers, and what it is quantised to."""
    plain = save_tiny(folder / f"plain-{dtype}-{scheme}", "llama", drawn=True, **TINY)
    held = {
        name: one.to(getattr(torch, dtype)) for name, one in load_file(plain / "model.safetensors").items()
    }
    for name in ("mlp.up_proj", "self_attn.k_proj"):
        weight = held[f"model.layers.0.{name}.weight"]
        weight[0], weight[1], weight[2], weight[3, :16] = (
            0,
            weight[1] * 1e-4,
            weight[2] * 30,
            weight[3, :16] * 1e-6,
        )
    save_file(held, plain / "model.safetensors", {"format": "pt"})
    config = json.loads((plain / "config.json").read_text())
    config.pop("dtype", None)
    (plain / "config.json").write_text(json.dumps({**config, "torch_dtype": dtype}))
    options = {"quantize": scheme.removesuffix("-32"), **WRITTEN[scheme]}
    coded = folder / f"{scheme}-{dtype}"
    wherry.convert(plain, coded, to="huggingface", options=options, lineage=False)
    return {"plain": str(plain), "coded": str(coded), "loads": True}


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_what_is_written_has_the_bits_of_compressed_tensors_and_transformers_loads_it(tmp_path):
    rows = {(scheme, dtype): written(tmp_path, scheme, dtype) for scheme, dtype in product(WRITTEN, DTYPES)}
    answer = judged(tmp_path, {f"{scheme}-{dtype}": case for (scheme, dtype), case in rows.items()}, WRITES)
    for (scheme, dtype), case in rows.items():
        found = answer[f"{scheme}-{dtype}"]
        assert found["modules"] == 14, scheme
        assert found["differ"] == [], (scheme, dtype)
        assert found["loaded"], (scheme, dtype)
        assert found["nearest"] >= LEAST[dtype], (scheme, dtype)
        kind = "bfloat16" if "fp4" in scheme else dtype  # the type in which it decompresses them
        made = dequantized(Path(case["coded"]), tmp_path / f"{scheme}-{dtype}-plain", kind)
        for key, wanted in load_file(f"{case['coded']}.safetensors").items():
            assert made[key].dtype == wanted.dtype, (scheme, dtype, key)
            assert as_bytes(made[key]) == as_bytes(wanted), (scheme, dtype, key)


# In every run: 4-bit floats mean code × (scale / global scale), rounded once, and code × a power of two.
FLOATS = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], "f4")
NVFP4 = {"type": "float", "num_bits": 4, "strategy": "tensor_group", "group_size": 16, "symmetric": True}
MX = {"type": "float", "num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": True}


def floats(rows, columns):
    """Bytes of two codes each, and their values."""
    stored = torch.randint(0, 256, (rows, columns // 2), generator=torch.manual_seed(rows), dtype=torch.uint8)
    table = torch.from_numpy(np.concatenate([FLOATS, -FLOATS]))
    return stored, table[torch.stack([stored & 15, stored >> 4], -1).flatten(-2).long()]


def four_bit_floats():
    """The tensors of a module with a global scale, and the weight that they mean."""
    packed, values = floats(24, 64)
    scales = torch.randint(0, 127, (24, 4), dtype=torch.uint8, generator=torch.manual_seed(1)).view(
        torch.float8_e4m3fn
    )
    factor = torch.tensor([123.456])
    wanted = (values * (scales.float() / factor).repeat_interleave(16, 1)).to(torch.bfloat16)
    return {"m.weight_packed": packed, "m.weight_scale": scales, "m.weight_global_scale": factor}, wanted


@pytest.mark.parametrize("activations", [False, True])
def test_scales_are_divided_by_the_global_scale(activations, tmp_path):
    stored, wanted = four_bit_floats()
    source = folder(tmp_path / "a", stored, NVFP4, "nvfp4-pack-quantized")
    if activations:  # they are left out, as those of other schemes are
        save_file(
            {**stored, "m.input_global_scale": torch.ones(1)},
            source / "model.safetensors",
            {"format": "pt"},
        )
        config = json.loads((source / "config.json").read_text())
        group = config["quantization_config"]["config_groups"]["group_0"]
        group["input_activations"] = {**NVFP4, "dynamic": "local"}
        (source / "config.json").write_text(json.dumps(config))
    made = dequantized(source, tmp_path / "b", "bfloat16")
    assert made.keys() == {"m.weight"}
    assert as_bytes(made["m.weight"]) == as_bytes(wanted)
    assert wherry.verify(tmp_path / "b", level="roundtrip", against=str(source)).ok


def test_every_power_of_two_is_what_compressed_tensors_reads(tmp_path):
    packed, values = floats(256, 64)
    exponents = torch.arange(256, dtype=torch.uint8)[:, None].repeat(1, 2)
    scales = 2.0 ** (exponents.to(torch.int32) - 127).to(torch.bfloat16)
    wanted = values.to(torch.bfloat16) * scales.repeat_interleave(32, 1)
    stored = {"m.weight_packed": packed, "m.weight_scale": exponents}
    made = dequantized(folder(tmp_path / "a", stored, MX, "mxfp4-pack-quantized"), tmp_path / "b", "bfloat16")
    assert torch.equal(made["m.weight"].nan_to_num(nan=7), wanted.nan_to_num(nan=7))


@pytest.mark.parametrize(
    ("change", "weights", "code", "expected"),
    [
        ({"m.weight_global_scale": None}, {}, 5, "missing global scale m.weight_global_scale"),
        ({"m.weight_global_scale": torch.ones(2)}, {}, 9, r"expected one float32 in m.weight_global_scale, got"),
        ({"m.weight_global_scale": torch.ones(1).half()}, {}, 9, "expected one float32 in m.weight_global_scale"),
        ({"m.weight_scale": torch.ones(24, 4)}, {}, 7, "unsupported element type float32 of the scales"),
        ({"m.weight_scale": None}, {}, 5, "missing scale m.weight_scale"),
        ({"m.weight_packed": None}, {}, 5, "scales no tensor"),
        ({"m.weight_zero_point": torch.zeros(24, 4)}, {}, 7, "with a tensor m.weight_zero_point"),
        ({}, {"group_size": 32}, 7, "with group_size = 32"),
        ({}, {"symmetric": False}, 7, "with symmetric = False"),
        ({}, {"strategy": "group"}, 7, "with strategy = 'group'"),
    ],
)  # fmt: skip
def test_4_bit_floats_that_are_undefined_are_refused_by_name(
    change, weights, code, expected, tmp_path, capfd
):
    stored, _wanted = four_bit_floats()
    stored = {name: one for name, one in {**stored, **change}.items() if one is not None}
    folder(tmp_path / "a", stored, {**NVFP4, **weights}, "nvfp4-pack-quantized")
    ended, printed = typed(
        "convert HOME/a HOME/b --to huggingface --set dequantize=bfloat16", tmp_path, capfd
    )
    assert ended == code, printed
    assert re.search(expected, printed), printed
    assert not (tmp_path / "b").exists()


# In every run: (code - zero point) × scale in the type of the scale, as documented.
def folder(path, tensors, weights, form="pack-quantized", **more):
    path.mkdir()
    save_file(
        {name: one.contiguous() for name, one in tensors.items()},
        path / "model.safetensors",
        {"format": "pt"},
    )
    groups = {"group_0": {"targets": ["Linear"], "weights": {"type": "int", **weights}}}
    stated = {"quant_method": "compressed-tensors", "format": form, "config_groups": groups, **more}
    (path / "config.json").write_text(json.dumps({"quantization_config": stated}))
    return path


def words(codes, bits, axis):
    """Integers packed along an axis into 32-bit words, with half of their range added."""
    each = 32 // bits
    turned = np.moveaxis(codes.numpy().astype("i8") + (1 << bits - 1), axis, -1)
    turned = np.pad(turned, [*[(0, 0)] * (turned.ndim - 1), (0, -turned.shape[-1] % each)])
    shifts = bits * np.arange(each)
    packed = (turned.reshape(*turned.shape[:-1], -1, each) << shifts).sum(axis=-1).astype("u4").view("i4")
    return torch.from_numpy(np.moveaxis(packed, -1, axis).copy())


def drawn(bits, *shape):
    half = 1 << bits - 1
    return torch.randint(-half, half, shape, generator=torch.manual_seed(sum(shape)), dtype=torch.int8)


def parts(bits, rows, columns, group, *, packed):
    """Stored tensors of a module, and the weight that they mean."""
    codes, zeros = drawn(bits, rows, columns), drawn(bits, rows, columns // group)
    scales = (torch.rand(rows, columns // group) * 0.1).to(torch.bfloat16)
    wide = [one.repeat_interleave(group, dim=1) for one in (zeros, scales)]
    wanted = (codes.to(torch.bfloat16) - wide[0].to(torch.bfloat16)) * wide[1]
    if not packed:
        return {"m.weight": codes, "m.weight_scale": scales, "m.weight_zero_point": zeros}, wanted
    return {
        "m.weight_packed": words(codes, bits, 1), "m.weight_scale": scales,
        "m.weight_zero_point": words(zeros, bits, 0), "m.weight_shape": torch.tensor(codes.shape),
    }, wanted  # fmt: skip


ASYMMETRIC = {
    "num_bits": 4,
    "symmetric": False,
    "strategy": "group",
    "group_size": 16,
    "zp_dtype": "torch.int8",
}


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("rows", "group"), [(24, 16), (21, 16), (21, 48), (3, 48)])
def test_zero_points_are_subtracted(bits, rows, group, packed, tmp_path):
    tensors, wanted = parts(bits, rows, 48, group, packed=packed)
    how = {"strategy": "channel"} if group == 48 else {"strategy": "group", "group_size": group}
    weights = {"num_bits": bits, "symmetric": False, **how}
    source = folder(tmp_path / "a", tensors, weights, "pack-quantized" if packed else "int-quantized")
    made = dequantized(source, tmp_path / "b", "bfloat16")
    assert made.keys() == {"m.weight"}
    assert as_bytes(made["m.weight"]) == as_bytes(wanted)
    assert wherry.verify(tmp_path / "b", level="roundtrip", against=str(source)).ok


@pytest.mark.parametrize("packed", [True, False])
def test_any_region_is_that_part_of_the_whole(packed, tmp_path):
    from wherry.transform.dequantize import companion_config, dequantized_view

    tensors, wanted = parts(4, 45, 96, 16, packed=packed)
    form = "pack-quantized" if packed else "int-quantized"
    draw = np.random.default_rng(3)
    with wherry.open(folder(tmp_path / "a", tensors, ASYMMETRIC, form)) as source:
        seen = dequantized_view(source, companion_config(source), "float32")
        assert seen is not None
        codes = seen.read("m.weight")
        assert torch.equal(torch.from_numpy(codes).to(torch.bfloat16), wanted)
        for _ in range(60):
            ends = [sorted(draw.integers(0, extent + 1, 2)) for extent in codes.shape]
            region = tuple(slice(int(start), int(stop)) for start, stop in ends)
            np.testing.assert_array_equal(seen.read("m.weight", region), codes[region])


@pytest.mark.parametrize(
    ("change", "weights", "code", "expected"),
    [
        ({"m.weight_zero_point": None}, {}, 5, "missing zero points m.weight_zero_point"),
        (
            {"m.weight_zero_point": torch.zeros(24, 3, dtype=torch.int8)},
            {},
            7,
            "element type int8 of the zero points",
        ),
        ({"m.weight_zero_point": torch.zeros(3, 3)}, {}, 7, "element type float32 of the zero points"),
        ({"m.weight_zero_point": torch.zeros(3, 4, dtype=torch.int32)}, {}, 9, r"expected \(3, 3\)"),
        ({"m.weight_zero_point": torch.zeros(24, dtype=torch.int32)}, {}, 9, r"expected \(3, 3\)"),
        ({"m.weight_zero_point": torch.zeros((), dtype=torch.int32)}, {}, 9, r"expected \(3, 3\)"),
        (
            {},
            {"symmetric": True},
            7,
            "with a tensor m.weight_zero_point, of which quantization_config states nothing",
        ),
        ({"m.weight_g_idx": torch.zeros(48, dtype=torch.int32)}, {}, 7, "with a tensor m.weight_g_idx"),
        ({}, {"group_size": 20}, 7, "rows of 48 pack-quantized codes are not whole groups of 20"),
        ({}, {"symmetric": "maybe"}, 7, "with symmetric = 'maybe'"),
        ({"m.weight_packed": None}, {}, 5, "scales no tensor"),
    ],
)
def test_zero_points_that_are_undefined_are_refused_by_name(change, weights, code, expected, tmp_path, capfd):
    tensors, _wanted = parts(4, 24, 48, 16, packed=True)
    tensors = {name: one for name, one in {**tensors, **change}.items() if one is not None}
    folder(tmp_path / "a", tensors, {**ASYMMETRIC, **weights})
    line = "convert HOME/a HOME/b --to huggingface --set dequantize=bfloat16"
    ended, printed = typed(line, tmp_path, capfd)
    assert ended == code, printed
    assert re.search(expected, printed), printed
    assert not (tmp_path / "b").exists()


def test_the_strategy_may_follow_from_the_group_size(tmp_path):
    tensors, wanted = parts(4, 24, 48, 16, packed=True)
    weights = {name: value for name, value in ASYMMETRIC.items() if name != "strategy"}
    made = dequantized(folder(tmp_path / "a", tensors, weights), tmp_path / "b", "bfloat16")
    assert as_bytes(made["m.weight"]) == as_bytes(wanted)


def test_zero_points_are_not_written_with_kept_scales(tmp_path, capfd):
    tensors, _wanted = parts(4, 24, 48, 16, packed=True)
    source = folder(tmp_path / "a", tensors, ASYMMETRIC)
    dequantized(source, tmp_path / "b", "bfloat16")
    line = "convert HOME/b HOME/c --to huggingface --set quantize=pack-quantized --set scales=HOME/a"
    ended, printed = typed(line, tmp_path, capfd)
    assert ended == 7, printed
    assert "asymmetric codes are read, not written" in printed
