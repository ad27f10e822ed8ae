"""Small models of transformers with random weights, and their logits in float64: the source's side of every judgement.

Every parameter and every bias of a router is drawn anew, norms included: a norm of ones would hide a missing shift. In
most models `hidden_size` equals `heads * head_dim`: shapes alone do not show a transposed matrix, the logits must.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]

TOKENS = np.array([[3, 14, 15, 9, 26, 5, 35, 8, 59, 7], [1, 2, 40, 41, 9, 9, 13, 33, 58, 20]])
_COMMON = {
    "vocab_size": 60, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48,
    "num_hidden_layers": 3, "max_position_embeddings": 64,
}  # fmt: skip
_GRANITE = {
    **_COMMON, "embedding_multiplier": 12.0, "attention_multiplier": 0.3, "residual_multiplier": 0.7,
    "logits_scaling": 3.0,
}  # fmt: skip
_LATENT = {
    "vocab_size": 60, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": 3,
    "max_position_embeddings": 64, "intermediate_size": 48, "moe_intermediate_size": 24, "n_shared_experts": 2,
    "n_routed_experts": 8, "num_experts_per_tok": 3, "first_k_dense_replace": 1, "q_lora_rank": 12, "kv_lora_rank": 16,
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 6, "v_head_dim": 6,
}  # fmt: skip
_V3 = {**_LATENT, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "norm_topk_prob": True}
# Megatron-Core scores a group by as many of its experts as a token takes from each; transformers by two.
_V3_PAIRS = {**_V3, "n_routed_experts": 16, "num_experts_per_tok": 4}
_V2 = {
    **_LATENT, "n_group": 1, "topk_group": 1, "topk_method": "greedy", "norm_topk_prob": False,
    "routed_scaling_factor": 1.5,
}  # fmt: skip
_V32 = {
    **_V3,
    "index_n_heads": 16,  # of few heads, none may respond to several keys: a tie
    "index_head_dim": 12,
    "index_topk": 4,
}
_YARN = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 32,
    "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
}  # fmt: skip
_YARN_ALONE = {name: value for name, value in _YARN.items() if not name.startswith("mscale")}
_GPT_OSS = {
    **_COMMON, "head_dim": 16, "num_hidden_layers": 4, "sliding_window": 4, "num_local_experts": 4,
    "num_experts_per_tok": 2, "swiglu_limit": 0.5,
    "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0,
                        "truncate": False, "original_max_position_embeddings": 16},
}  # fmt: skip
_QWEN3_NEXT = {
    **_COMMON, "head_dim": 16, "num_hidden_layers": 8, "num_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 6, "linear_value_head_dim": 10, "partial_rotary_factor": 0.5,
}  # fmt: skip
_GLM4_MOE = {
    **_COMMON, "head_dim": 16, "first_k_dense_replace": 1, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "n_shared_experts": 1, "moe_intermediate_size": 24, "routed_scaling_factor": 2.5, "attention_bias": True,
    "use_qk_norm": True,
}  # fmt: skip
# Penzai's last norm has the epsilon 1e-6, whatever the others have.
_GPT_NEOX = {
    **{name: value for name, value in _COMMON.items() if name != "num_key_value_heads"}, "layer_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
}  # fmt: skip
_LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
_GEMMA4 = {
    **_COMMON, "head_dim": 16, "global_head_dim": 32, "num_hidden_layers": 6, "sliding_window": 4,
    "hidden_size_per_layer_input": 0, "final_logit_softcapping": 30.0,
}  # fmt: skip
_GEMMA4_SMALL = {**_GEMMA4, "hidden_size_per_layer_input": 12, "vocab_size_per_layer_input": 60}
# Layers 3 and 7 turn no positions. Chunks of 4 positions hide some of 10.
_LLAMA4 = {
    **_COMMON, "head_dim": 16, "num_hidden_layers": 8, "intermediate_size": 24, "intermediate_size_mlp": 48,
    "num_local_experts": 4, "attention_chunk_size": 4, "pad_token_id": 0,
}  # fmt: skip
_T5 = {
    "vocab_size": 60, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "num_decoder_layers": 3,
    "decoder_start_token_id": 0,
}  # fmt: skip


class Model(NamedTuple):
    """A class of transformers without `Config` or `ForCausalLM`, its settings, and wherry's family."""

    kind: str
    settings: Mapping[str, Any]
    family: str


MODELS: Mapping[str, Model] = {
    "llama": Model("Llama", _COMMON, "llama"),
    "llama-tied": Model("Llama", {**_COMMON, "tie_word_embeddings": True}, "llama"),
    "llama-3.1": Model("Llama", {**_COMMON, "rope_parameters": _LLAMA3}, "llama"),
    "llama-yarn": Model("Llama", {**_COMMON, "rope_parameters": _YARN_ALONE}, "llama"),
    "llama-head-dim": Model("Llama", {**_COMMON, "head_dim": 24}, "llama"),
    "llama-square": Model("Llama", {**_COMMON, "intermediate_size": 64}, "llama"),
    "phi3": Model("Phi3", {**_COMMON, "pad_token_id": 0}, "phi3"),
    "granite": Model("Granite", _GRANITE, "granite"),
    "granite-tied": Model("Granite", {**_GRANITE, "tie_word_embeddings": True}, "granite"),
    "qwen2-moe": Model("Qwen2Moe", {**_COMMON, "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True,
                                    "moe_intermediate_size": 24, "shared_expert_intermediate_size": 20}, "qwen2-moe"),
    "qwen2-moe-plain": Model("Qwen2Moe", {**_COMMON, "num_experts": 4, "num_experts_per_tok": 2,
                                          "moe_intermediate_size": 24, "shared_expert_intermediate_size": 20},
                             "qwen2-moe"),
    "smollm3": Model("SmolLM3", {**_COMMON, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
                                 "no_rope_layer_interval": 2, "tie_word_embeddings": False}, "smollm3"),
    "mistral": Model("Mistral", {**_COMMON, "sliding_window": None}, "mistral"),
    "mixtral": Model("Mixtral", {**_COMMON, "sliding_window": None, "num_local_experts": 4}, "mixtral"),
    "qwen2": Model("Qwen2", _COMMON, "qwen"),
    "qwen2-tied": Model("Qwen2", {**_COMMON, "tie_word_embeddings": True}, "qwen"),
    "qwen3": Model("Qwen3", {**_COMMON, "head_dim": 16}, "qwen"),
    "qwen3-yarn": Model("Qwen3", {**_COMMON, "head_dim": 16, "rope_parameters": _YARN_ALONE}, "qwen"),
    "qwen3-moe": Model("Qwen3Moe", {**_COMMON, "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2,
                                    "moe_intermediate_size": 24, "norm_topk_prob": True}, "qwen"),
    "gemma": Model("Gemma", {**_COMMON, "head_dim": 16}, "gemma"),
    "gemma2": Model("Gemma2", {**_COMMON, "head_dim": 16, "num_hidden_layers": 4, "query_pre_attn_scalar": 16,
                               "sliding_window": 4}, "gemma2"),
    "gemma3": Model("Gemma3Text", {**_COMMON, "head_dim": 16, "num_hidden_layers": 8, "query_pre_attn_scalar": 16,
                                   "sliding_window": 4}, "gemma3"),
    "gemma3-no-remainder": Model("Gemma3Text", {**_COMMON, "head_dim": 16, "num_hidden_layers": 12,
                                                "query_pre_attn_scalar": 16, "sliding_window": 4}, "gemma3"),
    "gemma4": Model("Gemma4Text", _GEMMA4, "gemma4"),
    "gemma4-experts": Model("Gemma4Text", {**_GEMMA4, "num_hidden_layers": 12, "attention_k_eq_v": True,
                                           "num_global_key_value_heads": 1, "enable_moe_block": True, "num_experts": 4,
                                           "top_k_experts": 2, "moe_intermediate_size": 24}, "gemma4"),
    "gemma4-e2b": Model("Gemma4Text", {**_GEMMA4_SMALL, "num_hidden_layers": 15, "num_key_value_heads": 1,
                                       "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 3,
                                       "num_kv_shared_layers": 5, "use_double_wide_mlp": True}, "gemma4-small"),
    "gemma4-e4b": Model("Gemma4Text", {**_GEMMA4_SMALL, "num_hidden_layers": 12, "num_kv_shared_layers": 6},
                        "gemma4-small"),
    "deepseek-v2": Model("DeepseekV2", _V2, "deepseek"),
    "deepseek-v2-lite": Model("DeepseekV2", {**_V2, "q_lora_rank": None}, "deepseek"),
    "deepseek-v3": Model("DeepseekV3", _V3, "deepseek"),
    "deepseek-v3-yarn": Model("DeepseekV3", {**_V3, "rope_parameters": _YARN}, "deepseek"),
    "deepseek-v3-pairs": Model("DeepseekV3", _V3_PAIRS, "deepseek"),
    "deepseek-v3-pairs-yarn": Model("DeepseekV3", {**_V3_PAIRS, "rope_parameters": _YARN}, "deepseek"),
    "deepseek-v3.2": Model("DeepseekV32", {**_V32, "rope_parameters": _YARN}, "deepseek"),
    "gpt-oss": Model("GptOss", _GPT_OSS, "gpt-oss"),
    "gpt-oss-published": Model("GptOss", {**_GPT_OSS, "swiglu_limit": 7.0}, "gpt-oss"),
    "qwen3-next": Model("Qwen3Next", _QWEN3_NEXT, "qwen3-next"),
    "qwen3-next-tied": Model("Qwen3Next", {**_QWEN3_NEXT, "num_hidden_layers": 4, "tie_word_embeddings": True},
                             "qwen3-next"),
    "glm4-moe": Model("Glm4Moe", _GLM4_MOE, "glm4-moe"),
    "glm4-moe-air": Model("Glm4Moe", {**_GLM4_MOE, "use_qk_norm": False, "n_shared_experts": 2}, "glm4-moe"),
    "stablelm": Model("StableLm", {**_COMMON, "partial_rotary_factor": 0.5}, "stablelm"),
    "stablelm-2": Model("StableLm", {**_COMMON, "partial_rotary_factor": 0.5, "use_qkv_bias": True}, "stablelm"),
    "gpt2": Model("GPT2", {"vocab_size": 60, "n_positions": 64, "n_embd": 64, "n_layer": 3, "n_head": 4}, "gpt2"),
    "gpt2-exact": Model("GPT2", {"vocab_size": 60, "n_positions": 64, "n_embd": 64, "n_layer": 3, "n_head": 4,
                                 "activation_function": "gelu", "tie_word_embeddings": False}, "gpt2"),
    "gpt-neox": Model("GPTNeoX", _GPT_NEOX, "gpt-neox"),
    "gpt-neox-serial": Model("GPTNeoX", {**_GPT_NEOX, "use_parallel_residual": False, "layer_norm_eps": 1e-5},
                             "gpt-neox"),
    "gpt-neox-approximate": Model("GPTNeoX", {**_GPT_NEOX, "use_parallel_residual": False, "hidden_act": "gelu_new"},
                                  "gpt-neox"),
    "olmo2": Model("Olmo2", {**_COMMON, "num_hidden_layers": 4, "pad_token_id": 0}, "olmo2"),
    "olmo3": Model("Olmo3", {**_COMMON, "num_hidden_layers": 8, "sliding_window": 4, "pad_token_id": 0}, "olmo3"),
    "llama4-scout": Model("Llama4Text", {**_LLAMA4, "num_hidden_layers": 4, "rope_parameters": _LLAMA3}, "llama4"),
    "llama4-maverick": Model("Llama4Text", {**_LLAMA4, "interleave_moe_layer_step": 2, "use_qk_norm": False}, "llama4"),
    "t5": Model("T5", {**_T5, "feed_forward_proj": "relu", "tie_word_embeddings": True}, "t5"),
    "t5-undivided": Model("T5", {**_T5, "feed_forward_proj": "relu", "tie_word_embeddings": True,
                                 "scale_decoder_outputs": False}, "t5"),
    "t5-unscaled": Model("T5", {**_T5, "feed_forward_proj": "relu", "tie_word_embeddings": False}, "t5"),
    "t5-1.1": Model("T5", {**_T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}, "t5"),
    "mt5": Model("MT5", {**_T5, "feed_forward_proj": "gated-gelu"}, "t5"),
    "umt5": Model("UMT5", {**_T5, "feed_forward_proj": "gated-gelu"}, "t5"),
    "t5-encoder": Model("T5", {**_T5, "feed_forward_proj": "gated-gelu"}, "t5"),
    "t5-encoder-one": Model("T5", {**_T5, "num_layers": 1, "feed_forward_proj": "relu"}, "t5"),
    "umt5-encoder-one": Model("UMT5", {**_T5, "num_layers": 1, "feed_forward_proj": "gated-gelu"}, "t5"),
}  # fmt: skip
_SAVED_BUFFERS = ("e_score_correction_bias", "layer_scalar")
UNTIED = ("t5-1.1", "mt5", "umt5")
_CLASSES = {"GPT2": "GPT2LMHeadModel", "T5": "T5ForConditionalGeneration", "MT5": "MT5ForConditionalGeneration",
            "UMT5": "UMT5ForConditionalGeneration", "Gemma3Text": "Gemma3ForCausalLM",
            "Llama4Text": "Llama4ForCausalLM", "Gemma4Text": "Gemma4ForCausalLM"}  # fmt: skip


def save(label: str, folder: Path, seed: int = 0) -> Path:
    """Write a model of the table as transformers saves it."""
    import torch
    import transformers

    kind, settings, _family = MODELS[label]
    torch.manual_seed(seed)
    config = getattr(transformers, f"{kind}Config")(**settings)
    classes = (
        {**_CLASSES, "T5": "T5EncoderModel", "UMT5": "UMT5EncoderModel"} if "encoder" in label else _CLASSES
    )
    name = classes.get(kind, f"{kind}ForCausalLM")
    model = getattr(transformers, name)(config)
    with torch.no_grad():
        saved = [one for name, one in model.named_buffers() if name.endswith(_SAVED_BUFFERS)]
        for parameter in [*model.parameters(), *saved]:
            parameter.add_(torch.randn_like(parameter) * 0.15)
    model.save_pretrained(folder)
    if label in UNTIED:
        _untie(folder, torch.randn(model.lm_head.weight.shape) * 0.3)
    return folder


def _untie(folder: Path, head: Any) -> None:
    """Give a T5 its own head: transformers 5 ties every T5 that it makes, and keeps apart what a file keeps apart."""
    from safetensors.torch import load_file, save_file

    file, config = folder / "model.safetensors", folder / "config.json"
    save_file({**load_file(file), "lm_head.weight": head}, file, {"format": "pt"})
    config.write_text(json.dumps({**json.loads(config.read_text()), "tie_word_embeddings": False}))


def logits(folder: Path, tokens: Array = TOKENS, change: Callable[[Any], None] | None = None) -> Array:
    """What transformers computes in float64 from a folder: nothing may be missing in it, or left over.

    An encoder alone gives its output; encoder and decoder get the same tokens.

    Args:
        folder: the model.
        tokens: [batch, position].
        change: what another system rounds, done to the loaded model.
    """
    import torch
    import transformers

    config = json.loads((folder / "config.json").read_text())
    model, report = getattr(transformers, config["architectures"][0]).from_pretrained(
        folder, output_loading_info=True, attn_implementation="eager", **_experts(config)
    )
    assert not any(report[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    inputs = {"input_ids": torch.tensor(tokens)}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = torch.tensor(tokens[:, ::-1].copy())
    model = model.double().eval()
    with torch.no_grad():
        if change is not None:
            change(model)
        found = model(**inputs)
    return (found.logits if "logits" in found else found.last_hidden_state).numpy()


def _experts(config: Mapping[str, Any]) -> dict[str, str]:
    """Experts one by one: the grouped kernel has no float64."""
    routed = any(name in config for name in ("num_local_experts", "num_experts", "n_routed_experts"))
    return {"experts_implementation": "eager"} if routed else {}


def apart(found: Array, wanted: Array) -> float:
    """The largest difference, as a share of the largest wanted value."""
    return float(np.abs(found - wanted).max() / np.abs(wanted).max())
