"""Writing Orbax: restored bit-equal and with its types by every API of the installed Orbax; durable."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import orbax.checkpoint.experimental.v1 as ocp1
import pytest
from orbax.checkpoint.experimental import v1

import wherry
from tests.support import orbax as support
from tests.support.corpus import CORPUS, expected, needs_corpus
from tests.support.orbax import ORBAX, assert_same_tree, full_manifest, nested, opened, sample, small_chunks
from wherry.core.tensorspec import Span, TensorSpec
from wherry.errors import StorageError, UnrepresentableError, UsageError
from wherry.formats.format import Glimpse
from wherry.formats.registry import checked_options
from wherry.mover.read import read_array
from wherry.store.local_store import locate
from wherry.store.location import MOST_CONFIG

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


# What `sync` of the Orbax writer promises: contents and names are durable, also when two threads call it.


PLACES = ("fsync", "fdatasync")
HELD = "held back"


@pytest.fixture
def synced(monkeypatch):
    """Paths whose contents or names were made durable, in order; `gate` holds one thread back while it is unset."""

    class Record(list):
        gate = threading.Event()
        entered = threading.Event()

    record = Record()
    record.gate.set()
    for name in PLACES:
        real = getattr(os, name)

        def watched(descriptor, real=real):
            if threading.current_thread().name == HELD:
                record.entered.set()
                record.gate.wait(10)
            real(descriptor)
            record.append(Path(f"/proc/self/fd/{descriptor}").readlink())

        monkeypatch.setattr(os, name, watched)
    return record


def writer_of(folder, arrays, **options):
    manifest = support.small_chunks(support.manifest_of(arrays))
    return support.writer_at(folder, manifest, **options)


def write_some(writer, arrays, count=None):
    jobs = [
        (path, region)
        for path, array in arrays.items()
        for region in support.regions(array.shape, writer.grid(path))
    ]
    for path, region in jobs[:count]:
        data = np.ascontiguousarray(arrays[path][region])
        writer.write(path, region, memoryview(data.reshape(-1).view("u1")))


@pytest.mark.parametrize("options", [{}, {"ocdbt": False}, {"compression": "zstd"}])
def test_no_call_returns_before_what_came_before_it_is_durable(tmp_path, synced, options):
    arrays = {("w",): np.random.default_rng(0).standard_normal((30, 40)).astype(np.float32)}
    writer = writer_of(tmp_path / "item", arrays, **options)
    write_some(writer, arrays)
    synced.entered.clear()
    synced.gate.clear()
    first = threading.Thread(target=writer.sync, name=HELD)
    second = threading.Thread(target=writer.sync)
    first.start()
    assert synced.entered.wait(10)
    second.start()
    second.join(0.3)
    assert second.is_alive(), "the second call returned while the first was still at work"
    synced.gate.set()
    first.join(10)
    second.join(10)
    assert not first.is_alive()
    assert not second.is_alive()
    writer.finish()
    writer.close()
    found = support.opened(tmp_path / "item")
    spec = found.manifest.tensors[("w",)]
    assert read_array(found.reader, spec, spec.whole).tobytes() == arrays[("w",)].tobytes()


# What an Orbax item of ours holds besides tensors: numbers, lists, PRNG keys, foreign metadata.


def test_numbers_come_back_as_the_values_they_were(tmp_path):
    values = {("epoch",): 3, ("lr",): 1e-4, ("done",): True, ("name",): "x", ("none",): None}
    arrays = {("w",): np.ones((4, 4), np.float32)}
    for version, ocdbt in product(("2", "3"), (True, False)):
        folder = tmp_path / f"{version}{ocdbt}"
        support.write(folder, arrays, support.manifest_of(arrays, values=values), zarr=version, ocdbt=ocdbt)
        found = opened(folder).manifest
        assert set(found.tensors) == set(arrays)
        assert found.values == {key: value for key, value in values.items() if value is not None}
        assert found.empties == {("none",): "none"}
        assert type(found.values[("done",)]) is bool
        restored = ocp.PyTreeCheckpointer().restore(folder)
        assert {key: restored[key] for key in ("epoch", "lr", "done", "name", "none")} == {
            path[0]: value for path, value in values.items()
        }


def test_long_lists_keep_their_order(tmp_path):
    arrays = {("list", str(index)): np.full(3, index, np.int32) for index in range(12)}
    manifest = replace(support.manifest_of(arrays), lists=frozenset({("list",)}))
    support.write(tmp_path / "item", arrays, manifest)
    for restored in (ocp.StandardCheckpointer().restore(tmp_path / "item"), ocp1.load(tmp_path / "item")):
        assert [int(leaf[0]) for leaf in restored["list"]] == list(range(12))


def test_what_orbax_has_no_place_for_is_kept(tmp_path):
    arrays = {("key",): np.asarray([1, 2], np.uint32)}
    spec = TensorSpec(("key",), (2,), "uint32", tags={"prng": "threefry2x32"})
    custom = {"item": {"a": 1}, "checkpoint": {"b": 2}, "format": "pt"}
    manifest = replace(support.manifest_of(arrays, custom=custom), tensors={("key",): spec})
    support.write(tmp_path / "item", arrays, manifest)
    found = opened(tmp_path / "item").manifest
    assert found.tensors[("key",)].tags == {"prng": "threefry2x32"}
    assert found.custom["item"]["a"] == 1
    assert found.custom["item"]["wherry"]["custom"] == {"format": "pt"}
    assert found.custom["checkpoint"] == {"b": 2}
    assert ocp.StandardCheckpointer().metadata(tmp_path / "item").custom_metadata["b"] == 2


def test_wrappers_are_distinguished_from_parameters_called_value():
    from wherry.integrations.containers.orbax.item import wrappers
    from wherry.layout.forms import wrapped_leaves

    old = [("layers", "0", "kernel", "raw_value"), ("layers", "0", "bias", "raw_value")]
    assert "2 of 2 arrays are NNX variables (`raw_value`, Flax 0.8)" in wrappers(old)[0].seen
    boxed = [("params", "wi", "kernel", "value"), ("params", "norm", "scale")]
    assert "1 of 2 arrays are in linen partition boxes" in wrappers(boxed)[0].seen
    assert wrapped_leaves([("a", "value"), ("a", "other")], "value") == set()
    assert wrapped_leaves([("a", "value"), ("a", "b", "c")], "value") == set()
    assert wrapped_leaves([("attention", "value", "kernel"), ("value",)], "value") == set()


# Orbax restores each target with the types with which it restores the source: typed keys, Python numbers,
# arrays.


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
