"""Loaders of the systems that PyTorch programs save with: every tensor on the GPU where there is one.

Archives are loaded with `weights_only`; what that refuses is not loaded. For a Hugging Face folder with a config whose
classes transformers knows, the model class itself loads it too, and nothing may be missing or left over.
"""

from __future__ import annotations

import json
from importlib import import_module
from typing import TYPE_CHECKING, Any

from wherry.errors import MismatchError, NotFoundError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from wherry.tensorspec import TensorSpec


def device() -> str:
    """The device that tensors are loaded onto."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def safetensors(file: Path, specs: Mapping[str, TensorSpec]) -> Any:
    """A file, by the safetensors library."""
    del specs
    from safetensors.torch import load_file

    return load_file(file, device=device())


def huggingface(folder: Path, specs: Mapping[str, TensorSpec]) -> Any:
    """A folder: its files by the safetensors library or torch, the whole by the class that the config names."""
    files = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("pytorch_model*.bin"))
    if not files:
        raise NotFoundError(f"no weights of Hugging Face in {folder}")
    load = safetensors if files[0].suffix == ".safetensors" else archive
    found: dict[str, Any] = {}
    for file in files:
        found |= load(file, specs)
    _whole(folder)
    return found


def archive(path: Path, specs: Mapping[str, TensorSpec]) -> Any:
    """A file of torch.save (in a folder: the only `.pth`), by `torch.load(weights_only=True)`."""
    del specs
    import torch

    if path.is_dir():
        files = sorted(path.glob("*.pth"))
        if len(files) != 1:
            raise NotFoundError(f"{len(files)} .pth files in {path}, not one")
        path = files[0]
    return torch.load(path, map_location=device(), weights_only=True)


def distributed(folder: Path, specs: Mapping[str, TensorSpec]) -> Any:
    """A folder, by `torch.distributed.checkpoint` in one process."""
    del specs
    import torch

    checkpoint: Any = import_module("torch.distributed.checkpoint")
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    reader = checkpoint.FileSystemReader(folder)
    rows: dict[str, Any] = reader.read_metadata().state_dict_metadata
    state: dict[str, Any] = {
        name: torch.empty(row.size, dtype=row.properties.dtype, device=device())
        for name, row in rows.items()
        if isinstance(row, TensorStorageMetadata)
    }
    checkpoint.load(state, storage_reader=reader, no_dist=True)
    return state


def model(folder: Path) -> Any:
    """The model, by the class that its config names; None where transformers is not there or knows no such class.

    Raises:
        MismatchError: something is missing, left over or of another shape.
    """
    try:
        import transformers
    except ImportError:
        return None
    config = folder / "config.json"
    names: list[str] = json.loads(config.read_text()).get("architectures") or [] if config.exists() else []
    kind: Any = getattr(transformers, names[0], None) if names else None
    if not _is_one_of(kind, transformers.PreTrainedModel):
        return None  # the config is data: it chooses among models, and reaches no other class of the library
    made, report = kind.from_pretrained(folder, output_loading_info=True, dtype="auto", local_files_only=True)
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if report.get(what):
            raise MismatchError(
                f"{names[0]}: {what.replace('_', ' ')}: {sorted(map(str, report[what]))[:20]}"
            )
    return made.to(device()).eval()


def _is_one_of(kind: Any, base: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, base)


def _whole(folder: Path) -> None:
    model(folder)
