"""The roots and nodes that JAX trainers put around a model: MaxText's NNX forms, T5X's parameters without `target` and
PaxML's variables in plain Orbax give the same weights as the system's own form, with no option more."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import wherry
from tests.support import paxml
from tests.support.model_systems import (
    LLAMA_CONFIG,
    T5_CONFIG,
    Arrays,
    gpt3_maxtext,
    llama_huggingface,
    llama_maxtext,
    t5_huggingface,
    t5_t5x,
)

ocp = pytest.importorskip("orbax.checkpoint")


def tree(arrays):
    found = {}
    for path, array in arrays.items():
        node = found
        for part in path[:-1]:
            node = node.setdefault(part, {})
        node[path[-1]] = array
    return found


def save(folder, item, arrays):
    """A step of Orbax's manager, or a bare tree if there is no item."""
    if item is None:
        ocp.PyTreeCheckpointer().save(folder, tree(arrays))
        return folder
    with ocp.CheckpointManager(folder, item_names=(item,)) as manager:
        manager.save(7, args=ocp.args.Composite(**{item: ocp.args.PyTreeSave(tree(arrays))}))
        manager.wait_until_finished()
    return folder / "7"


def weights(folder):
    from safetensors.numpy import load_file

    return {(name,): one for file in folder.glob("*.safetensors") for name, one in load_file(file).items()}


def assert_same(found, wanted):
    assert found.keys() == wanted.keys()
    assert [path for path in wanted if not np.array_equal(found[path], wanted[path])] == []


def below(root: tuple[str, ...], arrays: Arrays, end: tuple[str, ...] = ()) -> Arrays:
    return {(*root, *path, *end): array for path, array in arrays.items()}


# ---- MaxText


def _nnx_state(arrays: Arrays) -> Arrays:
    """A state of NNX: model and optimizer, every leaf a variable."""
    moments = {
        ("optimizer", "opt_state", "0", slot, *path, "value"): np.ones_like(array)
        for slot in ("mu", "nu")
        for path, array in arrays.items()
    }
    counts = {
        ("optimizer", "opt_state", "0", "count", "value"): np.int32(3),
        ("optimizer", "step", "value"): np.uint32(3),
    }
    return {**below(("model",), arrays, ("value",)), **moments, **counts}


# Form → the item, and what is saved of the decoder's own names.
MAXTEXT: dict[str, tuple[str | None, Callable[[Arrays], Arrays]]] = {
    "linen": ("items", lambda a: below(("params", "params"), a)),
    "nnx below model_params": ("model_params", lambda a: below((), a, ("value",))),
    "nnx without a root": ("items", lambda a: below((), a, ("value",))),
    "nnx below model, with its optimizer": ("items", _nnx_state),
    "nnx below base": ("items", lambda a: below(("base",), a, ("value",))),
    "nnx below params": ("state", lambda a: below(("params",), a, ("value",))),
    "bare": ("items", dict),
    "bare, without an item": (None, dict),
}


@pytest.mark.parametrize("form", MAXTEXT)
@pytest.mark.parametrize("scan", [True, False])
def test_every_form_of_maxtext_gives_the_same_model(form, scan, tmp_path):
    if scan and form in ("nnx without a root", "nnx below base", "bare, without an item"):
        return  # as without scanned layers
    config = tmp_path / "config.json"
    config.write_text(json.dumps(LLAMA_CONFIG))
    decoder = {path[2:]: one for path, one in llama_maxtext(scan=scan).items() if path[0] == "params"}
    item, made = MAXTEXT[form]
    source = save(tmp_path / "in", item, made(decoder))
    receipt = wherry.convert(source, tmp_path / "out", to="huggingface", config=str(config), lineage=False)
    assert_same(weights(tmp_path / "out"), llama_huggingface())
    if form != "linen":
        assert any(line.startswith("removed ") for line in receipt.warnings) == ("nnx" in form)


# ---- T5X

T5X: dict[str, tuple[str | None, tuple[str, ...]]] = {
    "target": (None, ("target",)),
    "without a root": (None, ()),
    "params": (None, ("params",)),
    "target/params": (None, ("target", "params")),
    "an item": ("default", ()),
}


@pytest.mark.parametrize("form", T5X)
def test_every_root_of_t5x_gives_the_same_model(form, tmp_path):
    config = tmp_path / "config.json"
    config.write_text(json.dumps(T5_CONFIG))
    item, root = T5X[form]
    arrays = {path[1:]: array for path, array in t5_t5x().items()}
    source = save(tmp_path / "in", item, below(root, arrays))
    wherry.convert(source, tmp_path / "out", to="huggingface", config=str(config), lineage=False)
    assert_same(weights(tmp_path / "out"), t5_huggingface())


def test_parameters_without_target_become_a_step_of_t5x(tmp_path: Path):
    config = tmp_path / "config.json"
    config.write_text(json.dumps(T5_CONFIG))
    source = save(tmp_path / "in", None, {path[1:]: array for path, array in t5_t5x().items()})
    wherry.convert(source, tmp_path / "out", to="t5x-orbax", config=str(config), lineage=False)
    with wherry.open(tmp_path / "out") as made:
        assert_same({path: made.read(path) for path in made.manifest.tensors}, t5_t5x())


# ---- PaxML


@pytest.mark.parametrize("form", ["a train state", "variables", "parameters"])
def test_variables_of_paxml_in_plain_orbax(form, tmp_path):
    leaves = paxml.leaves()
    own = {path: one for path, one in leaves.items() if path[0] == "mdl_vars"}
    arrays = {
        "a train state": leaves,
        "variables": own,
        "parameters": {path[1:]: one for path, one in own.items()},
    }[form]
    source = save(tmp_path / "in", None, arrays)
    family = "gpt3" if form == "parameters" else None  # MaxText restores parameters below `params` too
    wherry.convert(source, tmp_path / "out", to="maxtext", only="params", family=family, lineage=False)
    with wherry.open(tmp_path / "out") as made:
        found = {path: made.read(path) for path in made.manifest.tensors if path[0] == "params"}
    assert_same(found, {path: one for path, one in gpt3_maxtext(scan=True).items() if path[0] == "params"})
