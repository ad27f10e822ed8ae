"""Tiny models of every family: settings of transformers' configs, the systems that each is converted to, and files."""

from __future__ import annotations

COMMON = {
    "vocab_size": 60,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "max_position_embeddings": 64,
}


GATED = {**COMMON, "num_key_value_heads": 2, "intermediate_size": 48}


T5 = {
    "vocab_size": 60,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": 4,
    "num_decoder_layers": 3,
}


LATENT = {
    **COMMON, "num_key_value_heads": 4, "intermediate_size": 48, "moe_intermediate_size": 24, "n_shared_experts": 1,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
    "q_lora_rank": 12, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "v_head_dim": 7,
}  # fmt: skip


INDEXER = {"index_n_heads": 16, "index_head_dim": 8, "index_topk": 3}


PHI3 = {**GATED, "pad_token_id": 0}


GRANITE = {
    **GATED, "embedding_multiplier": 12.0, "attention_multiplier": 0.3, "residual_multiplier": 0.22,
    "logits_scaling": 8.0,
}  # fmt: skip


GEMMA3 = {**GATED, "head_dim": 16, "query_pre_attn_scalar": 16}


LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip


GPT_OSS = {
    **COMMON, "num_key_value_heads": 2, "intermediate_size": 64, "head_dim": 8, "num_local_experts": 4,
    "num_experts_per_tok": 2, "sliding_window": 4, "num_hidden_layers": 4,
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 150000.0, "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0,
        "truncate": False, "original_max_position_embeddings": 16,
    },
}  # fmt: skip


QWEN2_MOE = {
    **GATED, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 20, "norm_topk_prob": True,
}  # fmt: skip


QWEN3_NEXT = {
    **GATED, "head_dim": 16, "num_hidden_layers": 4, "num_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 6, "linear_value_head_dim": 10, "partial_rotary_factor": 0.5,
}  # fmt: skip


SMOLLM3 = {
    **GATED, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False,
    "no_rope_layer_interval": 2,
}  # fmt: skip


GLM4_MOE = {
    **GATED, "head_dim": 16, "num_hidden_layers": 3, "first_k_dense_replace": 1, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 24, "routed_scaling_factor": 2.5,
    "attention_bias": True, "use_qk_norm": True,
}  # fmt: skip


STABLELM = {
    **GATED,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "partial_rotary_factor": 0.5,
    "use_qkv_bias": True,
}


# Penzai's last norm has the epsilon 1e-6.
GPT_NEOX = {
    **COMMON, "intermediate_size": 48, "layer_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
}  # fmt: skip


GEMMA4 = {
    **GATED, "head_dim": 16, "global_head_dim": 32, "num_hidden_layers": 6, "sliding_window": 8,
    "hidden_size_per_layer_input": 0,
}  # fmt: skip


GEMMA4_EXPERTS = {
    **GEMMA4, "attention_k_eq_v": True, "num_global_key_value_heads": 1, "enable_moe_block": True, "num_experts": 4,
    "top_k_experts": 2, "moe_intermediate_size": 24,
}  # fmt: skip


GEMMA4_SMALL = {
    **GEMMA4, "num_hidden_layers": 12, "num_kv_shared_layers": 6, "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 60,
}  # fmt: skip


# Layer 4 turns no positions; of 24 tokens, chunks of 8 hide some.
LLAMA4 = {
    **GATED, "num_hidden_layers": 4, "intermediate_size": 24, "intermediate_size_mlp": 48, "head_dim": 8,
    "num_local_experts": 4, "attention_chunk_size": 8, "interleave_moe_layer_step": 2, "pad_token_id": 0,
}  # fmt: skip


OLMO2 = {**GATED, "num_hidden_layers": 4, "pad_token_id": 0, "eos_token_id": 1}


OLMO3 = {**GATED, "num_hidden_layers": 4, "sliding_window": 4, "pad_token_id": 0, "eos_token_id": 1}


MODELS = {
    "llama": ("Llama", GATED),
    "llama-tied": ("Llama", {**GATED, "tie_word_embeddings": True}),
    "llama-3.1": ("Llama", {**GATED, "rope_parameters": LLAMA3}),
    "llama-head-dim": ("Llama", {**GATED, "head_dim": 16}),
    "mistral": ("Mistral", {**GATED, "sliding_window": None}),
    "mistral-window": ("Mistral", {**GATED, "sliding_window": 16}),
    "mixtral": ("Mixtral", {**GATED, "num_local_experts": 4}),
    "phi3": ("Phi3", PHI3),
    "phi3-window": ("Phi3", {**PHI3, "sliding_window": 16}),
    "granite": ("Granite", GRANITE),
    "granite-tied": ("Granite", {**GRANITE, "tie_word_embeddings": True}),
    "qwen2": ("Qwen2", GATED),
    "qwen3": ("Qwen3", {**GATED, "head_dim": 16}),
    "qwen3-moe": (
        "Qwen3Moe",
        {**GATED, "head_dim": 8, "num_experts": 4, "moe_intermediate_size": 24, "norm_topk_prob": True},
    ),
    "gemma": ("Gemma", {**GATED, "head_dim": 16}),
    "gemma2": ("Gemma2", {**GATED, "head_dim": 16, "query_pre_attn_scalar": 16}),
    "gemma2-27b": ("Gemma2", {**GATED, "head_dim": 16, "query_pre_attn_scalar": 18}),
    "gemma3": ("Gemma3Text", {**GEMMA3, "num_hidden_layers": 8}),
    "gemma3-no-remainder": ("Gemma3Text", {**GEMMA3, "num_hidden_layers": 6}),
    "gemma3-no-block": ("Gemma3Text", {**GEMMA3, "num_hidden_layers": 4}),
    "gemma4": ("Gemma4Text", GEMMA4),
    "gemma4-experts": ("Gemma4Text", GEMMA4_EXPERTS),
    "gemma4-e4b": ("Gemma4Text", {**GEMMA4_SMALL, "use_double_wide_mlp": False}),
    "gemma4-e2b": (
        "Gemma4Text",
        {
            **GEMMA4_SMALL,
            "num_hidden_layers": 15,
            "num_kv_shared_layers": 5,
            "num_key_value_heads": 1,
            "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 3,
        },
    ),
    "deepseek-v3": ("DeepseekV3", LATENT),
    "deepseek-v3.2": ("DeepseekV32", {**LATENT, **INDEXER}),
    "deepseek-v3-no-dense": ("DeepseekV3", {**LATENT, "first_k_dense_replace": 0}),
    "gpt-oss": ("GptOss", GPT_OSS),
    "llama4": ("Llama4Text", LLAMA4),
    "llama4-experts": ("Llama4Text", {**LLAMA4, "interleave_moe_layer_step": 1}),
    "olmo2": ("Olmo2", OLMO2),
    "olmo3": ("Olmo3", OLMO3),
    "qwen2moe": ("Qwen2Moe", QWEN2_MOE),
    "qwen3next": ("Qwen3Next", {**QWEN3_NEXT, "num_hidden_layers": 8}),
    "smollm3": ("SmolLM3", SMOLLM3),
    "stablelm": ("StableLm", STABLELM),
    "gptneox": ("GPTNeoX", GPT_NEOX),
    "gptneoxserial": ("GPTNeoX", {**GPT_NEOX, "use_parallel_residual": False}),
    "glm4moe": ("Glm4Moe", GLM4_MOE),
    "glm4moe-air": ("Glm4Moe", {**GLM4_MOE, "use_qk_norm": False, "n_shared_experts": 2}),
    "t5": ("T5", {**T5, "feed_forward_proj": "relu", "tie_word_embeddings": True}),
    "t5-1.1": ("T5", {**T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
    "mt5": ("MT5", {**T5, "feed_forward_proj": "gated-gelu"}),
    "umt5": ("UMT5", {**T5, "feed_forward_proj": "gated-gelu"}),
    "t5-encoder": ("T5", {**T5, "feed_forward_proj": "gated-gelu"}),
}


CLASSES = {"T5": "T5ForConditionalGeneration", "MT5": "MT5ForConditionalGeneration",
           "UMT5": "UMT5ForConditionalGeneration", "Gemma3Text": "Gemma3ForCausalLM",
           "Llama4Text": "Llama4ForCausalLM",
           "Gemma4Text": "Gemma4ForCausalLM"}  # fmt: skip


# What a target cannot hold: label and target → the words of the refusal.
REFUSED = {
    ("llama-3.1", "lingua"): "rope_scaling is .* but lingua always uses",
    ("llama-3.1", "penzai"): "rope_scaling is .* but penzai always uses",
    ("phi3-window", "maxtext"): "sliding_window is 16 in .*, but maxtext always uses 0",
    ("phi3-window", "meta"): "sliding_window is 16 in .*, but meta always uses 0",
    ("mistral-window", "maxtext"): "sliding_window is 16 in .*, but maxtext always uses 0",
}


UNTIED = ("t5-1.1", "mt5", "umt5")  # models that are published with an output layer of their own


def class_of(config, label=""):
    """The name of the class of transformers that has a config, by the config's name; `t5-encoder` is an encoder."""
    return "T5EncoderModel" if label == "t5-encoder" else CLASSES.get(config, f"{config}ForCausalLM")


def model_type(label):
    """The type of a tiny model; the code of the model is not read."""
    import transformers

    return getattr(transformers, f"{MODELS[label][0]}Config").model_type


def tiny_model(label, *, drawn=False, **more):
    """A tiny model of transformers.

    Args:
        label: a key of MODELS.
        drawn: whether every weight is drawn anew, norms and biases too, always the same.
        more: settings that replace those of the label.
    """
    import torch
    import transformers

    name, settings = MODELS[label]
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**settings, **more})
    model = getattr(transformers, class_of(name, label))(config)
    if label in UNTIED:
        model.lm_head.weight = torch.nn.Parameter(torch.randn(model.lm_head.weight.shape))
    with torch.no_grad():
        for parameter in model.parameters() if drawn else ():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def save_tiny(folder, label, *, drawn=False, **more):
    """The folder of a tiny model, as transformers saves it."""
    tiny_model(label, drawn=drawn, **more).save_pretrained(folder)
    return folder


LLAMA_SYSTEMS = ("maxtext", "lingua", "meta", "penzai")


TARGETS = {"llama": LLAMA_SYSTEMS, "phi3": LLAMA_SYSTEMS, "granite": LLAMA_SYSTEMS, "mistral": ("maxtext", "penzai"),
           "smollm3": ("megatron",), "qwen2moe": ("megatron",), "glm4moe": ("megatron",),
           "stablelm": ("megatron",), "gptneox": ("penzai",), "gptneoxserial": ("megatron",), "t5": ("t5x",),
           "mt5": ("t5x",),
           "umt5": ("t5x",)}  # fmt: skip


# Settings by the name of a config's attribute, for any class of transformers: a model of a few kilobytes.
SMALL = {
    "bos_token_id": 0, "d_ff": 24, "d_inner": 16, "d_kv": 8, "d_model": 16, "decoder_attention_heads": 2,
    "decoder_ffn_dim": 24, "decoder_layers": 2, "dim": 16, "embedding_size": 16, "encoder_attention_heads": 2,
    "encoder_ffn_dim": 24, "encoder_layers": 2, "eos_token_id": 0, "ffn_dim": 24, "first_k_dense_replace": 1,
    "head_dim": 8, "hidden_dim": 32, "hidden_size": 16, "image_size": 8, "intermediate_size": 24,
    "intermediate_size_mlp": 24, "max_position_embeddings": 32, "max_source_positions": 16,
    "max_target_positions": 16, "moe_intermediate_size": 8, "n_embd": 16, "n_group": 1, "n_head": 2, "n_heads": 2,
    "n_inner": 24, "n_layer": 2, "n_layers": 2, "n_positions": 32, "n_routed_experts": 4, "n_shared_experts": 1,
    "num_attention_heads": 2, "num_experts": 4, "num_experts_per_tok": 2, "num_heads": 2, "num_hidden_layers": 2,
    "num_key_value_heads": 2, "num_layers": 2, "num_local_experts": 4, "num_mel_bins": 8, "pad_token_id": 0,
    "patch_size": 4, "rope_scaling": None, "rotary_dim": 4, "shared_expert_intermediate_size": 8, "state_size": 4,
    "topk_group": 1, "vocab_size": 64, "word_embed_proj_dim": 16,
}  # fmt: skip


def small_config(name, settings=()):
    """A small config of a class of transformers: every size that its config has."""
    import transformers

    kind = getattr(transformers, name).config_class
    return kind(**{key: value for key, value in SMALL.items() if hasattr(kind(), key)}, **dict(settings))
