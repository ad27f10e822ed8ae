"""MaxText's `Llama4DecoderLayer`: chunks where positions turn, all positions where they do not, and one expert a token.

Source of truth: MaxText 0.2.5, models/llama4.py (which layer is which), layers/attentions.py (norms without weights
after the rotation, growth of the scores), layers/attention_op.py (chunks), layers/moe.py (`RoutedAndSharedMoE`: the
sigmoid of the score multiplies what the expert sees, not what it says).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from tests.support.oracles.parts import ACTIVATIONS, attend, causal, rms_norm, sigmoid

if TYPE_CHECKING:
    from tests.support.oracles.leaves import Part


Array = np.ndarray[Any, np.dtype[Any]]
Turn = Callable[..., Array]
Mlp: TypeAlias = "Callable[[Part, Any, Array, int], Array]"

_FLOOR, _GROWTH = 8192, 0.1  # written in the block's code


def block(take: Part, c: Any, x: Array, number: int, turn: Turn, mlp: Mlp) -> Array:
    """One layer.

    Args:
        take: its leaves.
        c: MaxText's config.
        x: [batch, position, embed].
        number: its place in the cycle where layers are scanned, in the model where they are not; from 0.
        turn: rotary positions of [batch, position, head, dim].
        mlp: a gated feed-forward layer of a width.
    """

    def norm(name: str, value: Array) -> Array:
        return rms_norm(value, take(f"{name}/scale", c.base_emb_dim), c.normalization_layer_epsilon)

    turned = c.nope_layer_interval < 1 or (number + 1) % c.nope_layer_interval != 0
    seen = norm("pre_self_attention_layer_norm", x)
    x = x + _attention(take.under("self_attention"), c, seen, turn if turned else None)
    seen = norm("post_self_attention_layer_norm", x)
    if (number + 1) % c.interleave_moe_layer_step:
        return x + mlp(take.under("mlp"), c, seen, c.base_mlp_dim)
    experts = take.under("Llama4MoEBlock_0")
    shared = mlp(experts.under("shared_experts"), c, seen, c.shared_experts * c.base_moe_mlp_dim)
    return x + _routed(experts.under("MoeBlock_0"), c, seen) + shared


def _attention(take: Part, c: Any, x: Array, turn: Turn | None) -> Array:
    dim, heads, length = c.head_dim, c.base_num_query_heads, x.shape[1]

    def project(name: str, count: int) -> Array:
        return np.einsum("bte,ehd->bthd", x, take(f"{name}/kernel", c.base_emb_dim, count, dim))

    query, key = project("query", heads), project("key", c.base_num_kv_heads)
    visible = causal(length)
    if turn is not None:
        query, key = turn(c, query, local=False), turn(c, key, local=False)
        chunk = np.arange(length) // c.chunk_attn_window_size
        visible = visible & (chunk[:, None] == chunk[None, :])
        if c.use_qk_norm:
            query, key = (rms_norm(one, np.ones(dim), c.normalization_layer_epsilon) for one in (query, key))
    elif c.temperature_tuning:
        steps = np.floor((np.arange(length) + 1) / _FLOOR)
        query = query * (np.log(steps + 1) * _GROWTH + 1)[:, None, None]
    found = attend(query * dim**-0.5, key, project("value", c.base_num_kv_heads), visible)
    return np.einsum("bthd,hde->bte", found, take("out/kernel", heads, dim, c.base_emb_dim))


def _routed(take: Part, c: Any, x: Array) -> Array:
    """The one expert with the largest score; what it sees is multiplied by the sigmoid of the score."""
    count, embed, width = c.num_experts, c.base_emb_dim, c.base_moe_mlp_dim
    scores = x @ take("gate/kernel", embed, count)
    chosen = np.argmax(scores, -1)
    seen = x * sigmoid(np.max(scores, -1, keepdims=True))
    gate = np.einsum("bte,btew->btw", seen, take("wi_0", count, embed, width)[chosen])
    up = np.einsum("bte,btew->btw", seen, take("wi_1", count, embed, width)[chosen])
    hidden = ACTIVATIONS[c.mlp_activations[0]](gate) * up
    return np.einsum("btw,btwe->bte", hidden, take("wo", count, width, embed)[chosen])
