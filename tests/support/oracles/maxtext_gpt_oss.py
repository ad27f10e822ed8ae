"""MaxText's `GptOssDecoderLayer`: attention with sinks, and experts with biases and a limited activation.

Source of truth: MaxText 0.2.5, models/gpt_oss.py, layers/attentions.py and attention_op.py (`sinks`), layers/moe.py
(`GateLogit`, `dense_matmul`, `apply_ffn_activation`), layers/embeddings.py (`YarnRotaryEmbedding`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from tests.support.oracles.maxtext_experts import weights
from tests.support.oracles.maxtext_latent import turn
from tests.support.oracles.parts import attend, causal, rms_norm, sigmoid

if TYPE_CHECKING:
    from tests.support.oracles.leaves import Part


Array = np.ndarray[Any, np.dtype[Any]]

CYCLE = 2  # a layer with a window, and one without
_SLOPE = 1.702


def local(take: Part, c: Any, x: Array) -> Array:
    """A layer whose queries see a window."""
    return _block(take, c, x, causal(x.shape[1], c.sliding_window_size))


def whole(take: Part, c: Any, x: Array) -> Array:
    """A layer whose queries see all earlier positions."""
    return _block(take, c, x, causal(x.shape[1]))


def _block(take: Part, c: Any, x: Array, visible: Array) -> Array:
    def norm(name: str, value: Array) -> Array:
        return rms_norm(value, take(f"{name}/scale", c.base_emb_dim), c.normalization_layer_epsilon)

    x = x + _attention(take.under("GptOssAttention"), c, norm("pre_self_attention_layer_norm", x), visible)
    return x + _experts(take.under("GptOssMlp"), c, norm("post_self_attention_layer_norm", x))


def _attention(take: Part, c: Any, x: Array, visible: Array) -> Array:
    heads, dim, embed = c.base_num_query_heads, c.head_dim, c.base_emb_dim

    def project(name: str, count: int) -> Array:
        found = np.einsum("bte,ehd->bthd", x, take(f"{name}/kernel", embed, count, dim))
        return found + take(f"{name}/bias", count, dim)

    query, key = turn(c, project("query", heads)), turn(c, project("key", c.base_num_kv_heads))
    value = project("value", c.base_num_kv_heads)
    found = attend(query * dim**-0.5, key, value, visible, sinks=take("sinks", heads))
    return np.einsum("bthd,hde->bte", found, take("out/kernel", heads, dim, embed)) + take("out/bias", embed)


def _experts(take: Part, c: Any, x: Array) -> Array:
    count, embed, width = c.num_experts, c.base_emb_dim, c.base_mlp_dim

    def project(name: str) -> Array:
        found = np.einsum("bte,new->btnw", x, take(name, count, embed, width))
        return found + take(f"{name}_bias", count, width)

    limit = c.mlp_activations_limit
    gate, up = np.minimum(project("wi_0"), limit), np.clip(project("wi_1"), -limit, limit)
    hidden = gate * sigmoid(_SLOPE * gate) * (up + 1)
    found = np.einsum("btnw,nwe->btne", hidden, take("wo", count, width, embed)) + take(
        "wo_bias", count, embed
    )
    return np.einsum("btne,btn->bte", found, weights(take.under("gate"), c, x))
