"""Lingua's `LMTransformer` and Meta's `Transformer` of Llama: the same names and shapes, two configs.

Source of truth: facebookresearch/lingua at 437d680 (lingua/transformer.py, apps/main/transformer.py); for Meta,
meta-llama/llama-models (models/llama3/reference_impl/model.py): a `params.json` without `head_dim`, and frequencies
that `use_scaled_rope` scales. Rotary positions turn neighbouring elements of a head; w1 is the gate.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

from tests.support.oracles.parts import (
    ACTIVATIONS,
    attend,
    causal,
    frequencies,
    llama3_scaled,
    rms_norm,
    turn_neighbours,
)

if TYPE_CHECKING:
    import numpy as np

    from tests.support.oracles.leaves import Leaves


Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"

# Built into Meta's `apply_scaling`.
_LLAMA3 = {"factor": 8, "low": 1, "high": 4, "old_context": 8192}


def logits(leaves: Leaves, args: Mapping[str, Any], tokens: Array) -> Array:
    """Logits [batch, position, vocabulary] of tokens [batch, position].

    Args:
        leaves: parameters by their names in the state dict of the model.
        args: `model` of Lingua's params.json, or Meta's params.json.
        tokens: the tokens.
    """
    width, vocab, epsilon = args["dim"], args["vocab_size"], args["norm_eps"]
    table = leaves("tok_embeddings.weight", vocab, width)
    x = table[tokens]
    for index in range(args["n_layers"]):
        layer = f"layers.{index}"
        x = x + _attention(
            leaves, layer, args, rms_norm(x, leaves(f"{layer}.attention_norm.weight", width), epsilon)
        )
        x = x + _feed_forward(
            leaves, layer, args, rms_norm(x, leaves(f"{layer}.ffn_norm.weight", width), epsilon)
        )
    x = rms_norm(x, leaves("norm.weight", width), epsilon)
    if args.get("weight_tying"):
        return x @ leaves("output.tied_module.weight", vocab, width).T
    return x @ leaves("output.weight", vocab, width).T


def _attention(leaves: Leaves, layer: str, args: Mapping[str, Any], x: Array) -> Array:
    width = args["dim"]
    dim = args.get("head_dim") or width // args["n_heads"]
    heads = args.get("n_heads") or width // dim
    groups = args.get("n_kv_heads") or heads

    def project(name: str, count: int) -> Array:
        found = x @ leaves(f"{layer}.attention.{name}.weight", count * dim, width).T
        return found.reshape(*x.shape[:2], count, dim)

    turn = frequencies(dim, args.get("rope_theta", 10000.0))
    turn = llama3_scaled(turn, **_LLAMA3) if args.get("use_scaled_rope") else turn
    query, key = (
        turn_neighbours(project(name, count), turn) for name, count in (("wq", heads), ("wk", groups))
    )
    visible = causal(x.shape[1], args.get("sliding_window"))
    found = attend(query * dim**-0.5, key, project("wv", groups), visible)
    return found.reshape(*x.shape[:2], -1) @ leaves(f"{layer}.attention.wo.weight", width, heads * dim).T


def _feed_forward(leaves: Leaves, layer: str, args: Mapping[str, Any], x: Array) -> Array:
    width, hidden = args["dim"], hidden_size(args)
    gate, up = (x @ leaves(f"{layer}.feed_forward.{name}.weight", hidden, width).T for name in ("w1", "w3"))
    return (ACTIVATIONS["silu"](gate) * up) @ leaves(f"{layer}.feed_forward.w2.weight", width, hidden).T


def hidden_size(args: Mapping[str, Any]) -> int:
    """Two thirds of four times the width, times the multiplier, rounded up to a multiple."""
    hidden = int(2 * 4 * args["dim"] / 3)
    if args.get("ffn_dim_multiplier") is not None:
        hidden = int(args["ffn_dim_multiplier"] * hidden)
    multiple = args["multiple_of"]
    return multiple * ((hidden + multiple - 1) // multiple)
