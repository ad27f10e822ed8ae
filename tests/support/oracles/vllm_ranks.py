"""vLLM's splitting rule run alone: parameters of a rank, and the weight loaders of the classes of its layers.

Each class has the parameter that vLLM's class of this name has on a rank, and loads whole tensors of Hugging Face as
that one's `weight_loader` does: it narrows the tensor by the rank's own offsets and copies it. Written from the loaders
of vllm 0.33 (model_executor/layers/linear.py, vocab_parallel_embedding.py, models/llama.py, qwen2.py, qwen3.py); it
shares no code with wherry. `held` gives what `state_dict` of the rank's model holds.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

_STACKED = {
    "q_proj": ("qkv_proj", "q"), "k_proj": ("qkv_proj", "k"), "v_proj": ("qkv_proj", "v"),
    "gate_proj": ("gate_up_proj", 0), "up_proj": ("gate_up_proj", 1),
}  # fmt: skip


class QKVParallelLinear:
    def __init__(self, hidden, head, heads, groups, rank, ranks):
        assert heads % ranks == 0
        self.rank, self.head, self.own = rank, head, heads // ranks
        if ranks >= groups:
            assert ranks % groups == 0
            self.own_groups, self.replicas = 1, ranks // groups
        else:
            assert groups % ranks == 0
            self.own_groups, self.replicas = groups // ranks, 1
        self.rows = (self.own + 2 * self.own_groups) * head
        self.hidden = hidden

    def empty(self, kind):
        return (self.rows, self.hidden) if kind == "weight" else (self.rows,)

    def load(self, param, loaded, shard):
        offset = {"q": 0, "k": self.own, "v": self.own + self.own_groups}[shard] * self.head
        size = (self.own if shard == "q" else self.own_groups) * self.head
        start = (self.rank if shard == "q" else self.rank // self.replicas) * size
        param.narrow(0, offset, size).copy_(loaded.narrow(0, start, size))


class MergedColumnParallelLinear:
    def __init__(self, hidden, sizes, rank, ranks):
        assert all(size % ranks == 0 for size in sizes)
        self.hidden, self.rank, self.sizes = hidden, rank, [size // ranks for size in sizes]

    def empty(self, kind):
        return (sum(self.sizes), self.hidden) if kind == "weight" else (sum(self.sizes),)

    def load(self, param, loaded, shard):
        offset, size = sum(self.sizes[:shard]), self.sizes[shard]
        param.narrow(0, offset, size).copy_(loaded.narrow(0, self.rank * size, size))


class RowParallelLinear:
    def __init__(self, inputs, outputs, rank, ranks):
        assert inputs % ranks == 0
        self.inputs, self.outputs, self.rank = inputs // ranks, outputs, rank

    def empty(self, kind):
        return (self.outputs, self.inputs) if kind == "weight" else (self.outputs,)

    def load(self, param, loaded, _shard):
        if param.dim() == 2:
            loaded = loaded.narrow(1, self.rank * self.inputs, self.inputs)
        param.copy_(loaded)


class VocabParallelEmbedding:
    def __init__(self, rows, hidden, rank, ranks, padding=64):
        padded = (rows + padding - 1) // padding * padding
        assert padded % ranks == 0
        self.own, self.hidden = padded // ranks, hidden
        self.start, self.stop = min(rank * self.own, rows), min((rank + 1) * self.own, rows)

    def empty(self, _kind):
        return (self.own, self.hidden)

    def load(self, param, loaded, _shard):
        loaded = loaded.narrow(0, self.start, self.stop - self.start)
        param[: len(loaded)].copy_(loaded)
        param[len(loaded) :].fill_(0)


class RMSNorm:
    def __init__(self, size):
        self.size = size

    def empty(self, _kind):
        return (self.size,)

    def load(self, param, loaded, _shard):
        param.copy_(loaded)


def modules(config, rank: int, ranks: int):
    """The layers of a rank's model by name, each with the names of its parameters."""
    hidden, heads, groups = config.hidden_size, config.num_attention_heads, config.num_key_value_heads
    head, kind = getattr(config, "head_dim", None) or hidden // heads, config.model_type
    bias = getattr(config, "attention_bias", False)
    attention = ["weight"] + ["bias"] * (kind == "qwen2" or bias)
    out = ["weight"] + ["bias"] * (kind == "llama" and bias)
    mlp = ["weight"] + ["bias"] * (kind == "llama" and config.mlp_bias)
    found = {
        "model.embed_tokens": (VocabParallelEmbedding(config.vocab_size, hidden, rank, ranks), ["weight"])
    }
    for layer in range(config.num_hidden_layers):
        at = f"model.layers.{layer}"
        found[f"{at}.self_attn.qkv_proj"] = (
            QKVParallelLinear(hidden, head, heads, groups, rank, ranks),
            attention,
        )
        found[f"{at}.self_attn.o_proj"] = RowParallelLinear(heads * head, hidden, rank, ranks), out
        if kind == "qwen3":
            found[f"{at}.self_attn.q_norm"] = RMSNorm(head), ["weight"]
            found[f"{at}.self_attn.k_norm"] = RMSNorm(head), ["weight"]
        wide = [config.intermediate_size] * 2
        found[f"{at}.mlp.gate_up_proj"] = MergedColumnParallelLinear(hidden, wide, rank, ranks), mlp
        found[f"{at}.mlp.down_proj"] = RowParallelLinear(wide[0], hidden, rank, ranks), mlp
        found[f"{at}.input_layernorm"] = RMSNorm(hidden), ["weight"]
        found[f"{at}.post_attention_layernorm"] = RMSNorm(hidden), ["weight"]
    found["model.norm"] = RMSNorm(hidden), ["weight"]
    found["lm_head"] = VocabParallelEmbedding(config.vocab_size, hidden, rank, ranks), ["weight"]
    return found


def held(config, state: Mapping[str, torch.Tensor], rank: int, ranks: int) -> dict[str, torch.Tensor]:
    """What a rank's model holds, of an untied head, after it has loaded the tensors of Hugging Face.

    Args:
        config: of transformers.
        state: the tensors; a tied head is one of them.
        rank: its number.
        ranks: how many there are.
    """
    layers = modules(config, rank, ranks)
    dtype = next(iter(state.values())).dtype
    found = {
        f"{name}.{kind}": torch.full(layer.empty(kind), torch.nan, dtype=dtype)
        for name, (layer, kinds) in layers.items()
        for kind in kinds
    }
    for name, tensor in state.items():
        module, kind = name.rsplit(".", 1)
        above, last = module.rsplit(".", 1) if "." in module else ("", module)
        fused, shard = _STACKED.get(last, (last, None))
        module = f"{above}.{fused}" if above else fused
        layers[module][0].load(found[f"{module}.{kind}"], tensor, shard)
    assert not any(tensor.isnan().any() for tensor in found.values()), "a parameter was not loaded"
    for layer in range(config.num_hidden_layers):
        for scale in ("_k_scale", "_v_scale", "_q_scale", "_prob_scale"):
            found[f"model.layers.{layer}.self_attn.attn.{scale}"] = torch.tensor(1.0, dtype=torch.float32)
    return found
