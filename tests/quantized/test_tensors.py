"""Codes and scales belong together: what is missing, left over or does not fit is named, and nothing is written."""

from __future__ import annotations

import json

import pytest
from safetensors.torch import load_file, save_file

import wherry
from tests.support.quantized import FP8, INT4, MXFP4
from tests.support.torch import torch
from wherry.errors import CorruptError, IncompleteError, MismatchError, UnrepresentableError, UsageError

CODES = torch.zeros(64, 64).to(torch.float8_e4m3fn)
SCALES = torch.ones(4, 4)
ROUTE = {"to": "huggingface", "options": {"dequantize": "bfloat16"}, "lineage": False}


def folder(path, tensors, quantization, **more):
    path.mkdir()
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    config = {"quantization_config": quantization} if quantization is not None else {}
    (path / "config.json").write_text(json.dumps({**config, **more}))
    return path


def refused(tmp_path, kind, message, tensors, quantization):
    source = folder(tmp_path / "a", tensors, quantization)
    with pytest.raises(kind, match=message) as raised:
        wherry.convert(source, tmp_path / "b", **ROUTE)
    assert not (tmp_path / "b").exists()
    return raised.value


def test_a_missing_scale_is_named(tmp_path):
    error = refused(
        tmp_path,
        IncompleteError,
        "missing scale m.weight_scale_inv of the fp8 codes",
        {"m.weight": CODES},
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
    source = folder(tmp_path / "a", {"m.weight": CODES}, {**FP8, "modules_to_not_convert": ["m"]})
    receipt = wherry.convert(source, tmp_path / "b", **ROUTE)
    assert load_file(tmp_path / "b" / "model.safetensors")["m.weight"].dtype == torch.float8_e4m3fn
    assert receipt.lossless
    assert "no tensor is quantised" in " ".join(receipt.warnings)


@pytest.mark.parametrize("shape", [(4, 5), (5, 4), (1, 4), (2, 2), (4,)])
def test_scales_that_do_not_fit_are_refused(shape, tmp_path):
    tensors = {"m.weight": CODES, "m.weight_scale_inv": torch.ones(shape)}
    refused(
        tmp_path,
        MismatchError,
        r"m.weight_scale_inv of shape .* do not fit codes of shape \(64, 64\)",
        tensors,
        FP8,
    )


def test_scales_of_activations_are_left_out_by_name(tmp_path):
    tensors = {"m.weight": CODES, "m.weight_scale_inv": SCALES, "m.activation_scale": torch.ones(())}
    receipt = wherry.convert(folder(tmp_path / "a", tensors, FP8), tmp_path / "b", **ROUTE)
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
            "unsupported quantisation gptq: known are fp8, mxfp4, pack-quantized",
        ),
        ({"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}, "nvfp4-pack-quantized"),
        ({}, "unsupported quantisation an unnamed method"),
        (group(symmetric=False), "compressed-tensors pack-quantized with symmetric = False"),
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
    refused(tmp_path, UnrepresentableError, words, {"m.weight": CODES}, quantization)


def test_asking_for_it_without_a_quantisation_is_an_error(tmp_path):
    source = folder(tmp_path / "a", {"m.weight": CODES}, None)
    with pytest.raises(
        UsageError, match="nothing can be dequantised: no config next to the source states it"
    ):
        wherry.convert(source, tmp_path / "b", **ROUTE)
    with pytest.raises(UsageError, match="cannot dequantise to 'int8'"):
        quantized = folder(tmp_path / "c", {"m.weight": CODES, "m.weight_scale_inv": SCALES}, FP8)
        wherry.convert(
            quantized, tmp_path / "b", to="huggingface", options={"dequantize": "int8"}, lineage=False
        )


def test_a_text_model_inside_another_config(tmp_path):
    source = folder(
        tmp_path / "a", {"m.weight": CODES, "m.weight_scale_inv": SCALES}, None,
        text_config={"quantization_config": FP8, "dtype": "bfloat16"},
    )  # fmt: skip
    wherry.convert(source, tmp_path / "b", **ROUTE)
    assert json.loads((tmp_path / "b" / "config.json").read_text())["text_config"] == {"dtype": "bfloat16"}
