"""DeepSpeed's ZeRO folders by their documented layout, imitated with torch: partitions of random parameters.

Where DeepSpeed is not installed this stands for it: the layout is that which its `zero_to_fp32.py` reads.
"""

from __future__ import annotations

import math
import sys
import types
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np

SHAPES = {"a.weight": (5, 3), "a.bias": (7,), "b.weight": (4, 2, 3), "c.weight": (11,)}
_SCALER = "deepspeed.runtime.fp16.loss_scaler"


def parameters(shapes=SHAPES):
    rng = np.random.default_rng(5)
    return {name: rng.standard_normal(shape).astype("f4") for name, shape in shapes.items()}


def _padded(vector, multiple):
    return np.concatenate([vector, np.zeros(-len(vector) % multiple, "f4")])


def _scaler() -> Any:
    """An object of DeepSpeed's own class, which optimizer states hold."""
    for name in ("deepspeed", "deepspeed.runtime", "deepspeed.runtime.fp16", _SCALER):
        sys.modules.setdefault(name, types.ModuleType(name))
    kind = type("LossScaler", (), {"__module__": _SCALER})
    sys.modules[_SCALER].LossScaler = kind  # pyright: ignore[reportAttributeAccessIssue]
    made = kind()
    made.cur_scale = 1.0
    return made


def save(folder: Path, stage: int, ranks: int, whole=None, groups=(("a.weight", "a.bias", "b.weight"), ("c.weight",)),
         frozen=None, shared=None, buffers=None, others=None, scaler=False) -> Path:  # fmt: skip
    """The folder above a step, as `save_checkpoint` leaves it; 10 is the step."""
    import torch

    whole = parameters() if whole is None else whole
    step = folder / "global_step10"
    step.mkdir(parents=True)
    (folder / "latest").write_text(step.name)
    shapes = [OrderedDict((name, torch.Size(whole[name].shape)) for name in group) for group in groups]
    partitions = _by_parameter(whole, groups, ranks) if stage == 3 else _by_group(whole, groups, ranks)
    key = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"
    for rank in range(ranks):
        state = {
            "zero_stage": stage, "partition_count": ranks, key: [_vector(one[rank], stage) for one in partitions],
            "loss_scaler": _scaler() if scaler else None, "overflow": False,
            "base_optimizer_state": {"state": {0: {"exp_avg": torch.ones(3)}}},
        }  # fmt: skip
        torch.save(
            {"optimizer_state_dict": state, "ds_config": {}, "ds_version": "0.19.8"},
            step / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt",
        )
    module = {**(buffers or {}), **(others or {})}
    for rank in range(ranks if stage == 3 else 1):
        name = f"zero_pp_rank_{rank}_mp_rank_00" if stage == 3 else "mp_rank_00"
        fragments = {key: torch.tensor(_part(one, rank, ranks, stage)) for key, one in (frozen or {}).items()}
        torch.save({
            "module": OrderedDict((key, torch.tensor(one)) for key, one in module.items()),
            "buffer_names": list(buffers or {}), "param_shapes": shapes, "shared_params": dict(shared or {}),
            "frozen_param_shapes": {key: torch.Size(one.shape) for key, one in frozen.items()} if frozen else None,
            "frozen_param_fragments": fragments or None, "ds_version": "0.19.8", "dp_world_size": ranks,
        }, step / f"{name}_model_states.pt")  # fmt: skip
    return folder


def _vector(array, stage):
    """A rank's part; ZeRO 3 marks some of its tensors with an attribute."""
    import torch

    vector = torch.tensor(array)
    if stage == 3:
        vector.ds_id = "0_2"  # pyright: ignore[reportAttributeAccessIssue]
    return vector


def _by_group(whole, groups, ranks):
    """Group → the part of each rank."""
    vectors = [np.concatenate([whole[name].reshape(-1) for name in group]) for group in groups]
    return [np.split(_padded(vector, 2 * ranks), ranks) for vector in vectors]


def _by_parameter(whole, groups, ranks):
    parts = [[np.split(_padded(whole[name].reshape(-1), ranks), ranks) for name in group] for group in groups]
    return [[np.concatenate([one[rank] for one in group]) for rank in range(ranks)] for group in parts]


def _part(array, rank, ranks, stage):
    if stage != 3:
        return array
    part = math.ceil(array.size / ranks)
    return _padded(array.reshape(-1), ranks)[rank * part : (rank + 1) * part]
