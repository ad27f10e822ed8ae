"""What a config implies and the files lack ends with 5, what they have beyond it with 7, and each is named. A missing
tensor is not taken for one that is tied."""

from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import wherry
from tests.support.tiny_models import save_tiny, tiny_model
from wherry.errors import IncompleteError, UnrepresentableError

pytest.importorskip("transformers")
pytest.importorskip("torch")
UNTIED = (
    "llama",
    "mistral",
    "mixtral",
    "qwen2",
    "qwen3",
    "qwen3-moe",
    "gemma",
    "gemma2",
    "gemma3",
    "deepseek-v3",
)
WEIGHTS = "model.safetensors"


@pytest.fixture
def made(tmp_path):
    """A tiny model of a label, with attributes that replace those of its config, as transformers saves it."""

    def save(label, **more):
        return save_tiny(tmp_path / "hf", label, **more)

    return save


def change(folder, *, drop=(), add=None, **said):
    """Change the tensors and the config of a folder."""
    tensors = {
        name: array
        for name, array in load_file(folder / WEIGHTS).items()
        if not name.endswith(tuple(drop) or "/")
    }
    save_file({**tensors, **(add or {})}, folder / WEIGHTS, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **said}))


def planned(folder, label="llama"):
    to = "t5x-legacy" if "t5" in label else "maxtext"
    return wherry.plan(folder, folder.parent / "out", to=to)


def refused(folder, kind, *words, label="llama"):
    with pytest.raises(kind) as caught:
        planned(folder, label)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert caught.value.cure
    assert caught.value.exit_code == {IncompleteError: 5, UnrepresentableError: 7}[kind]


@pytest.mark.parametrize("label", UNTIED)
def test_a_head_that_is_not_tied_and_not_there(label, made):
    more = {"final_logit_softcapping": None} if label == "gemma2" else {}  # MaxText caps tied logits only
    folder = made(label, tie_word_embeddings=False, **more)
    assert planned(folder, label).tensors
    change(folder, drop=["lm_head.weight"])
    refused(
        folder, IncompleteError, "lm_head.weight", "config.json implies", "tie_word_embeddings", label=label
    )
    change(folder, tie_word_embeddings=True)
    assert planned(folder, label).tensors


def test_biases_of_qwen2(made):
    folder = made("qwen2")
    assert planned(folder).tensors
    change(folder, drop=[".bias"])
    refused(folder, IncompleteError, "self_attn.k_proj.bias", "config.json implies")


def test_norms_of_qwen3(made):
    folder = made("qwen3")
    change(folder, drop=["q_norm.weight", "k_norm.weight"])
    refused(folder, IncompleteError, "self_attn.k_norm.weight", "config.json implies")


def test_biases_that_no_qwen3_has(made):
    folder = made("qwen3")
    shapes = {"q": 64, "k": 32, "v": 32}
    add = {
        f"model.layers.{layer}.self_attn.{one}_proj.bias": np.ones(size, "f4")
        for layer in range(2)
        for one, size in shapes.items()
    }
    change(folder, add=add)
    refused(folder, UnrepresentableError, "without biases", "model.layers.0.self_attn.", "_proj.bias")


def test_dense_layers_among_experts_are_no_lack(made):
    folder = made("qwen3-moe", mlp_only_layers=[0])
    refused(folder, UnrepresentableError, "mlp_only_layers")


@pytest.mark.parametrize(("label", "wrong"), [("t5", "gated-gelu"), ("t5-1.1", "relu")])
def test_the_projections_of_t5(label, wrong, made):
    folder = made(label, tie_word_embeddings=label == "t5")
    assert planned(folder, label).tensors
    change(folder, feed_forward_proj=wrong, is_gated_act=wrong.startswith("gated"))
    with pytest.raises((IncompleteError, UnrepresentableError), match="feed_forward_proj"):
        planned(folder, label)


def test_the_router_s_bias_of_deepseek_v3(made):
    folder = made("deepseek-v3")
    change(folder, drop=["e_score_correction_bias"])
    refused(folder, IncompleteError, "mlp.gate.e_score_correction_bias", "config.json implies")


def test_a_shard_that_the_index_does_not_name(tmp_path):
    folder = tmp_path / "hf"
    tiny_model("llama").save_pretrained(folder, max_shard_size="20KB")
    index = folder / "model.safetensors.index.json"
    said = json.loads(index.read_text())
    lost = said["weight_map"]["lm_head.weight"]
    said["weight_map"] = {name: file for name, file in said["weight_map"].items() if file != lost}
    index.write_text(json.dumps(said))
    found = wherry.detect(folder)
    assert (found.verdict, lost in (found.reason or "")) == ("incomplete", True)
    for to in ("maxtext", "orbax"):
        with pytest.raises(IncompleteError, match=f"does not name {lost}"):
            wherry.plan(folder, tmp_path / "out", to=to)
    (folder / lost).rename(folder / lost.replace("-of-00", "-of-10"))  # of another save
    assert wherry.detect(folder).verdict == "ok"
