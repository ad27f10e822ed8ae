"""Export of what frameworks really hold (boxes, NNX, PRNG keys), read again by their own library; and what it costs."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

import wherry
from wherry.errors import WherryError
from wherry.integrations.live.export import _jax_bytes
from wherry.live.snapshot import Snapshot
from wherry.target.clean import clean

jax = pytest.importorskip("jax")

MEMORY = """
import resource, sys
import numpy as np
import wherry
from wherry.converter import plan
from wherry.ledger import record
from wherry.mover import carrier  # what every conversion imports
state = {f"w{n}": np.full((8 << 20,), n, np.float32) for n in range(8)}
np.zeros(1).view("u1"); wherry.export({"a": np.ones(3)}, sys.argv[1] + "/warm", to="orbax").result(60)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
wherry.export(state, sys.argv[1] + "/out", to="orbax", snapshot="disk", memory="32MiB").result(120)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10)
"""


def restored(folder, like):
    ocp = pytest.importorskip("orbax.checkpoint")
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(folder, like)


def same(found, truth):
    assert jax.tree.structure(found) == jax.tree.structure(truth)
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), found, truth))


def test_linen_boxes_come_back_through_orbax(tmp_path):
    linen = pytest.importorskip("flax.linen")
    box = linen.LogicallyPartitioned(jax.numpy.arange(12.0).reshape(3, 4), ("embed", "mlp"))
    truth = {"params": {"dense": {"kernel": box, "bias": jax.numpy.ones(4, "bfloat16")}}}
    wherry.export(truth, tmp_path / "boxed", to="orbax").result(60)
    same(restored(tmp_path / "boxed", truth), truth)
    with wherry.open(tmp_path / "boxed") as checkpoint:
        assert ("params", "dense", "kernel", "value") in checkpoint.manifest.tensors


def test_nnx_state_comes_back_through_orbax(tmp_path):
    nnx = pytest.importorskip("flax.nnx")
    model = nnx.Sequential(nnx.Linear(3, 4, rngs=nnx.Rngs(0)), nnx.BatchNorm(4, rngs=nnx.Rngs(1)))
    truth = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    wherry.export(nnx.state(model, nnx.Param), tmp_path / "nnx", to="orbax").result(60)
    with wherry.open(tmp_path / "nnx") as checkpoint:
        found = {path: checkpoint.read(path) for path in checkpoint.manifest.tensors}
    leaves = jax.tree_util.tree_leaves_with_path(truth)
    assert len(found) == len(leaves)
    for path, value in leaves:
        name = tuple(str(getattr(part, "key", getattr(part, "idx", part))) for part in path)
        held = next(one for key, one in found.items() if key[: len(name)] == name)
        assert np.array_equal(held, value), name


def test_a_typed_prng_key_is_its_key_data(tmp_path):
    key = jax.random.key(3)
    wherry.export({"rng": key, "w": jax.numpy.ones(2)}, tmp_path / "k", to="orbax").result(60)
    with wherry.open(tmp_path / "k") as checkpoint:
        assert np.array_equal(checkpoint.read(("rng",)), jax.random.key_data(key))


def test_a_donated_array_is_named(tmp_path):
    gone = jax.numpy.ones(3)
    gone.delete()
    with pytest.raises(WherryError, match="donated") as refused:
        wherry.export({"w": gone}, tmp_path / "t", to="orbax")
    assert "w" in str(refused.value)


def test_stand_ins_are_refused(tmp_path):
    with pytest.raises(WherryError, match="placeholder without elements"):
        wherry.export({"w": jax.ShapeDtypeStruct((3,), "float32")}, tmp_path / "t", to="orbax")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int4", "float8_e4m3fn"])
def test_the_bytes_are_read_through_another_array_over_the_buffer(dtype, monkeypatch):
    """JAX keeps the host copy with the array that is read; on a GPU, `test_gpu` finds none with the state's own."""
    array, converted, real = jax.numpy.arange(6).astype(dtype).reshape(2, 3), [], np.asarray
    with monkeypatch.context() as patch:
        patch.setattr(
            np, "asarray", lambda value, *how, **more: converted.append(value) or real(value, *how, **more)
        )
        found = bytes(_jax_bytes(array))
    assert found == np.asarray(array).tobytes()
    assert converted
    assert not any(one is array for one in converted)
    scalar = jax.numpy.zeros((), dtype)
    assert bytes(_jax_bytes(scalar)) == np.asarray(scalar).tobytes()


def test_memory_stays_bounded_with_a_snapshot_on_disk(tmp_path):
    """256 MiB of state through a budget of 32 MiB."""
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, str(tmp_path)], check=True, capture_output=True, text=True
    )
    assert int(done.stdout.splitlines()[-1]) < 160


def test_what_a_killed_process_leaves_is_found_and_removed(tmp_path):
    spool = tmp_path / ".wherry-step.0123abcd.spool"
    spool.mkdir()
    left = Snapshot(spool / "part-0")
    assert list(wherry.discover(tmp_path)) == []
    rows = clean(tmp_path, min_age=0)
    assert [row.removed for row in rows] == [True]
    left.close()
    assert list(tmp_path.iterdir()) == []
