"""PyTorch's own ways between its containers, called as its documentation says, each made durable at the end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.files import make_durable

_NAME = "model.pt"


def torch_save(source: str, target: str) -> Callable[[], None]:
    """Make the input `torch`: the state dict of a Hugging Face folder by torch.save."""
    import torch

    load = _loader(source)

    def run() -> None:
        Path(target).mkdir(parents=True)
        torch.save(load(), Path(target) / _NAME)
        make_durable(Path(target))

    return run


def torch_to_dcp(source: str, target: str) -> Callable[[], None]:
    """torch_save_to_dcp."""
    from torch.distributed.checkpoint.format_utils import torch_save_to_dcp

    def run() -> None:
        torch_save_to_dcp(Path(source) / _NAME, target)
        make_durable(Path(target))

    return run


def dcp_to_torch(source: str, target: str) -> Callable[[], None]:
    """dcp_to_torch_save."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    def run() -> None:
        dcp_to_torch_save(source, target)
        make_durable(Path(target))

    return run


def dcp_to_safetensors(source: str, target: str) -> Callable[[], None]:
    """dcp.load into a state dict of empty tensors, then save_file."""
    import torch
    import torch.distributed.checkpoint as dcp
    from safetensors.torch import save_file

    def run() -> None:
        held = dcp.FileSystemReader(source).read_metadata().state_dict_metadata
        state = {name: torch.empty(one.size, dtype=one.properties.dtype) for name, one in held.items()}
        dcp.load(state, checkpoint_id=source)
        save_file(state, target)
        make_durable(Path(target))

    return run


def safetensors_to_dcp(source: str, target: str) -> Callable[[], None]:
    """load_file of each shard, then dcp.save."""
    import torch.distributed.checkpoint as dcp

    load = _loader(source)

    def run() -> None:
        dcp.save(load(), checkpoint_id=target)
        make_durable(Path(target))

    return run


def torch_to_safetensors(source: str, target: str) -> Callable[[], None]:
    """torch.load(mmap=True), then save_file."""
    import torch
    from safetensors.torch import save_file

    def run() -> None:
        save_file(torch.load(Path(source) / _NAME, mmap=True, weights_only=True), target)
        make_durable(Path(target))

    return run


def _loader(source: str) -> Callable[[], dict[str, Any]]:
    from safetensors.torch import load_file

    def load() -> dict[str, Any]:
        state: dict[str, Any] = {}
        for shard in sorted(Path(source).glob("*.safetensors")):
            state |= load_file(shard)
        return state

    return load
