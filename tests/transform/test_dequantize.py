"""Quantised checkpoints: what codes and scales mean, what states them, and where they go."""

from __future__ import annotations

import ast
import json
import subprocess
from functools import partial

import ml_dtypes
import numpy as np
import pytest
from safetensors.torch import load_file, save_file

import wherry
from tests.support.generations import old_python
from tests.support.quantized import FP8, INT4, MXFP4, int4, mxfp4, save_quantized
from tests.support.quantized import fp8 as fp8_of_conversions
from tests.support.tiny_models import save_tiny
from tests.support.torch import as_bytes, torch
from wherry.core.request import LayoutRequest
from wherry.errors import (
    CorruptError,
    IncompleteError,
    MismatchError,
    UnrepresentableError,
    UsageError,
    WherryError,
)
from wherry.transform.codes import code_table, exact, scale_values

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
ROWS, COLUMNS = 300, 200  # neither is a multiple of a block


def dequantized(folder, tensors, quantization, dtype="bfloat16"):
    """The tensors of a folder after dequantisation, by name."""
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps({"quantization_config": quantization}))
    target = folder.with_name(f"{folder.name}-plain")
    wherry.convert(folder, target, to="huggingface", options={"dequantize": dtype}, lineage=False)
    return load_file(target / "model.safetensors")


def drawn_codes(kind, *shape):
    """All finite codes of an 8-bit float type, drawn."""
    codes = torch.from_numpy(np.random.default_rng(1).integers(0, 256, shape).astype("u1")).view(kind)
    return torch.where(codes.float().isfinite(), codes.float(), 1.5).to(kind)


def by_transformers(codes, scales, rows, columns, dtype):
    """Fp8Dequantize of transformers; it wants whole blocks, so the last ones are filled up and cut off again."""
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    grid = scales.shape[-2:] if scales.ndim > 1 else (1, 1)
    whole = torch.zeros(*codes.shape[:-2], grid[0] * rows, grid[1] * columns).to(codes.dtype)
    whole[..., : codes.shape[-2], : codes.shape[-1]] = codes
    made = Fp8Dequantize(None)._dequantize_one(whole, scales, dtype)
    return made[..., : codes.shape[-2], : codes.shape[-1]].contiguous()


def same_bits(one, other):
    return one.dtype == other.dtype and one.shape == other.shape and as_bytes(one) == as_bytes(other)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float16"])
@pytest.mark.parametrize("kind", [E4M3, E5M2])
@pytest.mark.parametrize(
    ("block", "grid", "name"),
    [
        ((128, 128), (3, 2), "weight_scale_inv"),
        ((128, 64), (3, 4), "weight_scale_inv"),
        (None, (ROWS, 1), "weight_scale"),
        (None, (ROWS,), "weight_scale"),
        (None, (1,), "weight_scale"),
        (None, (), "weight_scale_inv"),
        (None, (), "scale_inv"),
    ],
)
def test_8_bit_floats_are_what_transformers_makes_of_them(block, grid, name, kind, dtype, tmp_path):
    codes = drawn_codes(kind, ROWS, COLUMNS)
    scales = torch.rand(grid, generator=torch.manual_seed(0)) * 0.01
    made = dequantized(
        tmp_path / "a", {"m.weight": codes, f"m.{name}": scales},
        {"quant_method": "fp8", "weight_block_size": list(block) if block else None}, dtype,
    )  # fmt: skip
    if block is None:
        block = (1 if len(grid) and grid[0] == ROWS else ROWS, COLUMNS)
        scales = scales.reshape(-1, 1)
    assert made.keys() == {"m.weight"}
    assert same_bits(made["m.weight"], by_transformers(codes, scales, *block, getattr(torch, dtype)))


@pytest.mark.parametrize("kind", ["uint8", "float8_e8m0fnu"])
def test_scales_that_are_exponents(kind, tmp_path):
    codes = drawn_codes(E4M3, 2, ROWS, COLUMNS)
    scales = torch.randint(100, 140, (2, 3, 2), generator=torch.manual_seed(0)).to(torch.uint8)
    scales = scales.view(getattr(torch, kind))
    made = dequantized(
        tmp_path / "a", {"m.gate_up_proj": codes, "m.gate_up_proj_scale_inv": scales},
        {"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"},
    )  # fmt: skip
    assert same_bits(made["m.gate_up_proj"], by_transformers(codes, scales, 128, 128, torch.bfloat16))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_mxfp4_is_what_transformers_makes_of_it_for_every_code_and_scale(dtype, tmp_path):
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    blocks = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (2, 256, 3, 16)).astype("u1"))
    blocks[:, :, 0] = torch.arange(0, 256, 16)[:, None].repeat(16, 1).to(torch.uint8) + torch.arange(16)
    scales = torch.arange(256).to(torch.uint8)[None, :, None].expand(2, 256, 3).contiguous()
    made = dequantized(
        tmp_path / "a", {"experts.down_proj_blocks": blocks, "experts.down_proj_scales": scales},
        {"quant_method": "mxfp4"}, dtype,
    )  # fmt: skip
    wanted = convert_moe_packed_tensors(blocks, scales, dtype=getattr(torch, dtype)).contiguous()
    assert made["experts.down_proj"].shape == (2, 96, 256)
    assert same_bits(made["experts.down_proj"], wanted)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [32, None])
def test_packed_integers_are_as_documented(bits, group, tmp_path):
    """Code i of a row is in bits i·b of its words, with half of the range added; the product has the scale's type."""
    codes = torch.randint(-(1 << bits - 1), 1 << bits - 1, (24, 96), generator=torch.manual_seed(0))
    scales = (torch.rand(24, 96 // group if group else 1) * 0.1).to(torch.bfloat16)
    made = dequantized(
        tmp_path / "a", packed(codes, scales, bits), stated(bits, group)
    )  # fmt: skip
    wide = scales.repeat_interleave(96 // scales.shape[1], dim=1)
    assert same_bits(made["m.weight"], codes.to(torch.bfloat16) * wide)


def packed(codes, scales, bits):
    each = 32 // bits
    words = ((codes.numpy() + (1 << bits - 1)).astype("u4").reshape(len(codes), -1, each)) << (
        bits * np.arange(each, dtype="u4")
    )
    return {
        "m.weight_packed": torch.from_numpy(words.sum(axis=2).astype("u4").view("i4")),
        "m.weight_scale": scales,
        "m.weight_shape": torch.tensor(codes.shape),
    }


def stated(bits, group):
    weights = {
        "num_bits": bits,
        "type": "int",
        "symmetric": True,
        "strategy": "group" if group else "channel",
    }
    row = {"weights": {**weights, "group_size": group}, "targets": ["Linear"]}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": row},
    }


JUDGE = """
import hashlib, json, sys, torch
from safetensors.torch import load_file
from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

rows = json.load(open(sys.argv[1] + "/config.json"))["quantization_config"]["config_groups"]["group_0"]
scheme = QuantizationScheme(targets=rows["targets"], weights=QuantizationArgs(**rows["weights"]))
tensors = load_file(sys.argv[1] + "/model.safetensors")
digests = {}
for name in tensors:
    if name.endswith(".weight_packed"):
        module = name.removesuffix("weight_packed")
        own = {key.removeprefix(module): one for key, one in tensors.items() if key.startswith(module)}
        made = PackedQuantizationCompressor.decompress(own, scheme)["weight"]
        data = made.contiguous().view(torch.uint8).numpy()
        digests[module + "weight"] = [str(made.dtype), hashlib.sha256(data).hexdigest()]
print(json.dumps(digests))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("bits", "group"), [(4, 32), (4, None), (8, 32)])
def test_packed_integers_are_what_compressed_tensors_makes_of_them(bits, group, tmp_path):
    import hashlib

    codes = torch.randint(-(1 << bits - 1), 1 << bits - 1, (24, 96), generator=torch.manual_seed(0))
    scales = (torch.rand(24, 96 // group if group else 1) * 0.1).to(torch.bfloat16)
    made = dequantized(tmp_path / "a", packed(codes, scales, bits), stated(bits, group))["m.weight"]
    run = subprocess.run(
        [str(old_python("quantized")), "-c", JUDGE, str(tmp_path / "a")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    assert json.loads(run.stdout) == {
        "m.weight": ["torch.bfloat16", hashlib.sha256(as_bytes(made)).hexdigest()]
    }


def maxtext_functions(file, *names):
    """Functions of a script of MaxText 0.2.5, compiled without the script's imports of jax and absl."""
    (script,) = (old_python("maxtext").parents[1] / "lib").glob(
        f"python*/site-packages/maxtext/checkpoint_conversion/standalone_scripts/{file}"
    )
    tree = ast.parse(script.read_text(encoding="utf-8"))
    own = {
        node.name if isinstance(node, ast.FunctionDef) else ast.unparse(node.targets[0]): node
        for node in tree.body
        if isinstance(node, (ast.FunctionDef, ast.Assign))
    }
    namespace = {"torch": torch}
    exec(compile(ast.Module([own[name] for name in names], []), str(script), "exec"), namespace)
    return namespace[names[-1]]


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "columns"), [(256, 384), (ROWS, COLUMNS)])
@pytest.mark.parametrize("kind", ["float32", "uint8"])
def test_8_bit_floats_are_what_maxtext_makes_of_them(rows, columns, kind, tmp_path):
    made_by = maxtext_functions("deepseek_dequantize.py", "dequantize_fp8")
    codes, grid = drawn_codes(E4M3, rows, columns), (-(-rows // 128), -(-columns // 128))
    scales = torch.rand(grid, generator=torch.manual_seed(0)) * 0.01
    if kind == "uint8":
        scales = torch.randint(100, 140, grid, generator=torch.manual_seed(0)).to(torch.uint8)
    quantization = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    if kind == "uint8":
        quantization["scale_fmt"] = "ue8m0"
    made = dequantized(tmp_path / "a", {"m.weight": codes, "m.weight_scale_inv": scales}, quantization)
    assert same_bits(made["m.weight"], made_by(codes, scales))


@pytest.mark.slow
def test_mxfp4_is_what_maxtext_makes_of_it(tmp_path):
    """MaxText loses the sign of zeros, so that values are compared; it does not transpose the experts."""
    made_by = maxtext_functions("dequantize_mxfp4.py", "e2m1_to_fp", "dequantize_mxfp4")
    blocks = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (2, 253, 3, 16)).astype("u1"))
    scales = torch.arange(1, 254).to(torch.uint8)[None, :, None].expand(2, 253, 3).contiguous()
    made = dequantized(
        tmp_path / "a", {"experts.down_proj_blocks": blocks, "experts.down_proj_scales": scales},
        {"quant_method": "mxfp4"},
    )  # fmt: skip
    wanted = made_by(blocks, scales, torch.bfloat16).transpose(1, 2)
    assert torch.equal(made["experts.down_proj"], wanted)


@pytest.mark.slow
def test_packed_integers_are_what_maxtext_makes_of_them(tmp_path):
    made_by = maxtext_functions(
        "convert_deepseek_family_ckpt.py", "INT4_GROUP_SIZE", "dequantize_pack_quantized_int4"
    )
    codes = torch.randint(-8, 8, (24, 96), generator=torch.manual_seed(0))
    scales = (torch.rand(24, 3, generator=torch.manual_seed(1)) * 0.1).to(torch.bfloat16)
    stored = packed(codes, scales, 4)
    made = dequantized(tmp_path / "a", stored, stated(4, 32))["m.weight"]
    assert same_bits(made, made_by(stored["m.weight_packed"], scales, codes.shape))


def test_any_region_is_that_part_of_the_whole(tmp_path):
    """Bands, groups and words begin and end anywhere; a transposed tensor has its regions transposed."""

    draw = np.random.default_rng(2)
    codes = torch.randint(-8, 8, (40, 96), generator=torch.manual_seed(0))
    scales = (torch.rand(40, 3) * 0.1).to(torch.bfloat16)
    cases = {
        "int": (packed(codes, scales, 4), stated(4, 32)),
        "fp8": (
            {"m.weight": drawn_codes(E4M3, 40, 50), "m.weight_scale_inv": torch.rand(3, 4)},
            {"quant_method": "fp8", "weight_block_size": [16, 16]},
        ),
        "fp4": (mxfp4("m.weight", torch.randn(3, 64, 40)), {"quant_method": "mxfp4"}),
    }
    for name, (tensors, quantization) in cases.items():
        whole = dequantized(tmp_path / name, tensors, quantization)["m.weight"].float().numpy()
        from wherry.transform.dequantize import dequantized_view as view_of

        with wherry.open(tmp_path / name) as source:
            seen = view_of(source, {"quantization_config": quantization})
            assert seen is not None
            for _ in range(40):
                ends = [sorted(draw.integers(0, extent + 1, 2)) for extent in whole.shape]
                region = tuple(slice(int(start), int(stop)) for start, stop in ends)
                part = seen.read("m.weight", region).astype("f4")
                np.testing.assert_array_equal(part, whole[region])


@pytest.mark.parametrize(
    ("code", "scale", "target", "rounds"),
    [
        ("float4_e2m1fn", "uint8", "bfloat16", False),
        ("float4_e2m1fn", "uint8", "float16", True),  # it lacks the exponents
        ("float8_e4m3fn", "float32", "bfloat16", True),
        ("float8_e4m3fn", "float32", "float32", True),
        ("float8_e4m3fn", "bfloat16", "float32", False),
        ("int4", "bfloat16", "bfloat16", True),
        ("int4", "bfloat16", "float32", False),
    ],
)
def test_a_product_that_needs_no_rounding_is_lossless(code, scale, target, rounds):
    assert exact(code, scale, target) is not rounds
    if rounds or target != "float32":
        return
    kind = np.dtype(getattr(ml_dtypes, scale))
    scales = np.arange(1, 1 << 15, 7, dtype="u2").view(kind).astype("f8")
    with np.errstate(invalid="ignore"):
        table = code_table(code).astype("f8")
    table, scales = (
        table[np.isfinite(table)],
        scales[np.isfinite(scales) & (scales > 1e-20) & (scales < 1e20)],
    )
    products = table[:, None] * scales
    np.testing.assert_array_equal(products, products.astype("f4").astype("f8"))


def test_an_exponent_of_255_is_no_number_in_a_float():
    every = np.arange(256, dtype="u1")
    assert np.isinf(scale_values(every, "float8_e4m3fn")[255])
    assert np.isnan(scale_values(every.view(ml_dtypes.float8_e8m0fnu), "float8_e4m3fn")[255])
    assert scale_values(every, "float8_e4m3fn")[0] == 2.0**-127


# What states a quantisation is used or refused by name: attributes of the config, other files, and names
# of tensors.


PACKED = {**INT4, "config_groups": {"g": {"targets": ["Linear"], "weights": {
    "type": "int", "num_bits": 4, "group_size": 8, "strategy": "group", "symmetric": True}}}}  # fmt: skip
FLOATS = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"g": {"weights": {
    "type": "float", "num_bits": 8, "strategy": "channel", "symmetric": True}}}}  # fmt: skip
CODES = {"m.weight": torch.ones(16, 16).to(torch.float8_e4m3fn), "m.weight_scale": torch.rand(16, 1)}


def folder(path, tensors, quantization):
    path.mkdir()
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    (path / "config.json").write_text(json.dumps({"quantization_config": quantization}))
    return path


def dequantized_of_stated(source, target):
    done = wherry.convert(source, target, to="huggingface", options={"dequantize": "float32"}, lineage=False)
    return load_file(target / "model.safetensors"), done


@pytest.mark.parametrize("scheme", [FP8, MXFP4, PACKED, FLOATS], ids=["fp8", "mxfp4", "packed", "floats"])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("transform_config", {"config_groups": {"R4": {"type": "hadamard"}}}),
        ("sparsity_config", {"format": "sparse-24-bitmask"}),
        ("kv_cache_scheme", {"num_bits": 8}),
        ("rotation", True),
    ],
)
def test_an_attribute_that_is_not_read_is_refused_by_name(scheme, name, value, tmp_path):
    source = folder(tmp_path / "a", CODES, {**scheme, name: value})
    with pytest.raises(UnrepresentableError, match=f"unsupported attribute in quantization_config: {name}"):
        dequantized_of_stated(source, tmp_path / "b")
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("transform_config", {}),
        ("transform_config", None),
        ("transform_config", {"config_groups": {}}),
        ("sparsity_config", {"format": "dense"}),
        ("kv_cache_scheme", None),
        ("rotation", None),
    ],
)
def test_an_attribute_that_states_no_change_passes(name, value, tmp_path):
    made, _ = dequantized_of_stated(folder(tmp_path / "a", CODES, {**FLOATS, name: value}), tmp_path / "b")
    assert torch.equal(made["m.weight"], CODES["m.weight"].float() * CODES["m.weight_scale"])


@pytest.mark.parametrize("name", ["rotation", "weights_of"])
def test_an_attribute_of_a_group_that_is_not_read_is_refused_by_name(name, tmp_path):
    row = {**FLOATS["config_groups"]["g"], name: 1}
    source = folder(tmp_path / "a", CODES, {**FLOATS, "config_groups": {"g": row}})
    with pytest.raises(UnrepresentableError, match=name):
        dequantized_of_stated(source, tmp_path / "b")
    inner = {"weights": {**FLOATS["config_groups"]["g"]["weights"], name: 1}}
    source = folder(tmp_path / "c", CODES, {**FLOATS, "config_groups": {"g": inner}})
    with pytest.raises(UnrepresentableError, match=name):
        dequantized_of_stated(source, tmp_path / "b")


@pytest.mark.parametrize("strategy", ["tensor", "channel", "group", "block"])
@pytest.mark.parametrize("mixed", [False, True])
def test_floats_of_every_strategy_are_read(strategy, mixed, tmp_path):
    """The value is code × scale, as compressed-tensors documents; `mixed-precision` with one format is that format."""
    codes = torch.randn(32, 48, generator=torch.manual_seed(0)).to(torch.float8_e4m3fn)
    grid, more = {
        "tensor": ((1,), {}), "channel": ((32, 1), {}), "group": ((32, 3), {"group_size": 16}),
        "block": ((4, 3), {"block_structure": [8, 16]}),
    }[strategy]  # fmt: skip
    scales = torch.rand(grid, generator=torch.manual_seed(1))
    row = {"weights": {**FLOATS["config_groups"]["g"]["weights"], "strategy": strategy, **more}}
    stated = {**FLOATS, "config_groups": {"g": row}}
    if mixed:
        stated |= {"format": "mixed-precision", "config_groups": {"g": {**row, "format": "float-quantized"}}}
    made, _ = dequantized_of_stated(
        folder(tmp_path / "a", {"m.weight": codes, "m.weight_scale": scales}, stated), tmp_path / "b"
    )
    wide = scales.reshape(scales.shape if scales.ndim > 1 else (1, 1))
    for axis, extent in enumerate(codes.shape):
        wide = wide.repeat_interleave(extent // wide.shape[axis], axis)
    assert torch.equal(made["m.weight"], codes.float() * wide)


def bytes_of(*shape):
    return torch.zeros(shape, dtype=torch.uint8)


def words_of(*shape):
    return torch.zeros(shape, dtype=torch.int32)


# name → the file next to the tensors, the tensors in place of a weight, and words of the refusal.
METHODS = {
    "modelopt-fp8": (
        "hf_quant_config.json",
        lambda module: {f"{module}.weight": CODES["m.weight"], f"{module}.weight_scale": torch.ones(1)},
        r"ModelOpt, which hf_quant_config.json states",
    ),
    "modelopt-nvfp4": (
        "hf_quant_config.json",
        lambda module: {
            f"{module}.weight": bytes_of(32, 16),
            f"{module}.weight_scale": torch.ones(32, 2).to(torch.float8_e4m3fn),
            f"{module}.weight_scale_2": torch.ones(()),
        },
        r"ModelOpt, which hf_quant_config.json states; their scales are in .*weight_scale_2",
    ),
    "gptq": (
        "quantize_config.json",
        lambda module: {
            f"{module}.qweight": words_of(4, 32),
            f"{module}.qzeros": words_of(1, 4),
            f"{module}.scales": torch.ones(1, 32),
        },
        "GPTQ, which quantize_config.json states",
    ),
    "gptq-without-a-file": (
        None,
        lambda module: {f"{module}.qweight": words_of(4, 32), f"{module}.qzeros": words_of(1, 4)},
        "GPTQ or AWQ, which the names of tensors show",
    ),
    "bitsandbytes": (
        None,
        lambda module: {f"{module}.weight": bytes_of(512, 1), f"{module}.weight.absmax": torch.ones(16)},
        "bitsandbytes, which the names of tensors show",
    ),
    "mlx": (
        None,
        lambda module: {
            f"{module}.weight": words_of(32, 4),
            f"{module}.scales": torch.ones(32, 1),
            f"{module}.biases": torch.ones(32, 1),
        },
        "MLX, which the names of tensors show",
    ),
    "int8": (
        None,
        lambda module: {
            f"{module}.weight": torch.zeros(32, 32, dtype=torch.int8),
            f"{module}.weight_scale": torch.ones(32, 1),
        },
        "int8 codes without a quantization_config in config.json; their scales are in",
    ),
    "bare-fp8": (
        None,
        lambda module: {f"{module}.weight": CODES["m.weight"]},
        "float8_e4m3fn codes without a quantization_config in config.json; there are no scales",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", METHODS)
def test_codes_that_no_config_states_are_named_and_never_become_weights(name, tmp_path):
    file, codes, words = METHODS[name]
    source = save_tiny(tmp_path / "a", "llama")
    tensors = load_file(source / "model.safetensors")
    stem = "model.layers.0.self_attn.o_proj"
    del tensors[f"{stem}.weight"]
    save_file({**tensors, **codes(stem)}, source / "model.safetensors", {"format": "pt"})
    if file:
        (source / file).write_text('{"quantization": {"quant_algo": "X"}}')
    family = tmp_path / "family.toml"
    family.write_text(
        'extends = "llama"\nname = "own"\nabout = "scales ignored"\n[systems.huggingface]\n'
        'ignore = [["model.layers.*.self_attn.o_proj.*scale*", "no weights"]]\n'
    )
    for more in ({}, {"family_file": str(family)}):
        with pytest.raises(UnrepresentableError, match=words):
            wherry.convert(source, tmp_path / "b", to="maxtext", lineage=False, **more)
        assert not (tmp_path / "b").exists()
    wherry.convert(source, tmp_path / "c.safetensors", to="safetensors", lineage=False)
    assert load_file(tmp_path / "c.safetensors").keys() == {**tensors, **codes(stem)}.keys()


@pytest.mark.parametrize(
    "stated",
    [
        {"quantization": {"group_size": 64, "bits": 4}},
        {"quantization": {"bits": 4}, "quantization_config": {"bits": 4}},
        {"quantization_config": {"quant_method": "awq", "bits": 4}},
        {"quantization_config": FP8},
    ],
)
def test_a_stated_quantisation_of_plain_weights_is_a_leftover(stated, tmp_path):
    source = save_tiny(tmp_path / "a", "llama")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, **stated}))
    done = wherry.convert(source, tmp_path / "b", to="lingua", lineage=False)
    assert "but no tensor is quantised" in " ".join(done.warnings)
    wherry.convert(tmp_path / "b", tmp_path / "c", to="huggingface", lineage=False)
    made, want = (load_file(one / "model.safetensors") for one in (tmp_path / "c", source))
    assert made.keys() == want.keys()
    assert all(torch.equal(made[name], want[name]) for name in want)


def test_a_rotation_of_plain_weights_is_no_leftover(tmp_path):
    source = save_tiny(tmp_path / "a", "llama")
    config = json.loads((source / "config.json").read_text())
    stated = {
        "quant_method": "compressed-tensors",
        "format": "dense",
        "transform_config": {"config_groups": {"R": {}}},
    }
    (source / "config.json").write_text(json.dumps({**config, "quantization_config": stated}))
    with pytest.raises(UnrepresentableError, match="transform_config"):
        wherry.convert(source, tmp_path / "b", to="lingua", lineage=False)


# Codes and scales belong together: what is missing, left over or does not fit is named, and nothing is
# written.


CODES_OF_TENSORS = torch.zeros(64, 64).to(torch.float8_e4m3fn)
SCALES = torch.ones(4, 4)
ROUTE = {"to": "huggingface", "options": {"dequantize": "bfloat16"}, "lineage": False}


def folder_of_tensors(path, tensors, quantization, **more):
    path.mkdir()
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    config = {"quantization_config": quantization} if quantization is not None else {}
    (path / "config.json").write_text(json.dumps({**config, **more}))
    return path


def refused(tmp_path, kind, message, tensors, quantization):
    source = folder_of_tensors(tmp_path / "a", tensors, quantization)
    with pytest.raises(kind, match=message) as raised:
        wherry.convert(source, tmp_path / "b", **ROUTE)
    assert not (tmp_path / "b").exists()
    return raised.value


def test_a_missing_scale_is_named(tmp_path):
    error = refused(
        tmp_path,
        IncompleteError,
        "missing scale m.weight_scale_inv of the fp8 codes",
        {"m.weight": CODES_OF_TENSORS},
        FP8,
    )
    assert error.path == "m.weight"


def test_a_missing_scale_of_mxfp4_is_named(tmp_path):
    blocks = {"e.w_blocks": torch.zeros(1, 32, 1, 16, dtype=torch.uint8)}
    refused(tmp_path, IncompleteError, "missing scale e.w_scales", blocks, MXFP4)


@pytest.mark.parametrize("name", ["m.weight_scale_inv", "m.weight_scale"])
def test_a_scale_without_codes_is_named(name, tmp_path):
    tensors = {"m.weight": torch.zeros(64, 64), name: SCALES}
    refused(tmp_path, IncompleteError, f"{name} scales no tensor", tensors, FP8)


def test_a_module_that_the_config_calls_plain_needs_no_scale(tmp_path):
    source = folder_of_tensors(
        tmp_path / "a", {"m.weight": CODES_OF_TENSORS}, {**FP8, "modules_to_not_convert": ["m"]}
    )
    receipt = wherry.convert(source, tmp_path / "b", **ROUTE)
    assert load_file(tmp_path / "b" / "model.safetensors")["m.weight"].dtype == torch.float8_e4m3fn
    assert receipt.lossless
    assert "no tensor is quantised" in " ".join(receipt.warnings)


@pytest.mark.parametrize("shape", [(4, 5), (5, 4), (1, 4), (2, 2), (4,)])
def test_scales_that_do_not_fit_are_refused(shape, tmp_path):
    tensors = {"m.weight": CODES_OF_TENSORS, "m.weight_scale_inv": torch.ones(shape)}
    refused(
        tmp_path,
        MismatchError,
        r"m.weight_scale_inv of shape .* do not fit codes of shape \(64, 64\)",
        tensors,
        FP8,
    )


def test_scales_of_activations_are_left_out_by_name(tmp_path):
    tensors = {
        "m.weight": CODES_OF_TENSORS,
        "m.weight_scale_inv": SCALES,
        "m.activation_scale": torch.ones(()),
    }
    receipt = wherry.convert(folder_of_tensors(tmp_path / "a", tensors, FP8), tmp_path / "b", **ROUTE)
    assert load_file(tmp_path / "b" / "model.safetensors").keys() == {"m.weight"}
    assert [row["path"] for row in receipt.ignored] == ["m.activation_scale"]


def test_a_stated_shape_that_differs_is_refused(tmp_path):
    tensors = {
        "m.weight_packed": torch.zeros(4, 3, dtype=torch.int32), "m.weight_scale": torch.ones(4, 3),
        "m.weight_shape": torch.tensor([4, 20]),
    }  # fmt: skip
    refused(tmp_path, CorruptError, r"m.weight_shape states the shape \(4, 20\)", tensors, INT4)


def test_a_tensor_that_exists_is_not_replaced(tmp_path):
    tensors = {
        "e.w_blocks": torch.zeros(1, 32, 1, 16, dtype=torch.uint8), "e.w_scales": torch.ones(1, 32, 1).to(torch.uint8),
        "e.w": torch.ones(1),
    }  # fmt: skip
    refused(tmp_path, MismatchError, "e.w_blocks would become a tensor that exists", tensors, MXFP4)


def group(**weights):
    rows = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 8, **weights}
    return {**INT4, "config_groups": {"group_0": {"targets": ["Linear"], "weights": rows}}}


@pytest.mark.parametrize(
    ("quantization", "words"),
    [
        (
            {"quant_method": "gptq", "bits": 4},
            "unsupported quantisation gptq: known are fp8, mxfp4, int-quantized, pack-quantized",
        ),
        ({"quant_method": "compressed-tensors", "format": "mxfp8-quantized"}, "mxfp8-quantized"),
        ({}, "unsupported quantisation an unnamed method"),
        (group(symmetric="no"), "compressed-tensors pack-quantized with symmetric = 'no'"),
        (group(zp_dtype="torch.int32"), "with zp_dtype = 'torch.int32'"),
        (group(num_bits=3), "with num_bits = 3"),
        (group(actorder="group"), "with actorder = 'group'"),
        (group(group_size=-8), r"has blocks of \[1, -8\]"),
        (
            {**group(), "config_groups": {**group()["config_groups"], "other": {"weights": {"num_bits": 8}}}},
            "several",
        ),
        ({**INT4, "config_groups": {}}, "states no config_groups"),
        ({**FP8, "weight_block_size": [128]}, r"has blocks of \[128\]"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(quantization, words, tmp_path):
    refused(tmp_path, UnrepresentableError, words, {"m.weight": CODES_OF_TENSORS}, quantization)


def test_asking_for_it_without_a_quantisation_is_an_error(tmp_path):
    source = folder_of_tensors(tmp_path / "a", {"m.weight": CODES_OF_TENSORS}, None)
    with pytest.raises(
        UsageError, match="nothing can be dequantised: no config next to the source states it"
    ):
        wherry.convert(source, tmp_path / "b", **ROUTE)
    with pytest.raises(UsageError, match="cannot dequantise to 'int8'"):
        quantized = folder_of_tensors(
            tmp_path / "c", {"m.weight": CODES_OF_TENSORS, "m.weight_scale_inv": SCALES}, FP8
        )
        wherry.convert(
            quantized, tmp_path / "b", to="huggingface", options={"dequantize": "int8"}, lineage=False
        )


def test_a_text_model_inside_another_config(tmp_path):
    source = folder_of_tensors(
        tmp_path / "a", {"m.weight": CODES_OF_TENSORS, "m.weight_scale_inv": SCALES}, None,
        text_config={"quantization_config": FP8, "dtype": "bfloat16"},
    )  # fmt: skip
    wherry.convert(source, tmp_path / "b", **ROUTE)
    assert json.loads((tmp_path / "b" / "config.json").read_text())["text_config"] == {"dtype": "bfloat16"}


def fp8(codes, scales):
    return {"m.weight": codes, "m.weight_scale_inv": scales}


PACKED_OF_TENSORS = torch.zeros(4, 2, dtype=torch.int32)
BLOCKS = torch.zeros(2, 32, 1, 16, dtype=torch.uint8)
EXPONENTS = torch.zeros(2, 32, 1, dtype=torch.uint8)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("scales", [(), (1,), (1, 1)])
def test_codes_without_rows_and_columns_are_refused(rank, scales, tmp_path):
    tensors = fp8(torch.zeros((1,) * rank).to(torch.float8_e4m3fn), torch.ones(scales))
    refused(tmp_path, UnrepresentableError, "unsupported fp8 codes of shape", tensors, FP8)


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_blocks_without_rows_and_columns_are_refused(rank, tmp_path):
    tensors = {"e.w_blocks": torch.zeros((1,) * rank, dtype=torch.uint8), "e.w_scales": EXPONENTS[0, 0]}
    refused(tmp_path, UnrepresentableError, "unsupported mxfp4 codes of shape", tensors, MXFP4)


@pytest.mark.parametrize(
    "kind",
    [
        torch.int64,
        torch.int32,
        torch.int8,
        torch.bool,
        torch.complex64,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
    ],
)
def test_scales_of_a_type_that_does_not_scale_are_refused(kind, tmp_path):
    for name, quantization, tensors in (
        ("fp8", FP8, fp8(CODES_OF_TENSORS, SCALES.to(kind))),
        ("mxfp4", MXFP4, {"e.w_blocks": BLOCKS, "e.w_scales": EXPONENTS.to(kind)}),
        ("int4", INT4, {"m.weight_packed": PACKED_OF_TENSORS, "m.weight_scale": torch.ones(4, 2).to(kind)}),
    ):
        place = tmp_path / name
        place.mkdir()
        refused(place, UnrepresentableError, "unsupported element type", tensors, quantization)


@pytest.mark.parametrize("shape", [(2, 3, 1), (2, 32, 2), (2, 32, 1, 16), (64,)])
def test_exponents_that_do_not_fit_are_refused(shape, tmp_path):
    tensors = {"e.w_blocks": BLOCKS, "e.w_scales": torch.zeros(shape, dtype=torch.uint8)}
    refused(tmp_path, MismatchError, "do not fit codes of shape", tensors, MXFP4)


@pytest.mark.parametrize("shape", [(0, 64), (64, 0), (0, 0)])
def test_codes_without_elements_keep_their_shape(shape, tmp_path):
    grid = tuple(-(-extent // 16) for extent in shape)
    tensors = fp8(torch.zeros(shape).to(torch.float8_e4m3fn), torch.ones(grid))
    wherry.convert(folder_of_tensors(tmp_path / "a", tensors, FP8), tmp_path / "b", **ROUTE)
    assert load_file(tmp_path / "b" / "model.safetensors")["m.weight"].shape == shape


@pytest.mark.parametrize("size", [2**31, 2**62, 2**63, 2**70])
def test_a_block_longer_than_the_codes_is_all_of_them(size, tmp_path):
    codes = torch.full((4, 4), 2.0).to(torch.float8_e4m3fn)
    stated = {**FP8, "weight_block_size": [size, size]}
    source = folder_of_tensors(tmp_path / "a", fp8(codes, torch.full((1, 1), 0.5)), stated)
    wherry.convert(source, tmp_path / "b", **ROUTE)
    made = load_file(tmp_path / "b" / "model.safetensors")["m.weight"]
    assert torch.equal(made, torch.ones(4, 4, dtype=torch.bfloat16))


@pytest.mark.parametrize("bits", [None, 8.0, 4.0, True, "4", [4], {}, 3, -4, 2**70])
def test_a_number_of_bits_that_no_code_has_is_refused(bits, tmp_path):
    tensors = {"m.weight_packed": PACKED_OF_TENSORS, "m.weight_scale": torch.ones(4, 2)}
    refused(tmp_path, UnrepresentableError, "bits", tensors, group(num_bits=bits))


@pytest.mark.parametrize(
    "stated",
    [torch.ones(0, dtype=torch.int64), torch.tensor(4), torch.tensor([4, 16, 1]), torch.tensor([4.0, 16.0])],
)
def test_a_tensor_that_states_no_shape_is_refused(stated, tmp_path):
    tensors = {
        "m.weight_packed": PACKED_OF_TENSORS,
        "m.weight_scale": torch.ones(4, 2),
        "m.weight_shape": stated,
    }
    refused(tmp_path, MismatchError, "expected 2 integers in m.weight_shape", tensors, INT4)


@pytest.mark.parametrize("stated", [[2**62, 2**62], [-1, -1], [0, 0], [16, 4]])
def test_a_stated_shape_that_lies_is_refused(stated, tmp_path):
    tensors = {
        "m.weight_packed": PACKED_OF_TENSORS,
        "m.weight_scale": torch.ones(4, 2),
        "m.weight_shape": torch.tensor(stated),
    }
    refused(tmp_path, CorruptError, "m.weight_shape states the shape", tensors, INT4)


WRONG = [0, -1, True, "x", [], {}, [1], 1.5, [1.5, 2], [[1], [2]], None, 2**70, [None, None], {"a": {}}]
PLACES = [
    (FP8, ("weight_block_size",)), (FP8, ("quant_method",)), (FP8, ("modules_to_not_convert",)),
    (MXFP4, ("quant_method",)), (MXFP4, ("modules_to_not_convert",)),
    *((INT4, place) for place in (
        ("quant_method",), ("format",), ("ignore",), ("config_groups",), ("config_groups", "group_0"),
        ("config_groups", "group_0", "weights"),
        *(("config_groups", "group_0", "weights", name) for name in (
            "type", "num_bits", "group_size", "strategy", "symmetric", "dynamic", "actorder", "block_structure")),
    )),
]  # fmt: skip


def changed(table, place, value):
    first, *rest = place
    return {**table, first: changed(table.get(first, {}), rest, value) if rest else value}


@pytest.mark.parametrize(("quantization", "place"), PLACES, ids=lambda one: str(one)[:60])
def test_a_config_of_other_types_is_refused_or_read(quantization, place, tmp_path):
    tensors = {
        "fp8": fp8(CODES_OF_TENSORS, SCALES), "mxfp4": {"e.w_blocks": BLOCKS, "e.w_scales": EXPONENTS},
        "compressed-tensors": {"m.weight_packed": PACKED_OF_TENSORS, "m.weight_scale": torch.ones(4, 2)},
    }[quantization["quant_method"]]  # fmt: skip
    source = folder_of_tensors(tmp_path / "a", tensors, quantization)
    for number, value in enumerate(WRONG):
        config = {"quantization_config": changed(quantization, place, value)}
        (source / "config.json").write_text(json.dumps(config))
        try:
            wherry.convert(source, tmp_path / str(number), **ROUTE)
        except WherryError:
            assert not (tmp_path / str(number)).exists()


# Quantised checkpoints go where plain ones of their family go: the scheme is a word, the family stays as
# it is.


MODELS = {
    "fp8-blocks": ("deepseek-v3", FP8, fp8_of_conversions(16, 16)),
    "fp8-rows": ("qwen3", {"quant_method": "fbgemm_fp8"}, fp8_of_conversions(1, 1 << 20, "_scale")),
    "mxfp4": ("gpt-oss", MXFP4, mxfp4),
    "int4": ("qwen3-moe", INT4, int4(8)),
}
convert = partial(wherry.convert, lineage=False)


@pytest.fixture(params=sorted(MODELS), scope="module")
def model(request, tmp_path_factory):
    """A quantised model as its publishers store it, and the same dequantised to bfloat16."""
    folder = tmp_path_factory.mktemp(request.param)
    source = save_quantized(folder / "quantized", *MODELS[request.param])
    convert(source, folder / "plain", to="huggingface", options={"dequantize": "bfloat16"})
    return folder


def tensors(folder):
    return load_file(folder / "model.safetensors")


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_plain_weights_are_what_transformers_loads(model):
    import transformers

    config = json.loads((model / "plain" / "config.json").read_text())
    assert "quantization_config" not in config
    assert config["torch_dtype"] == "bfloat16"
    stated = json.loads((model / "quantized" / "config.json").read_text())
    assert {**config, "quantization_config": stated["quantization_config"]} == stated
    kind = getattr(transformers, config["architectures"][0])
    loaded, report = kind.from_pretrained(model / "plain", output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert all(one.dtype == torch.bfloat16 for one in loaded.parameters() if one.ndim > 1)


@pytest.mark.parametrize("scan", ["true", "false"])
def test_to_maxtext_and_back_are_the_dequantised_weights(model, scan, tmp_path):
    convert(model / "quantized", tmp_path / "maxtext", to="maxtext", options={"scan_layers": scan})
    convert(tmp_path / "maxtext", tmp_path / "back", to="huggingface")
    assert same(tensors(tmp_path / "back"), tensors(model / "plain"))
    convert(model / "plain", tmp_path / "again", to="maxtext", options={"scan_layers": scan})
    digests = [wherry.open(tmp_path / name).manifest for name in ("maxtext", "again")]
    assert digests[0].tensors == digests[1].tensors


def test_what_was_written_is_proved_against_the_codes(model, tmp_path):
    source = model / "quantized"
    receipt = convert(source, tmp_path / "maxtext", to="maxtext")
    rounded = "mxfp4" not in model.name  # whose products are exact
    assert receipt.lossless is not rounded
    assert "codes are dequantised to bfloat16" in " ".join(receipt.warnings)
    for target in (tmp_path / "maxtext", model / "plain"):
        assert wherry.verify(target, level="roundtrip", against=str(source)).ok
    codes = tensors(source)
    name = next(name for name in codes if name.endswith(("scale_inv", "weight_scale", "_scales")))
    changed = tmp_path / "changed"
    changed.mkdir()
    (changed / "config.json").write_bytes((source / "config.json").read_bytes())
    other = codes[name] + 1 if codes[name].dtype == torch.uint8 else codes[name] * 2
    save_file({**codes, name: other}, changed / "model.safetensors", {"format": "pt"})
    for target in (tmp_path / "maxtext", model / "plain"):
        assert not wherry.verify(target, level="roundtrip", against=str(changed)).ok


def test_the_plan_names_codes_and_scales_as_one(model, tmp_path):
    plan = wherry.plan(model / "quantized", tmp_path / "x", to="maxtext")
    assert not [row for row in plan.ignored if row.what == "tensor"]
    assert plan.parameters == sum(one.numel() for one in tensors(model / "plain").values())
    assert bool(plan.lossy) is ("mxfp4" not in model.name)
    source = wherry.open(model / "quantized").manifest
    receipt = convert(model / "quantized", tmp_path / "x", to="maxtext")
    stored = convert(model / "quantized", tmp_path / "same", to="huggingface").source
    assert (
        receipt.source.weights_digest == stored.weights_digest
    )  # of codes and scales, whatever is made of them
    assert len(source.tensors) > plan.tensors


def test_the_same_tree_keeps_codes_and_scales(model, tmp_path):
    for to, target in (("huggingface", tmp_path / "a"), ("orbax", tmp_path / "b")):
        receipt = convert(model / "quantized", target, to=to)
        assert receipt.lossless
    assert same(tensors(tmp_path / "a"), tensors(model / "quantized"))
    assert json.loads((tmp_path / "a" / "config.json").read_text())["quantization_config"]


def test_a_config_that_the_user_names_states_the_scheme_too(model, tmp_path):
    bare, config = tmp_path / "bare", tmp_path / "given.json"
    bare.mkdir()
    (bare / "model.safetensors").write_bytes((model / "quantized" / "model.safetensors").read_bytes())
    config.write_bytes((model / "quantized" / "config.json").read_bytes())
    layout = LayoutRequest(config=str(config), dtype="bfloat16")
    convert(bare, tmp_path / "a", to="maxtext", layout=layout)
    convert(tmp_path / "a", tmp_path / "b", to="huggingface")
    convert(bare, tmp_path / "c", to="huggingface", layout=layout)
    for name in "bc":
        assert same(tensors(tmp_path / name), tensors(model / "plain"))
        assert "quantization_config" not in json.loads((tmp_path / name / "config.json").read_text())


def test_another_element_type(model, tmp_path):
    convert(model / "quantized", tmp_path / "a", to="maxtext", layout=LayoutRequest(dtype="float32"))
    convert(model / "quantized", tmp_path / "b", to="huggingface", options={"dequantize": "float32"})
    wide = tensors(tmp_path / "b")
    for name, narrow in tensors(model / "plain").items():
        assert torch.equal(wide[name].to(narrow.dtype), narrow)
    assert json.loads((tmp_path / "b" / "config.json").read_text())["torch_dtype"] == "float32"
    convert(tmp_path / "a", tmp_path / "c", to="huggingface")
    back = tensors(tmp_path / "c")
    assert all(torch.equal(back[name], wide[name].float()) for name in back)


def test_a_scheme_that_is_not_supported_is_refused_between_systems_and_kept_within_one(tmp_path):
    def words(name, tensor):
        return {name.replace("weight", "qweight"): torch.zeros(*tensor.shape, dtype=torch.int32)}

    source = save_quantized(tmp_path / "a", "llama", {"quant_method": "awq", "bits": 4}, words)
    with pytest.raises(UnrepresentableError, match="unsupported quantisation awq"):
        convert(source, tmp_path / "b", to="maxtext")
    convert(source, tmp_path / "c", to="safetensors")
    with pytest.raises(UnrepresentableError, match="unsupported quantisation awq"):
        convert(source, tmp_path / "d", to="huggingface", options={"dequantize": "bfloat16"})
    assert not (tmp_path / "b").exists()
