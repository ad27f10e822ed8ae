"""Live states filled from checkpoints: names, shapes and element types are compared before any byte, and after."""

from __future__ import annotations

import ast
import re

import numpy as np
import pytest

import wherry
from tests.support.restore import on_eight_devices
from wherry.errors import AmbiguousError, IncompleteError, MismatchError, UnrepresentableError, UsageError

jax = pytest.importorskip("jax", reason="jax is not installed")
ocp = pytest.importorskip("orbax.checkpoint", reason="orbax is not installed")
nn = pytest.importorskip("flax.linen", reason="flax is not installed")
import jax.numpy as jnp  # noqa: E402  needs jax

MODULE = __name__


def saved(folder, tree):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder, tree)
    return folder


def written(path, tensors):
    """A safetensors file by the real library."""
    numpy = pytest.importorskip("safetensors.numpy", reason="safetensors is not installed")
    numpy.save_file(tensors, path)
    return path


def linen():
    return {
        "w": nn.LogicallyPartitioned(jax.random.normal(jax.random.key(1), (8, 6)), ("embed", "mlp")),
        "b": jnp.arange(4, dtype=jnp.bfloat16),
    }


def train_state():
    optax = pytest.importorskip("optax", reason="optax is not installed")
    params = linen()
    tx = optax.chain(optax.adam(1e-3), optax.clip(1.0))
    return {"params": params, "opt": tx.init(params), "rng": jax.random.key(3), "step": 7}


def blank(tree):
    return jax.tree.map(
        lambda x: jnp.zeros_like(x) if jnp.issubdtype(x.dtype, jnp.number) else jax.random.key(0), tree
    )


def same(first, second):
    assert jax.tree.structure(first) == jax.tree.structure(second)
    for one, other in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        if hasattr(one, "dtype") and jnp.issubdtype(one.dtype, jax.dtypes.prng_key):
            one, other = jax.random.key_data(one), jax.random.key_data(other)  # noqa: PLW2901  compared as data
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


def test_a_whole_train_state_with_boxes_and_keys(tmp_path):
    state = train_state()
    saved(tmp_path / "step", state)
    template = {**blank({name: part for name, part in state.items() if name != "step"}), "step": 0}
    found = wherry.restore(tmp_path / "step", into=template)
    same(found.state, state)
    assert found.state["step"] == 7
    assert found.state["params"]["w"].names == ("embed", "mlp")
    assert type(found.state["opt"][0][0]) is type(state["opt"][0][0])
    assert (found.missing, found.unexpected, found.filled) == ((), (), 9)
    assert float(jnp.sum(template["params"]["b"])) == 0


def test_only_the_parameters_below_their_node_or_with_it(tmp_path):
    state = train_state()
    saved(tmp_path / "step", state)
    bare = wherry.restore(tmp_path / "step", into=blank(linen()), only="params")
    same(bare.state, state["params"])
    assert bare.notes == ("params/ of the checkpoint is used as its root",)
    whole = wherry.restore(tmp_path / "step", into={"params": blank(linen())}, only="params")
    same(whole.state["params"], state["params"])
    some = wherry.restore(
        tmp_path / "step", into={"opt": {"0": {"0": {"count": np.int32(5)}}}}, only="opt/*/count"
    )
    assert some.state["opt"]["0"]["0"]["count"] == 0


def test_everything_that_does_not_fit_is_named_before_a_byte_is_read(tmp_path, monkeypatch):
    saved(tmp_path / "step", {"params": linen()})
    monkeypatch.setattr(
        "wherry.formats.checkpoint.Checkpoint.read", lambda *_: pytest.fail("a byte was read")
    )
    template = {"params": {"w": np.zeros((8, 5), "f4"), "b": np.zeros(4, "f4"), "c": np.zeros(3)}}
    with pytest.raises(MismatchError) as caught:
        wherry.restore(tmp_path / "step", into=template)
    text = str(caught.value)
    assert "3 mismatches" in text
    assert "params/w: shape mismatch: expected (8, 5), got (8, 6)" in text
    assert "params/b: dtype mismatch: expected float32, got bfloat16" in text
    assert "params/c: missing in the checkpoint" in text


def test_unmatched_names_are_errors_both_ways_if_strict(tmp_path):
    uri = written(tmp_path / "a.safetensors", {"a": np.ones(2), "b": np.ones(2)})
    template = {"a": np.zeros(2), "c": np.full(2, 9.0)}
    with pytest.raises(
        UnrepresentableError, match=r"(?s)c: missing in the checkpoint.*b: missing in the template"
    ):
        wherry.restore(uri, into=template)
    found = wherry.restore(uri, into=template, strict=False)
    assert (found.missing, found.unexpected) == (("c",), ("b",))
    assert found.state["a"].tolist() == [1, 1]
    assert found.state["c"].tolist() == [9, 9]
    with pytest.raises(UnrepresentableError, match="another system"):
        wherry.restore(uri, into={"q": np.zeros(2)})


def test_rename_and_cast(tmp_path):
    uri = written(tmp_path / "a.safetensors", {"old.0.w": np.arange(3, dtype="f4")})
    found = wherry.restore(
        uri, into={"new": [{"w": jnp.zeros(3, jnp.bfloat16)}]}, rename="old.{n}.w -> new.{n}.w", cast=True
    )
    assert found.state["new"][0]["w"].dtype == jnp.bfloat16
    assert found.state["new"][0]["w"].tolist() == [0, 1, 2]


def test_a_name_that_means_two_things_is_not_decided(tmp_path):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    torch.save({"a": {"b": {"c": torch.ones(1)}}, "a.b": {"c": torch.zeros(1)}}, tmp_path / "a.pt")
    with pytest.raises(
        AmbiguousError, match=r"ambiguous name: a\.b/c and a/b/c of the checkpoint both match"
    ):
        wherry.restore(tmp_path / "a.pt", into={"a": {"b.c": np.zeros(1, "f4")}})


def test_numbers_text_and_arrays_without_axes(tmp_path):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    torch.save({"step": 5, "name": "run", "lr": 0.5, "w": torch.ones(2)}, tmp_path / "a.pt")
    template = {"step": np.int64(0), "name": "", "lr": 0.0, "w": np.zeros(2, "f4")}
    found = wherry.restore(tmp_path / "a.pt", into=template).state
    assert (int(found["step"]), found["name"], found["lr"]) == (5, "run", 0.5)
    with pytest.raises(MismatchError, match="name: type mismatch: expected int, got str"):
        wherry.restore(tmp_path / "a.pt", into={**template, "name": 1})
    with pytest.raises(UsageError, match="no arrays"):
        wherry.restore(tmp_path / "a.pt", into={})


def test_missing_chunks_stop_it_before_a_byte(tmp_path, monkeypatch):
    saved(tmp_path / "step", {"a": jnp.ones(3), "b": jnp.ones(3)})
    from wherry.formats.format import Absent
    from wherry.integrations.containers.zarr.reader import ArrayReader

    monkeypatch.setattr(ArrayReader, "absent", lambda _self: iter([Absent(("a",), "0", "gone")]))
    with pytest.raises(IncompleteError):
        wherry.restore(tmp_path / "step", into={"a": np.zeros(3, "f4"), "b": np.zeros(3, "f4")})
    found = wherry.restore(tmp_path / "step", into={"b": np.zeros(3, "f4")}, strict=False)
    assert found.state["b"].tolist() == [1, 1, 1]


def test_sharded_arrays_read_each_shard_alone(tmp_path):
    saved(tmp_path / "step", {"params": linen()})
    assert "sharded" in on_eight_devices(MODULE, "child_sharded", tmp_path / "step")


def child_sharded(uri):
    from jax.sharding import NamedSharding, PartitionSpec

    from wherry.formats.checkpoint import Checkpoint

    read, regions = Checkpoint.read, []

    def counted(self, path, region=None):
        regions.append((path, region))
        return read(self, path, region)

    Checkpoint.read = counted
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    split, copied = NamedSharding(mesh, PartitionSpec("data", None)), NamedSharding(mesh, PartitionSpec())
    template = {
        "w": nn.LogicallyPartitioned(
            jax.ShapeDtypeStruct((8, 6), jnp.float32, sharding=split), ("embed", "mlp")
        ),
        "b": jax.ShapeDtypeStruct((4,), jnp.bfloat16, sharding=copied),
    }
    found = wherry.restore(uri, into=template).state
    assert found["w"].value.sharding.is_equivalent_to(split, 2)
    assert sorted(region[0].start for path, region in regions if path[-1] == "value") == [0, 2, 4, 6]
    assert len(regions) == 5
    same(jax.device_get(found), jax.device_get(linen()))
    print("sharded")


def test_nnx_modules_are_filled_in_place(tmp_path):
    nnx = pytest.importorskip("flax.nnx", reason="flax has no nnx")

    class Net(nnx.Module):
        def __init__(self, seed):
            rngs = nnx.Rngs(seed)
            self.first = nnx.Linear(3, 4, rngs=rngs)
            self.norm = nnx.BatchNorm(4, rngs=rngs)
            self.blocks = nnx.List([nnx.Linear(4, 2, rngs=rngs)])

    one, other, third = Net(0), Net(1), Net(2)
    saved(tmp_path / "step", nnx.to_pure_dict(nnx.state(one)))
    saved(tmp_path / "state", nnx.state(one))
    assert wherry.restore(tmp_path / "step", into=other).state is other
    same(nnx.to_pure_dict(nnx.state(other)), nnx.to_pure_dict(nnx.state(one)))
    made = wherry.restore(tmp_path / "state", into=nnx.state(third)).state
    same(nnx.to_pure_dict(made), nnx.to_pure_dict(nnx.state(one)))
    abstract = nnx.eval_shape(lambda: Net(0))
    filled = wherry.restore(tmp_path / "state", into=nnx.state(abstract)).state
    same(nnx.to_pure_dict(filled), nnx.to_pure_dict(nnx.state(one)))


def test_axis_names_of_boxes_must_agree(tmp_path):
    state = {"params": linen()}
    saved(tmp_path / "step", state)
    axes = tmp_path / "axes.json"
    axes.write_text('{"axes": {"params/w": ["embed", "mlp"]}}')
    wherry.convert(
        tmp_path / "step", tmp_path / "named", to="orbax", options={"axes": str(axes)}, lineage=False
    )
    same(wherry.restore(tmp_path / "named", into=blank(state)).state, state)
    other = {"params": {**linen(), "w": nn.LogicallyPartitioned(jnp.zeros((8, 6)), ("mlp", "embed"))}}
    with pytest.raises(MismatchError, match=r"axes mismatch: expected \(mlp, embed\), got \(embed, mlp\)"):
        wherry.restore(tmp_path / "named", into=other)


def test_the_cure_of_other_names_is_the_rename_that_matches(tmp_path):
    path = written(
        tmp_path / "a.safetensors", {"w": np.ones((2, 3), np.float32), "b": np.ones(3, np.float32)}
    )
    template = {"kernel": np.zeros((2, 3), np.float32), "b": np.zeros(3, np.float32)}
    with pytest.raises(
        UnrepresentableError, match=r"2 mismatches .*: kernel: missing in the checkpoint; w:"
    ) as caught:
        wherry.restore(path, into=template)
    rename = re.search(r"pass rename=(\[.*\])", caught.value.cure)[1]
    assert wherry.restore(path, into=template, rename=ast.literal_eval(rename)).state["kernel"].sum() == 6


def test_no_rename_is_suggested_where_two_would_match(tmp_path):
    path = written(tmp_path / "a.safetensors", {"v": np.ones(3, np.float32), "w": np.ones(3, np.float32)})
    with pytest.raises(UnrepresentableError) as caught:
        wherry.restore(path, into={"a": np.zeros(3, np.float32), "b": np.zeros(3, np.float32)})
    assert "->" not in caught.value.cure
