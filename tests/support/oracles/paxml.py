"""PaxML's GPT-3 by praxis's definition.

Source of truth: google/praxis at feeaff1 (layers/transformer_models.py `TransformerLm`, transformers.py, attentions.py
`CombinedQKVProjectionLayer` and `_scale_query`, normalizations.py `LayerNorm`, embedding_softmax.py
`SharedEmbeddingSoftmax`) as google/paxml at b397693 configures it (tasks/lm/params/c4.py `configure_gpt3_task`): no
scale of the embedding, gelu by tanh, no cap of the logits, the query times dim_per_head ** -0.5.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from tests.support.oracles.leaves import Leaves, Part, stacked
from tests.support.oracles.parts import ACTIVATIONS, attend, causal, layer_norm

Array = np.ndarray[Any, np.dtype[Any]]


class Sizes(NamedTuple):
    """What the experiment's class states; a checkpoint has no config."""

    layers: int
    embed: int
    heads: int
    dim: int
    ffn: int
    vocab: int
    positions: int
    repeat: bool
    epsilon: float = 1e-5


def logits(leaves: Leaves, sizes: Sizes, tokens: Array) -> Array:
    """Logits [batch, position, vocabulary] of tokens [batch, position]; leaves below `mdl_vars/params/lm`."""
    table = leaves("softmax/logits_ffn/linear/w", sizes.embed, sizes.vocab)
    positions = leaves("position_emb/emb_var", sizes.positions, sizes.embed)
    x = table.T[tokens] + positions[: tokens.shape[1]]
    if sizes.repeat:
        layers = stacked(leaves, "transformer/repeat/sub/x_layers_0", sizes.layers, 0)
    else:
        layers = [Part(leaves, f"transformer/x_layers_{index}") for index in range(sizes.layers)]
    for take in layers:
        x = x + _attention(take.under("self_attention"), sizes, _norm(take.under("layer_norm"), sizes, x))
        x = x + _feed_forward(take.under("ff_layer"), sizes, x)
    return _norm(Part(leaves, "final_ln"), sizes, x) @ table


def _norm(take: Part, sizes: Sizes, x: Array) -> Array:
    return layer_norm(x, 1 + take("scale", sizes.embed), take("bias", sizes.embed), sizes.epsilon)


def _attention(take: Part, sizes: Sizes, x: Array) -> Array:
    embed, heads, dim = sizes.embed, sizes.heads, sizes.dim
    weight, bias = take("combined_qkv/w", 3, embed, heads, dim), take("combined_qkv/b", 3, heads, dim)
    query, key, value = np.einsum("btd,kdnh->kbtnh", x, weight) + bias[:, None, None]
    found = attend(query * dim**-0.5, key, value, causal(x.shape[1]))
    return np.einsum("btnh,dnh->btd", found, take("post/w", embed, heads, dim)) + take("post/b", embed)


def _feed_forward(take: Part, sizes: Sizes, x: Array) -> Array:
    x = _norm(take.under("layer_norm"), sizes, x)
    for name, before, after, activation in (
        ("ffn_layer1", sizes.embed, sizes.ffn, "gelu"),
        ("ffn_layer2", sizes.ffn, sizes.embed, "linear"),
    ):
        x = ACTIVATIONS[activation](
            x @ take(f"{name}/linear/w", before, after) + take(f"{name}/bias/b", after)
        )
    return x
