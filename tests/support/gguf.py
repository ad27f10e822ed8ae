"""GGUF files of models of transformers, as llama.cpp's converter writes them: names, metadata, order of rows.

Written from the specification of the container and from the definitions of the architectures, without wherry and
without the `gguf` package; transformers judges these files too (`tests/oracles/test_gguf.py`).
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]

# model_type → architecture.
ARCHITECTURES = {
    "llama": "llama", "mistral": "llama", "mixtral": "llama", "qwen2": "qwen2", "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe", "qwen2_moe": "qwen2moe", "gemma": "gemma", "gemma2": "gemma2", "gemma3_text": "gemma3",
    "phi3": "phi3",
    "gpt2": "gpt2", "gpt_oss": "gpt-oss", "deepseek_v2": "deepseek2", "deepseek_v3": "deepseek2",
}  # fmt: skip
_NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm",
    "pre_feedforward_layernorm": "ffn_norm", "post_feedforward_layernorm": "post_ffw_norm",
    "block_sparse_moe.gate": "ffn_gate_inp", "mlp.gate": "ffn_gate_inp", "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp", "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp", "mlp.router": "ffn_gate_inp", "self_attn.sinks": "attn_sinks",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp", "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp", "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm", "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa", "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b",
    "ln_1": "attn_norm", "ln_2": "ffn_norm", "attn.c_attn": "attn_qkv", "attn.c_proj": "attn_output",
    "mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down",
}  # fmt: skip
_OUTER = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "transformer.wte": "token_embd", "transformer.wpe": "position_embd", "transformer.ln_f": "output_norm",
}  # fmt: skip
_EXPERTS = {"gate_proj": "ffn_gate_exps", "up_proj": "ffn_up_exps", "down_proj": "ffn_down_exps",
            "w1": "ffn_gate_exps", "w3": "ffn_up_exps", "w2": "ffn_down_exps"}  # fmt: skip
_LAYER = re.compile(r"(?:model\.layers|transformer\.h)\.(\d+)\.(.+)\.(weight|bias)")
_EXPERT = re.compile(r"(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(\w+)")


def model_parts(folder: Path) -> tuple[dict[str, Any], dict[str, Array]]:
    """Metadata and tensors of the GGUF file of a model in a Hugging Face folder."""
    from safetensors.numpy import load_file

    config = json.loads((folder / "config.json").read_text())
    kind = config["model_type"]
    tensors: dict[str, Array] = {}
    experts: dict[str, dict[int, Array]] = {}
    for name, value in load_file(folder / "model.safetensors").items():
        found = _LAYER.fullmatch(name)
        expert = _EXPERT.fullmatch(found[2]) if found else None
        layer = name.split(".")[2] if name.startswith("model.layers.") else ""
        if name.endswith("e_score_correction_bias"):
            tensors[f"blk.{layer}.exp_probs_b.bias"] = value
            continue
        if kind == "gpt_oss" and (".experts." in name or name.endswith("sinks")):
            tensors |= _of_gpt_oss(f"blk.{layer}", name.rpartition(".")[2], value)
            continue
        if found and expert:
            key = f"blk.{found[1]}.{_EXPERTS[expert[2]]}.weight"
            experts.setdefault(key, {})[int(expert[1])] = value
            continue
        tensors[_gguf_name(name, kind)] = _gguf_value(name, value, config)
    for key, rows in experts.items():
        tensors[key] = np.stack([rows[number] for number in sorted(rows)])
    metadata = _metadata(config)
    factors = _llama3_factors(config)
    return metadata, {**tensors, **({"rope_freqs.weight": factors} if factors is not None else {})}


def _of_gpt_oss(block: str, name: str, value: Array) -> dict[str, Array]:
    """Sinks, and experts: their gate and up projections take turns in the columns, and matrices are transposed."""
    if name == "sinks":
        return {f"{block}.attn_sinks.weight": value}
    end = "bias" if name.endswith("_bias") else "weight"
    rows = value if end == "bias" else value.swapaxes(1, 2)
    if name.startswith("down_proj"):
        return {f"{block}.ffn_down_exps.{end}": np.ascontiguousarray(rows)}
    return {
        f"{block}.ffn_{which}_exps.{end}": np.ascontiguousarray(rows[:, first::2])
        for which, first in (("gate", 0), ("up", 1))
    }


def _gguf_name(name: str, kind: str) -> str:
    found = _LAYER.fullmatch(name)
    if found is None:
        stem, _, end = name.rpartition(".")
        return f"{_OUTER[stem]}.{end}"
    of_gemma = "post_attention_norm" if kind in ("gemma2", "gemma3_text", "gpt_oss") else "ffn_norm"
    inner = {**_NAMES, "post_attention_layernorm": of_gemma}[found[2]]
    return f"blk.{found[1]}.{inner}.{found[3]}"


def _gguf_value(name: str, value: Array, config: Mapping[str, Any]) -> Array:
    kind = config["model_type"]
    if kind.startswith("gemma") and name.endswith("norm.weight"):
        return value + np.ones((), value.dtype)
    if name.endswith("shared_expert_gate.weight"):
        return value.reshape(-1)
    if kind == "gpt2" and re.search(r"c_(attn|proj|fc)\.weight", name):
        return np.ascontiguousarray(value.T)
    if ARCHITECTURES[kind] == "llama" and re.search(r"[qk]_proj\.weight", name):
        heads = config["num_key_value_heads" if "k_proj" in name else "num_attention_heads"]
        wide = value.reshape(heads, 2, -1, value.shape[1])  # two halves of a head
        return np.ascontiguousarray(wide.swapaxes(1, 2)).reshape(value.shape)  # neighbours
    return value


def _metadata(config: Mapping[str, Any]) -> dict[str, Any]:  # noqa: C901, PLR0912  a row for each architecture
    kind = config["model_type"]
    name = ARCHITECTURES[kind]
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if kind == "gemma3_text":
        rope = rope["full_attention"]
    if kind == "gpt2":
        rows = {
            "context_length": config["n_positions"], "embedding_length": config["n_embd"],
            "feed_forward_length": 4 * config["n_embd"], "block_count": config["n_layer"],
            "attention.head_count": config["n_head"], "attention.layer_norm_epsilon": config["layer_norm_epsilon"],
        }  # fmt: skip
    else:
        head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        rows = {
            "context_length": config["max_position_embeddings"], "embedding_length": config["hidden_size"],
            "feed_forward_length": config["intermediate_size"], "block_count": config["num_hidden_layers"],
            "attention.head_count": config["num_attention_heads"],
            "attention.head_count_kv": config["num_key_value_heads"],
            "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
            "rope.freq_base": float(rope.get("rope_theta", 10000.0)), "rope.dimension_count": head,
            "vocab_size": config["vocab_size"],
        }  # fmt: skip
        if kind not in ("llama", "qwen2", "phi3", "mistral", "mixtral") or config.get("head_dim"):
            rows |= {"attention.key_length": head, "attention.value_length": head}
    if (kind.startswith("gemma") and kind != "gemma") or kind == "gpt_oss":
        rows["attention.sliding_window"] = config["sliding_window"]
    if kind == "gemma2":
        rows["attn_logit_softcapping"] = config["attn_logit_softcapping"]
        rows["final_logit_softcapping"] = config["final_logit_softcapping"]
    if kind == "phi3":
        rows["rope.scaling.original_context_length"] = config["original_max_position_embeddings"]
        rows["attention.sliding_window"] = config.get("sliding_window") or 0
    experts = config.get("num_experts") or config.get("num_local_experts") or config.get("n_routed_experts")
    if experts:
        rows |= {"expert_count": experts, "expert_used_count": config["num_experts_per_tok"]}
    if kind == "gpt_oss":
        rows["expert_feed_forward_length"] = config["intermediate_size"]
    if kind.startswith("deepseek"):
        rows |= _of_deepseek(config)
    if kind in ("qwen2_moe", "qwen3_moe"):
        rows["expert_feed_forward_length"] = config["moe_intermediate_size"]
    if kind == "qwen2_moe":
        rows["expert_shared_feed_forward_length"] = config["shared_expert_intermediate_size"]
    if rope.get("rope_type") in ("linear", "yarn"):
        rows |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": float(rope["factor"])}
        if rope["rope_type"] == "yarn":
            rows["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    return {
        "general.architecture": name,
        "general.name": "tiny",
        "general.file_type": 0,
        **{f"{name}.{key}": value for key, value in rows.items()},
    }


def _of_deepseek(config: Mapping[str, Any]) -> dict[str, Any]:
    rope = config["rope_parameters"]
    third = config["model_type"] == "deepseek_v3"
    groups = {"expert_group_count": config["n_group"], "expert_group_used_count": config["topk_group"]}
    yarn = {"rope.scaling.yarn_log_multiplier": 0.1 * rope.get("mscale_all_dim", 0.0)}
    return {
        "attention.key_length": config["qk_nope_head_dim"] + config["qk_rope_head_dim"],
        "attention.value_length": config["v_head_dim"], "attention.kv_lora_rank": config["kv_lora_rank"],
        "attention.q_lora_rank": config["q_lora_rank"] or 0, "rope.dimension_count": config["qk_rope_head_dim"],
        "leading_dense_block_count": config["first_k_dense_replace"],
        "expert_feed_forward_length": config["moe_intermediate_size"],
        "expert_shared_count": config["n_shared_experts"],
        "expert_weights_scale": config["routed_scaling_factor"], "expert_weights_norm": config["norm_topk_prob"],
        "expert_gating_func": 2 if third else 1, **(groups if third else {}),
        **(yarn if rope["rope_type"] == "yarn" else {}),
    }  # fmt: skip


def _llama3_factors(config: Mapping[str, Any]) -> Array | None:
    """The tensor of divisors that llama.cpp's converter computes for Llama 3.1."""
    rope = config.get("rope_parameters") or {}
    if rope.get("rope_type") != "llama3":
        return None
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    low = rope["original_max_position_embeddings"] / rope["low_freq_factor"]
    high = rope["original_max_position_embeddings"] / rope["high_freq_factor"]
    found: list[float] = []
    for step in range(0, head, 2):
        wave = 2 * math.pi * rope["rope_theta"] ** (step / head)
        if wave < high:
            found.append(1.0)
        elif wave > low:
            found.append(rope["factor"])
        else:
            smooth = (rope["original_max_position_embeddings"] / wave - rope["low_freq_factor"]) / (
                rope["high_freq_factor"] - rope["low_freq_factor"]
            )
            found.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(found, "f4")


def save_gguf(file: Path, metadata: Mapping[str, Any], tensors: Mapping[str, Any]) -> Path:
    """Write a file of version 3.

    Args:
        file: where to.
        metadata: key → text, whole number, number or truth value; a list of texts or whole numbers.
        tensors: name → float32 array, or (number of a type, shape, bytes).
    """
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    for key, value in metadata.items():
        head += _text(key) + _value(value)
    body = b""
    for name, value in tensors.items():
        number, shape, data = (
            value if isinstance(value, tuple) else (0, value.shape, value.astype("<f4").tobytes())
        )
        head += _text(name) + struct.pack(
            f"<I{len(shape)}QIQ", len(shape), *reversed(shape), number, len(body)
        )
        body += data + b"\0" * (-len(data) % 32)
    file.write_bytes(head + b"\0" * (-len(head) % 32) + body)
    return file


def _text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def _value(value: Any) -> bytes:
    match value:
        case bool():
            return struct.pack("<I?", 7, value)
        case int():
            return struct.pack("<II", 4, value) if value >= 0 else struct.pack("<Ii", 5, value)
        case float():
            return struct.pack("<If", 6, value)
        case str():
            return struct.pack("<I", 8) + _text(value)
        case _:
            inner = [_value(one) for one in value]
            return (
                struct.pack("<I", 9)
                + inner[0][:4]
                + struct.pack("<Q", len(inner))
                + b"".join(one[4:] for one in inner)
            )
