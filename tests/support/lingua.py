"""Checkpoints of Meta Lingua made here: step folders as its CheckpointManager leaves them, and files of Meta."""

from __future__ import annotations

import json

from tests.support.torch import save, torch

PARAMS = {
    "model": {"dim": 8, "n_layers": 1, "weight_tying": True},
    "distributed": {"model_dtype": "bf16", "dp_shard": 2, "dp_replicate": 1},
    "data": {"tokenizer": {"name": "bytes", "path": None}},
}


def model(*, tied=False) -> dict:
    generator = torch.Generator().manual_seed(3)
    shapes = {"tok_embeddings.weight": (12, 8), "layers.0.attention.wq.weight": (8, 8), "norm.weight": (8,)}
    state = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    output = "output.tied_module.weight" if tied else "output.weight"
    return state | {
        output: state["tok_embeddings.weight"].clone() if tied else torch.randn(12, 8, generator=generator)
    }


def optimizer(parameters) -> dict:
    moments = {
        name: {"step": torch.tensor(7.0), "exp_avg": one * 2, "exp_avg_sq": one * one}
        for name, one in parameters.items()
        if "tied" not in name
    }
    group = {"lr": 0.1, "betas": (0.9, 0.95), "params": list(moments), "fused": True}
    return {"state": moments, "param_groups": [group]}


def step_folder(path, *, ranks=2, tied=False, optim=True, params=None):
    """What CheckpointManager.save leaves: DCP, params.json, one train state per rank."""
    weights = model(tied=tied)
    state = {"model": weights} | ({"optim": optimizer(weights)} if optim else {})
    path.mkdir(parents=True)
    save(state, path)
    (path / "params.json").write_text(json.dumps(PARAMS if params is None else params))
    for rank in range(ranks):
        (path / f"train_state_{rank:05d}.json").write_text(json.dumps({"step": 7, "acc_step": 0}))
    return path


def meta_files(path, parts=2):
    path.mkdir()
    rows = []
    for part in range(parts):
        state = {
            "tok_embeddings.weight": torch.randn(12, 8 // parts).bfloat16(),
            "layers.0.attention.wo.weight": torch.randn(8, 8 // parts).bfloat16(),
            "norm.weight": torch.ones(8).bfloat16(),
            "rope.freqs": torch.ones(2),
        }
        torch.save(state, path / f"consolidated.{part:02d}.pth")
        rows.append(state)
    (path / "params.json").write_text('{"dim": 8, "n_layers": 1}')
    (path / "tokenizer.model").write_bytes(b"x")
    return rows
