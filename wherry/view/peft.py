"""PEFT: what `adapter_config.json` says of a LoRA adapter, and what of it is supported.

Facts: PEFT 0.21 (tuners/lora/config.py). The scale of B · A is alpha / rank, with `use_rslora` alpha / sqrt(rank).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

from wherry.view.peft_patterns import pattern_refusal

LORA = "LORA"
START = "base_model.model."  # of the names of an adapter's tensors
SCALE = frozenset({"peft_type", "r", "lora_alpha", "use_rslora", "fan_in_fan_out"})
PATTERNS = frozenset({"rank_pattern", "alpha_pattern"})
DORA = "use_dora"
BIAS, TOKENS, PARAMETERS = "bias", "trainable_token_indices", "target_parameters"
TRAINED = frozenset(
    {BIAS, "lora_bias", TOKENS, PARAMETERS}
)  # what is trained besides the matrices of modules
# Fields that change no value: what was trained, and how.
_IGNORED = frozenset({
    "auto_mapping", "base_model_name_or_path", "ensure_weight_tying", "exclude_modules", "inference_mode",
    "layers_pattern", "layers_to_transform", "lora_dropout", "megatron_core", "modules_to_save", "peft_version",
    "revision", "runtime_config", "target_modules", "task_type", "qalora_group_size",
    "corda_config", "eva_config", "loftq_config", "lora_ga_config",  # of initialisations, which init_lora_weights names
})  # fmt: skip
_MOST_RANK = 1 << 31
_INITIALISATIONS = (None, True, False, "gaussian", "eva", "orthogonal")  # those that leave the base as it is
_NO_BIAS = (None, "none")
_BIASES = (*_NO_BIAS, "all", "lora_only")
_LARGEST = 2**63  # of an alpha


def refusal(config: Mapping[str, Any], read: Collection[str]) -> str | None:
    """What an adapter states that is not supported; None if there is nothing.

    Args:
        config: `adapter_config.json`.
        read: the fields that the caller reads.
    """
    if config.get("peft_type") != LORA:
        return f"adapters of type {config.get('peft_type')} are not supported, only those of type {LORA}"
    if config.get("init_lora_weights") not in _INITIALISATIONS:
        return (
            f"init_lora_weights is {config['init_lora_weights']!r}, which changes the base: save the adapter with "
            "path_initial_model_for_weight_conversion, which PEFT converts to plain LoRA"
        )
    if config.get("bias") not in _BIASES:
        return f"bias is {config['bias']!r}, not one of none, all and lora_only"
    known = {*read, *_IGNORED, "init_lora_weights", *(["bias"] if config.get("bias") in _NO_BIAS else [])}
    stated = sorted(name for name, value in config.items() if name not in known and value)
    if stated:
        return f"{', '.join(f'{name} is {config[name]!r}' for name in stated)}, which is not supported"
    return _number_refusal(config, read)


def _number_refusal(config: Mapping[str, Any], read: Collection[str]) -> str | None:
    """Which rank or alpha is none; None if all are."""
    tables = {name: config.get(name) for name in PATTERNS.intersection(read)}
    for name in sorted(tables):
        if reason := pattern_refusal(name, tables[name]):
            return reason
    ranks, alphas = (
        {whole: config.get(whole)}
        | {f"{name} of {key}": one for key, one in (tables.get(name) or {}).items()}
        for whole, name in (("r", "rank_pattern"), ("lora_alpha", "alpha_pattern"))
    )
    for name, value in ranks.items():
        if type(value) is not int or not 0 < value <= _MOST_RANK:
            return f"{name} is {value!r}, not a positive integer"
    for name, value in alphas.items():
        if not is_number(value):
            return f"{name} is {value!r}, not a number"
    return None


def is_number(value: Any) -> bool:
    """Whether a value can be the alpha of an adapter: finite, and of a size that floats have."""
    return type(value) in (int, float) and abs(value) < _LARGEST


def scale_of(config: Mapping[str, Any], rank: float, alpha: float) -> float:
    """The factor of B · A for a rank and an alpha."""
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
