"""MaxText's `Gemma4DecoderLayer`: five local layers and a global one, norms of values, experts next to a dense layer.

Source of truth: MaxText 0.2.5, models/gemma4.py, layers/attentions.py (values that are the keys before their norm),
layers/embeddings.py (`Gemma4PartialRotaryEmbedding`), layers/moe.py (the softmax of all scores, made to sum to 1).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.support.oracles.leaves import DisagreementError, Leaves, Part
from tests.support.oracles.parts import (
    ACTIVATIONS,
    attend,
    causal,
    frequencies,
    rms_norm,
    softmax,
    turn_halves,
)

Array = np.ndarray[Any, np.dtype[Any]]
Mlp = Callable[[Part, Any, Array, int], Array]

CYCLE = 6
_EPSILON = 1e-6  # what RMSNorm has if a block passes it none


def layers(leaves: Leaves, c: Any) -> list[Part]:
    """Scanned, the local layers of a block are stacked, and blocks are stacked again."""
    count, rest = divmod(c.base_num_decoder_layers, CYCLE)
    if rest:
        raise DisagreementError("transformers has no remainder of local layers")
    if not c.scan_layers:
        return [Part(leaves, f"decoder/layers_{number}") for number in range(c.base_num_decoder_layers)]
    axis, found = c.param_scan_axis, []
    for number in range(count):
        block = Part(leaves, "decoder/scanned_blocks", number, count, axis)
        found += [Part(block, "local_layers", place, CYCLE - 1, axis) for place in range(CYCLE - 1)]
        found.append(block.under("global_layer"))
    return found


def block(take: Part, c: Any, x: Array, mlp: Mlp, *, local: bool) -> Array:
    """One layer."""

    def norm(name: str, value: Array) -> Array:
        return rms_norm(value, take(f"{name}/scale", c.base_emb_dim), _EPSILON)

    part, seen = take.under("self_attention"), norm("pre_self_attention_norm", x)
    seen = attention(part, c, seen, keys_and_values(part, c, seen, local=local), local=local)
    x = x + norm("post_self_attention_norm", seen)
    seen, under = norm("pre_ffw_norm", x), take.under("mlp")
    found = (
        _with_experts(under, c, x, seen, mlp) if c.num_experts > 1 else mlp(under, c, seen, c.base_mlp_dim)
    )
    return (x + norm("post_ffw_norm", found)) * take("layer_scalar", 1)


def keys_and_values(take: Part, c: Any, x: Array, *, local: bool) -> tuple[Array, Array]:
    """The keys, turned, and the values of a layer."""
    dim, groups = _dim(c, local=local), c.base_num_kv_heads
    groups = groups if local else c.global_num_kv_heads or groups
    epsilon = c.normalization_layer_epsilon
    key = _project(take, c, x, "key", groups, dim)
    value = key if c.share_kv_projections and not local else _project(take, c, x, "value", groups, dim)
    if c.v_norm_with_scale:
        raise DisagreementError("the norms of values have weights")
    key = rms_norm(key, take("key_norm/scale", dim), epsilon)
    return turn_halves(key, _frequencies(c, dim, local=local)), rms_norm(value, np.ones(dim), epsilon)


def attention(take: Part, c: Any, x: Array, held: tuple[Array, Array], *, local: bool) -> Array:
    """What a layer's queries find in keys and values, which may be those of an earlier layer."""
    dim, heads = _dim(c, local=local), c.base_num_query_heads
    query = _project(take, c, x, "query", heads, dim)
    query = rms_norm(query, take("query_norm/scale", dim), c.normalization_layer_epsilon)
    visible = causal(x.shape[1], c.sliding_window_size if local else None)
    found = attend(turn_halves(query, _frequencies(c, dim, local=local)), *held, visible)
    return np.einsum("bthd,hde->bte", found, take("out/kernel", heads, dim, c.base_emb_dim))


def _dim(c: Any, *, local: bool) -> int:
    return c.head_dim if local else c.global_head_dim or c.head_dim


def _project(take: Part, c: Any, x: Array, name: str, count: int, dim: int) -> Array:
    return np.einsum("bte,ehd->bthd", x, take(f"{name}/kernel", c.base_emb_dim, count, dim))


def _frequencies(c: Any, dim: int, *, local: bool) -> Array:
    """Of a part of each half of a head; the rest of it does not turn."""
    own = c.local_rope_max_timescale if local else c.global_rope_max_timescale
    share = c.local_rope_proportion if local else c.global_rope_proportion
    if share < 1 and not c.model_name.startswith("gemma4"):
        raise DisagreementError("other models turn the first part of a head")
    turns = frequencies(dim, own if own > 0 else c.rope_max_timescale)
    turns[int(dim * share) // 2 :] = 0
    return turns


def _with_experts(take: Part, c: Any, x: Array, seen: Array, mlp: Mlp) -> Array:
    """A feed-forward layer and the routed experts, each with norms of its own."""
    embed = c.base_emb_dim

    def norm(name: str, value: Array) -> Array:
        return rms_norm(value, take(f"{name}/scale", embed), _EPSILON)

    shared = mlp(take.under("moe_block/shared_experts"), c, seen, c.shared_experts * c.base_mlp_dim)
    plain = rms_norm(x, np.ones(embed), c.normalization_layer_epsilon)
    routing = plain * embed**-0.5 * take("pre_forward_scale_2", embed)
    routed = _experts(take.under("moe_block/MoeBlock_0"), c, norm("pre_feedforward_layernorm_2", x), routing)
    return norm("post_feedforward_layernorm_2", routed) + norm("post_feedforward_layernorm_1", shared)


def _experts(take: Part, c: Any, x: Array, routing: Array) -> Array:
    count, embed, width = c.num_experts, c.base_emb_dim, c.base_moe_mlp_dim
    scores = softmax(routing @ take("gate/kernel", embed, count))
    least = np.sort(scores, -1)[..., -c.num_experts_per_tok, None]
    shares = np.where(scores >= least, scores, 0)
    shares = shares / (shares.sum(-1, keepdims=True) if c.norm_topk_prob else 1)
    gate = np.einsum("bte,new->btnw", x, take("wi_0", count, embed, width))
    up = np.einsum("bte,new->btnw", x, take("wi_1", count, embed, width))
    hidden = ACTIVATIONS[c.mlp_activations[0]](gate) * up
    found = np.einsum("btnw,nwe->btne", hidden, take("wo", count, width, embed))
    return np.einsum("btne,btn->bte", found, shares * take("per_expert_scale", count))
