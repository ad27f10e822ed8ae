"""MaxText's `Attention`: grouped queries, norms and biases, rotary positions, no scale unless a block passes one.

Source of truth: AI-Hypercomputer/maxtext at e591f30, layers/attentions.py, layers/attention_op.py (mask, soft cap,
order of heads) and layers/embeddings.py (`RotaryEmbedding`, `LLaMARotaryEmbedding`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from tests.support.oracles.maxtext_latent import turn
from tests.support.oracles.parts import (
    attend,
    frequencies,
    llama3_scaled,
    rms_norm,
    turn_halves,
    turn_neighbours,
)

if TYPE_CHECKING:
    from tests.support.oracles.leaves import Part


Array = np.ndarray[Any, np.dtype[Any]]

# Built into LLaMARotaryEmbedding.
_LLAMA3 = {"factor": 8, "low": 1, "high": 4, "old_context": 8192}


def attention(
    take: Part,
    c: Any,
    x: Array,
    *,
    visible: Array,
    scale: float = 1.0,
    cap: float | None = None,
    normed: bool = False,
    biased: bool = False,
    local: bool = False,
) -> Array:
    """Self-attention.

    Args:
        take: leaves of the attention.
        c: MaxText's config.
        x: [batch, position, embed], normalised.
        visible: [query, key].
        scale: what the block multiplies the query with.
        cap: soft cap of the scores.
        normed: whether query and key are normalised.
        biased: whether their projections and the value's have biases.
        local: whether the layer attends locally, with the positions of local layers.
    """
    dim = c.head_dim

    def project(name: str, heads: int) -> Array:
        found = np.einsum("bte,ehd->bthd", x, take(f"{name}/kernel", c.base_emb_dim, heads, dim))
        return found + take(f"{name}/bias", heads, dim) if biased else found

    query, key = project("query", c.base_num_query_heads), project("key", c.base_num_kv_heads)
    if normed:
        query, key = (_normed(take, c, name, one) for name, one in (("query", query), ("key", key)))
    query, key = (turned(c, one, local=local) for one in (query, key))
    found = attend(query * scale, key, project("value", c.base_num_kv_heads), visible, cap=cap)
    return np.einsum("bthd,hde->bte", found, take("out/kernel", c.base_num_query_heads, dim, c.base_emb_dim))


def _normed(take: Part, c: Any, name: str, heads: Array) -> Array:
    """Each head normalised, or all heads together (`GlobalRMSNorm`), by the model's name."""
    together = c.model_name.startswith("olmo3")
    x = heads.reshape(*heads.shape[:2], -1) if together else heads
    found = rms_norm(x, take(f"{name}_norm/scale", x.shape[-1]), c.normalization_layer_epsilon)
    return found.reshape(heads.shape)


def turned(c: Any, x: Array, *, local: bool) -> Array:
    """Heads [batch, position, head, dim] with rotary positions."""
    if c.model_name.startswith("llama3.1") or c.rope_type.startswith("llama3.1"):
        found = frequencies(c.head_dim, c.rope_max_timescale)
        return turn_neighbours(x, llama3_scaled(found, **_LLAMA3) if c.rope_use_scale else found)
    if c.rope_type.startswith("yarn"):
        return turn(c, x)
    own = local and c.local_rope_max_timescale > 0
    linear = 1.0 if local and c.model_name.startswith("gemma3") else c.rope_linear_scaling_factor
    base = c.local_rope_max_timescale if own else c.rope_max_timescale
    return turn_halves(x, frequencies(c.head_dim, base) / linear)
