"""Linen and NNX key forms of one model: each restored by Flax from the other, and given back."""

from __future__ import annotations

import jax
import numpy as np
from flax import linen as nn
from flax import nnx
from jax import numpy as jnp
from jax.sharding import PartitionSpec

import wherry
from tests.support.flax import hashes, restored, same_leaves, saved
from tests.support.orbax import CORPUS, needs_corpus
from wherry.core.manifest import Manifest
from wherry.core.tensorspec import TensorSpec
from wherry.integrations.flax.boxes import partition_specs
from wherry.tree.axes import rules_of


class LinenNet(nn.Module):
    """Parameters and batch statistics."""

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(5, name="lin")(x)
        return nn.BatchNorm(use_running_average=True, name="bn")(x)


class NnxNet(nnx.Module):
    """The same in NNX."""

    def __init__(self, rngs):
        self.lin = nnx.Linear(4, 5, rngs=rngs)
        self.bn = nnx.BatchNorm(5, use_running_average=True, rngs=rngs)

    def __call__(self, x):
        return self.bn(self.lin(x))


NEST = {"nest": "batch_stats:*/mean,*/var;params:*"}
UNNEST = {"unnest": "params,batch_stats"}


def linen_variables():
    variables = LinenNet().init(jax.random.key(1), jnp.ones((2, 4)))
    return jax.tree.map(lambda array: array + jnp.arange(array.size).reshape(array.shape), variables)


def test_linen_to_nnx_and_back(tmp_path):
    """A linen checkpoint is restored by NNX, which computes the same; and the other way."""
    variables, x = linen_variables(), jnp.linspace(-1, 1, 8).reshape(2, 4)
    source = saved(tmp_path / "linen", variables)
    options = {**UNNEST, "nnx": "value"}
    wherry.convert(source, tmp_path / "nnx", to="orbax", options=options, lineage=False)
    model = NnxNet(nnx.Rngs(0))
    graph, begun = nnx.split(model)
    raw = restored(tmp_path / "nnx")
    assert set(raw) == {"lin", "bn"}
    target = saved(tmp_path / "own", begun)
    with wherry.open(target) as by_nnx, wherry.open(tmp_path / "nnx") as converted:
        assert set(by_nnx.manifest.tensors) == set(converted.manifest.tensors)
    found = nnx.merge(graph, restored(tmp_path / "nnx", begun))
    np.testing.assert_array_equal(found(x), LinenNet().apply(variables, x))
    wherry.convert(
        tmp_path / "nnx", tmp_path / "back", to="orbax", options={**NEST, "nnx": "none"}, lineage=False
    )
    same_leaves(restored(tmp_path / "back", jax.tree.map(jnp.zeros_like, variables)), variables)
    assert hashes(tmp_path / "back") == hashes(source)
    assert wherry.verify(tmp_path / "back", against=tmp_path / "nnx").ok


def test_a_pure_state_and_the_older_wrapper(tmp_path):
    state_ = nnx.state(NnxNet(nnx.Rngs(0)))
    source = saved(tmp_path / "state", state_)
    pure = saved(tmp_path / "pure", nnx.to_pure_dict(state_))
    wherry.convert(source, tmp_path / "p", to="orbax", options={"nnx": "none"}, lineage=False)
    wherry.convert(pure, tmp_path / "s", to="orbax", options={"nnx": "value"}, lineage=False)
    wherry.convert(source, tmp_path / "o", to="orbax", options={"nnx": "raw_value"}, lineage=False)
    assert hashes(tmp_path / "p") == hashes(pure)
    assert hashes(tmp_path / "s") == hashes(source)
    same_leaves(restored(tmp_path / "s", state_), state_)
    assert {path[-1] for path in hashes(tmp_path / "o")} == {"raw_value"}


@needs_corpus
def test_the_corpus_state_and_pure_dict(tmp_path):
    cases = {name: CORPUS / f"flax-nnx-{name}/checkpoint/ckpt" for name in ("state", "pure")}
    wherry.convert(cases["state"], tmp_path / "p", to="orbax", options={"nnx": "none"}, lineage=False)
    wherry.convert(cases["pure"], tmp_path / "s", to="orbax", options={"nnx": "value"}, lineage=False)
    assert hashes(tmp_path / "p") == hashes(cases["pure"])
    assert hashes(tmp_path / "s") == hashes(cases["state"])


def test_names_of_an_nnx_state():
    state_ = nnx.state(NnxNet(nnx.Rngs(0)))
    spec = TensorSpec(("lin", "kernel", "value"), (4, 5), "float32", axes=("embed", "mlp"))
    specs = partition_specs(state_, Manifest({spec.path: spec}), rules=rules_of("mlp:model"))
    leaves = jax.tree.leaves(specs, is_leaf=lambda node: isinstance(node, PartitionSpec))
    assert leaves.count(PartitionSpec(None, "model")) == 1
    assert leaves.count(PartitionSpec()) == len(leaves) - 1 > 0
