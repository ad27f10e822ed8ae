"""What codes and scales mean: our arithmetic has the bits of the software of those who publish them.

transformers judges 8-bit floats and mxfp4, compressed-tensors (in an environment of its own, a slow test) packed
integers; its documented arithmetic, in torch, judges them in every run. The functions of MaxText's own converters judge
all three, slow too.
"""

from __future__ import annotations

import ast
import json
import subprocess

import ml_dtypes
import numpy as np
import pytest
from safetensors.torch import load_file, save_file

import wherry
from tests.support.generations import old_python
from tests.support.quantized import mxfp4
from tests.support.torch import as_bytes, torch
from wherry.quantized.codes import code_table, exact, scale_values

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
        from wherry.quantized.view import dequantized_view as view_of

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
