"""Parts of transformers in numpy, in the order of their published definitions and in float64.

Arrays of activations are [batch, position, …]; a head is the last axis but one, its elements the last.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]


def rms_norm(x: Array, scale: Array, epsilon: float) -> Array:
    """Root mean square normalisation (Zhang and Sennrich, 2019)."""
    return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + epsilon) * scale


def layer_norm(x: Array, scale: Array, bias: Array, epsilon: float) -> Array:
    """Layer normalisation (Ba, Kiros and Hinton, 2016)."""
    centred = x - np.mean(x, -1, keepdims=True)
    return centred / np.sqrt(np.mean(centred * centred, -1, keepdims=True) + epsilon) * scale + bias


def softmax(x: Array) -> Array:
    """Softmax over the last axis."""
    raised = np.exp(x - np.max(x, -1, keepdims=True))
    return raised / np.sum(raised, -1, keepdims=True)


def sigmoid(x: Array) -> Array:
    """Logistic function."""
    return 1 / (1 + np.exp(-x))


def soft_cap(x: Array, cap: float | None) -> Array:
    """Values bent into -cap … cap by tanh; unchanged without a cap (None or 0)."""
    return np.tanh(x / cap) * cap if cap else x


def _gelu(x: Array) -> Array:
    """The approximation by tanh, which flax's and praxis's gelu are."""
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "linear": lambda x: x,
    "relu": lambda x: np.maximum(x, 0),
    "gelu": _gelu,
    "silu": lambda x: x * sigmoid(x),
}


class TieError(ValueError):
    """What a model computes is not determined: libraries choose differently of equal scores."""


def causal(length: int, window: int | None = None) -> Array:
    """Which key (column) a query (row) sees: none after it, and with a window only that many, itself included."""
    query, key = np.arange(length)[:, None], np.arange(length)[None, :]
    return (key <= query) & (True if window is None else key > query - window)


def attend(
    query: Array,
    key: Array,
    value: Array,
    visible: Array | bool,
    *,
    cap: float | None = None,
    bias: Array | float = 0.0,
    sinks: Array | None = None,
) -> Array:
    """Dot-product attention without a scale of its own; consecutive query heads share a key head.

    Args:
        query: [batch, query, head, dim].
        key, value: [batch, key, group, dim].
        visible: [query, key].
        cap: soft cap of the scores.
        bias: [head, query, key], added to the scores.
        sinks: [head], scores of a key whose value is zero.

    Returns:
        [batch, query, head, dim of the values].
    """
    heads, groups = query.shape[2], key.shape[2]
    shared = [np.repeat(one, heads // groups, axis=2) for one in (key, value)]
    scores = soft_cap(np.einsum("bqhd,bkhd->bhqk", query, shared[0]), cap) + bias
    scores = np.where(visible, scores, -1e30)
    if sinks is None:
        return np.einsum("bhqk,bkhe->bqhe", softmax(scores), shared[1])
    sink_scores = np.broadcast_to(sinks[:, None, None], (*scores.shape[:-1], 1))
    shares = softmax(np.concatenate([scores, sink_scores], axis=-1))[..., :-1]
    return np.einsum("bhqk,bkhe->bqhe", shares, shared[1])


def frequencies(dim: int, base: float) -> Array:
    """Radians per position of each of the dim / 2 planes in which rotary positions turn a head (Su et al., 2021)."""
    return float(base) ** (-np.arange(0, dim, 2) / dim)


def llama3_scaled(frequency: Array, factor: float, low: float, high: float, old_context: float) -> Array:
    """Frequencies scaled by the rule of Llama 3.1: long waves by the factor, short ones not, a ramp between."""
    length = 2 * np.pi / frequency
    smooth = (old_context / length - low) / (high - low)
    between = (1 - smooth) * frequency / factor + smooth * frequency
    scaled = np.where(length > old_context / low, frequency / factor, between)
    return np.where(length < old_context / high, frequency, scaled)


def turn_halves(x: Array, frequency: Array) -> Array:
    """Rotary positions where a plane is element i of the first and of the second half of a head."""
    cos, sin = _angles(x, frequency)
    first, second = np.split(x, 2, axis=-1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def turn_neighbours(x: Array, frequency: Array) -> Array:
    """Rotary positions where a plane is two neighbouring elements of a head."""
    cos, sin = _angles(x, frequency)
    first, second = x[..., 0::2], x[..., 1::2]
    return np.stack([first * cos - second * sin, second * cos + first * sin], axis=-1).reshape(x.shape)


def _angles(x: Array, frequency: Array) -> tuple[Array, Array]:
    angle = np.arange(x.shape[1])[:, None, None] * frequency
    return np.cos(angle), np.sin(angle)
