"""The number of parameters that a config promises, against the models that transformers builds."""

from __future__ import annotations

import pytest

from wherry.core.tensorspec import TensorSpec
from wherry.integrations.formats.huggingface.parameters import expected_elements, expected_parameters

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 50,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MODELS = [
    ("Llama", "ForCausalLM", {}),
    ("Llama", "Model", {}),
    ("Llama", "ForCausalLM", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    ("Llama", "ForCausalLM", {"head_dim": 16, "num_key_value_heads": None}),
    ("Mistral", "ForCausalLM", {"head_dim": 16}),
    ("Mixtral", "ForCausalLM", {"num_local_experts": 3}),
    ("Qwen2", "ForCausalLM", {}),
    ("Qwen3", "ForCausalLM", {"head_dim": 16, "tie_word_embeddings": True}),
    ("Qwen3", "ForCausalLM", {"head_dim": 16, "attention_bias": True}),
    ("Qwen3Moe", "ForCausalLM", {"num_experts": 4, "moe_intermediate_size": 24, "mlp_only_layers": [1]}),
    ("Qwen3Moe", "ForCausalLM", {"num_experts": 4, "moe_intermediate_size": 24, "decoder_sparse_step": 2}),
    ("Gemma", "ForCausalLM", {"head_dim": 8}),
    ("Gemma2", "ForCausalLM", {"head_dim": 8}),
    ("Gemma3", "ForCausalLM", {"head_dim": 8}),
    ("GPT2", "LMHeadModel", {}),
    ("GPT2", "Model", {"n_inner": 40}),
    ("Bert", "Model", {}),
    ("Bert", "ForMaskedLM", {}),
]
GPT2 = {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64, "vocab_size": 50}


def stored_config(model, config) -> dict:
    """The config as `save_pretrained` writes it."""
    config.architectures = [type(model).__name__]
    return config.to_diff_dict()


@pytest.mark.parametrize(("family", "suffix", "more"), MODELS)
def test_counts_as_transformers_builds(family, suffix, more):
    import torch
    import transformers

    name = "Gemma3Text" if family == "Gemma3" else family
    config = getattr(transformers, f"{name}Config")(**{**(GPT2 if family == "GPT2" else SMALL), **more})
    with torch.device("meta"):
        model = getattr(transformers, family + suffix)(config)
    assert expected_parameters(stored_config(model, config)) == sum(p.numel() for p in model.parameters())


LLAMA = {**SMALL, "model_type": "llama", "architectures": ["LlamaForCausalLM"]}


def test_a_known_number():
    """Counted by hand: embedding and head 2·50·32, norm 32, per layer q 32·32, k and v 32·16, o 32·32, mlp, norms."""
    layer = 32 * 32 * 2 + 2 * 32 * 16 + 3 * 32 * 48 + 2 * 32
    assert expected_parameters(LLAMA) == 2 * 50 * 32 + 32 + 3 * layer


@pytest.mark.parametrize(
    "change",
    [
        {"model_type": "unheard-of"},
        {"architectures": ["LlamaForSequenceClassification"]},
        {"architectures": None},
        {"quantization_config": {"quant_method": "fp8"}},
        {"hidden_size": "32"},
        {"num_attention_heads": 0},
        {"num_hidden_layers": 10**9},
        {"vocab_size": None},
        {"vocab_size": 10**15, "hidden_size": "x"},
        {"model_type": "bert", "architectures": ["BertForMaskedLM"], "tie_word_embeddings": False},
    ],
)
def test_never_a_guess(change):
    assert expected_parameters({**LLAMA, **change}) is None


def test_buffers_and_tied_copies_in_the_files_are_added():
    stored = [
        TensorSpec(("model.layers.0.self_attn.rotary_emb.inv_freq",), (16,), "float32"),
        TensorSpec(("lm_head.weight",), (50, 32), "float32"),
        TensorSpec(("model.norm.weight",), (32,), "float32"),
    ]
    assert expected_elements(LLAMA, stored) == expected_parameters(LLAMA) + 16
    tied = {**LLAMA, "tie_word_embeddings": True}
    assert expected_elements(tied, stored) == expected_parameters(tied) + 16  # the only one of both
    stored.append(TensorSpec(("model.embed_tokens.weight",), (50, 32), "float32"))
    assert expected_elements(tied, stored) == expected_parameters(tied) + 16 + 50 * 32
    assert expected_elements({}, stored) is None
