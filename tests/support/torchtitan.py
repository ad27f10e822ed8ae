"""torchtitan's steps, imitated with torch's own DCP: what torchtitan's CheckpointManager saves, by the same names.

tests/oracles/test_torchtitan.py has torchtitan itself save and load.
"""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import wherry


def step(
    hf: Path, run: Path, number: int = 7, *, release: str = "0.3", trained: bool = True, fused: bool = False
) -> Path:
    """A step of a run with the model of a Hugging Face folder, whose config is put next to the run as `model.json`.

    Args:
        hf: the model.
        run: the folder of the run; its parent gets `model.json`.
        number: of the step.
        release: whose names the parameters have.
        trained: whether optimizer, schedule and data loader are saved too.
        fused: whether the moments of query, key and value are one tensor.
    """
    import torch
    import torch.distributed.checkpoint as dcp

    made = run.parent / f"made-{number}"
    wherry.convert(hf, made, to="torchtitan", options={"release": release}, lineage=False)
    (run.parent / "model.json").write_bytes((made / "torchtitan_config.json").read_bytes())
    rows = dcp.FileSystemReader(made).read_metadata().state_dict_metadata
    state: dict[str, Any] = {
        name: torch.empty(row.size, dtype=row.properties.dtype) for name, row in rows.items()
    }
    dcp.load(state, checkpoint_id=made)
    target = run / f"step-{number}"
    target.mkdir(parents=True)
    dcp.save({**(_trained(state, number, fused=fused) if trained else {}), **state}, checkpoint_id=target)
    return target


def _trained(state: dict[str, Any], number: int, *, fused: bool) -> dict[str, Any]:
    import torch

    generator, optimizer = torch.Generator().manual_seed(3), dict[str, Any]()
    for name, one in state.items():
        key = name.replace("qkv_linear.wq.", "qkv_linear.wqkv.") if fused else name
        if fused and any(mark in name for mark in ("qkv_linear.wk.", "qkv_linear.wv.")):
            continue
        for moment in ("exp_avg", "exp_avg_sq"):
            optimizer[f"state.{key}.{moment}"] = torch.randn(one.shape, generator=generator).abs()
        optimizer[f"state.{key}.step"] = torch.tensor(float(number))
        optimizer |= {f"param_groups.{key}.lr": 1e-3, f"param_groups.{key}.betas": (0.9, 0.95)}
    return {
        "train_state": {"step": number, "ntokens_seen": 1234}, "optimizer": optimizer,
        "dataloader": {"dp_rank_0": pickle.dumps({"at": 3}), "world_size": 1}, "lr_scheduler": {"last_epoch": number},
    }  # fmt: skip


def config(run: Path) -> dict[str, Any]:
    """The config next to a run."""
    return json.loads((run.parent / "model.json").read_text())
