"""Hugging Face folders that hold more than one set of weights: precedence, variants, adapters, pipelines, steps."""

from __future__ import annotations

import json

import pytest
from safetensors.numpy import save_file

import wherry
from tests.support.formats import canonical, opened
from tests.support.huggingface import INDEX, ONES, detected, sharded


def test_several_sets_of_weights_have_a_stated_order(tmp_path):
    torch = pytest.importorskip("torch")
    save_file(ONES, tmp_path / "model.safetensors")
    save_file({"a": ONES["a"].astype("f2")}, tmp_path / "model.fp16.safetensors")
    torch.save({"a": torch.ones(2)}, tmp_path / "pytorch_model.bin")
    (tmp_path / "flax_model.msgpack").write_bytes(b"\x80")
    found = opened(tmp_path, "huggingface").detection
    assert found.evidence[0].file == "model.safetensors"
    passed = [one.file for one in found.evidence if "take precedence over .bin over msgpack" in one.seen]
    assert passed == ["flax_model.msgpack", "model.fp16.safetensors", "pytorch_model.bin"]
    assert wherry.detect(tmp_path, format="huggingface-flax").evidence[0].file == "flax_model.msgpack"
    for name, version in (
        ("model.safetensors", "single safetensors"), ("model.fp16.safetensors", "single safetensors"),
        ("pytorch_model.bin", "single pytorch_model.bin"),
    ):  # fmt: skip
        assert detected(tmp_path).format_version == version
        assert detected(tmp_path).evidence[0].file == name
        (tmp_path / name).unlink()
    assert detected(tmp_path) is None
    assert wherry.detect(tmp_path).format == "huggingface-flax"


def test_a_variant_with_an_index(tmp_path):
    sharded(tmp_path)
    (tmp_path / INDEX).rename(tmp_path / "model.safetensors.index.fp16.json")
    found = opened(tmp_path, "huggingface")
    assert found.detection.evidence[0].seen == "index of weights in several files, variant fp16"
    assert canonical(found, ("a",)) == ONES["a"].tobytes()


def test_an_adapter_is_called_one(tmp_path):
    save_file(ONES, tmp_path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "base_model_name_or_path": "meta/llama"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    seen = {one.file: one.seen for one in detected(tmp_path).evidence}
    assert seen["adapter_config.json"] == "a LORA adapter of meta/llama, not a whole model"


def test_a_pipeline_is_several_models(tmp_path):
    for part, stem in (("unet", "diffusion_pytorch_model"), ("text_encoder", "model")):
        (tmp_path / part).mkdir()
        save_file(ONES, tmp_path / part / f"{stem}.safetensors")
    (tmp_path / "scheduler").mkdir()
    names = {"_class_name": "P", **{part: ["x", "Y"] for part in ("unet", "text_encoder", "scheduler")}}
    (tmp_path / "model_index.json").write_text(json.dumps(names))
    found = wherry.detect(tmp_path)
    assert (found.verdict, found.reason) == (
        "unsupported",
        "ambiguous source: a diffusers pipeline of 2 models: text_encoder, unet",
    )
    assert wherry.detect(tmp_path, item="unet").verdict == "ok"
    below = [one.uri.rsplit("/", 1)[-1] for one in wherry.discover(tmp_path)]
    assert below == ["text_encoder", "unet"]


def test_a_trainers_folder_holds_a_model_and_its_steps(tmp_path):
    for name in (".", "checkpoint-5", "checkpoint-10"):
        (tmp_path / name).mkdir(exist_ok=True)
        save_file(ONES, tmp_path / name / "model.safetensors")
    found = [(one.step, one.uri) for one in wherry.discover(tmp_path)]
    assert [step for step, _ in found] == [None, 10, 5]
    assert wherry.detect(tmp_path, step=5).step == 5
