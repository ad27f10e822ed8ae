"""What trainers put around the names of a model, and the files that they save: a state dict in each of them."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

State = dict[str, Any]


class Wrapper(NamedTuple):
    """One way to save a state dict.

    Attributes:
        removed: what is printed of each removal, in any order.
        saved: from a state dict to what is saved.
        ignore: rules that leave out other weights in it.
    """

    removed: tuple[str, ...]
    saved: Callable[[State], State]
    ignore: tuple[str, ...] = ()


def before(*words: str) -> Callable[[State], State]:
    """Words before every name, the outermost first."""
    start = "".join(f"{word}." for word in words)
    return lambda state: {start + name: value for name, value in state.items()}


def inside(*words: str, after: str = r"layers\.\d+\.") -> Callable[[State], State]:
    """Words between a module and what is in it."""
    middle = "".join(f"{word}." for word in words)
    return lambda state: {re.sub(f"({after})", rf"\g<1>{middle}", name): one for name, one in state.items()}


def _both(outer: Callable[[State], State], inner: Callable[[State], State]) -> Callable[[State], State]:
    return lambda state: outer(inner(state))


def _moments(state: State) -> State:
    """The state of torch's Adam, by name as `get_state_dict` gives it."""
    import torch

    ones = {
        name: {"step": torch.tensor(3.0), "exp_avg": torch.ones_like(one), "exp_avg_sq": torch.ones_like(one)}
        for name, one in state.items()
    }
    return {"state": ones, "param_groups": [{"lr": 1e-3, "params": list(state)}]}


def _numbered(state: State) -> State:
    """The state of torch's Adam, as `Optimizer.state_dict` gives it."""
    found = _moments(state)
    return {
        "state": dict(enumerate(found["state"].values())),
        "param_groups": [{"params": [*range(len(state))]}],
    }


def _near(state: State) -> State:
    return {name: value + 1 for name, value in state.items()}


def _lightning(*words: str) -> Callable[[State], State]:
    return lambda state: {
        "epoch": 1, "global_step": 7, "pytorch-lightning_version": "2.5.0", "loops": {"fit_loop": {"state_dict": {}}},
        "callbacks": {}, "optimizer_states": [_numbered(state)], "lr_schedulers": [{"last_epoch": 3}],
        "hyper_parameters": {"lr": 1e-3}, "state_dict": before(*words)(state),
    }  # fmt: skip


def _scalar(value: float) -> Any:
    import torch

    return torch.tensor(value)


# Words before or between the names of a flat state dict.
FLAT: dict[str, Wrapper] = {
    "plain": Wrapper((), dict),
    "ddp": Wrapper(("module.",), before("module")),
    "compile": Wrapper(("_orig_mod.",), before("_orig_mod")),
    "compile-ddp": Wrapper(("_orig_mod.", "module."), before("_orig_mod", "module")),
    "ddp-compile": Wrapper(("_orig_mod.", "module."), before("module", "_orig_mod")),
    "ddp-twice": Wrapper(("module.", "module."), before("module", "module")),
    "compile-each-layer": Wrapper(("_orig_mod.",), inside("_orig_mod")),
    "compile-each-attention": Wrapper(("_orig_mod.",), inside("_orig_mod", after=r"self_attn\.")),
    "ddp-compile-each-layer": Wrapper(
        ("_orig_mod.", "module."), _both(before("module"), inside("_orig_mod"))
    ),
    "fsdp": Wrapper(("_fsdp_wrapped_module.",), before("_fsdp_wrapped_module")),
    "fsdp-each-layer": Wrapper(("_fsdp_wrapped_module.",), inside("_fsdp_wrapped_module")),
    "fsdp-all": Wrapper(
        ("_fsdp_wrapped_module.",), _both(before("_fsdp_wrapped_module"), inside("_fsdp_wrapped_module"))
    ),
    "fsdp-checkpointing": Wrapper(
        ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module."),
        inside("_fsdp_wrapped_module", "_checkpoint_wrapped_module"),
    ),
    "checkpointing": Wrapper(("_checkpoint_wrapped_module.",), inside("_checkpoint_wrapped_module")),
    "fairscale": Wrapper(("_fpw_module.",), inside("_fpw_module")),
    "opacus": Wrapper(("_module.",), before("_module")),
    "fabric": Wrapper(("_forward_module.",), before("_forward_module")),
    "fabric-ddp": Wrapper(("_forward_module.", "module."), before("_forward_module", "module")),
    "fabric-compile": Wrapper(("_forward_module.", "_orig_mod."), before("_forward_module", "_orig_mod")),
    "model": Wrapper(("model.",), before("model")),
    "model-ddp": Wrapper(("model.", "module."), before("model", "module")),
    "ddp-model": Wrapper(("model.", "module."), before("module", "model")),
    "megatron-fsdp": Wrapper(("model.", "module."), before("model", "module", "module")),
    "composer": Wrapper(("state.", "model.", "module."), before("state", "model", "module")),
    "composer-model": Wrapper(("state.", "model."), before("state", "model", "model")),
    "lightning": Wrapper(("state_dict.", "model."), before("state_dict", "model")),
    "lightning-fabric": Wrapper(
        ("state_dict.", "_forward_module.", "model."), before("state_dict", "_forward_module", "model")
    ),
    "net": Wrapper(("net.",), before("net")),
    "network": Wrapper(("network.",), before("network")),
}
# Dicts in which the state dict is one entry.
NESTED: dict[str, Wrapper] = {
    "model, optim": Wrapper(
        ("model/",), lambda s: {"model": s, "optim": _moments(s), "epoch": 3, "step": _scalar(7)}
    ),
    "model, optimizer": Wrapper(
        ("model/",),
        lambda s: {"model": s, "optimizer": _numbered(s), "scheduler": {"last_epoch": 3, "_step_count": 4}},
    ),
    "app": Wrapper(("app/", "model/"), lambda s: {"app": {"model": s, "optim": _moments(s)}}),
    "fabric": Wrapper(
        ("_forward_module.", "model/"),
        lambda s: {"model": before("_forward_module")(s), "optimizer": _numbered(s)},
    ),
    "state_dict": Wrapper(("state_dict/",), lambda s: {"state_dict": s}),
    "imagenet": Wrapper(
        ("state_dict/", "module."),
        lambda s: {"epoch": 3, "arch": "llama", "state_dict": before("module")(s), "best_acc1": _scalar(1.0),
                   "optimizer": _numbered(s)},
    ),
    "tutorial": Wrapper(
        ("model_state_dict/",),
        lambda s: {"epoch": 3, "model_state_dict": s, "optimizer_state_dict": _numbered(s), "loss": 0.3},
    ),
    "net": Wrapper(("net/",), lambda s: {"net": s, "acc": 91.0, "epoch": 2}),
    "network": Wrapper(("network/",), lambda s: {"network": s}),
    "params": Wrapper(("params/",), lambda s: {"params": s}),
    "nanogpt": Wrapper(
        ("_orig_mod.", "model/"),
        lambda s: {"model": before("_orig_mod")(s), "optimizer": _numbered(s), "model_args": {"n_layer": 2},
                   "iter_num": _scalar(10), "best_val_loss": _scalar(1.5), "config": {"lr": 1e-3}},
    ),
    "ema": Wrapper(("model/",), lambda s: {"model": s, "ema": _near(s), "step": 5}, ("others",)),
    "timm": Wrapper(
        ("state_dict/",), lambda s: {"state_dict": s, "state_dict_ema": _near(s), "epoch": 5}, ("others",)
    ),
    "params_ema": Wrapper(("params/",), lambda s: {"params": s, "params_ema": _near(s)}, ("others",)),
    "lightning": Wrapper(("state_dict/", "model."), _lightning("model")),
    "lightning-fabric": Wrapper(("state_dict/", "_forward_module.", "model."), _lightning("_forward_module", "model")),
    "composer": Wrapper(
        ("state/", "model/", "module."),
        lambda s: {"state": {"model": before("module")(s), "optimizers": {"AdamW": _moments(s)}, "timestamp": {}},
                   "rng": []},
    ),
    "composer-model": Wrapper(
        ("state/", "model/", "model."),
        lambda s: {"state": {"model": before("model")(s), "optimizers": {"AdamW": _moments(s)}}},
    ),
    "megatron-fsdp": Wrapper(
        ("model/", "module."), lambda s: {"model": before("module", "module")(s), "iteration": 4}
    ),
    "deepspeed": Wrapper(("module/",), lambda s: {"module": s, "lr_scheduler": None, "global_steps": 4}),
    "trainer": Wrapper(("trainer/", "model/"), lambda s: {"trainer": {"model": s, "global_step": 4}}),
}  # fmt: skip


def save_pt(folder: Path, saved: State) -> Path:
    """`torch.save` of today."""
    import torch

    torch.save(saved, folder / "model.pt")
    return folder / "model.pt"


def save_legacy(folder: Path, saved: State) -> Path:
    """`torch.save` before 1.6."""
    import torch

    torch.save(saved, folder / "model.pt", _use_new_zipfile_serialization=False)
    return folder / "model.pt"


def save_ckpt(folder: Path, saved: State) -> Path:
    """A file with the name that Lightning gives it."""
    import torch

    torch.save(saved, folder / "epoch=1-step=7.ckpt")
    return folder / "epoch=1-step=7.ckpt"


def save_bin(folder: Path, saved: State) -> Path:
    """A Hugging Face folder without a config."""
    import torch

    torch.save(saved, folder / "pytorch_model.bin")
    return folder


def save_safetensors(folder: Path, saved: State) -> Path:
    """A file of safetensors."""
    from safetensors.torch import save_file

    save_file({name: one.contiguous().clone() for name, one in saved.items()}, folder / "weights.safetensors")
    return folder / "weights.safetensors"


def save_dcp(folder: Path, saved: State) -> Path:
    """torch.distributed.checkpoint, by one process."""
    import torch.distributed.checkpoint as dcp

    dcp.save(saved, checkpoint_id=folder / "step-7", no_dist=True)
    return folder / "step-7"


def save_accelerate(folder: Path, saved: State) -> Path:
    """accelerate and transformers' Trainer: DCP below a root `model`, in a folder below the step."""
    import torch.distributed.checkpoint as dcp

    dcp.save({"model": saved}, checkpoint_id=folder / "checkpoint-7" / "pytorch_model_fsdp_0", no_dist=True)
    return folder / "checkpoint-7"


def save_ranks(folder: Path, saved: State) -> Path:
    """FSDP2 rank files, as verl saves them."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    for rank in range(2):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=2)
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))
        own = {
            name: DTensor.from_local(
                torch.chunk(one, 2)[rank].contiguous().clone(), mesh, [Shard(0)], run_check=False,
                shape=one.shape, stride=one.stride(),
            )
            for name, one in saved.items()
        }  # fmt: skip
        torch.save(own, folder / f"model_world_size_2_rank_{rank}.pt")
        dist.destroy_process_group()
    return folder


# Container → what writes it, and whether it holds nested dicts.
CONTAINERS: dict[str, tuple[Callable[[Path, State], Path], bool]] = {
    "pt": (save_pt, True),
    "legacy": (save_legacy, True),
    "ckpt": (save_ckpt, True),
    "dcp": (save_dcp, True),
    "bin": (save_bin, False),
    "safetensors": (save_safetensors, False),
    "accelerate": (save_accelerate, False),
    "ranks": (save_ranks, False),
}
