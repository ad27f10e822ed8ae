"""MaxText's `RoutedMoE` and `RoutedAndSharedMoE`: which experts a token goes to, and with which weights.

Source of truth: AI-Hypercomputer/maxtext at e591f30, layers/moe.py (`GateLogit`, `get_topk`, `deepseek_routing`,
`expert_group_mask`, `deepseek_scale_weights`, `dense_matmul`). Groups and weights without the bias are looked at only
if the model's name begins with deepseek3.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.support.oracles.parts import ACTIVATIONS, sigmoid, softmax

if TYPE_CHECKING:
    from tests.support.oracles.leaves import Part


Array = np.ndarray[Any, np.dtype[Any]]

_SCORES = {"": lambda x: x, "sigmoid": sigmoid, "softmax": softmax}


def experts(take: Part, c: Any, x: Array, width: int) -> Array:
    """The weighted sum of the experts' outputs for activations [batch, position, embed]."""
    count, embed = c.num_experts, c.base_emb_dim
    gates = np.einsum("bte,new->btnw", x, take("wi_0", count, embed, width))
    hidden = ACTIVATIONS[c.mlp_activations[0]](gates)
    hidden = hidden * np.einsum("bte,new->btnw", x, take("wi_1", count, embed, width))
    found = np.einsum("btnw,nwe->btne", hidden, take("wo", count, width, embed))
    return np.einsum("btne,btn->bte", found, weights(take.under("gate"), c, x))


def shared_and_routed(take: Part, c: Any, x: Array, mlp: Callable[[Part, Any, Array, int], Array]) -> Array:
    """DeepSeek's experts that every token goes to, and those that it is routed to."""
    routed = experts(take.under("MoeBlock_0"), c, x, c.base_moe_mlp_dim)
    return routed + mlp(take.under("shared_experts"), c, x, c.shared_experts * c.base_moe_mlp_dim)


def weights(take: Part, c: Any, x: Array) -> Array:
    """A weight for each expert [batch, position, expert], 0 for those that a token is not routed to."""
    scores = _SCORES[c.routed_score_func](x @ take("kernel", c.base_emb_dim, c.num_experts))
    biased = scores + take("bias", c.num_experts) if c.routed_bias else scores
    deepseek3 = c.model_name.startswith("deepseek3")
    open_to = np.where(_groups(c, biased), biased, -np.inf) if deepseek3 else biased
    chosen = np.argsort(-open_to, axis=-1)[..., : c.num_experts_per_tok]
    taken = _scaled(c, np.take_along_axis(scores if deepseek3 else biased, chosen, -1))
    weights = np.zeros_like(scores)
    np.put_along_axis(weights, chosen, taken, -1)
    return weights


def _scaled(c: Any, taken: Array) -> Array:
    if c.decoder_block == "deepseek":
        divisor = taken.sum(-1, keepdims=True) + 1e-20 if c.routed_score_func == "sigmoid" else 1.0
        return taken / divisor * c.routed_scaling_factor
    return softmax(taken)  # norm_topk_prob divides by their sum, which is 1


def _groups(c: Any, scores: Array) -> Array:
    """Which experts belong to the groups with the largest sums of their two best scores."""
    if c.n_routing_groups == -1:
        return np.ones_like(scores, bool)
    grouped = scores.reshape(*scores.shape[:-1], c.n_routing_groups, -1)
    sums = np.sort(grouped, axis=-1)[..., -2:].sum(-1)
    best = np.argsort(-sums, axis=-1)[..., : c.topk_routing_group]
    mask = np.zeros_like(sums, bool)
    np.put_along_axis(mask, best, values=True, axis=-1)
    return np.repeat(mask, grouped.shape[-1], axis=-1)
