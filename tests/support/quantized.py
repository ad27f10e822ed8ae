"""Quantised checkpoints for tests: weights of tiny models as codes and scales, stored as their publishers store them.

The codes are made here in numpy. What they mean is judged by the software of their owners, which the tests name.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.torch import load_file, save_file

from tests.support.tiny_models import save_tiny
from tests.support.torch import torch

Encode = Callable[[str, Any], dict[str, Any]]

PLAIN = ("embed_tokens", "lm_head", "norm", "mlp.gate.weight", "router", "bias", "sinks")
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [16, 16]}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
INT4 = {
    "quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head", "re:.*self_attn.*"],
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": {
        "type": "int", "num_bits": 4, "group_size": 8, "strategy": "group", "symmetric": True, "dynamic": False,
        "actorder": None,
    }}},
}  # fmt: skip


def save_quantized(
    folder: Path, label: str, quantization: dict[str, Any], encode: Encode, **more: Any
) -> Path:
    """A tiny model whose weights are quantised, except those of PLAIN, which are bfloat16.

    Args:
        folder: of the checkpoint.
        label: of the tiny model.
        quantization: of the config.
        encode: name and float32 tensor → the stored tensors; none if it stays plain.
        more: settings of the model.
    """
    save_tiny(folder, label, drawn=True, **more)
    tensors = load_file(folder / "model.safetensors")
    stored: dict[str, Any] = {}
    for name, tensor in tensors.items():
        made = {} if any(one in name for one in PLAIN) else encode(name, tensor.float())
        stored.update(made or {name: tensor.to(torch.bfloat16)})
    save_file(
        {name: one.contiguous() for name, one in stored.items()},
        folder / "model.safetensors",
        {"format": "pt"},
    )
    config = json.loads((folder / "config.json").read_text())
    for name in ("dtype", "torch_dtype"):
        config.pop(name, None)
    text = json.dumps({**config, "torch_dtype": "bfloat16", "quantization_config": quantization})
    (folder / "config.json").write_text(text)
    return folder


def fp8(rows: int, columns: int, suffix: str = "_scale_inv") -> Encode:
    """Codes float8_e4m3fn, and a float32 scale for each block; the last blocks may be smaller."""

    def encode(name: str, tensor: Any) -> dict[str, Any]:
        if tensor.ndim != 2:
            return {}
        height, width = tensor.shape
        grid = (-(-height // rows), -(-width // columns))
        scales = torch.empty(grid)
        codes = torch.empty(height, width, dtype=torch.float8_e4m3fn)
        for row in range(grid[0]):
            for column in range(grid[1]):
                at = (slice(row * rows, (row + 1) * rows), slice(column * columns, (column + 1) * columns))
                scales[row, column] = tensor[at].abs().max().clamp(min=1e-4) / 448
                codes[at] = (tensor[at] / scales[row, column]).to(torch.float8_e4m3fn)
        return {name: codes, f"{name}{suffix}": scales}

    return encode


def int4(group: int) -> Encode:
    """Eight codes to an int32, and a bfloat16 scale for each group of a row."""

    def encode(name: str, tensor: Any) -> dict[str, Any]:
        if "self_attn" in name:
            return {}
        module = name.removesuffix(".weight")
        wide = tensor.numpy().reshape(tensor.shape[0], -1, group)
        scales = (np.abs(wide).max(axis=2, keepdims=True) / 7).astype(ml_dtypes.bfloat16)
        codes = np.clip(np.rint(wide / scales.astype("f4")), -8, 7).astype("i4").reshape(tensor.shape) + 8
        packed = (codes.reshape(tensor.shape[0], -1, 8).astype("u4") << (4 * np.arange(8, dtype="u4"))).sum(
            axis=2
        )
        return {
            f"{module}.weight_packed": torch.from_numpy(packed.astype("u4").view("i4").copy()),
            f"{module}.weight_scale": torch.from_numpy(scales[..., 0].astype("f4")).to(torch.bfloat16),
            f"{module}.weight_shape": torch.tensor(tensor.shape),
        }

    return encode


def mxfp4(name: str, tensor: Any) -> dict[str, Any]:
    """Two codes to a byte and a byte of exponent for 32 of them, of the transposed experts, as gpt-oss stores them."""
    if tensor.ndim != 3:
        return {}
    turned = tensor.numpy().swapaxes(1, 2)
    wide = turned.reshape(*turned.shape[:2], -1, 32)
    exponents = np.floor(np.log2(np.abs(wide).max(axis=3) + 1e-30)).astype("i4") - 2
    scaled = wide / np.exp2(exponents)[..., None].astype("f4")
    codes = scaled.astype(ml_dtypes.float4_e2m1fn).view("u1") & 15
    return {
        f"{name}_blocks": torch.from_numpy(np.ascontiguousarray(codes[..., 0::2] | codes[..., 1::2] << 4)),
        f"{name}_scales": torch.from_numpy(np.ascontiguousarray(exponents + 127).astype("u1", order="C")),
    }
