"""MaxText's `MLA`: multi-head latent attention of DeepSeek, with its rotary positions and the scale of its query.

Source of truth: AI-Hypercomputer/maxtext at e591f30, layers/attention_mla.py, and layers/embeddings.py
(`YarnRotaryEmbedding` for rope_type yarn, else `RotaryEmbedding`, which turns halves).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.support.oracles.parts import (
    TieError,
    attend,
    causal,
    frequencies,
    layer_norm,
    rms_norm,
    turn_halves,
    turn_neighbours,
)

if TYPE_CHECKING:
    from tests.support.oracles.leaves import Part


Array = np.ndarray[Any, np.dtype[Any]]


def latent_attention(take: Part, c: Any, x: Array) -> Array:
    """Self-attention of normalised activations [batch, position, embed]."""
    heads, nope, value_dim = c.base_num_query_heads, c.qk_nope_head_dim, c.v_head_dim
    query, latent = _query(take, c, x)
    visible = chosen(take.under("indexer"), c, x, latent) if c.use_indexer else causal(x.shape[1])
    query = np.concatenate([query[..., :nope], turn(c, query[..., nope:])], axis=-1) * _scale(c)
    low = x @ take("wkv_a/kernel", c.base_emb_dim, c.kv_lora_rank + c.qk_rope_head_dim)
    shared = turn(c, low[:, :, None, c.kv_lora_rank :])
    low = rms_norm(
        low[..., : c.kv_lora_rank], take("kv_norm/scale", c.kv_lora_rank), c.normalization_layer_epsilon
    )
    up = np.einsum("btr,rhd->bthd", low, take("wkv_b/kernel", c.kv_lora_rank, heads, nope + value_dim))
    key = np.concatenate([up[..., :nope], np.repeat(shared, heads, axis=2)], axis=-1)
    found = attend(query, key, up[..., nope:], visible)
    return np.einsum("bthd,hde->bte", found, take("out/kernel", heads, value_dim, c.base_emb_dim))


def _query(take: Part, c: Any, x: Array) -> tuple[Array, Array]:
    """The query's heads, and the latent query that they are projected from."""
    heads, dim = c.base_num_query_heads, c.qk_nope_head_dim + c.qk_rope_head_dim
    if c.q_lora_rank == 0:
        return np.einsum("bte,ehd->bthd", x, take("query/kernel", c.base_emb_dim, heads, dim)), x
    low = x @ take("wq_a/kernel", c.base_emb_dim, c.q_lora_rank)
    low = rms_norm(low, take("q_norm/scale", c.q_lora_rank), c.normalization_layer_epsilon)
    return np.einsum("btr,rhd->bthd", low, take("wq_b/kernel", c.q_lora_rank, heads, dim)), low


def chosen(take: Part, c: Any, x: Array, latent: Array) -> Array:
    """The keys that each query sees by DeepSeek-V3.2's indexer: [batch, 1, query, key]; its positions turn halves."""
    heads, dim, turned = c.indexer_n_heads, c.indexer_head_dim, c.qk_rope_head_dim
    query = np.einsum("btr,rhd->bthd", latent, take("wq_b/kernel", c.q_lora_rank, heads, dim))
    key = x @ take("wk/kernel", c.base_emb_dim, dim)
    key = layer_norm(key, take("k_norm/scale", dim), take("k_norm/bias", dim), 1e-6)[:, :, None]
    shares = x @ take("weights_proj/kernel", c.base_emb_dim, heads) * (heads * dim) ** -0.5
    query, key = (
        np.concatenate([turn(c, one[..., :turned], neighbours=False), one[..., turned:]], axis=-1)
        for one in (query, key)
    )
    products = np.maximum(np.einsum("bthd,bsd->bhts", query, key[:, :, 0]), 0)
    seen = causal(x.shape[1])
    scores = np.where(seen, np.einsum("bhts,bth->bts", products, shares), -np.inf)
    order = np.argsort(-scores, axis=-1, kind="stable")  # as lax.top_k: of equal ones the earlier
    ranked = np.take_along_axis(scores, order, axis=-1)
    last, next_ = (
        ranked[..., c.indexer_topk - 1 : c.indexer_topk],
        ranked[..., c.indexer_topk : c.indexer_topk + 1],
    )
    if (np.isfinite(next_) & (last == next_)).any():
        raise TieError(
            "two positions have the same score where the indexer chooses: another library takes the other one"
        )
    taken = np.zeros(scores.shape, bool)
    np.put_along_axis(taken, order[..., : c.indexer_topk], values=True, axis=-1)
    return (taken & seen)[:, None]


def _scale(c: Any) -> float:
    """Yarn's correction is applied whenever the context is longer than the original one, whatever the rope_type."""
    scale = (c.qk_nope_head_dim + c.qk_rope_head_dim) ** -0.5
    if c.max_position_embeddings <= c.original_max_position_embeddings:
        return scale
    return scale * (0.1 * c.mscale * math.log(c.rope_factor) + 1.0) ** 2


def turn(c: Any, x: Array, *, neighbours: bool = True) -> Array:
    """Heads [batch, position, head, dim] with rotary positions; without `neighbours` always of halves."""
    if not c.rope_type.startswith("yarn"):
        return turn_halves(x, frequencies(x.shape[-1], c.rope_max_timescale))
    found = (turn_neighbours if c.rope_interleave and neighbours else turn_halves)(x, _yarn(c, x.shape[-1]))
    stretched = c.rope_attention_scaling and c.rope_factor > 1
    return found * (0.1 * math.log(c.rope_factor) + 1.0) if stretched else found


def _yarn(c: Any, dim: int) -> Array:
    """Frequencies by Peng et al., 2023: divided by the factor where waves are long, a ramp between two corrections."""
    base = c.rope_max_timescale

    def correction(turns: float) -> float:
        return (
            dim * math.log(c.original_max_position_embeddings / (turns * 2 * math.pi)) / (2 * math.log(base))
        )

    low, high = correction(c.beta_fast), correction(c.beta_slow)
    if c.rope_truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = np.clip((np.arange(dim // 2) - low) / ((high - low) or 0.001), 0, 1)
    plain = frequencies(dim, base)
    return plain / c.rope_factor * ramp + plain * (1 - ramp)
