"""Models of very many tensors in files without blocks, and measures that do not depend on the speed of the machine."""

from __future__ import annotations

import cProfile
import json
import math
import pstats
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

WIDTH, INNER, RANK, HEADS = 64, 32, 16, 2
_BYTES = {"F8_E4M3": 1, "BF16": 2, "F32": 4}
Row = tuple[str, str, list[int]]


def deepseek(folder: Path, layers: int, experts: int, files: int, *, quantised: bool = True) -> int:
    """A Hugging Face folder with the names of DeepSeek-V3 and narrow tensors; returns how many tensors it has."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(_config(layers, experts)))
    rows = list(_tensors(layers, experts, quantised=quantised))
    return sparse_folder(folder, rows, files)


def sparse_folder(folder: Path, rows: list[Row], files: int) -> int:
    """Safetensors files of tensors (name, dtype, shape) in order, with an index; the bytes are holes in the files."""
    share, weight_map = -(-len(rows) // files), {}
    for number in range(files):
        name, end = f"model-{number + 1:05d}-of-{files:05d}.safetensors", 0
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        for tensor, dtype, shape in rows[number * share : (number + 1) * share]:
            start, end = end, end + math.prod(shape) * _BYTES[dtype]
            header[tensor] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
            weight_map[tensor] = name
        text = json.dumps(header).encode()
        with (folder / name).open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + end)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return len(rows)


def calls(act: Callable[[], object]) -> int:
    """The number of function calls of an action: the same on any machine, whatever else it does."""
    profile = cProfile.Profile()
    profile.runcall(act)
    return int(vars(pstats.Stats(profile))["total_calls"])


def calls_of_threads(act: Callable[[], object]) -> int:
    """The number of calls of Python functions of an action, in this thread and in those that it starts."""
    counts: list[int] = []

    def note(_frame: object, event: str, _argument: object) -> None:
        if event == "call":
            counts.append(1)  # no lock: the list has one

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        act()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return len(counts)


def peak_of(act: Callable[[], object]) -> int:
    """The most memory that Python's own allocations take while an action runs, in bytes."""
    tracemalloc.start(1)
    try:
        act()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def seconds(act: Callable[[], object], times: int = 3) -> float:
    """The least processor time of some runs of an action."""
    found: list[float] = []
    for _ in range(times):
        began = time.process_time()
        act()
        found.append(time.process_time() - began)
    return min(found)


def _config(layers: int, experts: int) -> dict[str, Any]:
    return {
        "model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"], "vocab_size": 128,
        "hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "moe_intermediate_size": INNER,
        "num_hidden_layers": layers, "first_k_dense_replace": 1, "moe_layer_freq": 1, "n_routed_experts": experts,
        "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.5,
        "num_attention_heads": HEADS, "num_key_value_heads": HEADS, "q_lora_rank": RANK, "kv_lora_rank": RANK,
        "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "rms_norm_eps": 1e-6, "rope_theta": 10000,
        "max_position_embeddings": 4096, "tie_word_embeddings": False, "hidden_act": "silu", "torch_dtype": "bfloat16",
    }  # fmt: skip


def _tensors(layers: int, experts: int, *, quantised: bool) -> Iterator[Row]:
    def linear(name: str, out: int, into: int) -> Iterator[Row]:
        yield f"{name}.weight", "F8_E4M3" if quantised else "BF16", [out, into]
        if quantised:
            yield f"{name}.weight_scale_inv", "F32", [-(-out // 128), -(-into // 128)]

    def gated(name: str, inner: int) -> Iterator[Row]:
        yield from linear(f"{name}.gate_proj", inner, WIDTH)
        yield from linear(f"{name}.up_proj", inner, WIDTH)
        yield from linear(f"{name}.down_proj", WIDTH, inner)

    yield "model.embed_tokens.weight", "BF16", [128, WIDTH]
    for layer in range(layers):
        start = f"model.layers.{layer}"
        yield from linear(f"{start}.self_attn.q_a_proj", RANK, WIDTH)
        yield f"{start}.self_attn.q_a_layernorm.weight", "BF16", [RANK]
        yield from linear(f"{start}.self_attn.q_b_proj", HEADS * 24, RANK)
        yield from linear(f"{start}.self_attn.kv_a_proj_with_mqa", RANK + 8, WIDTH)
        yield f"{start}.self_attn.kv_a_layernorm.weight", "BF16", [RANK]
        yield from linear(f"{start}.self_attn.kv_b_proj", HEADS * 32, RANK)
        yield from linear(f"{start}.self_attn.o_proj", WIDTH, HEADS * 16)
        yield f"{start}.input_layernorm.weight", "BF16", [WIDTH]
        yield f"{start}.post_attention_layernorm.weight", "BF16", [WIDTH]
        if layer == 0:
            yield from gated(f"{start}.mlp", 2 * WIDTH)
            continue
        yield f"{start}.mlp.gate.weight", "BF16", [experts, WIDTH]
        yield f"{start}.mlp.gate.e_score_correction_bias", "BF16", [experts]
        for expert in range(experts):
            yield from gated(f"{start}.mlp.experts.{expert}", INNER)
        yield from gated(f"{start}.mlp.shared_experts", INNER)
    yield "model.norm.weight", "BF16", [WIDTH]
    yield "lm_head.weight", "BF16", [128, WIDTH]
