"""What lies in a checkpoint by its system's own library, in this process and without our code.

`loaded` gives key path → (dtype, shape, bytes) of every array. T5X and PaxML do not install here: their folders are
read as they read them, by flax's msgpack, tensorstore and Orbax.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.torch import as_bytes, torch

Held = dict[tuple[str, ...], tuple[str, tuple[int, ...], bytes]]


def loaded(name: str, path: Path) -> Held:
    """Every array of a checkpoint of a format."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return held(LIBRARIES[name](path))


def held(tree: Any) -> Held:
    """The arrays of a tree; single numbers of Python are none."""
    return {at: _described(leaf) for at, leaf in _leaves(tree, ()) if hasattr(leaf, "shape")}


def _leaves(node: Any, at: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    if isinstance(node, dict):
        for key, child in node.items():
            yield from _leaves(child, (*at, *(key if isinstance(key, tuple) else (str(key),))))
    elif isinstance(node, list | tuple):
        for number, child in enumerate(node):
            yield from _leaves(child, (*at, str(number)))
    else:
        yield at, node


def _described(leaf: Any) -> tuple[str, tuple[int, ...], bytes]:
    if torch.is_tensor(leaf):
        return str(leaf.dtype).removeprefix("torch."), tuple(leaf.shape), as_bytes(leaf)
    array = np.asarray(leaf)
    return array.dtype.name, array.shape, array.tobytes()


def _safetensors(path: Path) -> Any:
    from safetensors.torch import load_file

    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def _npz(path: Path) -> Any:
    with np.load(path) as arrays:
        return dict(arrays)


def _torch(path: Path) -> Any:
    return torch.load(path / "consolidated.pth" if path.is_dir() else path, weights_only=True)


def _rank(path: Path) -> Any:
    """Megatron's file of one rank, whose arguments are the one class that is not torch's own."""
    from argparse import Namespace

    with torch.serialization.safe_globals([Namespace]):
        return torch.load(path / "mp_rank_00" / "model_optim_rng.pt", weights_only=True)["model"]


def _distributed(path: Path) -> Any:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    rows = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    state = {
        name: torch.empty(row.size, dtype=row.properties.dtype)
        for name, row in rows.items()
        if isinstance(row, TensorStorageMetadata)
    }
    dcp.load(state, checkpoint_id=str(path), no_dist=True)
    return state


def _orbax(item: str) -> Callable[[Path], Any]:
    def restore(path: Path) -> Any:
        import orbax.checkpoint as ocp

        with ocp.PyTreeCheckpointer() as checkpointer:
            return checkpointer.restore(path / item)

    return restore


def _paxml(path: Path) -> Any:
    import tensorstore as ts

    if (path / "state" / "manifest.ocdbt").exists():
        return _orbax("state")(path)
    specs = {
        folder.name: {"driver": "zarr", "kvstore": {"driver": "file", "path": f"{folder}/"}}
        for folder in (path / "state").iterdir()
        if (folder / ".zarray").exists()
    }
    return {
        tuple(name.split(".")): ts.open(spec, open=True).result().read().result()
        for name, spec in specs.items()
    }


def _msgpack(path: Path) -> Any:
    from flax import serialization

    return serialization.msgpack_restore(
        (path / "flax_model.msgpack" if path.is_dir() else path).read_bytes()
    )


def _t5x(path: Path) -> Any:
    from tests.support import t5x

    return {tuple(name.split("/")): leaf for name, leaf in t5x.load(path).items()}


def _gguf(path: Path) -> Any:
    import ml_dtypes
    from gguf import GGMLQuantizationType, GGUFReader

    found = {one.name: (one.tensor_type, one.data) for one in GGUFReader(path).tensors}
    brain = GGMLQuantizationType.BF16  # whose values numpy has no name for
    return {
        name: data.view(ml_dtypes.bfloat16) if kind == brain else data for name, (kind, data) in found.items()
    }


LIBRARIES: dict[str, Callable[[Path], Any]] = {
    "safetensors": _safetensors,
    "huggingface": _safetensors,
    "vllm-sharded": _safetensors,
    "npz": _npz,
    "torch-zip": _torch,
    "lingua-consolidated": _torch,
    "dcp": _distributed,
    "lingua": _distributed,
    "torchtitan": _distributed,
    "megatron": _distributed,
    "megatron-ranks": _rank,
    "orbax": _orbax(""),
    "penzai": _orbax(""),
    "maxtext": _orbax("items"),
    "t5x-orbax": _orbax("state"),
    "paxml": _paxml,
    "flax-msgpack": _msgpack,
    "huggingface-flax": _msgpack,
    "t5x-legacy": _t5x,
    "gguf": _gguf,
}
