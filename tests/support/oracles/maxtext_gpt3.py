"""MaxText's gpt3 decoder block.

Source of truth: AI-Hypercomputer/maxtext at e591f30, models/gpt3.py (norms whose scale is centred at zero, fused or
separate query, key and value, the query divided by sqrt(dim)) and `MlpBlock` of layers/linears.py (a norm of its own).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from tests.support.oracles.parts import ACTIVATIONS, attend, causal, layer_norm

if TYPE_CHECKING:
    from tests.support.oracles.leaves import Part


Array = np.ndarray[Any, np.dtype[Any]]


def block(take: Part, c: Any, x: Array) -> Array:
    """One layer."""
    x = x + _attention(take.under("self_attention"), c, norm(take.under("pre_self_attention_norm"), c, x))
    return x + _mlp(take.under("mlp"), c, x)


def norm(take: Part, c: Any, x: Array) -> Array:
    """`Gpt3LayerNorm`."""
    scale, bias = (take(name, c.base_emb_dim) for name in ("scale", "bias"))
    return layer_norm(x, 1 + scale, bias, c.normalization_layer_epsilon)


def _attention(take: Part, c: Any, x: Array) -> Array:
    embed, heads, dim = c.base_emb_dim, c.base_num_query_heads, c.head_dim
    if c.fused_qkv:
        kernel, bias = take("qkv_proj/kernel", embed, 3, heads, dim), take("qkv_proj/bias", 3, heads, dim)
        query, key, value = np.moveaxis(np.einsum("bte,ekhd->btkhd", x, kernel) + bias, 2, 0)
    else:
        query, key, value = (
            np.einsum("bte,ehd->bthd", x, take(f"{name}/kernel", embed, heads, dim))
            + take(f"{name}/bias", heads, dim)
            for name in ("query", "key", "value")
        )
    found = attend(query / dim**0.5, key, value, causal(x.shape[1]))
    return np.einsum("bthd,hde->bte", found, take("out/kernel", heads, dim, embed)) + take("out/bias", embed)


def _mlp(take: Part, c: Any, x: Array) -> Array:
    embed, width = c.base_emb_dim, c.base_mlp_dim
    x = norm(take.under("mlp_layer_norm"), c, x)
    hidden = ACTIVATIONS[c.mlp_activations[0]](x @ take("wi/kernel", embed, width) + take("wi/bias", width))
    return hidden @ take("wo/kernel", width, embed) + take("wo/bias", embed)
