"""The models and forms in which pairs are judged, and MaxText's own configs of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from tests.support.oracles import files
from tests.support.oracles.huggingface import MODELS
from tests.support.oracles.leaves import Leaves

Array = np.ndarray[Any, np.dtype[Any]]

_NOT_IN_MAXTEXT = ("t5", "smollm3", "qwen2-moe", "glm4-moe", "stablelm", "gpt-neox", "gpt2")
_FOR_MEGATRON = ("deepseek-v3-pairs", "deepseek-v3-pairs-yarn")
LABELS = [
    label
    for label, model in MODELS.items()
    if model.family not in _NOT_IN_MAXTEXT
    and label not in _FOR_MEGATRON
    and not label.endswith(("-square", "-published"))
]
FORMS: Mapping[str, Mapping[str, str]] = {
    "scanned": {"scan_layers": "true"},
    "unscanned": {"scan_layers": "false"},
    "axis-0": {"scan_layers": "true", "param_scan_axis": "0"},
}
NEVER_SCANNED = ("gemma4-e2b", "gemma4-e4b")
# What runs each time, in addition to the scanned form of every model.
SAMPLED = {("llama", "unscanned"), ("gemma3", "unscanned"), ("deepseek-v3", "unscanned"), ("gemma2", "unscanned"),
           ("gpt-oss", "unscanned"), ("olmo3", "unscanned"), ("olmo2", "axis-0"), ("qwen3-next", "unscanned"),
           ("qwen3-next", "axis-0"),
           ("gemma4-experts", "unscanned"), ("llama4-maverick", "unscanned"),
           *((label, "unscanned") for label in NEVER_SCANNED),
           ("mixtral", "axis-0"), ("llama-3.1", "axis-0"), ("deepseek-v3", "axis-0"), ("gemma3", "axis-0")}  # fmt: skip
# Models that differ little from another one.
RARE = {
    "gemma3-no-remainder",
    "llama-head-dim",
    "deepseek-v2-lite",
    "qwen2-tied",
    "qwen3-yarn",
    "qwen3-next-tied",
}
# MaxText's gemma3 block and its routing with a bias go by the model's name, which a user states.
_DEEPSEEK3 = {"model_name": "deepseek3-671b", "override_model_config": True}
_GEMMA3 = {"model_name": "gemma3-4b", "override_model_config": True}
MODEL_NAMES: Mapping[str, Mapping[str, str]] = {
    "gemma3": _GEMMA3, "gemma3-no-remainder": _GEMMA3, "deepseek-v3": _DEEPSEEK3, "deepseek-v3-yarn": _DEEPSEEK3,
    "deepseek-v3.2": {**_DEEPSEEK3, "model_name": "deepseek3.2-671b"},
}  # fmt: skip

_COMMON = {
    "base_config": "base.yml", "base_emb_dim": 64, "base_num_query_heads": 4, "base_num_kv_heads": 2, "head_dim": 16,
    "base_mlp_dim": 48, "base_num_decoder_layers": 3, "vocab_size": 60, "normalization_layer_epsilon": 1e-6,
    "rope_max_timescale": 10000,
}  # fmt: skip
_YARN = {
    "rope_type": "yarn", "rope_factor": 4, "rope_attention_scaling": True, "rope_interleave": False,
    "max_position_embeddings": 64, "original_max_position_embeddings": 16,
}  # fmt: skip
_GELU = {"mlp_activations": ["gelu", "linear"], "logits_via_embedding": True}
_POSTS = {**_GELU, "use_post_attn_norm": True, "use_post_ffw_norm": True, "sliding_window_size": 4}
_LATENT = {
    **_COMMON, "base_emb_dim": 32, "base_num_kv_heads": 4, "base_moe_mlp_dim": 24, "first_num_dense_layers": 1,
    "num_experts": 8, "num_experts_per_tok": 3, "shared_experts": 2, "decoder_block": "deepseek",
    "attention_type": "mla", "q_lora_rank": 12, "kv_lora_rank": 16, "qk_nope_head_dim": 6, "qk_rope_head_dim": 8,
    "v_head_dim": 6, "rope_type": "yarn", "rope_factor": 4, "beta_fast": 32, "mscale": 1.0,
    "max_position_embeddings": 64, "original_max_position_embeddings": 16,
}  # fmt: skip
_GEMMA4 = {
    **_COMMON, **_POSTS, "decoder_block": "gemma4", "base_num_decoder_layers": 6, "override_model_config": True,
    "global_head_dim": 32, "local_rope_max_timescale": 10000, "global_rope_max_timescale": 1000000,
    "global_rope_proportion": 0.25, "v_norm_with_scale": False, "final_logits_soft_cap": 30.0,
}  # fmt: skip
_GEMMA4_SMALL = {
    **_GEMMA4, "decoder_block": "gemma4_small", "hidden_size_per_layer_input": 12, "vocab_size_per_layer_input": 60,
    "scan_layers": False,
}  # fmt: skip
_LLAMA4 = {
    **_COMMON, "decoder_block": "llama4", "base_num_decoder_layers": 8, "base_moe_mlp_dim": 24, "num_experts": 4,
    "shared_experts": 1, "chunk_attn_window_size": 4, "nope_layer_interval": 4, "temperature_tuning": True,
    "inhomogeneous_layer_cycle_interval": 4,
}  # fmt: skip
# MaxText's own configs, in the words of base.yml.
CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "llama": {**_COMMON, "decoder_block": "llama2", "rope_type": "default"},
    "llama-tied": {**_COMMON, "decoder_block": "llama2", "rope_type": "default", "logits_via_embedding": True,
                   "normalize_embedding_logits": False},
    "llama-3.1": {**_COMMON, "decoder_block": "llama2", "rope_type": "llama3.1", "rope_max_timescale": 500000},
    "llama-yarn": {**_COMMON, "decoder_block": "llama2", **_YARN},
    "phi3": {**_COMMON, "decoder_block": "llama2", "rope_type": "default"},
    "granite": {**_COMMON, "decoder_block": "llama2", "rope_type": "default"},
    "granite-tied": {**_COMMON, "decoder_block": "llama2", "rope_type": "default", "logits_via_embedding": True,
                     "normalize_embedding_logits": False},
    "mistral": {**_COMMON, "decoder_block": "mistral"},
    "mixtral": {**_COMMON, "decoder_block": "mixtral", "num_experts": 4, "num_experts_per_tok": 2,
                "base_moe_mlp_dim": 48},
    "qwen2": {**_COMMON, "decoder_block": "qwen2", "attention_bias": True},
    "qwen3": {**_COMMON, "decoder_block": "qwen3", "use_qk_norm": True},
    "qwen3-yarn": {**_COMMON, "decoder_block": "qwen3", "use_qk_norm": True, **_YARN, "rope_interleave": True},
    "qwen3-moe": {**_COMMON, "decoder_block": "qwen3_moe", "use_qk_norm": True, "num_experts": 4,
                  "num_experts_per_tok": 2, "base_moe_mlp_dim": 24, "base_mlp_dim": 24, "norm_topk_prob": True},
    "gpt-oss": {
        **_COMMON, "decoder_block": "gpt_oss", "base_num_decoder_layers": 4, "sliding_window_size": 4,
        "inhomogeneous_layer_cycle_interval": 2, "num_experts": 4, "num_experts_per_tok": 2, "attention_bias": True,
        "attention_sink": True, "mlp_bias": True, "routed_bias": True, "mlp_activations": ["sigmoid", "linear"],
        "mlp_activations_limit": 0.5, "rope_type": "yarn", "rope_factor": 4, "rope_interleave": False,
        "rope_truncate": False, "rope_attention_scaling": True, "max_position_embeddings": 64,
        "original_max_position_embeddings": 16,
    },
    "llama4-scout": {**_LLAMA4, "base_num_decoder_layers": 4, "rope_type": "llama3.1", "use_qk_norm": True},
    "llama4-maverick": {**_LLAMA4, "interleave_moe_layer_step": 2},
    "olmo3": {
        **_COMMON, "decoder_block": "olmo3", "base_num_decoder_layers": 8, "sliding_window_size": 4,
        "use_qk_norm": True,
        "inhomogeneous_layer_cycle_interval": 4, "rope_type": "default", "model_name": "olmo3-7b-pt",
        "override_model_config": True,
    },
    "olmo2": {
        **_COMMON, "decoder_block": "olmo3", "base_num_decoder_layers": 4, "sliding_window_size": 4096,
        "max_target_length": 2048, "use_qk_norm": True, "inhomogeneous_layer_cycle_interval": 4,
        "model_name": "olmo3-7b-pt", "override_model_config": True,
    },
    "qwen3-next": {
        **_COMMON, "decoder_block": "qwen3_next", "base_num_decoder_layers": 8, "inhomogeneous_layer_cycle_interval": 4,
        "num_experts": 4, "num_experts_per_tok": 2, "base_mlp_dim": 24, "base_moe_mlp_dim": 24, "shared_experts": 1,
        "gdn_num_key_heads": 2, "gdn_num_value_heads": 4, "gdn_key_head_dim": 6, "gdn_value_head_dim": 10,
        "partial_rotary_factor": 0.5, "norm_topk_prob": True,
    },
    "gemma": {**_COMMON, **_GELU, "decoder_block": "gemma"},
    "gemma2": {**_COMMON, **_POSTS, "decoder_block": "gemma2", "base_num_decoder_layers": 2,
               "final_logits_soft_cap": 30.0, "attn_logits_soft_cap": 50.0},
    "gemma3": {**_COMMON, **_POSTS, "decoder_block": "gemma3", "base_num_decoder_layers": 8, "head_dim": 256,
               "local_rope_max_timescale": 10000, "rope_max_timescale": 1000000, **_GEMMA3},
    "gemma4": {**_GEMMA4, "model_name": "gemma4-31b", "global_num_kv_heads": 0,
               "share_kv_projections": False},
    "gemma4-experts": {
        **_GEMMA4, "model_name": "gemma4-26b", "base_num_decoder_layers": 12, "global_num_kv_heads": 1,
        "share_kv_projections": True, "num_experts": 4, "num_experts_per_tok": 2, "base_moe_mlp_dim": 24,
        "shared_experts": 1, "norm_topk_prob": True,
    },
    "gemma4-e2b": {**_GEMMA4_SMALL, "model_name": "gemma4-e2b", "base_num_decoder_layers": 15, "base_num_kv_heads": 1,
                   "num_kv_shared_layers": 5, "use_double_wide_mlp": True},
    "gemma4-e4b": {**_GEMMA4_SMALL, "model_name": "gemma4-e4b", "base_num_decoder_layers": 12,
                   "num_kv_shared_layers": 6},
    "deepseek-v2": {**_LATENT, "routed_score_func": "softmax", "routed_scaling_factor": 1.5},
    "deepseek-v3": {**_LATENT, "routed_score_func": "sigmoid", "routed_bias": True, "routed_scaling_factor": 2.5,
                    "n_routing_groups": 4, "topk_routing_group": 2, **_DEEPSEEK3},
    "deepseek-v3.2": {**_LATENT, "routed_score_func": "sigmoid", "routed_bias": True, "routed_scaling_factor": 2.5,
                      "use_indexer": True, "indexer_n_heads": 16, "indexer_head_dim": 12, "indexer_topk": 4,
                      "model_name": "deepseek3.2-671b", "override_model_config": True},
}  # fmt: skip
# Where the forms of a family differ most, unscanned too.
UNSCANNED = (
    "gemma2",
    "gemma3",
    "deepseek-v3-yarn",
    "qwen3-next",
    "llama4-maverick",
    "gemma4-experts",
    *NEVER_SCANNED,
)
# MaxText itself has not computed these yet.
NOT_BY_ITSELF = {"olmo2", "olmo3", "gpt-oss", "phi3", "granite", "granite-tied"}
ITSELF_PAIRS = [(label, "scanned") for label in LABELS if label not in {*NOT_BY_ITSELF, *NEVER_SCANNED}] + [
    (label, "unscanned") for label in UNSCANNED
]
# Adapters that MaxText itself restores and saves: one model of each block whose projections lie otherwise.
ADAPTER_PAIRS = [
    ("llama", "scanned"), ("llama", "unscanned"), ("llama-3.1", "scanned"), ("llama-3.1", "axis-0"),
    ("mistral", "scanned"), ("mixtral", "unscanned"), ("qwen3", "scanned"), ("gemma", "scanned"),
    ("gemma2", "scanned"), ("gemma2", "unscanned"), ("gemma3", "scanned"),
    ("gemma3", "unscanned"), ("deepseek-v3", "scanned"), ("deepseek-v3", "unscanned"),
]  # fmt: skip

LINGUA_SYSTEMS = ("lingua", "meta")
LINGUA_INTO = ["llama", "llama-tied", "phi3", "granite", "granite-tied"]
META_INTO = ["llama", "llama-3.1", "phi3", "granite"]
LLAMA_OUT_OF = ["llama", "phi3", "granite"]  # from Lingua and Meta
# Gemma's own release: the model of transformers whose config is stated, and TransformerConfig of the library.
_GEMMA = {
    "num_embed": 60, "embed_dim": 64, "hidden_dim": 48, "num_heads": 4, "head_dim": 16, "num_kv_heads": 2,
    "attention_types": ["global"] * 3,
}  # fmt: skip
_GEMMA_POSTS = {"use_post_attn_norm": True, "use_post_ffw_norm": True}
_GEMMA2 = {
    **_GEMMA, **_GEMMA_POSTS, "attention_types": ["local", "global"] * 2, "attn_logits_soft_cap": 50.0,
    "final_logit_softcap": 30.0, "sliding_window_size": 4,
}  # fmt: skip
_GEMMA3_TYPES = (["local"] * 5 + ["global"]) * 2
_GEMMA3_RELEASE = {
    **_GEMMA, **_GEMMA_POSTS, "attention_types": _GEMMA3_TYPES[:8], "use_qk_norm": True, "sliding_window_size": 4,
    "global_base_frequency": 1_000_000, "transpose_gating_einsum": True,
}  # fmt: skip
DEEPMIND: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "gemma": ("gemma", _GEMMA),
    "gemma-one-group": ("gemma", {**_GEMMA, "num_kv_heads": 1}),
    "gemma-all-groups": ("gemma", {**_GEMMA, "num_kv_heads": 4}),
    "gemma-transposed": ("gemma", {**_GEMMA, "transpose_gating_einsum": True}),
    "gemma2": ("gemma2", _GEMMA2),
    "gemma2-transposed": ("gemma2", {**_GEMMA2, "transpose_gating_einsum": True}),
    "gemma3": ("gemma3", _GEMMA3_RELEASE),
    "gemma3-no-remainder": ("gemma3-no-remainder", {**_GEMMA3_RELEASE, "attention_types": _GEMMA3_TYPES}),
}
_NARROW = {"hidden_dim": 16, "num_heads": 2, "num_kv_heads": 1, "head_dim": 8}
_BY_WIDTH = {"query_pre_attn_norm": "width"}
# Of the widths of the released models, by which the library's configs are known: family and TransformerConfig.
DEEPMIND_DOCUMENTED: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "gemma": ("gemma", _GEMMA),
    "gemma2-2b": ("gemma2", {**_GEMMA2, **_NARROW, "embed_dim": 2304, "sliding_window_size": 4096}),
    "gemma2-27b": ("gemma2", {**_GEMMA2, **_NARROW, **_BY_WIDTH, "embed_dim": 4608, "sliding_window_size": 4096}),
}  # fmt: skip
PENZAI_INTO = ["llama", "llama-head-dim", "mistral", "phi3", "granite", "gpt-neox"]
PENZAI_OUT_OF = ["llama", "mistral", "phi3", "granite", "gpt-neox"]
# MaxText from PaxML, and PaxML from MaxText.
GPT3_WAYS = [("maxtext", "into"), ("paxml", "out_of"), ("paxml", "into"), ("maxtext", "out_of")]
# The minimal network joins heads, the scalable one keeps them apart, scanned or not.
T5X_FORMS = {
    "minimal": {"scan_layers": "false", "heads": "joined"},
    "scalable": {"scan_layers": "false", "heads": "apart"},
    "scanned": {"scan_layers": "true", "heads": "apart"},
    "scanned-axis-0": {"scan_layers": "true", "heads": "apart", "param_scan_axis": "0"},
}
# The scalable network has a table of relative biases in each layer, as of all models only UMT5 has.
T5X_PAIRS = [
    ("t5", "minimal", "t5x-orbax"), ("t5-1.1", "minimal", "t5x-legacy"), ("umt5", "scalable", "t5x-orbax"),
    ("mt5", "minimal", "t5x-orbax"), ("umt5", "scanned", "t5x-legacy"),
    ("umt5", "scanned-axis-0", "t5x-orbax"), ("t5-encoder", "minimal", "t5x-orbax"),
    ("t5-encoder-one", "minimal", "t5x-orbax"), ("umt5-encoder-one", "scalable", "t5x-orbax"),
    ("t5-unscaled", "minimal", "t5x-legacy"), ("t5-undivided", "minimal", "t5x-orbax"),
]  # fmt: skip


def leaves_of(found: Mapping[str, Array], config: Mapping[str, Any]) -> Leaves:
    """The leaves below `params/params`, the router's bias stacked on the scan axis as all others.

    MaxText 0.2.5 saves what is no `nnx.Param` below `nnx_aux/model`, and loads it from there or, with
    `load_parameters_path`, from among the parameters. Its scan stacks that on the first axis, wherever parameters are
    stacked (layers/nnx_decoders.py: `StateAxes({Param: param_scan_axis, ...: 0})`).
    """
    leaves = {**files.below(found, "params/params/"), **files.below(found, "nnx_aux/model/")}
    for name in (name for name in leaves if name.endswith("MoeBlock_0/gate/bias")):
        bias = leaves[name]
        leaves[name] = np.moveaxis(bias, 0, config.get("param_scan_axis", 1)) if bias.ndim > 1 else bias
    return Leaves(leaves)


# Megatron-Core's models of its own layers; Transformer Engine's need a GPU.
MEGATRON_INTO = ("llama", "llama-tied", "llama-3.1", "llama-head-dim", "phi3", "mistral", "mixtral", "qwen2", "qwen3",
                 "qwen3-moe", "smollm3", "qwen2-moe", "gpt-oss", "glm4-moe", "glm4-moe-air",
                 "stablelm", "stablelm-2", "gpt-neox-serial", "gpt-neox-approximate", "gpt2",
                 "gpt2-exact", "deepseek-v2", "deepseek-v2-lite", *_FOR_MEGATRON)  # fmt: skip
MEGATRON_OUT_OF = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3-moe", "smollm3", "qwen2-moe", "gpt-oss",
                   "glm4-moe", "stablelm", "gpt-neox-serial", "gpt-neox-approximate", "gpt2",
                   "deepseek-v2", "deepseek-v2-lite", *_FOR_MEGATRON)  # fmt: skip
# torchtitan itself loads what wherry wrote, and wherry reads what it saved.
TORCHTITAN = ("llama", "llama-tied", "llama-3.1", "qwen3", "qwen3-moe", "deepseek-v2-lite", "deepseek-v3",
              "deepseek-v3-yarn", "gpt-oss")  # fmt: skip

# Models whose GGUF files are converted, and those that transformers' own loader of GGUF reads.
GGUF = (
    "llama", "llama-tied", "llama-3.1", "llama-yarn", "llama-head-dim", "mistral", "mixtral", "qwen2", "qwen2-tied",
    "qwen3", "qwen3-yarn", "qwen3-moe", "gemma", "gemma2", "gemma3", "gemma3-no-remainder", "phi3", "gpt2",
)  # fmt: skip
# Models of which GGUF files are written: llama.cpp computes from them what the models compute.
GGUF_WRITTEN = (
    "llama", "llama-tied", "llama-3.1", "llama-yarn", "llama-head-dim", "mistral", "mixtral", "qwen2", "qwen2-tied",
    "qwen3", "qwen3-yarn", "qwen3-moe", "qwen2-moe-plain", "gemma", "gemma2", "gemma3", "gemma3-no-remainder", "phi3",
    "gpt-oss-published", "deepseek-v2", "deepseek-v2-lite", "deepseek-v3-pairs", "deepseek-v3-pairs-yarn",
)  # fmt: skip
# Those of which transformers' own loader of GGUF returns the tensors by their names in memory.
GGUF_LOADED = (
    "llama", "llama-tied", "llama-head-dim", "qwen2", "qwen2-tied", "qwen3", "qwen3-moe", "qwen2-moe-plain", "gemma2",
    "gemma3", "phi3",
)  # fmt: skip
# Those that transformers reads by the metadata alone.
GGUF_WRITTEN_FOR_TRANSFORMERS = ("llama", "llama-tied", "llama-head-dim")
GGUF_BY_TRANSFORMERS = ("llama", "llama-tied", "qwen2", "qwen3", "gemma2", "gemma3", "phi3", "gpt2")
