"""Orbax restores each target with the types with which it restores the source: typed keys, Python numbers, arrays.

For every way to save and every way to restore, with and without a target tree. Arrays of numpy and of JAX count alike:
targets hold no topology.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from orbax.checkpoint.experimental import v1

import wherry
from tests.support.corpus import CORPUS, expected, needs_corpus

OPTIONS = [{}, {"zarr": "3"}, {"ocdbt": False}, {"compression": "zstd"}]


@cache
def tree() -> dict[str, Any]:
    return {
        "key": jax.random.key(0),
        "rbg": jax.random.key(1, impl="rbg"),
        "unsafe": jax.random.key(1, impl="unsafe_rbg"),
        "batch": jax.random.split(jax.random.key(2), (3, 2)),
        "rbg_batch": jax.random.split(jax.random.key(3, impl="rbg"), 4),
        "raw": jax.random.PRNGKey(0),
        "in": {"a.b": [jax.random.key(5), jnp.ones((2, 3))], "rank0": jnp.float32(2), "numpy0": np.asarray(3)},
        "int": 3, "float": 2.5, "bool": True, "bf16": jnp.ones(3, jnp.bfloat16), "array": np.ones(2),
    }  # fmt: skip


def _standard(path: Path, item: Any) -> None:
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, item)


SAVES: dict[str, Callable[[Path, Any], None]] = {
    "StandardCheckpointer": _standard,
    "PyTreeCheckpointer": lambda path, item: ocp.PyTreeCheckpointer().save(path, item),
    "zarr 3": lambda path, item: ocp.Checkpointer(
        ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=True)
    ).save(path, item),
    "v1": v1.save,
}


def abstract(item: Any) -> Any:
    """A target tree of shapes; Python numbers as they are."""
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.tree.map(
        lambda leaf: (
            jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=one)
            if isinstance(leaf, jax.Array | np.ndarray)
            else leaf
        ),
        item,
    )


RESTORES: dict[str, Callable[[Path], Any]] = {
    "PyTreeCheckpointer": lambda path: ocp.PyTreeCheckpointer().restore(path),
    "StandardCheckpointer": lambda path: ocp.StandardCheckpointer().restore(path),
    "StandardCheckpointer, target": lambda path: ocp.StandardCheckpointer().restore(path, abstract(tree())),
    "v1": v1.load,
    "v1, target": lambda path: v1.load(path, abstract(tree())),
}


def described(item: Any) -> dict[str, tuple[str, str, Any]]:
    """Key path → type, shape and values of each leaf."""
    found: dict[str, tuple[str, str, Any]] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(item)[0]:
        name = jax.tree_util.keystr(path)
        if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            found[name] = (str(leaf.dtype), str(leaf.shape), np.asarray(jax.random.key_data(leaf)).tolist())
        elif isinstance(leaf, jax.Array | np.ndarray):
            found[name] = (str(leaf.dtype), str(leaf.shape), np.asarray(leaf).tolist())
        else:
            found[name] = (type(leaf).__name__, "", leaf)
    return found


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    home, made = tmp_path_factory.mktemp("sources"), {}

    def get(name: str) -> Path:
        if name not in made:
            made[name] = home / name.replace(" ", "")
            SAVES[name](made[name], tree())
        return made[name]

    return get


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("save", SAVES)
def test_orbax_restores_the_types_of_the_source(sources, tmp_path, save, options):
    source, target = sources(save), tmp_path / "out"
    wherry.convert(source, target, to="orbax", lineage=False, options=options)
    item = source / "state" if save == "v1" else source
    for name, restore in RESTORES.items():
        wanted = described(restore(source if name.startswith("v1") and save == "v1" else item))
        assert described(restore(target)) == wanted, name
    again = tmp_path / "again"
    wherry.convert(target, again, to="orbax", lineage=False)
    assert described(RESTORES["v1"](again)) == described(RESTORES["v1"](target))


def test_a_target_of_steps(sources, tmp_path):
    source = sources("StandardCheckpointer")
    wherry.convert(source, tmp_path / "run", to="orbax", into=True, as_step=7, lineage=False)
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        restored = manager.restore(7, args=ocp.args.StandardRestore())
    assert described(restored) == described(RESTORES["StandardCheckpointer"](source))


def test_keys_are_restored_on_other_devices(sources, tmp_path):
    """No topology is stored: eight devices restore what one has saved."""
    target = tmp_path / "out"
    wherry.convert(sources("StandardCheckpointer"), target, to="orbax", lineage=False)
    program = (
        "import jax, json, sys, orbax.checkpoint as ocp, orbax.checkpoint.experimental.v1 as v1\n"
        "trees = [ocp.PyTreeCheckpointer().restore(sys.argv[1]), v1.load(sys.argv[1])]\n"
        "print(json.dumps([len(jax.devices()), *(str(t[n].dtype) for t in trees for n in ('key', 'rbg', 'batch'))]))\n"
    )
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    ran = subprocess.run(
        [sys.executable, "-c", program, str(target)], env=env, capture_output=True, text=True, check=True
    )
    assert json.loads(ran.stdout.splitlines()[-1]) == [8, *["key<fry>", "key<rbg>", "key<fry>"] * 2]


@needs_corpus
@pytest.mark.parametrize(
    "case",
    ["orbax-0523-default", "orbax-0110-default", "orbax-0128-noocdbt-zarr2",
                       "orbax-044-aggregate", "orbax-0523-aggregate", "orbax-0110-nnx-state",
                       "orbax-0128-manager", "orbax-0110-numpy"],
)  # fmt: skip
def test_sources_of_other_releases(tmp_path, case):
    source = CORPUS / case / "checkpoint" / expected(case)["uri"]
    target = tmp_path / "out"
    item = wherry.detect(source).uri
    wherry.convert(source, target, to="orbax", lineage=False)
    restore = RESTORES["PyTreeCheckpointer"]
    wanted = {name: row[:2] for name, row in described(restore(item)).items()}
    assert {name: row[:2] for name, row in described(restore(target)).items()} == wanted
