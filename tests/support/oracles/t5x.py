"""T5X's minimal and scalable T5 by their definition: encoder and decoder with relative positions.

Source of truth: google-research/t5x at cc342d4 (t5x/examples/t5 and t5x/examples/scalable_t5: network.py, layers.py).
No query is scaled; relative biases are added to every layer, from one table (minimal) or one of its own (scalable).
Norms have 1e-6 for epsilon, and logits through the embedding are divided by sqrt(embed). Tokens must not be 0, which
T5X takes for padding. The minimal network joins heads, [embed, heads * dim], the scalable one does not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from tests.support.oracles.leaves import Leaves, Part, stacked
from tests.support.oracles.parts import ACTIVATIONS, attend, causal, rms_norm

Array = np.ndarray[Any, np.dtype[Any]]

_EPSILON, _BUCKETS, _MAX_DISTANCE = 1e-6, 32, 128
DEFAULTS: Mapping[str, Any] = {
    "emb_dim": 512, "num_heads": 8, "num_encoder_layers": 6, "num_decoder_layers": 6, "head_dim": 64, "mlp_dim": 2048,
    "mlp_activations": ("relu",), "logits_via_embedding": False, "scan_layers": False, "param_scan_axis": 1,
}  # fmt: skip


class Network(NamedTuple):
    """A network and the form of its checkpoint.

    Attributes:
        c: `T5Config`.
        apart: whether heads are axes of their own.
        own_bias: whether every layer has a table of relative biases.
    """

    c: Mapping[str, Any]
    apart: bool = False
    own_bias: bool = False


def logits(leaves: Leaves, network: Network, encoder_tokens: Array, decoder_tokens: Array) -> Array:
    """Logits [batch, position, vocabulary] of the decoder; leaves below `target`."""
    c, encoded = network.c, encode(leaves, network, encoder_tokens)
    table = leaves("token_embedder/embedding", c["vocab_size"], c["emb_dim"])
    x = table[decoder_tokens]
    visible = causal(x.shape[1])
    for take in _layers(leaves, network, "decoder"):
        bias = _bias(leaves, take, network, "decoder", x.shape[1])
        seen = _norm(take, network, "pre_self_attention_layer_norm", x)
        x = x + _attention(take.under("self_attention"), network, seen, seen, visible, bias)
        seen = _norm(take, network, "pre_cross_attention_layer_norm", x)
        x = x + _attention(take.under("encoder_decoder_attention"), network, seen, encoded, True, 0.0)
        x = x + _mlp(take.under("mlp"), network, _norm(take, network, "pre_mlp_layer_norm", x))
    x = _norm(Part(leaves, "decoder"), network, "decoder_norm", x)
    if c["logits_via_embedding"]:
        return x @ table.T / c["emb_dim"] ** 0.5
    return x @ leaves("decoder/logits_dense/kernel", c["emb_dim"], c["vocab_size"])


def encode(leaves: Leaves, network: Network, tokens: Array) -> Array:
    """The encoder's output [batch, position, embed]."""
    x = leaves("token_embedder/embedding", network.c["vocab_size"], network.c["emb_dim"])[tokens]
    for take in _layers(leaves, network, "encoder"):
        bias = _bias(leaves, take, network, "encoder", x.shape[1])
        seen = _norm(take, network, "pre_attention_layer_norm", x)
        x = x + _attention(take.under("attention"), network, seen, seen, True, bias)
        x = x + _mlp(take.under("mlp"), network, _norm(take, network, "pre_mlp_layer_norm", x))
    return _norm(Part(leaves, "encoder"), network, "encoder_norm", x)


def _layers(leaves: Leaves, network: Network, side: str) -> list[Part]:
    count = network.c[f"num_{side}_layers"]
    if network.c["scan_layers"]:
        return stacked(leaves, f"{side}/{side}", count, network.c["param_scan_axis"])
    return [Part(leaves, f"{side}/layers_{index}") for index in range(count)]


def _norm(take: Part, network: Network, name: str, x: Array) -> Array:
    return rms_norm(x, take(f"{name}/scale", network.c["emb_dim"]), _EPSILON)


def _attention(
    take: Part, network: Network, x: Array, other: Array, visible: Array | bool, bias: Array | float
) -> Array:
    embed, heads, dim = (network.c[name] for name in ("emb_dim", "num_heads", "head_dim"))
    joined = (heads, dim) if network.apart else (heads * dim,)

    def project(name: str, value: Array) -> Array:
        kernel = take(f"{name}/kernel", embed, *joined).reshape(embed, heads, dim)
        return np.einsum("bte,ehd->bthd", value, kernel)

    found = attend(project("query", x), project("key", other), project("value", other), visible, bias=bias)
    return np.einsum("bthd,hde->bte", found, take("out/kernel", *joined, embed).reshape(heads, dim, embed))


def _mlp(take: Part, network: Network, x: Array) -> Array:
    embed, width, names = (network.c[name] for name in ("emb_dim", "mlp_dim", "mlp_activations"))
    hidden: Array | float = 1.0
    for number, name in enumerate(names):
        wi = "wi" if len(names) == 1 else f"wi_{number}"
        hidden = hidden * ACTIVATIONS[name](x @ take(f"{wi}/kernel", embed, width))
    return hidden @ take("wo/kernel", width, embed)


def _bias(leaves: Leaves, take: Part, network: Network, side: str, length: int) -> Array:
    """[head, query, key]."""
    own = take if network.own_bias else Part(leaves, side)
    table = own("relpos_bias/rel_embedding", network.c["num_heads"], _BUCKETS)
    return table[:, _bucket(np.arange(length)[None] - np.arange(length)[:, None], both=side == "encoder")]


def _bucket(distance: Array, *, both: bool) -> Array:
    """Near distances have a bucket each, far ones share them by their logarithm; in both directions or backwards."""
    count = _BUCKETS // 2 if both else _BUCKETS
    found = np.where(distance > 0, count, 0) if both else 0
    far = np.abs(distance) if both else np.maximum(-distance, 0)
    exact = count // 2
    share = np.log(np.maximum(far, 1) / exact) / np.log(_MAX_DISTANCE / exact) * (count - exact)
    return found + np.where(far < exact, far, np.minimum(exact + share.astype(int), count - 1))
