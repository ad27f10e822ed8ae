"""Codes and scales belong together: what is missing, left over or does not fit is named, and nothing is written."""

from __future__ import annotations

import json

import pytest
from safetensors.torch import load_file, save_file

import wherry
from tests.support.quantized import FP8, INT4, MXFP4
from tests.support.torch import torch
from wherry.errors import (
    CorruptError,
    IncompleteError,
    MismatchError,
    UnrepresentableError,
    UsageError,
    WherryError,
)

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
            "unsupported quantisation gptq: known are fp8, mxfp4, int-quantized, pack-quantized",
        ),
        ({"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}, "nvfp4-pack-quantized"),
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


def fp8(codes, scales):
    return {"m.weight": codes, "m.weight_scale_inv": scales}


PACKED = torch.zeros(4, 2, dtype=torch.int32)
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
        ("fp8", FP8, fp8(CODES, SCALES.to(kind))),
        ("mxfp4", MXFP4, {"e.w_blocks": BLOCKS, "e.w_scales": EXPONENTS.to(kind)}),
        ("int4", INT4, {"m.weight_packed": PACKED, "m.weight_scale": torch.ones(4, 2).to(kind)}),
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
    wherry.convert(folder(tmp_path / "a", tensors, FP8), tmp_path / "b", **ROUTE)
    assert load_file(tmp_path / "b" / "model.safetensors")["m.weight"].shape == shape


@pytest.mark.parametrize("size", [2**31, 2**62, 2**63, 2**70])
def test_a_block_longer_than_the_codes_is_all_of_them(size, tmp_path):
    codes = torch.full((4, 4), 2.0).to(torch.float8_e4m3fn)
    stated = {**FP8, "weight_block_size": [size, size]}
    source = folder(tmp_path / "a", fp8(codes, torch.full((1, 1), 0.5)), stated)
    wherry.convert(source, tmp_path / "b", **ROUTE)
    made = load_file(tmp_path / "b" / "model.safetensors")["m.weight"]
    assert torch.equal(made, torch.ones(4, 4, dtype=torch.bfloat16))


@pytest.mark.parametrize("bits", [None, 8.0, 4.0, True, "4", [4], {}, 3, -4, 2**70])
def test_a_number_of_bits_that_no_code_has_is_refused(bits, tmp_path):
    tensors = {"m.weight_packed": PACKED, "m.weight_scale": torch.ones(4, 2)}
    refused(tmp_path, UnrepresentableError, "bits", tensors, group(num_bits=bits))


@pytest.mark.parametrize(
    "stated",
    [torch.ones(0, dtype=torch.int64), torch.tensor(4), torch.tensor([4, 16, 1]), torch.tensor([4.0, 16.0])],
)
def test_a_tensor_that_states_no_shape_is_refused(stated, tmp_path):
    tensors = {"m.weight_packed": PACKED, "m.weight_scale": torch.ones(4, 2), "m.weight_shape": stated}
    refused(tmp_path, MismatchError, "expected 2 integers in m.weight_shape", tensors, INT4)


@pytest.mark.parametrize("stated", [[2**62, 2**62], [-1, -1], [0, 0], [16, 4]])
def test_a_stated_shape_that_lies_is_refused(stated, tmp_path):
    tensors = {
        "m.weight_packed": PACKED,
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
        "fp8": fp8(CODES, SCALES), "mxfp4": {"e.w_blocks": BLOCKS, "e.w_scales": EXPONENTS},
        "compressed-tensors": {"m.weight_packed": PACKED, "m.weight_scale": torch.ones(4, 2)},
    }[quantization["quant_method"]]  # fmt: skip
    source = folder(tmp_path / "a", tensors, quantization)
    for number, value in enumerate(WRONG):
        config = {"quantization_config": changed(quantization, place, value)}
        (source / "config.json").write_text(json.dumps(config))
        try:
            wherry.convert(source, tmp_path / str(number), **ROUTE)
        except WherryError:
            assert not (tmp_path / str(number)).exists()
