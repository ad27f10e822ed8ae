"""Tiny models of every config class, with one attribute changed: as transformers saves and computes them.

Every weight is a function of its name and shape, so that two models of the same shapes have the same weights and only
the config tells them apart. Weights are float64, in which the words of values (scales, shifts) round by 2^-53.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tests.support.tiny_models import (
    CLASSES,
    COMMON,
    GATED,
    GEMMA4_EXPERTS,
    GEMMA4_SMALL,
    GLM4_MOE,
    GPT_NEOX,
    GPT_OSS,
    GRANITE,
    INDEXER,
    LATENT,
    LLAMA4,
    OLMO2,
    OLMO3,
    PHI3,
    QWEN2_MOE,
    QWEN3_NEXT,
    SMOLLM3,
    STABLELM,
    T5,
)
from tests.support.walk.change import ABSENT, Change

DTYPE = "float64"
_ATTENTIONS = ("eager", "sdpa")
_FAULTS = ("missing_keys", "unexpected_keys", "mismatched_keys")
SEQUENCE = 24
_EXPERTS = {
    **GATED, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
    "norm_topk_prob": True,
}  # fmt: skip
_WINDOW = {**GATED, "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 8}
_LATENT = {**LATENT, "num_hidden_layers": 3, "n_routed_experts": 8, "n_group": None, "topk_group": None}
_PLAIN_TABLES = {
    "full_attention": {"rope_type": "default", "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
_BERT = {**COMMON, "intermediate_size": 48, "type_vocab_size": 2}
_GPT2 = {"vocab_size": 60, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4}
_GATED_T5 = {**T5, "feed_forward_proj": "gated-gelu"}


class Base(NamedTuple):
    """The model that each change of a class starts from.

    Attributes:
        config: the name of the class without `Config`.
        family: wherry's family.
        settings: the arguments of the class.
        model: the class of the model; None is that of the config.
        untied: whether the output layer is a weight of its own, as in the published models, where the class ties it.
    """

    config: str
    family: str
    settings: Mapping[str, Any]
    model: str | None = None
    untied: bool = False


BASES = {
    "llama": Base("Llama", "llama", GATED),
    "mistral": Base("Mistral", "mistral", {**GATED, "sliding_window": None}),
    "mixtral": Base("Mixtral", "mixtral", {**GATED, "head_dim": 8, "num_local_experts": 4}),
    "phi3": Base("Phi3", "phi3", PHI3),
    "granite": Base("Granite", "granite", GRANITE),
    "qwen2": Base("Qwen2", "qwen", GATED),
    "qwen3": Base("Qwen3", "qwen", {**GATED, "head_dim": 16}),
    "qwen3_moe": Base("Qwen3Moe", "qwen", _EXPERTS),
    "qwen2_moe": Base("Qwen2Moe", "qwen2-moe", QWEN2_MOE),
    "qwen3_next": Base("Qwen3Next", "qwen3-next", QWEN3_NEXT),
    "stablelm": Base("StableLm", "stablelm", STABLELM),
    "gpt_neox": Base("GPTNeoX", "gpt-neox", GPT_NEOX),
    "gpt_neox_serial": Base("GPTNeoX", "gpt-neox", {**GPT_NEOX, "use_parallel_residual": False}),
    "glm4_moe": Base("Glm4Moe", "glm4-moe", GLM4_MOE),
    "gemma": Base("Gemma", "gemma", {**GATED, "head_dim": 16}),
    "gemma2": Base("Gemma2", "gemma2", _WINDOW),
    "gemma4_text": Base("Gemma4Text", "gemma4", {**GEMMA4_EXPERTS, "rope_parameters": _PLAIN_TABLES}),
    "gemma4_small": Base("Gemma4Text", "gemma4-small", {**GEMMA4_SMALL, "rope_parameters": _PLAIN_TABLES}),
    "gemma3_text": Base("Gemma3Text", "gemma3", {**_WINDOW, "num_hidden_layers": 8}),
    "deepseek_v2": Base("DeepseekV2", "deepseek", _LATENT),
    "deepseek_v3": Base("DeepseekV3", "deepseek", {**_LATENT, "n_group": 2, "topk_group": 1}),
    "deepseek_v32": Base("DeepseekV32", "deepseek", {**_LATENT, **INDEXER, "n_group": 2, "topk_group": 1}),
    "gpt_oss": Base("GptOss", "gpt-oss", GPT_OSS),
    "llama4_text": Base("Llama4Text", "llama4", LLAMA4),
    "olmo2": Base("Olmo2", "olmo2", OLMO2),
    "olmo3": Base("Olmo3", "olmo3", OLMO3),
    "smollm3": Base("SmolLM3", "smollm3", SMOLLM3),
    "t5": Base("T5", "t5", {**T5, "feed_forward_proj": "relu"}),
    "t5_1_1": Base("T5", "t5", {**_GATED_T5, "tie_word_embeddings": False}, untied=True),
    "mt5": Base("MT5", "t5", _GATED_T5, untied=True),
    "umt5": Base("UMT5", "t5", _GATED_T5, untied=True),
    "t5_encoder": Base("T5", "t5", _GATED_T5, "T5EncoderModel"),
    "bert": Base("Bert", "bert", _BERT, "BertForMaskedLM"),
    "gpt2": Base("GPT2", "gpt2", _GPT2, "GPT2LMHeadModel"),
}


def attributes_of(label: str) -> set[str]:
    """Every attribute that a class can be made with or writes, entries of `rope_parameters` dotted."""
    from dataclasses import fields

    from transformers.modeling_rope_utils import RopeParameters

    kind = _config_class(label)
    config = kind(**settings_of(label))
    named = {one.name for one in fields(kind) if one.init} | set(config.to_dict())
    named = {kind.attribute_map.get(name, name) for name in named}
    rope = getattr(config, "rope_parameters", None) or {}
    places = [f"rope_parameters.{name}." for name, one in rope.items() if isinstance(one, dict)]
    places = places or ["rope_parameters."]
    entries = {f"{place}{name}" for place in places for name in RopeParameters.__annotations__}
    return named | (entries if "rope_parameters" in named else set())


def settings_of(
    label: str, change: tuple[str, Change] | None = None, *, reference: bool = False
) -> dict[str, Any]:
    """The arguments of a class: the base's, those that change too, and the value itself unless it is the reference."""
    settings = json.loads(json.dumps(BASES[label].settings))
    if change is None:
        return settings
    attribute, one = change
    for name, value in one.also.items():
        if value is not ABSENT:
            put(settings, name, value)
    if not reference and not one.in_file:
        put(settings, attribute, one.value)
    return settings


def put(table: dict[str, Any], name: str, value: Any) -> None:
    """Set an attribute, dotted where nested; ABSENT removes it."""
    *outer, last = name.split(".")
    for part in outer:
        table = table.setdefault(part, {})
    if value is ABSENT:
        table.pop(last, None)
    else:
        table[last] = json.loads(json.dumps(value))


def save(
    folder: Path, label: str, change: tuple[str, Change] | None = None, *, reference: bool = False
) -> Path:
    """Save a model; null, absent and what only stands in the file is edited into `config.json`."""
    settings = settings_of(label, change, reference=reference)
    model = made(label, json.dumps(settings))
    model.save_pretrained(folder)
    if change is not None:
        _edit(folder / "config.json", *change, reference=reference)
    return folder


def _edit(file: Path, attribute: str, change: Change, *, reference: bool) -> None:
    config = json.loads(file.read_text())
    for name, value in change.also.items():
        if value is ABSENT:
            put(config, name, value)
    if not reference and (change.in_file or change.value is None or change.value is ABSENT):
        put(config, attribute, change.value)
    file.write_text(json.dumps(config, indent=2))


def made(label: str, settings: str) -> Any:
    """A model of a class, made with these arguments (JSON)."""
    import torch
    import transformers

    config = _config_class(label)(**json.loads(settings))
    model = getattr(transformers, model_class(label))(config).double()
    if BASES[label].untied:
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone())
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            tensor.copy_(torch.from_numpy(_weight(name, tuple(tensor.shape))))
    return model


def _config_class(label: str) -> Any:
    import transformers

    return getattr(transformers, f"{BASES[label].config}Config")


def model_class(label: str) -> str:
    """The name of the class of a model."""
    base = BASES[label]
    return base.model or CLASSES.get(base.config, f"{base.config}ForCausalLM")


def _weight(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Matrices that keep the size of what they multiply, and let attention and routing choose; norms far from one."""
    rng = np.random.default_rng(zlib.crc32(f"{name} {shape}".encode()))
    drawn = rng.standard_normal(shape)
    if len(shape) < 2:
        return 0.3 * drawn + ("norm" in name.lower() or ".ln_" in name)
    return drawn if "embed" in name or "shared.weight" in name else drawn * 1.5 / np.sqrt(shape[-1])


def logits(
    folder: Path,
    label: str,
    *,
    own: bool = True,
    change: Callable[[Any], None] | None = None,
    given: np.ndarray | None = None,
    dtype: str = DTYPE,
) -> np.ndarray:
    """What the model in a folder computes; nothing may be missing or left over.

    Args:
        folder: the model.
        label: its class.
        own: whether it is the class of the label, rather than the one that `config.json` names.
        change: what another system rounds, done to the loaded model.
        given: tokens [batch, position]; None are those of every model.
        dtype: the data type that it computes in.

    Raises:
        ValueError: a weight is missing, left over or of another shape.
    """
    import torch
    import transformers

    named = json.loads((folder / "config.json").read_text()).get("architectures")
    kind = model_class(label) if own or not named else named[0]
    # Experts compute in float64 by `eager` alone.
    model, report = getattr(transformers, kind).from_pretrained(
        folder, output_loading_info=True, dtype=getattr(torch, dtype), attn_implementation="eager",
        experts_implementation="eager",
    )  # fmt: skip
    wrong = {name: sorted(report[name])[:2] for name in _FAULTS if report[name]}
    if wrong:
        raise ValueError(f"the model does not fit its config: {wrong}")
    if change is not None:
        with torch.no_grad():
            change(model)
    return np.stack(
        [
            _computed(model.eval(), kind, one, tokens() if given is None else torch.from_numpy(given))
            for one in _ATTENTIONS
            if one == "eager" or model._supports_sdpa
        ]
    )


def _computed(model: Any, kind: str, attention: str, given: Any) -> np.ndarray:
    """By one implementation of attention: `eager` alone computes soft caps, `sdpa` alone attends in both directions."""
    import torch

    model.set_attn_implementation(attention)
    with torch.no_grad():
        made = model(**_inputs(given, decoder="Conditional" in kind), return_dict=True)
    return (made.logits if "logits" in made else made.last_hidden_state).numpy()


@cache
def tokens() -> Any:
    """The tokens of every model: [batch, position]."""
    import torch

    drawn = np.random.default_rng(7).integers(3, 60, (2, SEQUENCE))
    return torch.from_numpy(drawn)


def _inputs(given: Any, *, decoder: bool) -> dict[str, Any]:
    return {"input_ids": given, **({"decoder_input_ids": given.flip(1)} if decoder else {})}


def meta_params(folder: Path) -> dict[str, Any]:
    """The `params.json` that Meta publishes with a model, of a folder of transformers."""
    import transformers

    named = json.loads((folder / "config.json").read_text()).get("architectures") or ["LlamaForCausalLM"]
    kind = getattr(transformers, named[0].replace("ForCausalLM", "Config"))
    config = kind.from_pretrained(folder)
    rope, wide = config.rope_parameters, 8 * config.hidden_size // 3
    return {
        "dim": config.hidden_size, "n_layers": config.num_hidden_layers, "n_heads": config.num_attention_heads,
        "n_kv_heads": config.num_key_value_heads, "vocab_size": config.vocab_size, "norm_eps": config.rms_norm_eps,
        "multiple_of": config.intermediate_size, "ffn_dim_multiplier": 1.5 / wide, "rope_theta": rope["rope_theta"],
        "use_scaled_rope": rope["rope_type"] == "llama3",
    }  # fmt: skip
