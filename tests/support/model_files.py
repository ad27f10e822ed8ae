"""Writes the models of `tests.support.model_systems` as each system saves them, by the installed libraries."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tests.support import paxml, t5x
from tests.support.model_systems import (
    LLAMA_CONFIG,
    META_PARAMS,
    RUN,
    T5_CONFIG,
    Arrays,
    gpt3_maxtext,
    llama_huggingface,
    llama_maxtext,
    llama_meta,
    llama_penzai,
    penzai_axes,
    t5_huggingface,
    t5_t5x,
)


def _tree(arrays: Arrays) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, array in arrays.items():
        node = tree
        for part in path[:-1]:
            node = node.setdefault(part, {})
        node[path[-1]] = array
    return tree


def _huggingface(folder: Path, arrays: Arrays, config: dict[str, Any], *, binary: bool = False) -> Path:
    from safetensors.numpy import save_file

    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    if binary:
        import torch

        state = {path[0]: torch.from_numpy(array.copy()) for path, array in arrays.items()}
        torch.save(state, folder / "pytorch_model.bin")
    else:
        save_file(
            {path[0]: array for path, array in arrays.items()}, folder / "model.safetensors", {"format": "pt"}
        )
    return folder


def _state(arrays: Arrays) -> dict[str, Any]:
    import torch

    return {path[-1]: torch.from_numpy(np.ascontiguousarray(array)) for path, array in arrays.items()}


def _lingua(folder: Path) -> Path:
    from tests.support.torch import save

    step = folder / "checkpoints" / "0000000007"
    step.mkdir(parents=True)
    save(_state(llama_meta(joint="model.")), step)
    (step / "params.json").write_text(json.dumps(RUN))
    (step / "train_state_00000.json").write_text(json.dumps({"step": 7, "acc_step": 0}))
    return step


def _consolidated(folder: Path) -> Path:
    import torch

    folder.mkdir(parents=True)
    torch.save({"model": _state(llama_meta())}, folder / "consolidated.pth")
    (folder / "params.json").write_text(json.dumps(RUN))
    return folder


def _meta(folder: Path, *, legacy: bool) -> Path:
    import torch

    folder.mkdir(parents=True)
    file = folder / "consolidated.pth"
    (folder / "params.json").write_text(json.dumps(META_PARAMS))
    torch.save(_state(llama_meta()), file, _use_new_zipfile_serialization=not legacy)
    return file


def _maxtext(folder: Path, arrays: Arrays) -> Path:
    import orbax.checkpoint as ocp

    with ocp.CheckpointManager(folder, item_names=("items",)) as manager:
        tree = {"opt_state": {}, **_tree(arrays)}
        manager.save(7, args=ocp.args.Composite(items=ocp.args.PyTreeSave(tree)))
        manager.wait_until_finished()
    return folder / "7"


def _penzai(folder: Path) -> Path:
    import jax.numpy as jnp
    import orbax.checkpoint as ocp
    from penzai import pz

    tree = {
        label: pz.nx.wrap(jnp.asarray(array)).tag(*penzai_axes(label))
        for (label, _leaf), array in llama_penzai().items()
    }
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder, tree)
    return folder


def _t5x_legacy(folder: Path) -> Path:
    leaves = {"/".join(path): array for path, array in t5_t5x().items()} | {
        "state/step": np.asarray(7, np.int32)
    }
    return t5x.save(folder / "checkpoint_7", leaves, is_stored=lambda name: name.startswith("target/"))


def _t5x_orbax(folder: Path) -> Path:
    import orbax.checkpoint as ocp

    tree = _tree({**t5_t5x(), ("state", "step"): np.asarray(7, np.int32)})
    ocp.PyTreeCheckpointer().save(folder / "checkpoint_7", tree)
    return folder / "checkpoint_7"


def _paxml(version: float) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        step, found = folder / f"checkpoint_{paxml.STEP:08d}", paxml.leaves()
        (paxml.ocdbt if version == 1.2 else paxml.gda)(step / "state" if version else step, found)
        if version:
            paxml.write_metadata(step, version, found)
        return step

    return write


# Family → source → how it is written.
MAKERS: dict[str, dict[str, Callable[[Path], Path]]] = {
    "llama": {
        "huggingface": lambda folder: _huggingface(folder, llama_huggingface(), LLAMA_CONFIG),
        "huggingface-bin": lambda folder: _huggingface(
            folder, llama_huggingface(), LLAMA_CONFIG, binary=True
        ),
        "lingua": _lingua,
        "lingua-consolidated": _consolidated,
        "meta-zip": lambda folder: _meta(folder, legacy=False),
        "meta-legacy": lambda folder: _meta(folder, legacy=True),
        "maxtext-scan": lambda folder: _maxtext(folder, llama_maxtext(scan=True)),
        "maxtext-unscan": lambda folder: _maxtext(folder, llama_maxtext(scan=False)),
        "penzai": _penzai,
    },
    "t5": {
        "huggingface": lambda folder: _huggingface(folder, t5_huggingface(), T5_CONFIG),
        "t5x-legacy": _t5x_legacy,
        "t5x-orbax": _t5x_orbax,
    },
    "gpt3": {
        "paxml-1.2": _paxml(1.2),
        "paxml-1.1": _paxml(1.1),
        "paxml-1.0": _paxml(1.0),
        "paxml-0.0": _paxml(0.0),
        "maxtext-scan": lambda folder: _maxtext(folder, gpt3_maxtext(scan=True)),
        "maxtext-unscan": lambda folder: _maxtext(folder, gpt3_maxtext(scan=False)),
    },
}
