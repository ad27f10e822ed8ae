"""Small Hugging Face folders for the tests of merges, and how they are read back."""

from __future__ import annotations

import json

import numpy as np
from safetensors.numpy import save_file

import wherry

SHAPES = {"model.a.weight": (700, 300), "model.b.weight": (5,), "scalar": ()}


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
