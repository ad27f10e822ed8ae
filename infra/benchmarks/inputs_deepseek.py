"""Makes a dense layer and a layer of experts with the dimensions of DeepSeek-V3, in fp8 with blocks of 128×128.

The layout of the released checkpoint: codes (float8_e4m3fn) and `weight_scale_inv` (float32) for each projection, and
plain bfloat16 for the rest. 32 of the 256 experts keep the size within a test; an expert more changes no other tensor.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

BLOCK = 128
_CODES = 1 << 22  # codes that are repeated, shifted by another number each time
_BYTES = {"F8_E4M3": 1, "BF16": 2, "F32": 4}
_PLAIN_PROJECTION = "kv_a_proj_with_mqa"


class Dimensions(NamedTuple):
    """The dimensions of the layers; the defaults are those of DeepSeek-V3, with fewer experts."""

    experts: int = 32
    embed: int = 7168
    heads: int = 128
    dense: int = 18432
    expert: int = 2048
    q_rank: int = 1536
    kv_rank: int = 512

    def config(self, *, plain: bool = False) -> dict[str, object]:
        """Contents of `config.json`; see `make_layers`."""
        quantized = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK]}
        left = {"modules_to_not_convert": ["lm_head", _PLAIN_PROJECTION]} if plain else {}
        return {
            "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "hidden_size": self.embed,
            "vocab_size": 1024, "num_hidden_layers": 2, "first_k_dense_replace": 1, "num_attention_heads": self.heads,
            "num_key_value_heads": self.heads, "intermediate_size": self.dense, "moe_intermediate_size": self.expert,
            "n_routed_experts": self.experts, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 2,
            "topk_group": 1, "routed_scaling_factor": 2.5, "norm_topk_prob": True, "q_lora_rank": self.q_rank,
            "kv_lora_rank": self.kv_rank, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
            "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 10000, "max_position_embeddings": 4096,
            "tie_word_embeddings": False, "torch_dtype": "bfloat16", "quantization_config": {**quantized, **left},
        }  # fmt: skip

    def shapes(self, *, plain: bool = False) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Name → element type of safetensors, and shape."""
        codes = self._codes()
        plain_shapes = self._plain()
        if plain:
            for name in [name for name in codes if name.endswith(_PLAIN_PROJECTION)]:
                plain_shapes[name] = codes.pop(name)
        found = {f"{name}.weight": ("BF16", shape) for name, shape in plain_shapes.items()}
        for name, shape in codes.items():
            found[f"{name}.weight"] = ("F8_E4M3", shape)
            found[f"{name}.weight_scale_inv"] = ("F32", (-(-shape[0] // BLOCK), -(-shape[1] // BLOCK)))
        return {**found, "model.layers.1.mlp.gate.e_score_correction_bias": ("F32", (self.experts,))}

    def _codes(self) -> dict[str, tuple[int, ...]]:
        attention = {
            "q_a_proj": (self.q_rank, self.embed), "q_b_proj": (self.heads * 192, self.q_rank),
            _PLAIN_PROJECTION: (self.kv_rank + 64, self.embed), "kv_b_proj": (self.heads * 256, self.kv_rank),
            "o_proj": (self.embed, self.heads * 128),
        }  # fmt: skip
        moe = "model.layers.1.mlp"
        parts = [f"{moe}.shared_experts", *(f"{moe}.experts.{number}" for number in range(self.experts))]
        return {
            **{
                f"model.layers.{layer}.self_attn.{name}": shape
                for layer in (0, 1)
                for name, shape in attention.items()
            },
            **{f"model.layers.0.mlp.{name}": shape for name, shape in self._mlp(self.dense)},
            **{f"{part}.{name}": shape for part in parts for name, shape in self._mlp(self.expert)},
        }

    def _mlp(self, width: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield "gate_proj", (width, self.embed)
        yield "up_proj", (width, self.embed)
        yield "down_proj", (self.embed, width)

    def _plain(self) -> dict[str, tuple[int, ...]]:
        found: dict[str, tuple[int, ...]] = {
            "model.embed_tokens": (1024, self.embed), "lm_head": (1024, self.embed), "model.norm": (self.embed,),
            "model.layers.1.mlp.gate": (self.experts, self.embed),
        }  # fmt: skip
        for layer in ("model.layers.0", "model.layers.1"):
            found |= {
                f"{layer}.{name}": (self.embed,) for name in ("input_layernorm", "post_attention_layernorm")
            }
            found[f"{layer}.self_attn.q_a_layernorm"] = (self.q_rank,)
            found[f"{layer}.self_attn.kv_a_layernorm"] = (self.kv_rank,)
        return found


def make_deepseek(folder: Path, experts: int) -> None:
    """The input of the bench: as many experts, and one projection plain.

    transformers 5.23 cannot dequantise `kv_a_proj_with_mqa`, whose 576 rows are not whole blocks (`Fp8Dequantize`
    raises an error), and the row needs a peer.
    """
    make_layers(folder, Dimensions(experts), plain=True)


def make_layers(folder: Path, dimensions: Dimensions, *, plain: bool = False) -> None:
    """A folder of finite numbers, written tensor by tensor; blocks differ.

    Args:
        folder: created.
        dimensions: of the layers.
        plain: whether `kv_a_proj_with_mqa` is bfloat16.
    """
    import numpy as np

    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(dimensions.config(plain=plain)))
    header, end, draw = {}, 0, np.random.default_rng(0)
    shapes = dimensions.shapes(plain=plain)
    for name, (kind, shape) in shapes.items():
        size = math.prod(shape) * _BYTES[kind]
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps({**header, "__metadata__": {"format": "pt"}}).encode()
    text += b" " * (-len(text) % 8)
    codes = draw.integers(0, 256, _CODES).astype("u1") & 0xBF
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for kind, shape in shapes.values():
            count = math.prod(shape)
            if kind == "F8_E4M3":
                for start in range(0, count, _CODES):
                    file.write(np.roll(codes, start // 999)[: count - start].data)
            elif kind == "F32":
                file.write(draw.random(count, np.float32).data)
            else:
                file.write((draw.random(count, np.float32).view("u4") >> 16).astype("u2").data)
