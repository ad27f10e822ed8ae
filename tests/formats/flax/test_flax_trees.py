"""Flax trees: boxes and their logical names; linen and NNX key forms, restored by Flax."""

from __future__ import annotations

import json
import shutil

import jax
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from flax.training.train_state import TrainState
from jax import numpy as jnp
from jax.sharding import PartitionSpec

import wherry
from tests.support.flax import hashes, restored, same_leaves, saved
from tests.support.orbax import CORPUS, needs_corpus
from wherry.core.manifest import Manifest
from wherry.core.tensorspec import TensorSpec
from wherry.errors import MismatchError, NotFoundError, UsageError
from wherry.integrations.containers.orbax import partitioning
from wherry.integrations.flax.boxes import named_leaves, partition_specs, rebuild_boxes
from wherry.layout.axes import rules_of

RULES = (("embed", "data"), ("mlp", "model"), ("layers", None))
RULES_TEXT = "embed:data,mlp:model,layers:-"
AXES = {
    "axes": {
        "*/layers/wi/kernel": ["layers", "embed", "mlp"],
        "*/layers/wi/bias": ["layers", "mlp"],
        "*/layers/wo/kernel": ["layers", "mlp", "embed"],
        "*/token_embedder/embedding": ["vocab", "embed"],
    },
    "boxes": {"*/wo/kernel": "Partitioned"},
}


class Mlp(nn.Module):
    """One layer, partitioned."""

    @nn.compact
    def __call__(self, x, _):
        init = nn.with_logical_partitioning
        hidden = nn.Dense(
            12,
            kernel_init=init(nn.initializers.lecun_normal(), ("embed", "mlp")),
            bias_init=init(nn.initializers.zeros_init(), ("mlp",)),
            name="wi",
        )(x)
        wo = nn.with_partitioning(nn.initializers.lecun_normal(), ("mlp", "embed"))
        return nn.Dense(6, use_bias=False, kernel_init=wo, name="wo")(nn.relu(hidden)), None


class Model(nn.Module):
    """Scanned layers between an embedding and a norm without boxes."""

    @nn.compact
    def __call__(self, ids):
        init = nn.with_logical_partitioning(nn.initializers.normal(), ("vocab", "embed"))
        x = nn.Embed(10, 6, embedding_init=init, name="token_embedder")(ids)
        layers = nn.scan(
            Mlp, variable_axes={"params": 0}, split_rngs={"params": True}, length=3,
            metadata_params={nn.PARTITION_NAME: "layers"},
        )  # fmt: skip
        x, _ = layers(name="layers")(x, None)
        return nn.LayerNorm(name="final_norm")(x)


def state(*, boxes):
    """A train state after a step, so that the moments are not zero."""
    model = Model()
    params = model.init(jax.random.key(0), jnp.zeros((2, 4), jnp.int32))["params"]
    params = params if boxes else nn.unbox(params)
    begun = TrainState.create(apply_fn=model.apply, params=params, tx=optax.adamw(1e-3))
    grads = jax.tree.map(jnp.cos, params)
    return begun.apply_gradients(grads=grads)


def is_box(node):
    return isinstance(node, nn.meta.AxisMetadata)


def names_of(tree):
    boxes = [box for box in jax.tree.leaves(tree, is_leaf=is_box) if is_box(box)]
    return [(type(box).__name__, box.names) for box in boxes]


@pytest.fixture(scope="module")
def boxed_state():
    return state(boxes=True)


@pytest.fixture
def axes_file(tmp_path):
    path = tmp_path / "axes.json"
    path.write_text(json.dumps(AXES))
    return str(path)


def test_boxes_go_and_come_back_with_their_names(tmp_path, boxed_state, axes_file):
    """Boxed by Flax, unboxed by us, restored without boxes; boxed again, restored into the boxed target."""
    source = saved(tmp_path / "source", boxed_state)
    options = {"boxed": "false", "axes": axes_file, "rules": RULES_TEXT}
    wherry.convert(source, tmp_path / "plain", to="orbax", options=options, lineage=False)
    assert wherry.verify(tmp_path / "plain", against=source).ok
    plain = nn.unbox(boxed_state)
    found = restored(tmp_path / "plain", jax.tree.map(jnp.zeros_like, plain))
    same_leaves(found, plain)
    again = rebuild_boxes(found, tmp_path / "plain")
    assert names_of(again) == names_of(boxed_state)
    same_leaves(nn.unbox(again), plain)
    kinds = [
        box
        for box in jax.tree.leaves(again.params, is_leaf=is_box)
        if isinstance(box, nn.LogicallyPartitioned)
    ]
    assert {box.rules for box in kinds} == {RULES}
    wherry.convert(
        tmp_path / "plain", tmp_path / "boxed", to="orbax", options={"boxed": "true"}, lineage=False
    )
    same_leaves(restored(tmp_path / "boxed", jax.tree.map(jnp.zeros_like, boxed_state)), boxed_state)
    assert named_leaves(tmp_path / "boxed") == named_leaves(tmp_path / "plain")
    raw = rebuild_boxes(restored(tmp_path / "boxed")["params"], params_of(tmp_path / "boxed"))
    assert names_of(raw) == names_of(boxed_state.params)


def params_of(folder):
    with wherry.open(folder) as checkpoint:
        tensors = checkpoint.manifest.tensors
    return Manifest({path[1:]: spec for path, spec in tensors.items() if path[0] == "params"})


def test_partition_specs_are_those_of_flax(tmp_path, boxed_state, axes_file):
    source = saved(tmp_path / "source", boxed_state)
    options = {"boxed": "false", "axes": axes_file, "rules": RULES_TEXT}
    wherry.convert(source, tmp_path / "plain", to="orbax", options=options, lineage=False)
    logical = nn.get_partition_spec(boxed_state)
    plain = nn.unbox(boxed_state)
    leaf = {"is_leaf": lambda node: isinstance(node, PartitionSpec)}
    ours = jax.tree.leaves(partition_specs(plain, tmp_path / "plain", logical=True), **leaf)
    assert ours == jax.tree.leaves(logical, **leaf)
    ours = jax.tree.leaves(partition_specs(plain, tmp_path / "plain"), **leaf)
    assert ours == jax.tree.leaves(nn.logical_to_mesh(logical, RULES), **leaf)
    assert PartitionSpec(None, "data", "model") in ours
    other = (("embed", "x"),)
    ours = jax.tree.leaves(partition_specs(plain, tmp_path / "plain", rules=other), **leaf)
    assert ours == jax.tree.leaves(nn.logical_to_mesh(logical, other), **leaf)


def test_names_survive_a_container_that_has_no_place_for_them(tmp_path, boxed_state, axes_file):
    source = saved(tmp_path / "source", boxed_state)
    options = {"boxed": "false", "axes": axes_file}
    wherry.convert(source, tmp_path / "a.msgpack", to="flax-msgpack", options=options, lineage=False)
    assert names_of(rebuild_boxes(nn.unbox(boxed_state), tmp_path / "a.msgpack")) == names_of(boxed_state)
    with pytest.raises(NotFoundError, match="no rules"):
        partition_specs(nn.unbox(boxed_state), tmp_path / "a.msgpack")


@needs_corpus
def test_the_corpus_unboxed_and_boxed(tmp_path):
    """The two cases are one state: its names are in the free metadata of the unboxed one."""
    cases = {name: CORPUS / f"flax-linen-{name}-scan/checkpoint/ckpt" for name in ("boxed", "unboxed")}
    wherry.convert(cases["unboxed"], tmp_path / "b", to="orbax", options={"boxed": "true"}, lineage=False)
    wherry.convert(cases["boxed"], tmp_path / "u", to="orbax", options={"boxed": "false"}, lineage=False)
    assert hashes(tmp_path / "b") == hashes(cases["boxed"])
    assert hashes(tmp_path / "u") == hashes(cases["unboxed"])
    known = named_leaves(cases["unboxed"])
    assert (
        known["params/layers/wi/kernel"]
        == ("layers", "embed", "mlp")
        == known["opt_state/0/nu/layers/wi/kernel"]
    )
    assert named_leaves(tmp_path / "b") == known
    tree = rebuild_boxes(restored(tmp_path / "b"), tmp_path / "b")
    assert isinstance(tree["params"]["layers"]["wo"]["kernel"], nn.Partitioned)
    assert tree["params"]["layers"]["wi"]["kernel"].names == ("layers", "embed", "mlp")
    assert not is_box(tree["params"]["final_norm"]["scale"])
    with pytest.raises(UsageError, match="axis names"):
        wherry.convert(tmp_path / "u", tmp_path / "x", to="orbax", options={"boxed": "true"}, lineage=False)
    with pytest.raises(NotFoundError, match="no axis names"):
        rebuild_boxes(tree, tmp_path / "u")


@needs_corpus
def test_free_metadata_that_fits_nothing_names_nothing(tmp_path):
    shutil.copytree(CORPUS / "flax-linen-unboxed-scan/checkpoint/ckpt", tmp_path / "c")
    file = tmp_path / "c/_METADATA"
    data = json.loads(file.read_text())
    rows = data["custom_metadata"][partitioning.FIELD]
    for change in (
        {"no/such": rows["layers/wi/kernel"]},
        {"layers/wi/kernel": {"names": 3}},
        {"a": {"type": "x"}},
    ):
        data["custom_metadata"][partitioning.FIELD] = {**rows, **change}
        file.write_text(json.dumps(data))
        with wherry.open(tmp_path / "c") as checkpoint:
            assert not any(spec.axes for spec in checkpoint.manifest.tensors.values())
            refused = ("cannot read axis names: ", "axis names do not fit the tree")
            assert any(row.seen.startswith(refused) for row in checkpoint.detection.evidence)
    boxes = {
        f"params/{key}": {"box": row["type"], "names": row["names"], "rules": None}
        for key, row in rows.items()
    }
    data["custom_metadata"] = {"version": 1, "boxes": boxes}
    file.write_text(json.dumps(data))
    assert named_leaves(tmp_path / "c") == named_leaves(CORPUS / "flax-linen-unboxed-scan/checkpoint/ckpt")


def test_boxes_that_contradict_are_refused():
    spec = TensorSpec(("w", "value"), (2, 3), "float32", axes=("embed", "mlp"))
    manifest = Manifest({spec.path: spec})
    with pytest.raises(MismatchError, match="shape"):
        rebuild_boxes({"w": np.zeros(3)}, manifest)
    with pytest.raises(MismatchError, match="boxed with other axis names"):
        rebuild_boxes({"w": nn.LogicallyPartitioned(np.zeros((2, 3)), ("mlp", "embed"))}, manifest)
    kept = rebuild_boxes({"w": nn.LogicallyPartitioned(np.zeros((2, 3)), ("embed", "mlp"))}, manifest)
    assert kept["w"].names == ("embed", "mlp")
    with pytest.raises(NotFoundError, match="any leaf"):
        rebuild_boxes({"v": np.zeros((2, 3))}, manifest)


# Linen and NNX key forms of one model: each restored by Flax from the other, and given back.


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
