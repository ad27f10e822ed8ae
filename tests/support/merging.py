"""Small Hugging Face folders and LoRA adapters for the tests of merges, and how results are read back."""

from __future__ import annotations

import json

import numpy as np
from safetensors.numpy import save_file

import wherry

SHAPES = {"model.a.weight": (700, 300), "model.b.weight": (5,), "scalar": ()}
START = "base_model.model."
CONFIG = {"peft_type": "LORA", "r": 2, "lora_alpha": 6, "bias": "none", "target_modules": ["q", "up"],
          "base_model_name_or_path": "org/base", "peft_version": "0.21.2", "lora_dropout": 0.1}  # fmt: skip


def made(seed, dtype="float32", shapes=SHAPES):
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}


def save(folder, tensors, config=None):
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def read(uri):
    with wherry.open(uri) as checkpoint:
        return {path: checkpoint.read(path) for path in checkpoint.manifest.tensors}


def pair(rng, module, ins, outs, rank=2, kind="lora", end=".weight"):
    return {
        f"{START}{module}.{kind}_A{end}": rng.standard_normal((rank, ins)).astype("f4"),
        f"{START}{module}.{kind}_B{end}": rng.standard_normal((outs, rank)).astype("f4"),
    }


def save_adapter(folder, tensors, **config):
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    (folder / "adapter_config.json").write_text(json.dumps({**CONFIG, **config}))
    return folder


def merged(base, adapter, folder, **common):
    receipt = wherry.merge([str(base), str(adapter)], folder / "out", to="huggingface", **common)
    return receipt, {path[0]: tensor for path, tensor in read(folder / "out").items()}


def delta(tensors, module, scale, kind="lora", end=".weight"):
    down, up = (tensors[f"{START}{module}.{kind}_{name}{end}"] for name in "AB")
    return scale * (up.astype("f8") @ down.astype("f8"))
