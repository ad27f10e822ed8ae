"""What states a quantisation is used or refused by name: attributes of the config, other files, and names of tensors.

Codes whose scheme no config states never become weights of a system, whatever a family ignores. A config that states a
quantisation of plain weights is a leftover of another copy: the weights are read, and a warning says so.
"""

from __future__ import annotations

import json

import pytest
from safetensors.torch import load_file, save_file

import wherry
from tests.support.quantized import FP8, INT4, MXFP4
from tests.support.tiny_models import save_tiny
from tests.support.torch import torch
from wherry.errors import UnrepresentableError

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


def dequantized(source, target):
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
        dequantized(source, tmp_path / "b")
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
    made, _ = dequantized(folder(tmp_path / "a", CODES, {**FLOATS, name: value}), tmp_path / "b")
    assert torch.equal(made["m.weight"], CODES["m.weight"].float() * CODES["m.weight_scale"])


@pytest.mark.parametrize("name", ["rotation", "weights_of"])
def test_an_attribute_of_a_group_that_is_not_read_is_refused_by_name(name, tmp_path):
    row = {**FLOATS["config_groups"]["g"], name: 1}
    source = folder(tmp_path / "a", CODES, {**FLOATS, "config_groups": {"g": row}})
    with pytest.raises(UnrepresentableError, match=name):
        dequantized(source, tmp_path / "b")
    inner = {"weights": {**FLOATS["config_groups"]["g"]["weights"], name: 1}}
    source = folder(tmp_path / "c", CODES, {**FLOATS, "config_groups": {"g": inner}})
    with pytest.raises(UnrepresentableError, match=name):
        dequantized(source, tmp_path / "b")


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
    made, _ = dequantized(
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
