"""Megatron's checkpoints of a tiny Llama, imitated by their layout with torch, and what Megatron-Core computes."""

from __future__ import annotations

import json
import subprocess
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.generations import old_python
from tests.support.model_systems import DIM, EMBED, FFN, GROUPS, HEADS, LAYERS, VOCAB, llama_huggingface

ARGS: dict[str, Any] = {
    "num_layers": LAYERS, "hidden_size": EMBED, "num_attention_heads": HEADS, "num_query_groups": GROUPS,
    "group_query_attention": True, "kv_channels": DIM, "ffn_hidden_size": FFN, "vocab_size": VOCAB,
    "padded_vocab_size": VOCAB, "norm_epsilon": 1e-5, "rotary_base": 500000, "max_position_embeddings": 64,
    "untie_embeddings_and_output_weights": True, "swiglu": True, "normalization": "RMSNorm", "add_bias_linear": False,
    "position_embedding_type": "rope", "rotary_percent": 1.0, "rotary_interleaved": False, "lr": 1e-4,
    "train_iters": 10, "tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1,
}  # fmt: skip
IDS = (np.arange(24).reshape(2, 12) * 7 % 53 + 1).tolist()
_PROGRAM = Path(__file__).with_name("megatron_program.py")


def qkv(query: np.ndarray, key: np.ndarray, value: np.ndarray) -> np.ndarray:
    """The heads of each group: its queries, its key, its value."""
    rows = [
        part
        for at in range(GROUPS)
        for part in (
            query[at * HEADS // GROUPS * DIM : (at + 1) * HEADS // GROUPS * DIM],
            key[at * DIM : (at + 1) * DIM],
            value[at * DIM : (at + 1) * DIM],
        )
    ]
    return np.concatenate(rows)


def layer(at: int) -> dict[str, np.ndarray]:
    """One layer under GPTModel's names, as Transformer Engine's modules have them."""
    arrays = {path[0]: array for path, array in llama_huggingface().items()}
    of = {
        name.removeprefix(f"model.layers.{at}.").removesuffix(".weight"): one for name, one in arrays.items()
    }
    return {
        "self_attention.linear_qkv.layer_norm_weight": of["input_layernorm"],
        "self_attention.linear_qkv.weight": qkv(
            of["self_attn.q_proj"], of["self_attn.k_proj"], of["self_attn.v_proj"]
        ),
        "self_attention.linear_proj.weight": of["self_attn.o_proj"],
        "mlp.linear_fc1.layer_norm_weight": of["post_attention_layernorm"],
        "mlp.linear_fc1.weight": np.concatenate([of["mlp.gate_proj"], of["mlp.up_proj"]]),
        "mlp.linear_fc2.weight": of["mlp.down_proj"],
    }


def outer() -> dict[str, np.ndarray]:
    """The parameters outside of layers."""
    arrays = llama_huggingface()
    return {
        "embedding.word_embeddings.weight": arrays["model.embed_tokens.weight",],
        "decoder.final_layernorm.weight": arrays["model.norm.weight",],
        "output_layer.weight": arrays["lm_head.weight",],
    }


def whole(*, stacked: bool = True) -> dict[str, np.ndarray]:
    """The whole model; layers are one tensor, or one each."""
    layers = [layer(at) for at in range(LAYERS)]
    if stacked:
        inner = {f"decoder.layers.{name}": np.stack([one[name] for one in layers]) for name in layers[0]}
    else:
        inner = {
            f"decoder.layers.{at}.{name}": one for at, row in enumerate(layers) for name, one in row.items()
        }
    return {**outer(), **inner}


def save(folder: Path, *, stacked: bool = True, args: Any = ARGS, more: Any = (), common: Any = ()) -> Path:
    """A step as Megatron-Core saves it, imitated with torch's own DCP."""
    import torch
    import torch.distributed.checkpoint as dcp

    state: dict[str, Any] = {
        name: torch.from_numpy(array.copy()) for name, array in whole(stacked=stacked).items()
    }
    state["decoder.layers.mlp.linear_fc1._extra_state/shard_0_2"] = None
    dcp.save({**state, **dict(more)}, checkpoint_id=folder, no_dist=True)
    spoken = {"args": Namespace(**args)} if args else {}
    torch.save({**spoken, "iteration": 10, "checkpoint_version": 3.0, **dict(common)}, folder / "common.pt")
    backend = {"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch"}
    (folder / "metadata.json").write_text(json.dumps(backend))
    return folder


def save_ranks(folder: Path, tensor: int, pipeline: int, args: Any = ARGS) -> Path:
    """The folders of all ranks, imitated: each parameter cut as GPTModel's modules cut it."""
    import torch

    own = {**args, "tensor_model_parallel_size": tensor, "pipeline_model_parallel_size": pipeline}
    for stage in range(pipeline):
        for rank in range(tensor):
            name = f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if pipeline > 1 else "")
            place = folder / name
            place.mkdir(parents=True)
            model = {
                key: torch.from_numpy(_part(key, array, rank, tensor).copy())
                for key, array in _stage(stage, pipeline).items()
            }
            spoken = {"args": Namespace(**own), "iteration": 10, "checkpoint_version": 3.0, "model": model}
            torch.save(spoken, place / "model_optim_rng.pt")
    return folder


def _stage(stage: int, count: int) -> dict[str, np.ndarray]:
    """The parameters of a stage, whose layers are counted from 0."""
    each, ends = LAYERS // count, outer()
    rows = {
        f"decoder.layers.{at}.{name}": array
        for at in range(each)
        for name, array in layer(stage * each + at).items()
    }
    first = ["embedding.word_embeddings.weight"] if stage == 0 else []
    last = ["decoder.final_layernorm.weight", "output_layer.weight"] if stage == count - 1 else []
    return {**{name: ends[name] for name in (*first, *last)}, **rows}


def _part(name: str, array: np.ndarray, rank: int, count: int) -> np.ndarray:
    """What one tensor-parallel rank has of a parameter."""
    if name.endswith(("linear_proj.weight", "linear_fc2.weight")):
        return np.split(array, count, axis=1)[rank]
    if name.endswith("linear_fc1.weight"):
        gate, up = np.split(array, 2)
        return np.concatenate([np.split(gate, count)[rank], np.split(up, count)[rank]])
    if name.endswith(("linear_qkv.weight", "word_embeddings.weight", "output_layer.weight")):
        return np.split(array, count)[rank]
    return array


def megatron_logits(*jobs: dict[str, Any]) -> list[np.ndarray]:
    """What Megatron-Core computes for the token ids, see `megatron_program`."""
    run = subprocess.run(
        [str(old_python("megatron")), "-P", "-W", "ignore", str(_PROGRAM), json.dumps(jobs), json.dumps(IDS)],
        capture_output=True, text=True, check=False, env={"PATH": "/usr/bin:/bin", "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-3000:]
    return [np.array(rows) for rows in json.loads(run.stdout.splitlines()[-1])]
