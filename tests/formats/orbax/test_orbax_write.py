"""Writing Orbax: what we write is restored bit-equal by every API of the installed Orbax, and by our own reader."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path

import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import orbax.checkpoint.experimental.v1 as ocp1
import pytest

import wherry
from tests.support import orbax as support
from tests.support.orbax import ORBAX, assert_same_tree, full_manifest, nested, opened, sample, small_chunks
from wherry.core.tensorspec import Span
from wherry.errors import StorageError, UnrepresentableError, UsageError
from wherry.formats.format import Glimpse
from wherry.formats.registry import checked_options
from wherry.mover.read import read_array
from wherry.storage.location import MOST_CONFIG
from wherry.storage.stores import locate

FORMS = list(product(("2", "3"), (True, False), ("none", "zstd")))


def form(version, ocdbt, compression):
    return {"zarr": version, "ocdbt": ocdbt, "compression": compression}


def neighbours(folder):
    """What the engine puts next to the arrays: companions and the sidecar."""
    (folder / "assets" / "deep").mkdir(parents=True)
    (folder / "assets" / "config.json").write_text('{"model_type": "llama"}')
    (folder / "assets" / "deep" / "tokenizer.model").write_bytes(b"tokens")
    (folder / "wherry.json").write_text("{}")


def same_as_written(folder, arrays):
    found = opened(folder)
    assert list(found.reader.absent()) == []
    assert set(found.manifest.tensors) == set(arrays)
    for path, array in arrays.items():
        spec = found.manifest.tensors[path]
        back = read_array(found.reader, spec, spec.whole)
        assert (back.dtype, back.tobytes()) == (array.dtype, array.tobytes()), path
        raw = found.reader.access(spec).extents
        if raw is not None:
            parts = [Path(part.file).read_bytes()[part.offset : part.offset + part.length] for part in raw]
            assert b"".join(parts) == array.tobytes(), path
    return found


@pytest.mark.parametrize(("version", "ocdbt", "compression"), FORMS)
def test_every_form_is_restored_by_every_api(tmp_path, version, ocdbt, compression):
    folder, arrays, manifest = tmp_path / "item", sample(), small_chunks(full_manifest())
    support.write(folder, arrays, manifest, seed=5, times=2, threads=4, **form(version, ocdbt, compression))
    neighbours(folder)
    wanted = nested(manifest, arrays)
    assert_same_tree(ocp.StandardCheckpointer().restore(folder), wanted)
    assert_same_tree(ocp.PyTreeCheckpointer().restore(folder), wanted)
    assert_same_tree(ocp1.load(folder), wanted)
    target = {
        key: value for key, value in wanted.items() if key != "note"
    }  # Orbax takes no strings in targets
    plain = tmp_path / "plain"
    support.write(plain, arrays, replace(manifest, values={}), **form(version, ocdbt, compression))
    neighbours(plain)
    assert_same_tree(ocp.StandardCheckpointer().restore(plain, target), target)
    found = same_as_written(folder, arrays)
    assert (found.manifest.values, found.manifest.empties) == (manifest.values, manifest.empties)
    assert found.manifest.lists == manifest.lists
    assert {row.name for row in found.manifest.companions} == {"config.json", "deep/tokenizer.model"}
    assert found.reader.companion("config.json").read_whole(MOST_CONFIG) == b'{"model_type": "llama"}'
    assert {"wherry.json"}.isdisjoint(entry.name for entry in found.reader.members())
    assert found.detection.format_version == ORBAX.version(manifest, form(version, ocdbt, compression))
    assert found.detection.verdict == "ok"


@pytest.mark.parametrize("ocdbt", [True, False])
def test_a_manager_finds_the_step(tmp_path, ocdbt):
    arrays, manifest = sample(), replace(full_manifest(), values={})
    for step in (3, 12):
        item = tmp_path / ORBAX.step_folder(step)
        item.parent.mkdir()
        support.write(item, arrays, manifest, ocdbt=ocdbt)
        neighbours(item)
        ORBAX.finish_step(locate(tmp_path / str(step)), manifest)
    with ocp.CheckpointManager(tmp_path) as manager:
        assert (manager.latest_step(), list(manager.all_steps())) == (12, [3, 12])
        assert_same_tree(manager.restore(12, args=ocp.args.StandardRestore()), nested(manifest, arrays))
        assert_same_tree(manager.restore(12), nested(manifest, arrays))
    found = opened(tmp_path / "12")
    assert (found.manifest.step, found.detection.uri) == (12, str(tmp_path / "12" / "default"))


_RESHARD = """
import json, sys, jax, numpy as np, orbax.checkpoint as ocp, orbax.checkpoint.experimental.v1 as v1
from jax.sharding import NamedSharding, PartitionSpec as P
mesh = jax.make_mesh((4, 2), ("fsdp", "tensor"))
target = {"w": jax.ShapeDtypeStruct((96, 64), "float32", sharding=NamedSharding(mesh, P("fsdp", "tensor"))),
          "b": jax.ShapeDtypeStruct((96, 64), "bfloat16", sharding=NamedSharding(mesh, P(None, "tensor")))}
wanted = np.load(sys.argv[2])
for load in (lambda: ocp.StandardCheckpointer().restore(sys.argv[1], target), lambda: v1.load(sys.argv[1], target)):
    found = load()
    for name in target:
        assert found[name].sharding == target[name].sharding, name
        assert np.asarray(found[name]).tobytes() == wanted[name].tobytes(), name
"""


@pytest.mark.parametrize(("version", "ocdbt"), list(product(("2", "3"), (True, False))))
def test_resharded_over_eight_devices(tmp_path, version, ocdbt):
    rows = np.random.default_rng(0).standard_normal((96, 64)).astype(np.float32)
    arrays = {("w",): rows, ("b",): rows.astype(ml_dtypes.bfloat16)}
    manifest = small_chunks(support.manifest_of(arrays))
    support.write(tmp_path / "item", arrays, manifest, zarr=version, ocdbt=ocdbt)
    neighbours(tmp_path / "item")
    np.savez(tmp_path / "wanted.npz", w=rows, b=arrays[("b",)].view("u2"))
    env = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", _RESHARD, str(tmp_path / "item"), str(tmp_path / "wanted.npz")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize(("version", "ocdbt"), list(product(("2", "3"), (True, False))))
@pytest.mark.parametrize(
    ("shape", "chunks"), [((10, 300), (4, 300)), ((3, 7, 300), (1, 4, 300)), ((700,), (300,))]
)
def test_raw_extents_leave_the_padding_of_edge_chunks_out(tmp_path, version, ocdbt, shape, chunks):
    array = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    manifest = support.manifest_of({("w",): array})
    manifest = replace(manifest, tensors={("w",): replace(manifest.tensors[("w",)], chunks=chunks)})
    support.write(tmp_path / "item", {("w",): array}, manifest, zarr=version, ocdbt=ocdbt)
    found = opened(tmp_path / "item")
    raw = found.reader.access(found.manifest.tensors[("w",)]).extents
    assert raw is not None
    assert sum(part.length for part in raw) == array.nbytes
    same_as_written(tmp_path / "item", {("w",): array})


def test_a_single_leaf_and_a_tree_of_strings(tmp_path):
    bare = {(): np.arange(6, dtype=np.int16)}
    for ocdbt in (True, False):
        support.write(tmp_path / f"bare{ocdbt}", bare, ocdbt=ocdbt)
        same_as_written(tmp_path / f"bare{ocdbt}", bare)
    assert_same_tree(ocp.StandardCheckpointer().restore(tmp_path / "bareTrue"), bare[()])
    support.write(tmp_path / "words", {}, support.manifest_of({}, values={("a",): "b"}))
    assert opened(tmp_path / "words").manifest.values == {("a",): "b"}


@pytest.mark.parametrize(
    ("arrays", "options", "named"),
    [
        ({("a.b",): np.ones(2), ("a", "b"): np.zeros(2)}, {}, r"a\.b and a/b"),
        ({("empty",): np.ones((0, 3))}, {}, "without elements"),
        ({("u",): np.ones(2).astype(ml_dtypes.uint4)}, {}, "uint4"),
        ({("f",): np.ones(2).astype(ml_dtypes.float8_e4m3)}, {}, "float8_e4m3"),
        ({("../../outside",): np.ones(2)}, {"ocdbt": False}, "outside"),
        ({("/abs",): np.ones(2)}, {"ocdbt": False}, "abs"),
        ({("_METADATA",): np.ones(2)}, {"ocdbt": False}, "_METADATA"),
        ({("assets/x",): np.ones(2)}, {"ocdbt": False}, "assets"),
        ({("a",): np.ones(2), ("a/0",): np.ones(2)}, {"ocdbt": False}, "a/0"),
    ],
)
def test_what_orbax_would_lose_or_refuse(arrays, options, named):
    manifest, checked = support.manifest_of(arrays), checked_options(ORBAX, options)
    with pytest.raises(UnrepresentableError, match=named):
        ORBAX.prepare(manifest, checked)


def test_the_same_names_are_no_trouble_inside_ocdbt(tmp_path):
    arrays = {
        (name,): np.full(700, index, np.float32)
        for index, name in enumerate(["../../out", "d", "a", "a/0", "_METADATA"])
    }
    support.write(tmp_path / "item", arrays)
    same_as_written(tmp_path / "item", arrays)
    assert_same_tree(
        ocp.StandardCheckpointer().restore(tmp_path / "item"), nested(support.manifest_of(arrays), arrays)
    )
    assert not (tmp_path.parent / "out").exists()


def test_only_whole_chunks_are_taken(tmp_path):
    manifest = support.manifest_of({("w",): np.ones((8, 4), np.float32)})
    manifest = replace(manifest, tensors={("w",): replace(manifest.tensors[("w",)], chunks=(4, 4))})
    writer = support.writer_at(tmp_path / "x", manifest)
    for where in ((slice(0, 2), slice(0, 4)), (slice(2, 6), slice(0, 4)), Span(0, 64)):
        with pytest.raises(UsageError):
            writer.write(("w",), where, memoryview(bytes(64)))
    writer.close()


def test_an_unfinished_item_is_not_taken_for_whole(tmp_path):
    arrays = sample()
    writer = support.writer_at(tmp_path / "x", support.manifest_of(arrays))
    writer.sync()
    writer.close()
    found = ORBAX.detect(Glimpse(locate(tmp_path / "x")))
    assert found is None or found.verdict == "incomplete"


def test_a_chunk_never_written_is_named(tmp_path):
    arrays = {("w",): np.ones((8, 512), np.float32)}
    manifest = support.manifest_of(arrays)
    manifest = replace(manifest, tensors={("w",): replace(manifest.tensors[("w",)], chunks=(4, 512))})
    for version in ("2", "3"):
        folder = tmp_path / version
        writer = support.writer_at(folder, manifest, zarr=version, ocdbt=False)
        writer.write(("w",), (slice(0, 4), slice(0, 512)), memoryview(arrays[("w",)][:4].tobytes()))
        writer.finish()
        writer.close()
        (absent,) = opened(folder).reader.absent()
        assert absent.chunk == {"2": "1.0", "3": "c/1/0"}[version]
        assert "lost" in absent.reason


def test_the_chunk_option_and_prepare():
    manifest = support.manifest_of({("w",): np.ones((4096, 2048), np.float32)})
    chunks = {
        option: ORBAX.prepare(manifest, checked_options(ORBAX, {"chunks": option})).tensors[("w",)].chunks
        for option in ("auto", "whole", "1")
    }
    assert chunks == {"auto": (1024, 2048), "whole": (4096, 2048), "1": (128, 2048)}
    with pytest.raises(UsageError):
        ORBAX.prepare(manifest, checked_options(ORBAX, {"chunks": "many"}))


def test_a_full_disk_is_a_storage_error(tmp_path):
    manifest = support.manifest_of({("w",): np.ones((1024, 1024), np.float32)})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    writer = support.writer_at(tmp_path / "x", manifest)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        with pytest.raises(StorageError) as caught:
            writer.write(("w",), manifest.tensors[("w",)].whole, memoryview(bytes(4 << 20)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        writer.close()
    assert "file" in str(caught.value)


def test_the_small_files_are_what_orbax_writes(tmp_path):
    support.write(tmp_path / "item", {("w",): np.ones(3, np.float32)})
    metadata = json.loads((tmp_path / "item" / "_METADATA").read_text())
    assert metadata["tree_metadata"]["('w',)"] == {
        "key_metadata": [{"key": "w", "key_type": 2}],
        "value_metadata": {"value_type": "np.ndarray", "skip_deserialize": False},
    }
    assert (metadata["use_ocdbt"], metadata["use_zarr3"]) == (True, False)
    checkpoint = json.loads((tmp_path / "item" / "_CHECKPOINT_METADATA").read_text())
    assert checkpoint["init_timestamp_nsecs"] <= checkpoint["commit_timestamp_nsecs"]
    assert (tmp_path / "item" / "commit_success.txt").stat().st_size


def test_a_name_of_thousands_of_digits_is_no_index(tmp_path):
    """Python converts no text of more than 4,300 digits to an integer."""
    from safetensors.numpy import load_file, save_file

    name = "9" * 5000
    save_file({name: np.arange(4.0), "2": np.arange(3.0), "10": np.arange(2.0)}, tmp_path / "a.safetensors")
    wherry.convert(tmp_path / "a.safetensors", tmp_path / "out", to="orbax", lineage=False)
    wherry.convert(tmp_path / "out", tmp_path / "back.safetensors", to="safetensors", lineage=False)
    assert load_file(tmp_path / "back.safetensors").keys() == {name, "2", "10"}
