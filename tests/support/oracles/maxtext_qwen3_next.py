"""MaxText's `Qwen3NextDecoderLayer`: layers with gated delta nets, then one with gated attention.

Source of truth: MaxText 0.2.5, models/qwen3.py (`Qwen3NextGatedDeltaNet`, `Qwen3NextSparseMoeBlock`,
`Qwen3NextScannableBlock`), layers/attentions.py (`is_qwen3_hybrid`), layers/embeddings.py (`PartialRotaryEmbedding`),
layers/normalizations.py (`Qwen3NextRMSNorm`, whose scale is added to one). The delta rule is computed one position
after the other, as its definition says (Yang et al., 2024), where MaxText computes chunks of positions at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.support.oracles.leaves import Leaves, Part, stacked
from tests.support.oracles.maxtext_experts import experts
from tests.support.oracles.parts import (
    ACTIVATIONS,
    attend,
    causal,
    frequencies,
    rms_norm,
    sigmoid,
    turn_halves,
)

Array = np.ndarray[Any, np.dtype[Any]]

_L2_EPSILON = 1e-6
_SILU = ACTIVATIONS["silu"]


@dataclass(frozen=True)
class InnerPart(Part):
    """The leaves of one layer of a stack within a stack, the inner axis behind the outer one.

    Attributes:
        inner: the index in the inner stack.
        inners: the number of layers in it.
    """

    inner: int = 0
    inners: int = 0

    def __call__(self, name: str, *shape: int) -> Array:
        """One array of this part, without the axes of layers."""
        within = (*shape[: self.axis], self.inners, *shape[self.axis :])
        return super().__call__(name, *within).take(self.inner, self.axis)


def layers(leaves: Leaves, c: Any) -> list[tuple[Part, Callable[[Part, Any, Array], Array]]]:
    """Each layer's leaves and its block, in the order of the computation."""
    cycle, count, axis = c.inhomogeneous_layer_cycle_interval, c.base_num_decoder_layers, c.param_scan_axis
    if not c.scan_layers:
        parts = [Part(leaves, f"decoder/layers_{number}") for number in range(count)]
    else:
        blocks = count // cycle
        last = stacked(leaves, "decoder/layers/global_layer", blocks, axis)
        parts = [
            last[block] if place == cycle - 1
            else InnerPart(leaves, "decoder/layers/local_layers", block, blocks, axis, place, cycle - 1)
            for block in range(blocks)
            for place in range(cycle)
        ]  # fmt: skip
    return [(take, full if number % cycle == cycle - 1 else linear) for number, take in enumerate(parts)]


def norm(take: Part, c: Any, name: str, x: Array) -> Array:
    """A norm whose stored scale is added to one."""
    return rms_norm(x, 1 + take(f"{name}/scale", x.shape[-1]), c.normalization_layer_epsilon)


def linear(take: Part, c: Any, x: Array) -> Array:
    """A layer with a gated delta net."""
    x = x + _delta_net(take.under("attention"), c, norm(take, c, "input_layernorm", x))
    return x + _feed_forward(take.under("mlp"), c, norm(take, c, "post_attention_layernorm", x))


def full(take: Part, c: Any, x: Array) -> Array:
    """A layer whose queries see all earlier positions."""
    x = x + _attention(take.under("attention/attention"), c, norm(take, c, "input_layernorm", x))
    return x + _feed_forward(take.under("mlp"), c, norm(take, c, "post_attention_layernorm", x))


def _attention(take: Part, c: Any, x: Array) -> Array:
    heads, groups, dim, embed = c.base_num_query_heads, c.base_num_kv_heads, c.head_dim, c.base_emb_dim
    both = np.einsum("bte,ehd->bthd", x, take("query/kernel", embed, heads, 2 * dim))
    query, gate = both[..., :dim], both[..., dim:]
    key, value = (
        np.einsum("bte,ehd->bthd", x, take(f"{name}/kernel", embed, groups, dim)) for name in ("key", "value")
    )
    query, key = (
        _turn(c, norm(take, c, f"{name}_norm", one)) for name, one in (("query", query), ("key", key))
    )
    found = attend(query * dim**-0.5, key, value, causal(x.shape[1])) * sigmoid(gate)
    return found.reshape(*x.shape[:2], heads * dim) @ take("out/kernel", heads * dim, embed)


def _turn(c: Any, x: Array) -> Array:
    """Rotary positions of the first elements of a head."""
    turned = int(c.head_dim * c.partial_rotary_factor)
    first = turn_halves(x[..., :turned], frequencies(turned, c.rope_max_timescale))
    return np.concatenate([first, x[..., turned:]], axis=-1)


def _delta_net(take: Part, c: Any, x: Array) -> Array:
    heads, dim = c.gdn_num_value_heads, c.gdn_value_head_dim
    queries, keys, values, gate, ba = _projected(take, c, x)
    queries, keys, values = _convolved(take, c, queries, keys, values)
    share = heads // c.gdn_num_key_heads
    queries, keys = (np.repeat(_unit(one), share, axis=2) for one in (queries, keys))
    beta, step = sigmoid(ba[..., :share]), ba[..., share:].reshape(*x.shape[:2], heads)
    decay = np.exp(take("A_log", heads)) * np.logaddexp(0, step + take("dt_bias", heads))
    seen = _delta_rule(queries * c.gdn_key_head_dim**-0.5, keys, values, decay, beta.reshape(decay.shape))
    seen = rms_norm(seen, take("norm/rms_norm/scale", dim), c.normalization_layer_epsilon) * _SILU(gate)
    return seen.reshape(*x.shape[:2], heads * dim) @ take("out_proj/kernel", heads * dim, c.base_emb_dim)


def _projected(take: Part, c: Any, x: Array) -> tuple[Array, Array, Array, Array, Array]:
    """Queries, keys, values and gates of the output by heads, and both gates of each value head by key heads."""
    keys, dim, heads, width = (
        c.gdn_num_key_heads, c.gdn_key_head_dim, c.gdn_num_value_heads, c.gdn_value_head_dim
    )  # fmt: skip
    share = heads // keys
    mixed = x @ take("in_proj_qkvz/kernel", c.base_emb_dim, 2 * keys * dim + 2 * heads * width)
    mixed = mixed.reshape(*x.shape[:2], keys, -1)
    query, key, value, gate = np.split(mixed, [dim, 2 * dim, 2 * dim + share * width], axis=-1)
    value, gate = (one.reshape(*x.shape[:2], heads, width) for one in (value, gate))
    ba = x @ take("in_proj_ba/kernel", c.base_emb_dim, 2 * heads)
    return query, key, value, gate, ba.reshape(*x.shape[:2], keys, 2 * share)


def _convolved(take: Part, c: Any, *parts: Array) -> list[Array]:
    """Each channel's last positions, weighed and summed, then silu."""
    batch, length = parts[0].shape[:2]
    joined = np.concatenate([one.reshape(batch, length, -1) for one in parts], axis=-1)
    seen, channels = c.gdn_conv_kernel_dim, joined.shape[-1]
    kernel = take("conv1d/kernel", seen, 1, channels)
    padded = np.pad(joined, ((0, 0), (seen - 1, 0), (0, 0)))
    weighed = [padded[:, place : place + length] * kernel[place, 0] for place in range(seen)]
    found = _SILU(np.sum(weighed, axis=0))
    ends = np.cumsum([one[0, 0].size for one in parts])[:-1]
    return [new.reshape(old.shape) for new, old in zip(np.split(found, ends, axis=-1), parts, strict=True)]


def _unit(x: Array) -> Array:
    return x / np.sqrt((x * x).sum(-1, keepdims=True) + _L2_EPSILON)


def _delta_rule(query: Array, key: Array, value: Array, decay: Array, beta: Array) -> Array:
    """What each query reads from a memory that decays, and in which each key's value replaces what it held."""
    memory = np.zeros((*key.shape[:1], *key.shape[2:], value.shape[-1]))
    found = np.zeros_like(value)
    for at in range(query.shape[1]):
        memory = memory * np.exp(-decay[:, at])[..., None, None]
        held = np.einsum("bhkv,bhk->bhv", memory, key[:, at])
        new = (value[:, at] - held) * beta[:, at][..., None]
        memory = memory + key[:, at][..., None] * new[..., None, :]
        found[:, at] = np.einsum("bhkv,bhk->bhv", memory, query[:, at])
    return found


def _feed_forward(take: Part, c: Any, x: Array) -> Array:
    """The routed experts, and the share of the shared one that each token's gate decides."""
    width, embed = c.base_moe_mlp_dim, c.base_emb_dim
    shared = take.under("shared_expert")
    hidden = _SILU(x @ shared("wi_0/kernel", embed, width)) * (x @ shared("wi_1/kernel", embed, width))
    gate = sigmoid(x @ take("shared_expert_gate/kernel", embed, 1))
    return experts(take.under("routed_experts"), c, x, width) + gate * (
        hidden @ shared("wo/kernel", width, embed)
    )
