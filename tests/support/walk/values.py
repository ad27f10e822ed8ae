"""Alternative values for every attribute of the config classes that wherry has layouts for.

Attribute → classes → values. `attributes_of` in models.py lists the attributes that a class has; one for which no value
stands here fails the walk by name, until somebody decides whether wherry carries it. Sizes are alternatives too.
"""

from __future__ import annotations

from typing import Any

from tests.support.walk.change import ABSENT, Change, changes, in_file, to
from tests.support.walk.values_rope import OF_OTHERS, entries, entries_without_long, long_entries

GEMMAS = "gemma gemma2 gemma3_text"
QWENS = "qwen2 qwen3 qwen3_moe"
LATENT = "deepseek_v2 deepseek_v3 deepseek_v32"
V3S = "deepseek_v3 deepseek_v32"
SCALED = f"llama mistral mixtral granite smollm3 qwen2_moe {QWENS}"  # Phi3Config accepts no rule but longrope
LLAMAS = f"{SCALED} phi3"
NEOX = "gpt_neox gpt_neox_serial"
PARTS = f"qwen3_next glm4_moe stablelm {NEOX}"  # rotary positions turn a part of each head
GEMMA4 = "gemma4_text gemma4_small"
RMS = f"{LLAMAS} {GEMMAS} {LATENT} gpt_oss olmo2 olmo3 qwen3_next glm4_moe llama4_text {GEMMA4}"
DECODERS = f"{RMS} stablelm {NEOX}"
SEQ2SEQ = "t5 t5_1_1 mt5 umt5"
T5 = f"{SEQ2SEQ} t5_encoder"
EVERY = f"{DECODERS} {T5} bert gpt2"

WINDOW = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}
STEPS = {"num_hidden_layers": 6, "interleave_moe_layer_step": 2}
GROUPS = {"n_group": 2, "topk_group": 1}
ROUTED = {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 24}
DYNAMIC = {"rope_parameters.rope_type": "dynamic", "rope_parameters.factor": 4.0}
DYNAMIC_FULL = {name.replace(".", ".full_attention."): value for name, value in DYNAMIC.items()}
LOCAL, WHOLE, LINEAR, CHUNKED = "sliding_attention", "full_attention", "linear_attention", "chunked_attention"
FIVES = ([LOCAL] * 4 + [WHOLE]) * 3

# Attributes whose only alternatives are absent and null, or that have none; and why.
NONE: dict[str, str] = {
    "architectures": "it names the class of the model, which the walk loads",
    "model_type": "it names the class; another value is another class",
    "return_dict": "with false the decoders of transformers 5 compute nothing: they read the attributes of a tuple",
    "per_layer_config": "what global layers have for themselves decides which weights there are",
    "rope_parameters": "its entries are attributes of their own",
    "reorder_and_upcast_attn": "it computes in float32, which differs by what that rounds",
}

# Absent and null are tried of every other attribute that the saved file states; of these where it is stated here.
SIZES: dict[str, dict[str, list[Any]]] = {
    "hidden_size": {f"{DECODERS} bert": [48]},
    "head_dim": {"llama mistral mixtral llama4_text": [16, ABSENT, None],
                 f"qwen3 qwen3_moe {GEMMAS} {GEMMA4} gpt_oss qwen3_next": [12],
                 "glm4_moe": [12, in_file(ABSENT)],
                 "deepseek_v2": [in_file(8), ABSENT], V3S: [ABSENT]},
    "intermediate_size": {f"{DECODERS} bert": [40]},
    "intermediate_size_mlp": {"llama4_text": [40]},
    "n_embd": {"gpt2": [48]},
    "n_head": {"gpt2": [8]},
    "n_inner": {"gpt2": [40]},
    "n_layer": {"gpt2": [4, 1]},
    "n_positions": {"gpt2": [32]},
    "type_vocab_size": {"bert": [3]},
    "num_hidden_layers": {f"{LLAMAS} gemma {LATENT} bert": [4, 1], "gemma2": [4, 3], "gemma3_text": [6, 4, 13],
                          "gpt_oss": [2, 3], "olmo2 olmo3": [8, 3], "qwen3_next": [8, 5],
                          f"glm4_moe stablelm {NEOX}": [4, 1], "llama4_text": [2, 6, 8, 3], "gemma4_text": [12, 8],
                          "gemma4_small": [18, 13]},
    "num_attention_heads": {f"{LLAMAS} {GEMMAS} bert gpt_oss olmo2 olmo3 {PARTS} llama4_text {GEMMA4}": [8],
                            LATENT: [to(2, {"num_key_value_heads": 2})]},
    "num_key_value_heads": {"stablelm": [2],
                            "llama phi3 granite smollm3 qwen2_moe olmo2 olmo3 llama4_text": [4, 1, None, ABSENT],
                            f"mistral mixtral {QWENS} {GEMMAS} {GEMMA4} gpt_oss qwen3_next glm4_moe": [4, 1],
                            "deepseek_v2 deepseek_v3": [None, ABSENT], "deepseek_v32": [ABSENT]},
    "vocab_size": {EVERY: [72]},
    "kv_lora_rank": {LATENT: [12]},
    "q_lora_rank": {"deepseek_v2 deepseek_v3": [None, 8], "deepseek_v32": [8]},
    "index_head_dim": {"deepseek_v32": [12]},
    "index_n_heads": {"deepseek_v32": [12]},
    "qk_head_dim": {LATENT: [in_file(16)]},
    "qk_nope_head_dim": {LATENT: [8]},
    "qk_rope_head_dim": {LATENT: [8]},
    "v_head_dim": {LATENT: [8]},
    "d_model": {T5: [48]},
    "d_kv": {T5: [6]},
    "d_ff": {T5: [40]},
    "num_layers": {T5: [1, 4]},
    "num_decoder_layers": {T5: [1, None]},
    "num_heads": {T5: [2]},
    "linear_conv_kernel_dim": {"qwen3_next": [3]},
    "linear_key_head_dim": {"qwen3_next": [8]},
    "linear_num_key_heads": {"qwen3_next": [4, 1]},
    "linear_num_value_heads": {"qwen3_next": [2, 8]},
    "linear_value_head_dim": {"qwen3_next": [12]},
    "moe_intermediate_size": {f"qwen3_moe qwen2_moe glm4_moe {GEMMA4} {LATENT}": [16],
                              "qwen3_next": [16, to(16, {"shared_expert_intermediate_size": 16})]},
    "n_routed_experts": {LATENT: [4], "glm4_moe": [6]},
    "n_shared_experts": {f"{LATENT} glm4_moe": [2]},
    "num_experts": {f"qwen2_moe qwen3_next {GEMMA4}": [6]},
    "shared_expert_intermediate_size": {"qwen2_moe qwen3_next": [12]},
    "num_local_experts": {"mixtral qwen3_moe gpt_oss llama4_text": [6]},
    "relative_attention_num_buckets": {T5: [16]},
    "first_k_dense_replace": {f"{LATENT} glm4_moe": [0, 2, 3]},
}  # fmt: skip

VALUES: dict[str, dict[str, list[Any]]] = {
    # ---- of every class of transformers
    "_name_or_path": {EVERY: [in_file("org/other")]},
    "add_cross_attention": {"bert": [to(True, {"is_decoder": True})], "gpt2": [True]},
    "bos_token_id": {f"{DECODERS} mt5 bert gpt2": [7]},
    "chunk_size_feed_forward": {f"{DECODERS} {T5} gpt2": [1], "bert": [24]},
    "decoder_start_token_id": {"mt5 umt5": [7]},
    "dtype": {EVERY: [in_file("float32")]},
    "eos_token_id": {EVERY: [7, to([7, 8])]},
    "id2label": {EVERY: [to({"0": "A", "1": "B", "2": "C"})]},
    "is_encoder_decoder": {f"{DECODERS} bert gpt2": [True], T5: [False]},
    "label2id": {EVERY: [to({"A": 0, "B": 1, "C": 2})]},
    "output_attentions": {EVERY: [in_file(True)]},
    "output_hidden_states": {EVERY: [True]},
    "pad_token_id": {EVERY: [7]},
    "problem_type": {EVERY: ["regression"]},
    "tie_word_embeddings": {f"{LLAMAS} {LATENT} gpt_oss olmo2 olmo3 {PARTS} llama4_text": [True],
                            f"{GEMMAS} {GEMMA4} mt5 umt5 t5_encoder bert gpt2": [False],
                            "t5": [False, in_file(False, {"scale_decoder_outputs": ABSENT})],
                            "t5_1_1": [True, in_file(True, {"scale_decoder_outputs": ABSENT})]},
    "transformers_version": {EVERY: [in_file("4.30.0")]},
    "use_cache": {EVERY: [False]},
    # ---- the network
    "activation_function": {"gpt2": ["gelu", "relu", "silu", "tanh"]},
    "attention_probs_dropout_prob": {"bert": [0.5]},
    "attn_pdrop": {"gpt2": [0.5]},
    "embd_pdrop": {"gpt2 phi3": [0.5]},
    "embedding_multiplier": {"granite": [3.0, 1]},
    "logits_scaling": {"granite": [3.0, 1]},
    "residual_multiplier": {"granite": [0.5, 1]},
    "hidden_dropout": {f"stablelm {NEOX}": [0.5]},
    "hidden_dropout_prob": {"bert": [0.5]},
    "resid_pdrop": {"gpt2 phi3": [0.5]},
    "scale_attn_by_inverse_layer_idx": {"gpt2": [True]},
    "scale_attn_weights": {"gpt2": [False]},
    "summary_activation": {"gpt2": ["tanh"]},
    "summary_first_dropout": {"gpt2": [0.5]},
    "summary_proj_to_labels": {"gpt2": [False]},
    "summary_type": {"gpt2": ["mean"]},
    "summary_use_proj": {"gpt2": [False]},
    "attention_k_eq_v": {"gemma4_text": [False], "gemma4_small": [True]},
    "enable_moe_block": {"gemma4_text": [False], "gemma4_small": [to(True, ROUTED)]},
    "hidden_size_per_layer_input": {"gemma4_text": [8], "gemma4_small": [12, to(0, {"num_kv_shared_layers": 0})]},
    "num_kv_shared_layers": {
        "gemma4_text": [to(1, {"num_hidden_layers": 12, "hidden_size_per_layer_input": 8})],
        "gemma4_small": [0, 1, to(5, {"num_hidden_layers": 15, "layer_types": FIVES}),
                         to(12, {"num_hidden_layers": 18})],
    },
    "top_k_experts": {"gemma4_text": [1, 3], "gemma4_small": [1]},
    "use_double_wide_mlp": {"gemma4_text": [True], "gemma4_small": [False, to(False, {"num_kv_shared_layers": 0})]},
    "vocab_size_per_layer_input": {GEMMA4: [72]},
    "attention_chunk_size": {"llama4_text": [4, 64]},
    "attn_scale": {"llama4_text": [0.5, to(0.5, {"floor_scale": 4})]},
    "attn_temperature_tuning": {"llama4_text": [False, to(False, {"floor_scale": 4})]},
    "floor_scale": {"llama4_text": [4, 9]},
    "attention_bias": {f"llama granite smollm3 llama4_text {GEMMA4} olmo2 olmo3 qwen3 {GEMMAS}": [True],
                       f"qwen3_moe qwen3_next {LATENT}": [True],
                       f"gpt_oss glm4_moe {NEOX}": [False]},
    "attention_multiplier": {"granite": [0.5, 1]},
    "attention_dropout": {DECODERS: [0.5]},
    "classifier_dropout": {f"{T5} bert {NEOX}": [0.5]},
    "dense_act_fn": {T5: ["silu"]},
    "dropout_rate": {T5: [0.5]},
    "feed_forward_proj": {"t5": ["gelu", "gated-gelu", "gated-silu"],
                          "t5_1_1 mt5 umt5 t5_encoder": ["relu", "gated-silu", "gated-relu"]},
    "hidden_act": {f"{LLAMAS} {LATENT} olmo2 olmo3 qwen3_next glm4_moe stablelm llama4_text": ["gelu", "relu",
                                                                                               "gelu_pytorch_tanh"],
                   "gemma": ["silu", "relu", in_file("gelu")],
                   f"bert {NEOX}": ["silu", "relu", "gelu_new", "tanh"],
                   "gpt_oss": ["gelu"]},
    "index_topk": {"deepseek_v32": [5, 64]},
    "hidden_activation": {f"gemma2 gemma3_text {GEMMA4}": ["silu", "gelu", "relu"]},
    "initializer_factor": {T5: [2.0]},
    "initializer_range": {f"{DECODERS} bert gpt2": [0.5]},
    "is_decoder": {f"{T5} bert {NEOX}": [True]},
    "is_gated_act": {"t5": [True], "t5_1_1 mt5 umt5 t5_encoder": [False]},
    "layer_norm_eps": {f"bert stablelm {NEOX}": [0.1]},
    "layer_norm_epsilon": {f"{T5} gpt2": [0.1]},
    "max_position_embeddings": {"phi3": [128],
                                f"{SCALED} {PARTS} gemma gemma2 olmo2 llama4_text {LATENT}": [128, 16, to(16, DYNAMIC)],
                                "gpt_oss": [128, 16],
                                f"gemma3_text {GEMMA4} olmo3": [128, 16, to(16, DYNAMIC_FULL)], "bert": [32]},
    "original_max_position_embeddings": {"phi3": [48]},
    "mlp_bias": {"llama granite smollm3 deepseek_v2 deepseek_v32": [True]},
    "pretraining_tp": {"llama deepseek_v2 deepseek_v3": [2]},
    "relative_attention_max_distance": {T5: [24]},
    "rms_norm_eps": {RMS: [0.1]},
    "rope_interleave": {"deepseek_v3": [False]},
    "scale_decoder_outputs": {"t5": [in_file(False)], "t5_1_1": [in_file(True)],
                              "t5_encoder": [in_file(True), in_file(False)]},
    # ---- attention
    "attn_logit_softcapping": {"gemma2": [2.0, None], "gemma3_text": [2.0]},
    "final_logit_softcapping": {"gemma2": [2.0, None], f"gemma3_text {GEMMA4}": [2.0]},
    "layer_types": {
        "qwen2 qwen3": [to([LOCAL, WHOLE], WINDOW), in_file(None, WINDOW)],
        "deepseek_v32": [in_file(["indexed_attention"] * 3)],
        "smollm3 qwen2_moe": [to([LOCAL, LOCAL], {"use_sliding_window": True, "sliding_window": 8})],
        "qwen3_next": [to([WHOLE] * 4), to([LINEAR, WHOLE] * 2), to([WHOLE] + [LINEAR] * 3)],
        "gpt_oss": [to([WHOLE] * 4), to([LOCAL] * 4), to([WHOLE, LOCAL] * 2)],
        "olmo3": [to([WHOLE] * 4), to([LOCAL] * 4)],
        "gemma4_text": [to([WHOLE] * 6), to([LOCAL, WHOLE] * 3)],
        "gemma4_small": [to([WHOLE] * 12), to([LOCAL, WHOLE] * 6), to([LOCAL, LOCAL, WHOLE] * 4),
                         to(FIVES, {"num_hidden_layers": 15, "num_kv_shared_layers": 5})],
        "llama4_text": [to([WHOLE] * 4), to([CHUNKED] * 4), to([CHUNKED, WHOLE] * 2)],
        "gemma2": [to([WHOLE, WHOLE]), to([LOCAL, LOCAL]), to([WHOLE, LOCAL])],
        "gemma3_text": [to([WHOLE] * 8), to([LOCAL, WHOLE] * 4), to([LOCAL] * 4 + [WHOLE] * 4)],
    },
    "qkv_bias": {"qwen2_moe": [False]},
    "qk_layernorm": {"stablelm": [True]},
    "use_parallel_residual": {"stablelm gpt_neox_serial": [True], "gpt_neox": [False]},
    "use_qkv_bias": {"stablelm": [False]},
    "max_window_layers": {"qwen2_moe": [1, to(1, WINDOW)], "qwen2 qwen3": [1, to(1, WINDOW)]},
    "query_pre_attn_scalar": {"gemma2 gemma3_text": [32, 18]},
    "swiglu_alpha": {"gpt_oss": [1.0]},
    "swiglu_limit": {"gpt_oss": [0.5]},
    "no_rope_layer_interval": {"smollm3": [1, 3],
                               "llama4_text": [1, 2, to(2, {"interleave_moe_layer_step": 1}), to(3, STEPS), 8]},
    "no_rope_layers": {"smollm3": [to([0, 1]), to([1, 1]), to([0, 0])],
                       "llama4_text": [to([1] * 4), to([0] * 4), to([0, 1, 1, 1]), to([1, 0, 1, 0]),
                                       to([0, 1, 0, 1])]},
    "use_qk_norm": {"llama4_text glm4_moe": [False]},
    "sliding_window": {"olmo3": [3, 8], "smollm3 qwen2_moe": [8, to(8, {"use_sliding_window": True})],
                       "mistral mixtral phi3 gpt_oss": [8], QWENS: [4, to(4, WINDOW)],
                       f"gemma2 gemma3_text {GEMMA4}": [4, 4096]},
    "_sliding_window_pattern": {"gemma3_text": [in_file(3)]},
    "use_bidirectional_attention": {GEMMAS: [True], GEMMA4: ["all", "vision"]},
    "use_sliding_window": {"smollm3 qwen2_moe": [to(True, {"sliding_window": 8})],
                           QWENS: [to(True, {"sliding_window": 8, "max_window_layers": 0})]},
    # ---- experts
    "decoder_sparse_step": {"qwen3_moe qwen2_moe qwen3_next": [2]},
    "interleave_moe_layer_step": {"llama4_text": [1, 4, 3]},
    "moe_layers": {"llama4_text": [to([0, 1, 2, 3]), to([0, 2]), to([3]), to([]), to([1, 2, 3])]},
    "mlp_layer_types": {"deepseek_v32": [to(["dense", "dense", "sparse"]), to(["sparse", "dense", "sparse"])]},
    "mlp_only_layers": {"qwen3_moe qwen2_moe qwen3_next": [to([0])]},
    "n_group": {"deepseek_v2": [2, to(4, {**GROUPS, "topk_method": "group_limited_greedy"})], V3S: [4, 1],
                "glm4_moe": [2]},
    "norm_topk_prob": {"deepseek_v2": [True], f"qwen3_moe qwen2_moe qwen3_next glm4_moe {V3S}": [False]},
    "num_experts_per_tok": {"mixtral qwen3_moe qwen2_moe qwen3_next glm4_moe gpt_oss": [1, 3], "llama4_text": [2],
                            LATENT: [1, 3]},
    "num_nextn_predict_layers": {"deepseek_v3 glm4_moe": [0, 2]},
    "output_router_logits": {f"mixtral qwen3_moe qwen2_moe qwen3_next glm4_moe {LATENT} gpt_oss llama4_text": [True]},
    "routed_scaling_factor": {f"{LATENT} glm4_moe": [2.0]},
    "router_aux_loss_coef": {"mixtral qwen3_moe qwen2_moe qwen3_next gpt_oss llama4_text": [0.5]},
    "router_jitter_noise": {"mixtral llama4_text": [0.5]},
    "topk_group": {"deepseek_v2": [1, to(2, {**GROUPS, "topk_method": "group_limited_greedy"})], V3S: [2],
                   "glm4_moe": [to(2, GROUPS)]},
    "topk_method": {"deepseek_v2": [to("group_limited_greedy", GROUPS)]},
}  # fmt: skip

# Attributes that no class declares, as files of earlier releases and of other software spell them.
IN_FILES: dict[str, dict[str, list[Any]]] = {
    "aux_loss_alpha": {LATENT: [in_file(0.5)]},
    "attention_bias": {"mistral mixtral qwen2": [in_file(False)]},
    "bos_token_id": {"t5 t5_1_1 umt5 t5_encoder": [7]},
    "cache_implementation": {"gemma2 gemma3_text": [in_file("hybrid")]},
    "decoder_start_token_id": {"t5 t5_1_1 t5_encoder": [7]},
    "ep_size": {LATENT: [in_file(2)]},
    "full_attention_interval": {"qwen3_next": [in_file(4, {"layer_types": ABSENT})]},
    "head_dim": {"qwen2 qwen2_moe granite phi3 smollm3 olmo2 olmo3": [16]},
    "for_llm_compressor": {"llama4_text": [in_file(True)]},
    "hidden_activation": {"gemma": [in_file("silu"), in_file(None)]},
    "mlp_bias": {"mistral": [in_file(False)]},
    "moe_layer_freq": {LATENT: [in_file(2)]},
    "num_experts": {"qwen3_moe": [in_file(4, {"num_local_experts": ABSENT})]},
    "n_ctx": {"gpt2": [in_file(64)]},
    "partial_rotary_factor": {f"{LLAMAS} {GEMMAS} olmo2 llama4_text {LATENT}": [in_file(0.5)],
                              PARTS: [in_file(1.0, {"rope_parameters": ABSENT}), in_file(1.0)]},
    "position_embedding_type": {"bert": [in_file("relative_key")]},
    "pretraining_tp": {"deepseek_v32": [in_file(2)]},
    "rope_local_base_freq": {"gemma3_text": [in_file(500.0, {"rope_parameters": ABSENT})]},
    "rope_scaling": {
        f"{SCALED} {PARTS} gemma gemma2 olmo2 llama4_text {LATENT}": [
            in_file({"type": "linear", "factor": 4.0}, {"rope_parameters": ABSENT}),
            in_file({"rope_type": "linear", "factor": 4.0}, {"rope_parameters": ABSENT}),
            in_file({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024},
                    {"rope_parameters": ABSENT}),
            in_file(None, {"rope_parameters": ABSENT}),
        ],
        "gemma3_text": [in_file({"rope_type": "linear", "factor": 4.0}, {"rope_parameters": ABSENT})],
    },
    "rope_theta": {DECODERS: [in_file(500.0, {"rope_parameters": ABSENT})]},
    "rotary_emb_base": {NEOX: [in_file(500.0, {"rope_parameters": ABSENT})]},
    "rotary_pct": {NEOX: [in_file(0.5, {"rope_parameters": ABSENT}), in_file(0.25)]},
    "scoring_func": {LATENT: [in_file("softmax"), in_file("sigmoid")]},
    "seq_aux": {LATENT: [in_file(False)]},
    "sliding_window_pattern": {"gemma3_text": [in_file(4, {"layer_types": ABSENT})]},
    "tie_last_hidden_states": {f"llama {T5}": [in_file(False)]},
    "topk_method": {V3S: [in_file("noaux_tc")]},
    "torch_dtype": {EVERY: [in_file("float64")]},
    "use_mrope": {QWENS: [in_file(True)]},
}  # fmt: skip

_TURNED_PART = {"rope_parameters.partial_rotary_factor": [0.25, 1.0]}
_ROPE = {
    "phi3": long_entries(4, "rope_parameters."),
    "llama mistral mixtral qwen2 qwen2_moe qwen3_moe olmo2 smollm3": entries(4, "rope_parameters."),
    # Its norms after the rotation undo what multiplies all of a head.
    "llama4_text": entries(4, "rope_parameters.", {"use_qk_norm": False}),
    "granite": {**entries(4, "rope_parameters."), "rope_parameters.rope_theta": [500.0, 777.5]},
    "qwen3 gemma gemma2": entries(8, "rope_parameters."),
    "qwen3_next glm4_moe": {**entries(4, "rope_parameters."), **_TURNED_PART},
    NEOX: {**entries(2, "rope_parameters."), **_TURNED_PART},
    # StableLmAttention takes a part of a head, and the rule `proportional` the other elements too.
    "stablelm": {
        **entries(4, "rope_parameters."),
        **_TURNED_PART,
        "rope_parameters.rope_type": [
            one
            for one in entries(4, "rope_parameters.")["rope_parameters.rope_type"]
            if one.value != "proportional"
        ],
    },
    LATENT: entries(2, "rope_parameters."),
    # GptOssRotaryEmbedding turns a part of a head by no other rule.
    "gpt_oss": {
        **entries(4, "rope_parameters."),
        "rope_parameters.truncate": [True],
        "rope_parameters.partial_rotary_factor": [
            to(0.25, {"rope_parameters.rope_type": "proportional", "rope_parameters.rope_theta": 100.0})
        ],
    },
    "olmo3": {
        **entries(4, "rope_parameters.full_attention."),
        **entries(4, "rope_parameters.sliding_attention."),
    },
    GEMMA4: {
        **entries_without_long(16, "rope_parameters.full_attention."),
        **entries_without_long(8, "rope_parameters.sliding_attention."),
    },
    "gemma3_text": {
        **entries(8, "rope_parameters.full_attention."),
        **entries(8, "rope_parameters.sliding_attention."),
    },
}


# Attribute → classes → why no value that was tried changes an output, where the family neither ignores the attribute
# nor knows one value alone. Any other that changes nothing fails the walk: its alternatives are bad.
HARMLESS: dict[str, dict[str, str]] = {
    "_sliding_window_pattern": {"gemma3_text": "the class reads sliding_window_pattern, and layer_types before it"},
    "attention_bias": {"mistral mixtral qwen2": "an attribute of other classes"},
    "attn_logit_softcapping": {"gemma3_text": "Gemma3Attention does not pass it on"},
    "full_attention_interval": {"qwen3_next": "another interval is another list of layer_types, which are walked"},
    "head_dim": {LATENT: "the class computes it"},
    "hidden_activation": {"gemma": "an attribute of other classes"},
    "layer_types": {"deepseek_v32": "it chooses a cache"},
    "mlp_bias": {"mistral": "an attribute of other classes", "deepseek_v32": "the class has no such bias"},
    "intermediate_size": {"qwen3_moe qwen2_moe": "the width of dense layers, of which it has none"},
    "max_position_embeddings": {"gpt_oss": "yarn reads original_max_position_embeddings",
                                "phi3": "positions that are not scaled do not read it"},
    "moe_layer_freq": {LATENT: "read by DeepSeek's own code alone"},
    "norm_topk_prob": {"deepseek_v2": "the router of transformers does not read it"},
    "num_decoder_layers": {"t5_encoder": "there is no decoder"},
    "num_key_value_heads": {"deepseek_v2 deepseek_v3": "latent attention has as many as heads"},
    "num_nextn_predict_layers": {"deepseek_v3": "modules of speculative decoding, which are not loaded"},
    "partial_rotary_factor": {
        f"{LLAMAS} {GEMMAS} olmo2 llama4_text {LATENT}": "positions that are not scaled do not read it",
        NEOX: "the class reads rotary_pct",
    },
    "pretraining_tp": {f"llama {LATENT}": "transformers 5 does not read it"},
    "qk_head_dim": {LATENT: "the class computes it"},
    "rope_parameters.full_attention.mrope_section": {f"gemma3_text {GEMMA4} olmo3": "of models with images"},
    "rope_parameters.full_attention.truncate": {
        f"gemma3_text {GEMMA4} olmo3": "read outside the tables"
    },
    "rope_parameters.mrope_section": {
        f"{LLAMAS} {PARTS} gemma gemma2 olmo2 llama4_text {LATENT} gpt_oss": "of models with images"
    },
    **{f"rope_parameters.{name}": {"phi3": "of a rule that Phi3Config does not accept"} for name in OF_OTHERS},
    "rope_parameters.truncate": {"gpt_oss": "the ramp of a head of four pairs begins and ends at the same ones",
                                 "phi3": "of a rule that Phi3Config does not accept"},
    **{
        f"rope_parameters.{name}": {"phi3": "the sequence is shorter than original_max_position_embeddings"}
        for name in ("long_factor", "original_max_position_embeddings")
    },
    "rope_parameters.sliding_attention.mrope_section": {f"gemma3_text {GEMMA4} olmo3": "of models with images"},
    "rope_parameters.sliding_attention.truncate": {
        f"gemma3_text {GEMMA4} olmo3": "read outside the tables"
    },
    **{
        f"rope_parameters.{kind}_attention.{name}_factor": {GEMMA4: "of a rule that the class does not know"}
        for kind in ("full", "sliding")
        for name in ("long", "short")
    },
    "rope_theta": {GEMMA4: "the class reads its tables alone", NEOX: "the class reads rotary_emb_base"},
    "rotary_emb_base": {NEOX: "without rotary_pct two elements of eight turn, whose frequency no base changes"},
    "scale_decoder_outputs": {"t5_encoder": "there is no decoder"},
    "scoring_func": {LATENT: "read by DeepSeek's own code alone"},
    "tie_word_embeddings": {"mt5 umt5 t5_encoder": "the class ties whatever it says"},
    "topk_method": {V3S: "read by DeepSeek's own code alone"},
    "use_bidirectional_attention": {"gemma2": "read by kernels that make no mask, which the class lacks on a CPU"},
    "use_mrope": {QWENS: "of models with images"},
}  # fmt: skip


def harmless(label: str) -> set[str]:
    """The attributes of a class of which no value changes an output."""
    return {name for name, by in HARMLESS.items() for labels in by if label in labels.split()}


def values_of(label: str) -> dict[str, tuple[Change, ...]]:
    """Attribute → alternative values of a class."""
    found = {
        name: changes(values)
        for table in (SIZES, VALUES, IN_FILES)
        for name, rows in table.items()
        for labels, values in rows.items()
        if label in labels.split()
    }
    nested = {
        name: changes(values)
        for labels, rows in _ROPE.items()
        if label in labels.split()
        for name, values in rows.items()
    }
    return {**found, **nested}
