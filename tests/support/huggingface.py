"""Hugging Face folders made here, and how they are detected."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from wherry.formats.format import Glimpse
from wherry.formats.registry import find_format
from wherry.store.local_store import locate

ONES = {"a": np.ones((2, 3), "f4"), "b": np.arange(4, dtype="i8")}


INDEX = "model.safetensors.index.json"


SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def sharded(folder: Path, weight_map=None, **metadata) -> Path:
    """Tensor `a` in the first file, `b` in the second."""
    folder.mkdir(exist_ok=True)
    for name, shard in zip(ONES, SHARDS, strict=True):
        save_file({name: ONES[name]}, folder / shard, metadata={"format": "pt"})
    index = {"metadata": metadata, "weight_map": weight_map or dict(zip(ONES, SHARDS, strict=True))}
    (folder / INDEX).write_text(json.dumps(index))
    return folder


def detected(path):
    return find_format("hf").detect(Glimpse(locate(path)))


def training_arguments(monkeypatch):
    """Arguments as Trainer pickles them, of a class in a module that exists while the test runs."""
    module = types.ModuleType("transformers.training_args")
    module.TrainingArguments = type("TrainingArguments", (), {"__module__": module.__name__})
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module.TrainingArguments()
