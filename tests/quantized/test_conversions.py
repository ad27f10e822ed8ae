"""Quantised checkpoints go where plain ones of their family go: the scheme is a word, the family stays as it is."""

from __future__ import annotations

import json
from functools import partial

import pytest
from safetensors.torch import load_file, save_file

import wherry
from tests.support.quantized import FP8, INT4, MXFP4, fp8, int4, mxfp4, save_quantized
from tests.support.torch import torch
from wherry.core.request import LayoutRequest
from wherry.errors import UnrepresentableError

MODELS = {
    "fp8-blocks": ("deepseek-v3", FP8, fp8(16, 16)),
    "fp8-rows": ("qwen3", {"quant_method": "fbgemm_fp8"}, fp8(1, 1 << 20, "_scale")),
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
