"""Models whose layers are of several kinds: every layer of each kind is there, and no other.

What the target's layers of a kind cannot hold is refused with the reason.
"""

from __future__ import annotations

import json

import pytest

import wherry
from tests.support.tiny_models import save_tiny
from wherry.errors import IncompleteError, UnrepresentableError

pytest.importorskip("torch")
pytest.importorskip("transformers")


def edited(folder, label, edit):
    """A tiny model with other tensors."""
    from safetensors.torch import load_file, save_file

    file = save_tiny(folder / "hf", label) / "model.safetensors"
    tensors = load_file(file)
    edit(tensors)
    save_file(tensors, file, {"format": "pt"})
    return folder / "hf"


@pytest.mark.parametrize(
    ("label", "to", "more", "match"),
    [
        ("qwen3next", "maxtext", {"shared_expert_intermediate_size": 12}, "as wide as the others, 24, not 12"),
        ("qwen3next", "maxtext", {"num_hidden_layers": 5}, "the layers are not in blocks of four"),
        ("qwen3next", "maxtext", {"full_attention_interval": 2}, "the layers are not three with linear attention"),
        ("qwen3next", "maxtext", {"norm_topk_prob": False}, "norm_topk_prob is False in .* always uses True"),
        ("qwen3next", "megatron", {}, "megatron has no layout for family qwen3-next"),
        ("glm4moe", "megatron", {"num_experts_per_tok": 1}, "does not make the weight of a single expert 1"),
        ("deepseek-v3", "megatron", {"num_experts_per_tok": 1}, "does not make the weight of a single expert 1"),
        ("glm4moe", "maxtext", {}, "maxtext has no layout for family glm4-moe"),
        ("stablelm", "megatron", {"use_parallel_residual": True}, "parallel_residual is True .* always uses False"),
        ("gptneox", "penzai", {"layer_norm_eps": 1e-5}, "layer_norm_eps is 1e-05 .* but penzai always uses 1e-06"),
        ("gptneox", "penzai", {"tie_word_embeddings": True}, "it has an output layer of its own"),
        ("gptneox", "penzai", {"hidden_act": "silu"}, "it has no activation silu"),
        ("llama", "penzai", {"hidden_act": "gelu"}, "Penzai's feed-forward layers have no activation gelu"),
        ("t5", "t5x-orbax", {"relative_attention_num_buckets": 16}, "32 buckets of .* positions, this model has 16"),
        ("gptneox", "megatron", {}, "use_parallel_residual is True .* always uses False"),
        ("gptneox", "maxtext", {}, "maxtext has no layout for family gpt-neox"),
        ("gptneoxserial", "penzai", {}, "use_parallel_residual is False .* always uses True"),
        ("gptneoxserial", "megatron", {"hidden_act": "relu"}, "gelu or its approximation by tanh, not relu"),
        ("gptneoxserial", "megatron", {"attention_bias": False}, "the attention has no biases"),
        ("stablelm", "megatron", {"qk_layernorm": True}, "no layout for parameter key_norm of family stablelm"),
    ],
)  # fmt: skip
def test_what_a_system_cannot_hold_is_refused(label, to, more, match, tmp_path):
    save_tiny(tmp_path / "hf", label, **more)
    with pytest.raises(UnrepresentableError, match=match) as caught:
        wherry.plan(tmp_path / "hf", tmp_path / "out", to=to)
    assert caught.value.cure


def test_a_gpt_neox_as_it_was_released(tmp_path):
    """Its config spells rotary positions in attributes of its own, and its layers have what is computed anew."""
    import torch

    buffers = {"bias": torch.ones(1, 1, 64, 64, dtype=torch.uint8), "masked_bias": torch.tensor(-1e9),
               "rotary_emb.inv_freq": torch.ones(2)}  # fmt: skip
    computed = {
        f"gpt_neox.layers.{at}.attention.{name}": one.clone()
        for at in range(2)
        for name, one in buffers.items()
    }
    folder = edited(tmp_path, "gptneoxserial", lambda tensors: tensors.update(computed))
    config = json.loads((folder / "config.json").read_text())
    del config["rope_parameters"], config["attention_bias"]
    released = {"rotary_emb_base": 500, "rotary_pct": 0.5, "torch_dtype": "float16"}
    (folder / "config.json").write_text(json.dumps({**config, **released}))
    wherry.convert(folder, tmp_path / "there", to="megatron", lineage=False)
    args = json.loads((tmp_path / "there" / "megatron_args.json").read_text())
    assert (args["rotary_base"], args["rotary_percent"], args["bias_gelu_fusion"]) == (500, 0.5, False)
    wherry.convert(tmp_path / "there", tmp_path / "back", to="huggingface", lineage=False)
    again = json.loads((tmp_path / "back" / "config.json").read_text())
    assert (again["rotary_emb_base"], again["rotary_pct"], again["use_parallel_residual"]) == (
        500,
        0.5,
        False,
    )


DECAY = "model.layers.{}.linear_attn.A_log"


@pytest.mark.parametrize(
    ("gone", "copied", "error", "match"),
    [
        (DECAY.format(5), None, IncompleteError, "missing index 5 of linear_decay"),
        ("model.layers.7.self_attn.k_proj.weight", None, IncompleteError, "missing index 7 of full_key"),
        (
            None,
            DECAY.format(8),
            UnrepresentableError,
            "states 6 of linear_decay .* but the files have index 8",
        ),
        (None, DECAY.format(3), UnrepresentableError, "linear_decay .* has no index 3"),
    ],
    ids=["linear", "full", "beyond", "of-another-kind"],
)
def test_a_layer_of_a_cycle_that_is_missing_or_too_many_is_named(gone, copied, error, match, tmp_path):
    def edit(tensors):
        tensors.pop(gone, None)
        tensors.update({copied: tensors[DECAY.format(0)].clone()} if copied else {})

    folder = edited(tmp_path, "qwen3next", edit)
    with pytest.raises(error, match=match) as caught:
        wherry.plan(folder, tmp_path / "out", to="maxtext")
    assert "model.layers." in str(caught.value)


def test_layers_that_predict_further_tokens_stay_behind_with_the_reason(tmp_path):
    import torch

    folder = edited(
        tmp_path, "qwen3next", lambda tensors: tensors.update({"mtp.fc.weight": torch.ones(32, 64)})
    )
    planned = wherry.plan(folder, tmp_path / "out", to="maxtext")
    assert "mtp.fc.weight" not in str(list(planned.manifest.tensors))
    assert any("predict further tokens" in str(row) for row in planned.ignored)
