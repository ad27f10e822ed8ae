"""MaxText's decoder of Gemma 4 E2B and E4B: an embedding of each layer, and layers that share keys and values.

Source of truth: MaxText 0.2.5, models/gemma4_small.py, layers/nnx_decoders.py (`_apply_gemma4_small_layers`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

from tests.support.oracles.leaves import DisagreementError, Leaves, Part
from tests.support.oracles.maxtext_gemma4 import attention, keys_and_values
from tests.support.oracles.parts import ACTIVATIONS, rms_norm

if TYPE_CHECKING:
    import numpy as np


Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"
Mlp: TypeAlias = "Callable[[Part, Any, Array, int], Array]"

_CYCLES = {"gemma4-e2b": 5}
_CYCLE = 6  # of any other name
_EPSILON = 1e-6  # what RMSNorm has if a block passes it none


def decode(leaves: Leaves, c: Any, tokens: Array, x: Array, mlp: Mlp) -> Array:
    """All layers."""
    if c.scan_layers:
        raise DisagreementError("MaxText does not scan these layers")
    count, cycle = c.base_num_decoder_layers, _CYCLES.get(c.model_name, _CYCLE)
    first = count - c.num_kv_shared_layers  # of those that share
    own = _own_embeddings(Part(leaves, "decoder/per_layer_embedder"), c, tokens, x)
    held: dict[bool, tuple[Array, Array]] = {}
    for number in range(count):
        take, local = Part(leaves, f"decoder/layers_{number}"), (number + 1) % cycle != 0
        seen = rms_norm(x, take("pre_self_attention_norm/scale", c.base_emb_dim), _EPSILON)
        if number < first:
            held[local] = keys_and_values(take.under("self_attention"), c, seen, local=local)
        seen = attention(take.under("self_attention"), c, seen, held[local], local=local)
        x = x + rms_norm(seen, take("post_self_attention_norm/scale", c.base_emb_dim), _EPSILON)
        width = c.base_mlp_dim * (2 if c.use_double_wide_mlp and number >= first else 1)
        seen = rms_norm(x, take("pre_ffw_norm/scale", c.base_emb_dim), _EPSILON)
        seen = mlp(take.under("mlp"), c, seen, width)
        x = x + rms_norm(seen, take("post_ffw_norm/scale", c.base_emb_dim), _EPSILON)
        x = _with_own_embedding(take, c, x, own[:, :, number])
    return x


def _own_embeddings(take: Part, c: Any, tokens: Array, x: Array) -> Array:
    """What each layer gets of the tokens: [batch, position, layer, width]."""
    count, width = c.base_num_decoder_layers, c.hidden_size_per_layer_input
    shape = (*tokens.shape, count, width)
    table = take("embed_tokens_per_layer", c.vocab_size_per_layer_input, count * width)
    identity = (table[tokens] * width**0.5).reshape(shape)
    kernel = take("per_layer_model_projection/kernel", c.base_emb_dim, count * width)
    context = (x @ kernel * c.base_emb_dim**-0.5).reshape(shape)
    scale = take("per_layer_projection_norm/scale", width)
    return (identity + rms_norm(context, scale, c.normalization_layer_epsilon)) * 2**-0.5


def _with_own_embedding(take: Part, c: Any, x: Array, own: Array) -> Array:
    """The end of a layer, to which its own embedding is added through a gate."""
    embed, width = c.base_emb_dim, c.hidden_size_per_layer_input
    gate = ACTIVATIONS["gelu"](x @ take("per_layer_input_gate/kernel", embed, width))
    found = (gate * own) @ take("per_layer_projection/kernel", width, embed)
    scale = take("post_per_layer_input_norm/scale", embed)
    x = x + rms_norm(found, scale, c.normalization_layer_epsilon)
    return x * take("layer_scalar", 1)
