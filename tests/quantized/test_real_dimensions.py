"""Layers with the dimensions of DeepSeek-V3 in fp8, to MaxText and back, in bounded memory."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING

import numpy as np
import pytest

import wherry
from tests.support.large import measured

if TYPE_CHECKING:
    from pathlib import Path

EMBED, HEADS, EXPERTS, BLOCK = 7168, 128, 32, 128
MOST = 350 << 20  # of resident memory: a move is a row of chunks, 63 MiB here, and as much of the source
CONFIG = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "hidden_size": EMBED, "vocab_size": 1024,
    "num_hidden_layers": 2, "first_k_dense_replace": 1, "num_attention_heads": HEADS, "num_key_value_heads": HEADS,
    "intermediate_size": 18432, "moe_intermediate_size": 2048, "n_routed_experts": EXPERTS, "n_shared_experts": 1,
    "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5, "norm_topk_prob": True,
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
    "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 10000, "max_position_embeddings": 4096,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK]},
}  # fmt: skip
ATTENTION = {
    "q_a_proj": (1536, EMBED), "q_b_proj": (HEADS * 192, 1536), "kv_a_proj_with_mqa": (576, EMBED),
    "kv_b_proj": (HEADS * 256, 512), "o_proj": (EMBED, HEADS * 128),
}  # fmt: skip
CONVERT = """
import wherry
wherry.convert(sys.argv[1], sys.argv[2], to=sys.argv[3], lineage=False)
told = None
"""


def mlp(width: int) -> dict[str, tuple[int, int]]:
    return {"gate_proj": (width, EMBED), "up_proj": (width, EMBED), "down_proj": (EMBED, width)}


def shapes() -> dict[str, tuple[str, tuple[int, ...]]]:
    """Name → element type of safetensors, and shape."""
    plain = {"model.embed_tokens": (1024, EMBED), "lm_head": (1024, EMBED), "model.norm": (EMBED,)}
    codes: dict[str, tuple[int, int]] = {}
    for layer in ("model.layers.0", "model.layers.1"):
        codes |= {f"{layer}.self_attn.{name}": shape for name, shape in ATTENTION.items()}
        plain |= {f"{layer}.{name}": (EMBED,) for name in ("input_layernorm", "post_attention_layernorm")}
        plain |= {f"{layer}.self_attn.q_a_layernorm": (1536,), f"{layer}.self_attn.kv_a_layernorm": (512,)}
    moe = "model.layers.1.mlp"
    codes |= {f"model.layers.0.mlp.{name}": shape for name, shape in mlp(18432).items()}
    parts = [f"{moe}.shared_experts", *(f"{moe}.experts.{number}" for number in range(EXPERTS))]
    codes |= {f"{part}.{name}": shape for part in parts for name, shape in mlp(2048).items()}
    plain[f"{moe}.gate"] = (EXPERTS, EMBED)
    found = {f"{name}.weight": ("BF16", shape) for name, shape in plain.items()}
    for name, shape in codes.items():
        found[f"{name}.weight"] = ("F8_E4M3", shape)
        found[f"{name}.weight_scale_inv"] = ("F32", (-(-shape[0] // BLOCK), -(-shape[1] // BLOCK)))
    return {**found, f"{moe}.gate.e_score_correction_bias": ("F32", (EXPERTS,))}


def save(folder: Path) -> Path:
    """A folder of finite numbers, written tensor by tensor; blocks differ."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    header, end, draw = {}, 0, np.random.default_rng(0)
    for name, (kind, shape) in shapes().items():
        size = math.prod(shape) * {"F8_E4M3": 1, "BF16": 2, "F32": 4}[kind]
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps({**header, "__metadata__": {"format": "pt"}}).encode()
    text += b" " * (-len(text) % 8)
    codes = draw.integers(0, 256, 1 << 22).astype("u1") & 0xBF
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for kind, shape in shapes().values():
            count = math.prod(shape)
            if kind == "F8_E4M3":
                for start in range(0, count, len(codes)):
                    file.write(np.roll(codes, start // 999)[: count - start].data)
            elif kind == "F32":
                file.write(draw.random(count, np.float32).data)
            else:
                file.write((draw.random(count, np.float32).view("u4") >> 16).astype("u2").data)
    return folder


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_a_dense_layer_and_a_layer_of_experts_go_to_maxtext_and_back_in_bounded_memory(tmp_path):
    source, there, back = save(tmp_path / "fp8"), tmp_path / "maxtext", tmp_path / "bfloat16"
    peaks = [
        measured(CONVERT, source, there, "maxtext")[1],
        measured(CONVERT, there, back, "huggingface")[1],
    ]
    print("peaks in MB:", [round(peak / 1e6) for peak in peaks])
    assert max(peaks) <= MOST
    with wherry.open(source) as codes, wherry.open(back) as plain:
        for name in (
            "model.layers.1.mlp.experts.31.down_proj",
            "model.layers.0.self_attn.kv_a_proj_with_mqa",
        ):
            rows = (slice(500, 516), slice(1000, 1512))
            scales = codes.read(f"{name}.weight_scale_inv")
            blocks = scales[np.arange(500, 516) // BLOCK][:, np.arange(1000, 1512) // BLOCK]
            wanted = codes.read(f"{name}.weight", rows).astype("f4") * blocks
            np.testing.assert_array_equal(
                plain.read(f"{name}.weight", rows), wanted.astype(plain[f"{name}.weight"].dtype)
            )
