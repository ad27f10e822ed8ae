"""LoRA adapters of small models: random ones as PEFT saves them, and models with an adapter in their weights."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

RANK, ALPHA = 4, 6
PROJECTIONS = frozenset({
    "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "q_a_proj", "q_b_proj",
    "kv_a_proj_with_mqa", "kv_b_proj",
})  # fmt: skip
START = "base_model.model."


def weights(folder: Path) -> dict[str, np.ndarray[Any, Any]]:
    """The tensors of a model folder."""
    return {
        name: one for file in sorted(folder.glob("*.safetensors")) for name, one in load_file(file).items()
    }


def projections(folder: Path) -> dict[str, tuple[int, int]]:
    """Module → outputs and inputs, of the projections that adapters are made for; experts have none."""
    found: dict[str, tuple[int, int]] = {}
    for name, tensor in weights(folder).items():
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] in PROJECTIONS and name != module and ".experts." not in name:
            found[module] = (tensor.shape[0], tensor.shape[1])
    return found


def save_adapter(base: Path, folder: Path, **config: Any) -> Path:
    """A random adapter of every projection of a model, as PEFT saves it."""
    rng = np.random.default_rng(5)
    folder.mkdir()
    tensors: dict[str, np.ndarray[Any, Any]] = {}
    modules = projections(base)
    for module, (outs, ins) in modules.items():
        for letter, shape in (("A", (RANK, ins)), ("B", (outs, RANK))):
            values = rng.standard_normal(shape) * 0.2
            tensors[f"{START}{module}.lora_{letter}.weight"] = values.astype("f4")
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    names = sorted({module.rpartition(".")[2] for module in modules})
    said = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": ALPHA,
        "target_modules": names,
        "bias": "none",
        **config,
    }
    (folder / "adapter_config.json").write_text(json.dumps(said))
    return folder


def merge_by_definition(base: Path, adapter: Path, folder: Path) -> Path:
    """The base with W + scale · B · A, by PEFT's definition, in float64."""
    shutil.copytree(base, folder)
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    said = json.loads((adapter / "adapter_config.json").read_text())
    scale = said["lora_alpha"] / (math.sqrt(said["r"]) if said.get("use_rslora") else said["r"])
    pairs = load_file(adapter / "adapter_model.safetensors")
    merged = {}
    for name, weight in weights(base).items():
        down, up = (
            pairs.pop(f"{START}{name.removesuffix('.weight')}.lora_{one}.weight", None) for one in "AB"
        )
        if down is not None and up is not None:
            weight = (weight + scale * (up.astype("f8") @ down.astype("f8"))).astype("f4")  # noqa: PLW2901
        merged[name] = weight
    assert not pairs
    save_file(merged, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
