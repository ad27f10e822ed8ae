"""Gemma 1, 2 and 3 by the definition of Google DeepMind's library `gemma`: what it reads and computes.

Source of truth: google-deepmind/gemma at 7691fd4 (gemma 3.3), gm/nn/_config.py, _gemma.py, _modules.py, _layers.py,
_transformer.py, gm/math/_positional_embeddings.py. The roundings of its dtypes are left out. Key paths are those of the
tree NESTED; `save` writes each of the trees that the library's releases have.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.support.oracles.parts import ACTIVATIONS, attend, causal, frequencies, soft_cap, turn_halves

if TYPE_CHECKING:
    from tests.support.oracles.leaves import Leaves


Array = np.ndarray[Any, np.dtype[Any]]

LOCAL, GLOBAL = "local", "global"
# Of TransformerConfig.
DEFAULTS: Mapping[str, Any] = {
    "final_logit_softcap": None, "use_post_attn_norm": False, "use_post_ffw_norm": False, "attn_logits_soft_cap": None,
    "sliding_window_size": None, "transpose_gating_einsum": False, "use_qk_norm": False, "local_base_frequency": 10_000,
    "global_base_frequency": 10_000, "local_scale_factor": 1.0, "global_scale_factor": 1.0,
    "query_pre_attn_norm": "head_dim",
}  # fmt: skip
_EPSILON = 1e-6


def logits(leaves: Leaves, config: Mapping[str, Any], tokens: Array) -> Array:
    """Logits [batch, position, vocabulary] of tokens [batch, position].

    Args:
        leaves: parameters by their key path in the tree NESTED.
        config: TransformerConfig; the attention types are the words `local` and `global`.
        tokens: the tokens.
    """
    c = SimpleNamespace(**{**DEFAULTS, **config})
    table = leaves("embedder/input_embedding", c.num_embed, c.embed_dim)
    x = table[tokens] * c.embed_dim**0.5
    for index, kind in enumerate(c.attention_types):
        layer = f"layer_{index}"
        found = _attention(leaves, f"{layer}/attn", c, kind, _norm(leaves, f"{layer}/pre_attention_norm", x))
        x = x + (_norm(leaves, f"{layer}/post_attention_norm", found) if c.use_post_attn_norm else found)
        found = _feed_forward(leaves, f"{layer}/mlp", c, _norm(leaves, f"{layer}/pre_ffw_norm", x))
        x = x + (_norm(leaves, f"{layer}/post_ffw_norm", found) if c.use_post_ffw_norm else found)
    return soft_cap(_norm(leaves, "final_norm", x) @ table.T, c.final_logit_softcap)


def _norm(leaves: Leaves, name: str, x: Array) -> Array:
    scale = leaves(f"{name}/scale", x.shape[-1])
    return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + _EPSILON) * (1 + scale)


def _attention(leaves: Leaves, name: str, c: SimpleNamespace, kind: str, x: Array) -> Array:
    heads, groups, width, dim = c.num_heads, c.num_kv_heads, c.embed_dim, c.head_dim
    if heads == groups:
        query, key, value = np.einsum(
            "BTD,SNDH->SBTNH", x, leaves(f"{name}/qkv_einsum/w", 3, heads, width, dim)
        )
    else:
        query = np.einsum("BTD,NDH->BTNH", x, leaves(f"{name}/q_einsum/w", heads, width, dim))
        key, value = np.einsum("BSD,CKDH->CBSKH", x, leaves(f"{name}/kv_einsum/w", 2, groups, width, dim))
    if c.use_qk_norm:
        query, key = _norm(leaves, f"{name}/_query_norm", query), _norm(leaves, f"{name}/_key_norm", key)
    base, factor = (getattr(c, f"{kind}_{word}") for word in ("base_frequency", "scale_factor"))
    turn = frequencies(dim, base) / factor
    scale = (dim if c.query_pre_attn_norm == "head_dim" else width // heads) ** -0.5
    window = c.sliding_window_size if kind == LOCAL else None
    visible = causal(x.shape[1], window)
    query, key = turn_halves(query, turn) * scale, turn_halves(key, turn)
    found = attend(query, key, value, visible, cap=c.attn_logits_soft_cap)
    return np.einsum("BTNH,NHD->BTD", found, leaves(f"{name}/attn_vec_einsum/w", heads, dim, width))


def _feed_forward(leaves: Leaves, name: str, c: SimpleNamespace, x: Array) -> Array:
    if c.transpose_gating_einsum:
        gating = leaves(f"{name}/gating_einsum", 2, c.hidden_dim, c.embed_dim)
        gate, up = np.einsum("BTF,NHF->NBTH", x, gating)
    else:
        gate, up = np.einsum(
            "BTF,NFH->NBTH", x, leaves(f"{name}/gating_einsum", 2, c.embed_dim, c.hidden_dim)
        )
    return (ACTIVATIONS["gelu"](gate) * up) @ leaves(f"{name}/linear", c.hidden_dim, c.embed_dim)


def save(folder: Path, arrays: Mapping[str, Array], tree: str) -> Path:
    """A checkpoint of Orbax, in the tree `nested`, `flat` or `split`.

    The trees FLAT and NESTED are the library's; `split` are the names of FLAT, cut at their slashes.
    """
    import orbax.checkpoint as ocp

    from tests.support.oracles import files

    whole = files.tree(arrays)
    if tree != "nested":
        names = {f"transformer/{name}{'/w' if '/mlp/' in name else ''}": one for name, one in arrays.items()}
        whole = files.tree(names)
    if tree == "flat":
        whole = {}
        for name, one in names.items():
            module, leaf = name.rsplit("/", 1)
            whole.setdefault(module, {})[leaf] = one
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder, whole)
        checkpointer.wait_until_finished()
    return folder
