"""Megatron-Core itself as the judge: it loads what is written and computes the same logits, and what it saves is read.

Its models are of its own layers (`local`), which run on a processor; Transformer Engine's need a GPU. Latent attention
is Megatron's as well, but for what `tests/support/megatron_program.py` says of the sizes of its heads.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import wherry
from tests.support.libraries import loaded
from tests.support.megatron import ARGS, IDS, megatron_logits
from tests.support.oracles.cases import MEGATRON_INTO, MEGATRON_OUT_OF
from tests.support.oracles.huggingface import MODELS, save

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.slow

_DENSE = {**ARGS, "vocab_size": 60, "padded_vocab_size": 60}
_EXPERTS = {"num_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 48}
_NEOX = {
    "swiglu": False, "normalization": "LayerNorm", "add_bias_linear": True, "rotary_percent": 0.5,
    "num_query_groups": ARGS["num_attention_heads"], "kv_channels": ARGS["hidden_size"] // ARGS["num_attention_heads"],
}  # fmt: skip
_LATENT = {
    **{name: value for name, value in _DENSE.items() if name not in ("num_query_groups", "kv_channels")},
    "multi_latent_attention": True, "q_lora_rank": 12, "kv_lora_rank": 16, "qk_head_dim": 6, "qk_pos_emb_head_dim": 8,
    "v_head_dim": 10, "qk_layernorm": True, "norm_epsilon": 1e-6, "rope_type": "rope",
    "moe_layer_freq": [0] + [1] * (ARGS["num_layers"] - 1), "moe_shared_expert_intermediate_size": 48,
    "moe_ffn_hidden_size": 24, "num_experts": 8, "moe_router_topk": 3, "moe_router_topk_scaling_factor": 1.5,
    "moe_router_pre_softmax": True,
}  # fmt: skip
_LATENT_PAIRS = {
    **_LATENT, "num_experts": 16, "moe_router_topk": 4, "moe_router_num_groups": 4, "moe_router_group_topk": 2,
    "moe_router_pre_softmax": False, "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True,
    "moe_router_topk_scaling_factor": 2.5,
}  # fmt: skip
_LATENT_YARN = {
    "rope_type": "yarn", "rotary_scaling_factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 32.0,
    "beta_slow": 1.0,
}  # fmt: skip
# Where the norms lie that Transformer Engine makes a part of the next layer.
_NORMS = {"deepseek": "apart"}
# The arguments of a model that Megatron-Core makes and saves.
SAVED = {
    "llama": _DENSE,
    "smollm3": {**_DENSE, "no_rope_freq": 2},
    "mistral": {**_DENSE, "untie_embeddings_and_output_weights": False},
    "qwen3": {**_DENSE, "qk_layernorm": True},
    "qwen2": {**_DENSE, "add_qkv_bias": True},
    "mixtral": {**_DENSE, **_EXPERTS, "moe_router_pre_softmax": False},
    "qwen3-moe": {**_DENSE, **_EXPERTS, "qk_layernorm": True, "moe_router_pre_softmax": True},
    "gpt-oss": {
        **_DENSE, **_EXPERTS, "num_layers": 4, "swiglu": False, "quick_geglu": True, "glu_linear_offset": 1.0,
        "activation_func_clamp_value": 0.5, "softmax_type": "learnable", "window_size": [3, 0],
        "window_attn_skip_freq": 2, "add_bias_linear": True, "moe_router_pre_softmax": False,
        "position_embedding_type": "yarn", "yarn_rotary_scaling_factor": 4.0, "yarn_beta_fast": 32.0,
        "yarn_original_max_position_embeddings": 16, "yarn_beta_slow": 1.0, "yarn_correction_range_round_to_int": False,
    },
    "qwen2-moe": {
        **_DENSE, **_EXPERTS, "moe_router_pre_softmax": False, "add_qkv_bias": True,
        "moe_shared_expert_intermediate_size": 24, "moe_shared_expert_gate": True,
    },
    "stablelm": {**_DENSE, "normalization": "LayerNorm", "rotary_percent": 0.5, "add_qkv_bias": True},
    "gpt2": {**_DENSE, **_NEOX, "position_embedding_type": "learned_absolute", "bias_gelu_fusion": True,
             "untie_embeddings_and_output_weights": False},
    "gpt-neox-serial": {**_DENSE, **_NEOX, "bias_gelu_fusion": False},
    "gpt-neox-approximate": {**_DENSE, **_NEOX, "bias_gelu_fusion": True},
    "deepseek-v2": {**_LATENT, **_LATENT_YARN},
    "deepseek-v2-lite": {**_LATENT, "q_lora_rank": None},
    "deepseek-v3-pairs": _LATENT_PAIRS,
    "deepseek-v3-pairs-yarn": {**_LATENT_PAIRS, **_LATENT_YARN, "mscale": 0.5, "mscale_all_dim": 1.0},
    "glm4-moe": {
        **_DENSE, **_EXPERTS, "add_qkv_bias": True, "qk_layernorm": True, "rotary_percent": 0.5,
        "moe_layer_freq": [0] + [1] * (ARGS["num_layers"] - 1), "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True, "moe_router_topk_scaling_factor": 2.5,
        "moe_shared_expert_intermediate_size": 48,
    },
}  # fmt: skip


def torch_logits(folder):
    """What transformers computes for the same token ids."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(torch.tensor(IDS)).logits.numpy()


def close(found, wanted):
    assert np.abs(wanted).max() > 0.01
    np.testing.assert_allclose(found, wanted, atol=2e-5)


def read_back(folder, label):
    """What Megatron saved, as a folder of transformers."""
    out = Path(f"{folder}-out")
    receipt = wherry.convert(folder, out, to="huggingface", family=MODELS[label].family, lineage=False)
    assert receipt.lossless
    return out


def test_megatron_computes_what_the_source_computed(tmp_path):
    wanted, jobs = {}, []
    for label in MEGATRON_INTO:
        save(label, tmp_path / label)
        wanted[label] = torch_logits(tmp_path / label)
        step = tmp_path / f"{label}-megatron"
        norms = _NORMS.get(MODELS[label].family, "local")
        receipt = wherry.convert(
            tmp_path / label, step, to="megatron", options={"norms": norms}, lineage=False
        )
        assert receipt.lossless
        jobs.append({"load": str(step), "again": f"{step}-again"})
    for label, found in zip(MEGATRON_INTO, megatron_logits(*jobs), strict=True):
        close(found, wanted[label])
        back = read_back(f"{tmp_path / label}-megatron-again", label)
        assert loaded("huggingface", back) == loaded("huggingface", tmp_path / label)


def test_transformers_computes_what_megatron_saved(tmp_path):
    jobs = [{"save": str(tmp_path / label), "args": SAVED[label]} for label in MEGATRON_OUT_OF]
    for label, wanted in zip(MEGATRON_OUT_OF, megatron_logits(*jobs), strict=True):
        out = read_back(tmp_path / label, label)
        assert json.loads((out / "config.json").read_text())["vocab_size"] == 60
        close(torch_logits(out), wanted)
