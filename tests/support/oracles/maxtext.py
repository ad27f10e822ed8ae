"""MaxText's decoder by its definition: which leaves a forward pass reads, in which shape, and what it computes.

Source of truth: AI-Hypercomputer/maxtext at e591f30 (2026-08-22), src/maxtext: configs/base.yml for the defaults,
layers/decoders.py for the embedding, the order of layers, the scan and the output head, models/*.py for the blocks.
The roundings of its dtypes are left out: everything is computed in float64.

With `scan_layers`, flax's scan inserts the axis of layers into every parameter at `param_scan_axis`, counted within
the parameter of one layer: [embed, heads, dim] becomes [embed, layers, heads, dim].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeAlias

from tests.support.oracles import (
    maxtext_gemma4,
    maxtext_gemma4_small,
    maxtext_gpt3,
    maxtext_gpt_oss,
    maxtext_llama4,
    maxtext_qwen3_next,
)
from tests.support.oracles.leaves import DisagreementError, Leaves, Part, stacked
from tests.support.oracles.maxtext_attention import attention, turned
from tests.support.oracles.maxtext_experts import experts, shared_and_routed
from tests.support.oracles.maxtext_latent import latent_attention
from tests.support.oracles.parts import ACTIVATIONS, causal, rms_norm, soft_cap

if TYPE_CHECKING:
    import numpy as np


Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"

# Of base.yml what a forward pass reads.
DEFAULTS: Mapping[str, Any] = {
    "attention_bias": False, "attn_logits_soft_cap": 0.0, "beta_fast": 32, "beta_slow": 1, "chunk_attn_window_size": 0,
    "decoder_block": "llama2",
    "final_logits_soft_cap": 0.0, "first_num_dense_layers": 0, "fused_qkv": False, "head_dim": 128, "kv_lora_rank": 512,
    "gdn_conv_kernel_dim": 4, "gdn_key_head_dim": 128, "gdn_num_key_heads": 16, "gdn_num_value_heads": 32,
    "gdn_value_head_dim": 128, "partial_rotary_factor": 1.0,
    "indexer_head_dim": 128, "indexer_n_heads": 64, "indexer_topk": 2048, "inhomogeneous_layer_cycle_interval": 1,
    "global_head_dim": 0, "global_num_kv_heads": 0, "global_rope_max_timescale": -1, "global_rope_proportion": 0.25,
    "local_rope_proportion": 1.0, "num_experts": 1, "num_experts_per_tok": 1, "share_kv_projections": False,
    "v_norm_with_scale": True, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0,
    "use_double_wide_mlp": False, "vocab_size_per_layer_input": 0,
    "interleave_moe_layer_step": 1, "nope_layer_interval": -1, "temperature_tuning": False,
    "local_rope_max_timescale": -1, "logits_via_embedding": False, "max_position_embeddings": 163840,
    "mlp_activations": ["silu", "linear"], "mlp_activations_limit": -1.0, "model_name": "default", "mscale": 1.0,
    "n_routing_groups": -1,
    "norm_topk_prob": False, "normalization_layer_epsilon": 1e-5, "normalize_embedding_logits": True,
    "original_max_position_embeddings": 4096, "param_scan_axis": 1, "q_lora_rank": 0, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "rope_attention_scaling": False, "rope_factor": 40, "rope_interleave": True,
    "rope_linear_scaling_factor": 1.0, "rope_max_timescale": 10_000, "rope_truncate": True, "rope_type": "default",
    "rope_use_scale": True, "routed_bias": False, "routed_scaling_factor": 1.0, "routed_score_func": "",
    "scan_layers": True, "shared_experts": 0, "sliding_window_size": 0, "topk_routing_group": -1,
    "trainable_position_size": -1, "use_indexer": False,
    "use_post_attn_norm": False, "use_post_ffw_norm": False, "use_qk_norm": False,
    "v_head_dim": 128,
}  # fmt: skip
# Of models/*.yml what a forward pass reads: it holds for the name of a model unless the command line says otherwise.
_GEMMA3 = {"rope_linear_scaling_factor": 8.0}
MODEL_FILES: Mapping[str, Mapping[str, Any]] = {
    "gemma3-4b": _GEMMA3, "gemma3-12b": _GEMMA3, "gemma3-27b": _GEMMA3,
    "deepseek3.2-671b": {"rope_type": "yarn", "routed_score_func": "sigmoid", "routed_bias": True, "use_indexer": True},
    "deepseek3-671b": {"rope_type": "yarn", "routed_score_func": "sigmoid", "routed_bias": True},
}  # fmt: skip
OLMO3_CYCLE = 4  # three layers with a window, and one without
CYCLE = 6  # Gemma 3: five local layers and a global one
_GEMMA_EPSILON = 1e-6  # what RMSNorm has if a block passes it none, as those of Gemma do


def logits(leaves: Leaves, stated: Mapping[str, Any], tokens: Array) -> Array:
    """Logits of a batch of tokens.

    Args:
        leaves: parameters by their key path below `params/params`.
        stated: MaxText's config as on the command line; the rest is that of the model's name, or base.yml's.
        tokens: [batch, position].

    Returns:
        [batch, position, vocabulary], the rows that pad the vocabulary included.

    Raises:
        DisagreementError: the checkpoint is not that of this config.
    """
    c = SimpleNamespace(**{**DEFAULTS, **MODEL_FILES.get(stated.get("model_name", ""), {}), **stated})
    table = leaves("token_embedder/embedding", c.vocab_size, c.base_emb_dim)
    x = table[tokens]
    if c.trainable_position_size > 0:
        positions = leaves("decoder/position_embedder/embedding", c.trainable_position_size, c.base_emb_dim)
        x = x + positions[: tokens.shape[1]]
    x = _decode(leaves, c, tokens, x)
    x = _final_norm(leaves, c, x)
    if not c.logits_via_embedding:
        return x @ leaves("decoder/logits_dense/kernel", c.base_emb_dim, c.vocab_size)
    found = x @ table.T / (c.base_emb_dim**0.5 if c.normalize_embedding_logits else 1)
    return soft_cap(found, c.final_logits_soft_cap)


def _decode(leaves: Leaves, c: Any, tokens: Array, x: Array) -> Array:
    if c.decoder_block == "gemma4_small":
        return maxtext_gemma4_small.decode(leaves, c, tokens, x, _mlp)
    for take, block in _layers(leaves, c):
        x = block(take, c, x)
    return x


def _final_norm(leaves: Leaves, c: Any, x: Array) -> Array:
    if c.decoder_block == "gpt3":
        return maxtext_gpt3.norm(Part(leaves, "decoder/decoder_norm"), c, x)
    if c.decoder_block == "qwen3_next":
        return maxtext_qwen3_next.norm(Part(leaves, "decoder"), c, "decoder_norm", x)
    return rms_norm(x, leaves("decoder/decoder_norm/scale", c.base_emb_dim), c.normalization_layer_epsilon)


def _layers(leaves: Leaves, c: Any) -> list[tuple[Part, Callable[[Part, Any, Array], Array]]]:
    """Each layer's leaves and its block, in the order of the computation."""
    if c.decoder_block == "deepseek":
        moe = c.base_num_decoder_layers - c.first_num_dense_layers
        found = (
            _stack(leaves, c, "dense_layers", c.first_num_dense_layers),
            _stack(leaves, c, "moe_layers", moe),
        )
        return [(take, _deepseek_dense) for take in found[0]] + [(take, _deepseek_moe) for take in found[1]]
    if c.decoder_block == "llama4":
        return _llama4_layers(leaves, c)
    if c.decoder_block == "qwen3_next":
        return maxtext_qwen3_next.layers(leaves, c)
    if c.decoder_block in CYCLES:
        blocks = CYCLES[c.decoder_block]
        nested = c.decoder_block == "gemma4"
        layers = maxtext_gemma4.layers(leaves, c) if nested else _cycles(leaves, c, len(blocks))
        return [(take, blocks[number % len(blocks)]) for number, take in enumerate(layers)]
    return [
        (take, BLOCKS[c.decoder_block]) for take in _stack(leaves, c, "layers", c.base_num_decoder_layers)
    ]


def _gemma4_local(take: Part, c: Any, x: Array) -> Array:
    return maxtext_gemma4.block(take, c, x, _mlp, local=True)


def _gemma4_global(take: Part, c: Any, x: Array) -> Array:
    return maxtext_gemma4.block(take, c, x, _mlp, local=False)


def _llama4_layers(leaves: Leaves, c: Any) -> list[tuple[Part, Callable[[Part, Any, Array], Array]]]:
    """Scanned, each cycle counts its layers anew."""
    cycle = c.inhomogeneous_layer_cycle_interval
    return [
        (take, partial(_llama4, number=number % cycle if c.scan_layers else number))
        for number, take in enumerate(_cycles(leaves, c, cycle))
    ]


def _llama4(take: Part, c: Any, x: Array, number: int) -> Array:
    return maxtext_llama4.block(take, c, x, number, turned, _mlp)


def _stack(leaves: Leaves, c: Any, name: str, count: int) -> list[Part]:
    if c.scan_layers:
        return stacked(leaves, f"decoder/{name}", count, c.param_scan_axis)
    return [Part(leaves, f"decoder/{name}_{index}") for index in range(count)]


def _cycles(leaves: Leaves, c: Any, cycle: int) -> list[Part]:
    """Scanned, whole cycles are stacked, one stack for each place in the cycle; the rest is not."""
    if not c.scan_layers:
        return _stack(leaves, c, "layers", c.base_num_decoder_layers)
    cycles, rest = divmod(c.base_num_decoder_layers, cycle)
    columns = [
        stacked(leaves, f"decoder/layers/layers_{place}", cycles, c.param_scan_axis) for place in range(cycle)
    ]
    remainder = [Part(leaves, f"decoder/layers_remainder/layers_{place}") for place in range(rest)]
    return [column[turn] for turn in range(cycles) for column in columns] + remainder


def _mlp(take: Part, c: Any, x: Array, width: int) -> Array:
    """Gated feed-forward layer: the product of the activations of wi_0, wi_1 …, then wo."""
    hidden: Array | float = 1.0
    for number, name in enumerate(c.mlp_activations):
        hidden = hidden * ACTIVATIONS[name](x @ take(f"wi_{number}/kernel", c.base_emb_dim, width))
    return hidden @ take("wo/kernel", width, c.base_emb_dim)


def _feed_forward(take: Part, c: Any, x: Array) -> Array:
    """What the decoder block has in place of the feed-forward layer."""
    if c.decoder_block == "mixtral":
        return experts(take.under("MoeBlock_0"), c, x, c.base_mlp_dim)
    if c.decoder_block == "qwen3_moe":
        return experts(take.under("moe_block"), c, x, c.base_moe_mlp_dim)
    return _mlp(take.under("mlp"), c, x, c.base_mlp_dim)


def _llama(take: Part, c: Any, x: Array) -> Array:
    """llama2, mistral, mixtral, qwen2, qwen3, qwen3_moe; none of them looks at a sliding window."""
    qwen = c.decoder_block.startswith("qwen")
    scale, epsilon = (c.head_dim**-0.5 if qwen else 1.0), c.normalization_layer_epsilon
    seen = rms_norm(x, take("pre_self_attention_layer_norm/scale", c.base_emb_dim), epsilon)
    x = x + attention(
        take.under("self_attention"), c, seen, visible=causal(x.shape[1]), scale=scale,
        normed=qwen and c.use_qk_norm, biased=qwen and c.attention_bias,
    )  # fmt: skip
    seen = rms_norm(x, take("post_self_attention_layer_norm/scale", c.base_emb_dim), epsilon)
    return x + _feed_forward(take, c, seen)


def _gemma(take: Part, c: Any, x: Array) -> Array:
    return _gemma_half(take, c, x, "", causal(x.shape[1]), posts=False)


def _gemma2(take: Part, c: Any, x: Array) -> Array:
    """A local and a global layer."""
    length = x.shape[1]
    for side, visible in (("_local", causal(length, c.sliding_window_size)), ("_global", causal(length))):
        x = _gemma_half(take, c, x, side, visible, cap=c.attn_logits_soft_cap, local=side == "_local")
    return x


def _olmo3_local(take: Part, c: Any, x: Array) -> Array:
    return _olmo3(take, c, x, causal(x.shape[1], c.sliding_window_size), local=True)


def _olmo3_whole(take: Part, c: Any, x: Array) -> Array:
    return _olmo3(take, c, x, causal(x.shape[1]), local=False)


def _olmo3(take: Part, c: Any, x: Array, visible: Array, *, local: bool) -> Array:
    """Norms after attention and feed-forward layer, none before."""

    def norm(name: str, value: Array) -> Array:
        return rms_norm(value, take(f"{name}/scale", c.base_emb_dim), c.normalization_layer_epsilon)

    seen = attention(
        take.under("attention"), c, x, visible=visible, scale=c.head_dim**-0.5, normed=True, local=local
    )
    x = x + norm("post_self_attention_layer_norm", seen)
    return x + norm("post_mlp_layer_norm", _mlp(take.under("mlp"), c, x, c.base_mlp_dim))


def _gemma3_local(take: Part, c: Any, x: Array) -> Array:
    return _gemma3(take, c, x, local=True)


def _gemma3_global(take: Part, c: Any, x: Array) -> Array:
    return _gemma3(take, c, x, local=False)


def _gemma3(take: Part, c: Any, x: Array, *, local: bool) -> Array:
    visible = causal(x.shape[1], c.sliding_window_size if local else None)
    return _gemma_half(
        take, c, x, "", visible, cap=c.attn_logits_soft_cap, scale=_gemma3_scale(c), normed=True, local=local
    )


def _gemma3_scale(c: Any) -> float:
    """The scale of the query goes by the model's name; MaxText raises without one of these."""
    if c.model_name in ("gemma3-4b", "gemma3-12b"):
        return c.head_dim**-0.5
    if c.model_name == "gemma3-27b":
        return (c.base_emb_dim // c.base_num_query_heads) ** -0.5
    raise DisagreementError(f"MaxText's gemma3 block knows no model {c.model_name!r}")


def _gemma_half(
    take: Part, c: Any, x: Array, side: str, visible: Array, *, posts: bool = True, **more: Any
) -> Array:
    """Attention and feed-forward layer, with norms before and, from Gemma 2 on, after each."""

    def norm(name: str, value: Array) -> Array:
        return rms_norm(value, take(f"{name}{side}/scale", c.base_emb_dim), _GEMMA_EPSILON)

    seen = attention(
        take.under(f"self_attention{side}"), c, norm("pre_self_attention_norm", x), visible=visible, **more
    )
    x = x + (norm("post_self_attention_norm", seen) if posts and c.use_post_attn_norm else seen)
    seen = _mlp(take.under(f"mlp{side}"), c, norm("pre_ffw_norm", x), c.base_mlp_dim)
    return x + (norm("post_ffw_norm", seen) if posts and c.use_post_ffw_norm else seen)


def _deepseek_dense(take: Part, c: Any, x: Array) -> Array:
    x, seen = _deepseek_attention(take, c, x)
    return x + _mlp(take.under("mlp"), c, seen, c.base_mlp_dim)


def _deepseek_moe(take: Part, c: Any, x: Array) -> Array:
    x, seen = _deepseek_attention(take, c, x)
    return x + shared_and_routed(take.under("DeepSeekMoeBlock_0"), c, seen, _mlp)


def _deepseek_attention(take: Part, c: Any, x: Array) -> tuple[Array, Array]:
    """The residual stream after the attention, and what the feed-forward layer sees of it."""
    epsilon = c.normalization_layer_epsilon
    seen = rms_norm(x, take("pre_self_attention_layer_norm/scale", c.base_emb_dim), epsilon)
    x = x + latent_attention(take.under("self_attention"), c, seen)
    return x, rms_norm(x, take("post_self_attention_layer_norm/scale", c.base_emb_dim), epsilon)


BLOCKS: Mapping[str, Callable[[Part, Any, Array], Array]] = {
    "llama2": _llama, "mistral": _llama, "mixtral": _llama, "qwen2": _llama, "qwen3": _llama, "qwen3_moe": _llama,
    "gemma": _gemma, "gemma2": _gemma2, "gpt3": maxtext_gpt3.block,
}  # fmt: skip
# Blocks whose layers differ: what each layer of a cycle is.
CYCLES: Mapping[str, tuple[Callable[[Part, Any, Array], Array], ...]] = {
    "gemma3": (*(_gemma3_local,) * (CYCLE - 1), _gemma3_global),
    "gemma4": (*(_gemma4_local,) * (maxtext_gemma4.CYCLE - 1), _gemma4_global),
    "olmo3": (*(_olmo3_local,) * (OLMO3_CYCLE - 1), _olmo3_whole),
    "gpt_oss": (maxtext_gpt_oss.local, maxtext_gpt_oss.whole),
}
