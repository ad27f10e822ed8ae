"""Tensors of every dtype that torch has and wherry carries, and their canonical bytes."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

DTYPES = [
    *("bool", "uint8", "int8", "int16", "uint16", "int32", "uint32", "int64", "uint64"),
    *("float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128"),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
]


def every_dtype() -> dict:
    """A 5×3 tensor of each dtype, a scalar and tensors without elements."""
    raw = torch.randint(0, 256, (15 * 16,), dtype=torch.uint8, generator=torch.Generator().manual_seed(7))
    tensors = {}
    for name in DTYPES:
        dtype = getattr(torch, name)
        flat = (raw[:15] % 2).to(dtype) if name == "bool" else raw[: 15 * dtype.itemsize].view(dtype)
        tensors[f"{name}.weight"] = flat.reshape(5, 3).clone()
    return tensors | {"scalar": torch.tensor(2.5), "none": torch.zeros(0, 4), "inner": torch.zeros(3, 0, 2)}


def as_bytes(tensor) -> bytes:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def same(left: dict, right: dict) -> bool:
    """Whether two flat state dicts hold the same tensors, bit by bit."""
    return left.keys() == right.keys() and all(
        (left[name].dtype, left[name].shape, as_bytes(left[name]))
        == (right[name].dtype, right[name].shape, as_bytes(right[name]))
        for name in left
    )


def save(state, path) -> Path:
    import torch.distributed.checkpoint as dcp

    dcp.save(state, checkpoint_id=str(path), no_dist=True)
    return path


def meta(path):
    return pickle.loads((path / ".metadata").read_bytes())
