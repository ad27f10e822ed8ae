"""Chunk grids for a mesh and partition specs: Orbax restores on that mesh, and no device's shard cuts a chunk."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from tests.support import orbax as support
from tests.support.orbax import ORBAX
from wherry.core.tensorspec import TensorSpec
from wherry.errors import UsageError
from wherry.formats.registry import checked_options
from wherry.integrations.containers.orbax.write import chunks_for, parts_along, shard_chunks

MESH = "mesh:data=4,model=2"
MIB = 1 << 20


def spec(shape, name="params/wi/kernel", dtype="float32", axes=None):
    return TensorSpec(tuple(name.split("/")), shape, dtype, axes=axes)


@pytest.mark.parametrize(
    ("option", "shape", "parts"),
    [
        ("8x1", (64, 6), (8, 1)),
        ("8x", (64, 6), (8, 1)),
        ("4x2", (64, 6, 5), (4, 2, 1)),
        ("4x2", (6, 6), (1, 2)),
        ("8x1", (), ()),
        ("8x2", (16,), (8,)),
        (f"{MESH};spec:*/kernel=data,model", (64, 6), (4, 2)),
        (f"{MESH};spec:*/kernel=data+model", (64, 6), (8, 1)),
        (f"{MESH};spec:*/kernel=-,model", (64, 6), (1, 2)),
        (f"{MESH};spec:*/bias=data;spec:*=model", (64, 6), (2, 1)),
        (f"{MESH};spec:*/bias=data", (64, 6), (1, 1)),
        (f"{MESH};spec:*=data", (), ()),
    ],
)
def test_parts(option, shape, parts):
    assert parts_along(spec(shape), option) == parts


def test_logical_names():
    option = f"{MESH};rules:embed=data,mlp=model,heads=data+model"
    assert parts_along(spec((64, 6), axes=("embed", "mlp")), option) == (4, 2)
    assert parts_along(spec((3, 64), axes=(None, ("embed", "mlp"))), option) == (1, 8)
    assert parts_along(spec((3, 64), axes=("layers", "heads")), option) == (1, 8)
    assert parts_along(spec((64, 6)), option) == (1, 1)
    assert parts_along(spec((64, 6), axes=("embed", "mlp")), f"{option};spec:*=model") == (2, 1)


@pytest.mark.parametrize(
    ("option", "shape", "named"),
    [
        (f"{MESH};spec:*=data,model,data", (8, 8), "has 3 entries, the tensor 2 axes"),
        (f"{MESH};spec:*=data,data", (8, 8), "duplicate mesh axis"),
        (f"{MESH};spec:*=data", (6, 8), "not divisible by 4"),
        (f"{MESH};spec:*=fsdp", (8, 8), "unknown mesh axis in chunks: fsdp"),
        ("mesh:data=many;spec:*=data", (8, 8), "invalid number of devices 'many'"),
        ("mesh:data=4", (8, 8), "missing spec: or rules:"),
        (f"{MESH};embed=data", (8, 8), "invalid clause"),
        (f"{MESH};rules:embed", (8, 8), "invalid value for chunks"),
        ("0x4", (8, 8), "invalid value for chunks"),
        ("x4", (8, 8), "invalid value for chunks"),
        ("8y1", (8, 8), "invalid value for chunks"),
    ],
)
def test_what_does_not_fit_is_refused(option, shape, named):
    manifest = support.manifest_of({("w",): np.zeros(shape, np.float32)})
    with pytest.raises(UsageError, match=named):
        ORBAX.prepare(manifest, checked_options(ORBAX, {"chunks": option}))


@pytest.mark.parametrize(
    ("shape", "parts"),
    [
        ((151_936, 4096), (8, 1)),
        ((50_257 * 4, 4096), (4, 1)),
        ((32_003 * 8, 1024), (8, 1)),
        ((4096, 151_936), (1, 8)),
        ((32, 4096, 14_336), (1, 4, 2)),
        ((1 << 33,), (8,)),
        ((7, 11), (1, 1)),
    ],
)
def test_large_shards_are_cut_without_crossing_their_border(shape, parts):
    one = spec(shape, dtype="bfloat16")
    chunks = shard_chunks(one, parts)
    for extent, count, chunk in zip(shape, parts, chunks, strict=True):
        assert count == 1 or extent // count % chunk == 0
    nbytes = 2 * int(np.prod(chunks, dtype=object))
    assert nbytes <= 16 * MIB or 32_003 in chunks  # a prime: no smaller chunk divides the shard
    assert nbytes >= MIB or nbytes == one.nbytes


def test_counts_and_mesh_say_the_same():
    one = spec((64, 32))
    assert chunks_for(one, "4x2") == chunks_for(one, f"{MESH};spec:*=data,model") == (16, 16)


_RESTORE = """
import json, sys, jax, numpy as np, orbax.checkpoint as ocp
from jax.sharding import NamedSharding, PartitionSpec as P
folder, wanted, chunks = sys.argv[1], np.load(sys.argv[2]), json.loads(sys.argv[3])
mesh = jax.make_mesh((4, 2), ("data", "model"))
specs = {"kernel": P("data", "model"), "stacked": P(None, ("data", "model")), "bias": P("model"), "scale": P()}
target = {name: jax.ShapeDtypeStruct(wanted[name].shape, wanted[name].dtype, sharding=NamedSharding(mesh, spec))
          for name, spec in specs.items()}
found = ocp.StandardCheckpointer().restore(folder, target)
for name, array in found.items():
    assert array.sharding == target[name].sharding, name
    assert np.asarray(array).tobytes() == wanted[name].tobytes(), name
    assert len(array.addressable_shards) == 8
    for shard in array.addressable_shards:
        for part, chunk, extent in zip(shard.index, chunks[name], array.shape):
            start, stop, _ = part.indices(extent)
            assert start % chunk == 0 and (stop % chunk == 0 or stop == extent), (name, shard.index, chunk)
"""


@pytest.mark.parametrize("zarr", ["2", "3"])
def test_orbax_restores_on_the_mesh_and_reads_whole_chunks(tmp_path, zarr):
    rng = np.random.default_rng(2)
    shapes = {"kernel": (64, 24), "stacked": (3, 48, 5), "bias": (10,), "scale": (7,)}
    arrays = {(name,): rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    option = f"{MESH};spec:kernel=data,model;spec:stacked=-,data+model;spec:bias=model"
    options = {"zarr": zarr, "chunks": option}
    manifest = ORBAX.prepare(support.manifest_of(arrays), checked_options(ORBAX, options))
    support.write(tmp_path / "item", arrays, manifest, **options)
    chunks = {path[0]: row.chunks for path, row in support.opened(tmp_path / "item").manifest.tensors.items()}
    assert chunks == {"kernel": (16, 12), "stacked": (3, 6, 5), "bias": (5,), "scale": (7,)}
    np.savez(tmp_path / "wanted.npz", **{path[0]: array for path, array in arrays.items()})
    env = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    arguments = [str(tmp_path / "item"), str(tmp_path / "wanted.npz"), json.dumps(chunks)]
    command = [sys.executable, "-c", _RESTORE, *arguments]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_the_engine_takes_the_option(tmp_path):
    import wherry

    arrays = {("kernel",): np.arange(64 * 24, dtype=np.float32).reshape(64, 24)}
    support.write(tmp_path / "source", arrays)
    option = f"{MESH};spec:kernel=data,model"
    wherry.convert(
        tmp_path / "source", tmp_path / "target", to="orbax", options={"chunks": option}, lineage=False
    )
    with wherry.open(tmp_path / "target") as checkpoint:
        assert checkpoint.manifest.tensors[("kernel",)].chunks == (16, 12)
        assert checkpoint.read("kernel").tobytes() == arrays[("kernel",)].tobytes()
