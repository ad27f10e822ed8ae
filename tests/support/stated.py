"""Facts that a checkpoint without a config does not state, for `--set`: a family's usual values."""

from __future__ import annotations

from typing import Any

_LLAMA = {"activation": "silu", "norm_eps": 1e-5, "rope_theta": 500000.0}
FACTS: dict[tuple[str, str], dict[str, Any]] = {
    ("llama", "maxtext"): {**_LLAMA, "rope_scaling": "default"},
    ("llama", "penzai"): {**_LLAMA, "sliding_window": 0},
    ("mixtral", "maxtext"): {**_LLAMA, "rope_scaling": "default", "experts_per_token": 2},
    ("gemma2", "maxtext"): {
        "activation": "gelu_pytorch_tanh", "final_norm_eps": 1e-6, "rope_theta": 10000.0, "rope_scaling": "default",
        "sliding_window": 4096, "attention_softcap": 50.0, "final_softcap": 30.0, "tied_logits": "plain",
    },
    ("deepseek", "maxtext"): {
        "activation": "silu", "norm_eps": 1e-6, "latent_norm_eps": 1e-6, "rope_theta": 10000.0,
        "rope_scaling": "default", "rope_interleave": True, "experts_per_token": 2, "routed_scaling": 2.5,
        "norm_topk": True, "routing_score": "sigmoid", "routing_groups": 1, "routing_groups_taken": 1,
    },
}  # fmt: skip
