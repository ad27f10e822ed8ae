"""Penzai judges itself: its builders of transformers, with the arrays of a checkpoint bound to its slots.

Source of truth: the installed penzai, `models.transformer.variants`. It computes in float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]


_ACTIVATIONS = {"gelu": "gelu_exact", "gelu_new": "gelu_approx", "gelu_pytorch_tanh": "gelu_approx", "silu": "silu",
                "relu": "relu"}  # fmt: skip


def build(config: Mapping[str, Any], *, stack: bool, key: Any = None) -> Any:
    """The model of a Hugging Face config, as Penzai's importer would build it; with a key, random parameters.

    Args:
        config: of a Llama, Mistral or GPT-NeoX.
        stack: whether the blocks are one stack.
        key: of jax.random; without one the parameters are slots.
    """
    from penzai.models.transformer.variants import llamalike_common as common

    if config["model_type"] == "gpt_neox":
        return _gpt_neox(config, stack=stack, key=key)
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    return common.build_llamalike_transformer(
        common.LlamalikeTransformerConfig(
            num_kv_heads=groups,
            query_head_multiplier=heads // groups,
            embedding_dim=config["hidden_size"],
            projection_dim=config.get("head_dim") or config["hidden_size"] // heads,
            mlp_hidden_dim=config["intermediate_size"],
            num_decoder_blocks=config["num_hidden_layers"],
            vocab_size=config["vocab_size"],
            mlp_variant="swiglu",
            tie_embedder_and_logits=False,
            rope_wavelength=(config.get("rope_parameters") or config)["rope_theta"],
            rms_norm_eps=config["rms_norm_eps"],
            use_layer_stack=stack,
        ),
        init_base_rng=key,
    )


def _gpt_neox(config: Mapping[str, Any], *, stack: bool, key: Any) -> Any:
    from penzai.models.transformer.variants import gpt_neox

    dim = config["hidden_size"] // config["num_attention_heads"]
    rope = config["rope_parameters"]
    return gpt_neox.build_gpt_neox_transformer(
        gpt_neox.GPTNeoXTransformerConfig(
            num_attention_heads=config["num_attention_heads"],
            embedding_dim=config["hidden_size"],
            projection_dim=dim,
            mlp_hidden_dim=config["intermediate_size"],
            num_decoder_blocks=config["num_hidden_layers"],
            vocab_size=config["vocab_size"],
            activation_fn=_ACTIVATIONS[config["hidden_act"]],
            rope_subset_size=int(rope["partial_rotary_factor"] * dim),
            rope_wavelength=rope["rope_theta"],
            layernorm_epsilon=config["layer_norm_eps"],
            parameter_dtype="float32",
            activation_dtype="float32",
            use_layer_stack=stack,
        ),
        init_base_rng=key,
    )


def logits(model: Any, tokens: Array) -> Array:
    """Logits [batch, position, vocabulary]."""
    from penzai import pz

    found = model(pz.nx.wrap(np.asarray(tokens)).tag("batch", "seq"))
    return np.asarray(found.unwrap("batch", "seq", "vocabulary"))


def bound(definition: Any, arrays: Mapping[str, Any]) -> Any:
    """A model whose slots have these NamedArrays, by label: all slots and all arrays."""
    from penzai import pz

    model = pz.bind_variables(
        definition, [pz.Parameter(value=value, label=label) for label, value in arrays.items()]
    )
    pz.nn.assert_no_parameter_slots(model)
    return model
