"""What PEFT judges: random adapters of small models, and every field of its LoraConfig alone.

`tests/transform/test_adapter.py` makes them in an environment with PEFT; docs/reference/judged.md states the counts.
"""

from __future__ import annotations

from typing import Any

DRAWS = 17  # random adapters of each kind
# Kinds of bases → how many of the random adapters are refused, each by a reason of REASONS.
KINDS = {
    "llama": 0, "llama-tied": 0, "qwen2-tied": 1, "gemma-tied": 0, "gpt2": 0, "gpt2-tied": 0, "mixtral": 0,
    "qwen3-moe": 0, "gpt-oss": 0, "bert-classifier": 0, "bert-tied": 6, "vit-classifier": 0,
}  # fmt: skip
REASONS = (
    "untied models of this class are not supported",
    "has no tensor cls.predictions.decoder",  # BERT's bias of the predictions has two names, of which one is stored
    "ensure_weight_tying is stated, but",  # PEFT initialises tied matrices apart if they should be orthogonal
)

EQUAL, REFUSED, PEFT = "equal", "refused", "PEFT refuses"
_Q = {"target_modules": ["q_proj"]}


def _walk(*rows: tuple[str, Any, str]) -> dict[str, tuple[str, dict[str, Any], str]]:
    return {
        f"{field}-{number}": (field, {**_Q, field: value}, outcome)
        for number, (field, value, outcome) in enumerate(rows)
    }


# Label → field, config, outcome. All are adapters of `qwen2-tied`.
WALK = _walk(
    ("task_type", "FEATURE_EXTRACTION", EQUAL),
    ("peft_type", "LORA", EQUAL),
    ("auto_mapping", {"a": "b"}, EQUAL),
    ("peft_version", "0.21.2", EQUAL),
    ("base_model_name_or_path", "org/base", EQUAL),
    ("revision", "main", EQUAL),
    ("inference_mode", True, EQUAL),
    ("r", 3, EQUAL),
    ("target_modules", ".*v_proj", EQUAL),
    ("target_modules", "all-linear", EQUAL),
    ("exclude_modules", ["k_proj"], EQUAL),
    ("lora_alpha", 5, EQUAL),
    ("lora_dropout", 0.5, EQUAL),
    ("fan_in_fan_out", True, EQUAL),
    ("bias", "all", EQUAL),
    ("bias", "lora_only", EQUAL),
    ("use_rslora", True, EQUAL),
    ("modules_to_save", ["norm"], EQUAL),
    ("modules_to_save", ["embed_tokens"], EQUAL),
    ("modules_to_save", ["lm_head", "embed_tokens"], EQUAL),
    ("init_lora_weights", False, EQUAL),
    ("init_lora_weights", "gaussian", EQUAL),
    ("init_lora_weights", "eva", EQUAL),
    ("init_lora_weights", "orthogonal", EQUAL),
    ("init_lora_weights", "pissa", REFUSED),
    ("init_lora_weights", "olora", REFUSED),
    ("init_lora_weights", "pissa_niter_2", REFUSED),
    ("init_lora_weights", "corda", PEFT),
    ("init_lora_weights", "loftq", PEFT),
    ("init_lora_weights", "mica", REFUSED),
    ("init_lora_weights", "lora_ga", REFUSED),
    ("layers_to_transform", [1], EQUAL),
    ("layers_pattern", "layers", PEFT),
    ("rank_pattern", {"q_proj": 2}, EQUAL),
    ("alpha_pattern", {"q_proj": 2}, EQUAL),
    ("megatron_config", {"a": 1}, PEFT),
    ("megatron_core", "megatron.core", EQUAL),
    ("trainable_token_indices", [1, 5], EQUAL),
    ("trainable_token_indices", {"embed_tokens": [1], "lm_head": [2]}, EQUAL),
    ("loftq_config", {"loftq_bits": 4}, EQUAL),
    ("eva_config", {"rho": 1.5}, EQUAL),
    ("corda_config", {"corda_method": "kpm"}, EQUAL),
    ("lora_ga_config", {"scale": "unit"}, EQUAL),
    ("use_dora", True, EQUAL),
    ("velora_config", {"num_groups": 4}, REFUSED),
    ("alora_invocation_tokens", [1], PEFT),
    ("use_qalora", True, REFUSED),
    ("qalora_group_size", 8, EQUAL),
    ("monteclora_config", {"num_samples": 2}, REFUSED),
    ("layer_replication", [[0, 2], [1, 2]], PEFT),
    ("runtime_config", {"ephemeral_gpu_offload": False}, EQUAL),
    ("lora_bias", True, EQUAL),
    ("target_parameters", ["q_proj.weight"], PEFT),
    ("target_parameters", ["v_proj.weight"], EQUAL),
    ("use_bdlora", {"nblocks": 2}, PEFT),
    ("arrow_config", {"top_k": 1}, PEFT),
    ("kasa_config", {}, REFUSED),
    ("ensure_weight_tying", True, EQUAL),
)
# What one field alone does not show: adapters that PEFT converted, and both fields of a tie.
MORE = {
    "pissa converted": {**_Q, "init_lora_weights": "pissa", "converts": True},
    "olora converted": {**_Q, "init_lora_weights": "olora", "converts": True},
    "pissa converted, rslora": {**_Q, "init_lora_weights": "pissa", "use_rslora": True, "converts": True},
    "both ends": {"target_modules": ["embed_tokens", "lm_head"]},
    "both ends, tied": {"target_modules": ["embed_tokens", "q_proj"], "ensure_weight_tying": True},
    "both ends whole, tied": {**_Q, "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    "output layer": {"target_modules": ["lm_head"]},
    "embedding, dora": {"target_modules": ["embed_tokens"], "use_dora": True},
}
