"""Checkpoints on disk: read by the target's own library, and written by it in the system's own form."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from tests.support.libraries import loaded

Array = np.ndarray[Any, np.dtype[Any]]


def arrays(name: str, path: Path) -> dict[str, Array]:
    """Key path, joined by `/` → array, as the library of a format loads them."""
    return {
        "/".join(at): np.frombuffer(data, _dtype(dtype)).reshape(shape)
        for at, (dtype, shape, data) in loaded(name, path).items()
    }


def below(found: Mapping[str, Array], root: str) -> dict[str, Array]:
    """The arrays below a key path, without it."""
    return {name.removeprefix(root): one for name, one in found.items() if name.startswith(root)}


def _dtype(name: str) -> Any:
    return ml_dtypes.bfloat16 if name == "bfloat16" else np.dtype(name)


def tree(found: Mapping[str, Array]) -> dict[str, Any]:
    """Nested dicts of arrays by their key paths."""
    root: dict[str, Any] = {}
    for name, array in found.items():
        node = root
        *outer, last = name.split("/")
        for part in outer:
            node = node.setdefault(part, {})
        node[last] = array
    return root


def write_yaml(file: Path, config: Mapping[str, Any]) -> None:
    """A flat config, an attribute a line."""
    file.write_text("".join(f"{name}: {json.dumps(value)}\n" for name, value in config.items()))


def save_maxtext(folder: Path, found: Mapping[str, Array], aux: Mapping[str, Array] | None = None) -> Path:
    """A step of MaxText without moments, by Orbax; arrays below `params/params`, and those below `nnx_aux/model`."""
    import orbax.checkpoint as ocp

    whole = {"params": {"params": tree(found)}, "opt_state": {}, "step": np.zeros((), np.int32)}
    whole |= {"nnx_aux": {"model": tree(aux)}} if aux else {}
    with ocp.CheckpointManager(folder, item_names=("items",)) as manager:
        manager.save(0, args=ocp.args.Composite(items=ocp.args.PyTreeSave(whole)))
        manager.wait_until_finished()
    return folder / "0"


def save_torch(file: Path, found: Mapping[str, Array], *outer: str) -> Path:
    """One file of torch: a state dict, below further keys."""
    import torch

    state: Any = {name: torch.from_numpy(array.copy()) for name, array in found.items()}
    for key in reversed(outer):
        state = {key: state}
    torch.save(state, file)
    return file


def save_dcp(folder: Path, found: Mapping[str, Array]) -> Path:
    """A distributed checkpoint of torch."""
    import torch

    from tests.support.torch import save

    folder.mkdir(parents=True)
    save({name: torch.from_numpy(array.copy()) for name, array in found.items()}, folder)
    return folder


def save_t5x(folder: Path, found: Mapping[str, Array]) -> Path:
    """A T5X checkpoint of the Orbax era; arrays below `target`."""
    import orbax.checkpoint as ocp

    whole = {"target": tree(found), "state": {"step": np.zeros((), np.int32)}}
    ocp.PyTreeCheckpointer().save(folder, whole)
    return folder
