"""Reading Orbax: checkpoints made by the installed Orbax and by earlier ones."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import orbax.checkpoint as ocp
import pytest

import wherry
from tests.support import orbax as support
from tests.support.orbax import CORPUS, ORBAX, copied, digest, expectation, needs_corpus, opened
from wherry.errors import AmbiguousError
from wherry.formats.format import Glimpse
from wherry.mover.read import read_array
from wherry.store.local_store import locate


@needs_corpus
@pytest.mark.parametrize(
    ("case", "writer"),
    [
        ("orbax-0128-standard", ">= 0.12.3"),
        ("orbax-0128-v1", ">= 0.12.3"),
        ("orbax-upstream-v0-direct-cm-present-has", "0.11.31 to 0.12.2"),
        ("orbax-0110-standard", "0.10 to 0.11.0"),
        ("orbax-0523-standard", "0.5.16 to 0.10"),
        ("orbax-044-standard", "0.4.4 to 0.5.15"),
        ("orbax-041-standard", "0.4.0 to 0.4.3"),
        ("orbax-041-aggregate", "<= 0.5.15, aggregate"),
        ("orbax-017-default", "0.0.21 to 0.3"),
    ],
)
def test_generations(case, writer):
    detection = ORBAX.detect(Glimpse(locate(CORPUS / case / "checkpoint" / expectation(case)["uri"])))
    assert detection.writer.endswith(writer)
    assert detection.evidence


@needs_corpus
def test_detection_does_without_tensorstore():
    code = (
        "import sys; from wherry.formats.format import Glimpse; from wherry.store.local_store import locate\n"
        "from wherry.integrations.formats.orbax import FORMATS\n"
        "assert FORMATS[0].detect(Glimpse(locate(sys.argv[1]))).verdict == 'ok'\n"
        "assert 'tensorstore' not in sys.modules and 'jax' not in sys.modules\n"
    )
    folder = CORPUS / "orbax-0128-manager" / "checkpoint" / "run" / "ckpt_00000200"
    subprocess.run([sys.executable, "-c", code, str(folder)], check=True)


@needs_corpus
def test_what_a_checkpoint_states_apart_from_the_arrays():
    found = opened(CORPUS / "orbax-0128-async" / "checkpoint" / "ckpt").manifest
    assert found.values == {("s",): "hello str leaf"}
    found = opened(CORPUS / "orbax-0128-standard" / "checkpoint" / "ckpt").manifest
    assert found.empties[("none",)] == "none"
    assert {("params", "list"), ("tuple",)} <= found.lists
    found = opened(CORPUS / "orbax-0128-v1" / "checkpoint" / "ckpt").manifest
    assert found.custom["checkpoint"] == {"k": "v"}
    found = opened(CORPUS / "orbax-0128-sharded8" / "checkpoint" / "ckpt").manifest
    assert found.tensors[("f8_e5m2",)].sharding.mesh == (("fsdp", 4), ("tensor", 2))
    assert found.tensors[("f8_e5m2",)].sharding.spec == ("fsdp", "tensor")
    found = opened(CORPUS / "maxtext-llama31-l3-scan" / "checkpoint" / "0").manifest
    assert sum(spec.tags == {"prng": "threefry2x32"} for spec in found.tensors.values()) == 6
    found = opened(CORPUS / "penzai-llama-unroll-plain" / "checkpoint" / "plain").manifest
    assert "penzai" in found.custom["item"]


@needs_corpus
def test_a_part_is_read_from_four_threads():
    found = opened(CORPUS / "orbax-0128-sharded8" / "checkpoint" / "ckpt")
    spec = found.manifest.tensors[("params", "embed", "embedding")]
    whole = read_array(found.reader, spec, spec.whole)
    starts = [index % (spec.shape[0] - 5) for index in range(64)]
    with ThreadPoolExecutor(4) as executor:
        parts = list(
            executor.map(
                lambda start: read_array(found.reader, spec, (slice(start, start + 5), slice(1, 9))), starts
            )
        )
    assert all(
        (part == whole[start : start + 5, 1:9]).all() for start, part in zip(starts, parts, strict=True)
    )
    assert parts[0].flags.c_contiguous
    found.reader.close()


@needs_corpus
def test_items_of_a_step(tmp_path):
    run = copied("orbax-0128-manager", tmp_path).parent
    (run / "state").rename(run / "one")
    with pytest.raises(AmbiguousError, match="extra, one") as caught:
        ORBAX.detect(Glimpse(locate(run)))
    assert "--item" in caught.value.cure
    shutil.rmtree(run / "extra")
    assert ORBAX.detect(Glimpse(locate(run))).uri == str(run / "one")
    (run / "one").rename(run / "one.orbax-checkpoint-tmp-12")
    assert ORBAX.detect(Glimpse(locate(run))).verdict == "incomplete"


@needs_corpus
def test_any_name_of_the_folder_will_do(tmp_path):
    folder = copied("orbax-0128-sharded8", tmp_path)
    staged = folder.rename(folder.parent / ".wherry-x.abc")
    found = opened(staged)
    assert {
        spec.path: digest(read_array(found.reader, spec, spec.whole))
        for spec in found.manifest.tensors.values()
    } == {tuple(row["path"]): row["sha256"] for row in expectation("orbax-0128-sharded8")["tensors"]}


@pytest.mark.parametrize("name", ["models", "exp_2024"])
def test_neighbours_are_not_taken_for_items(tmp_path, name):
    folder = tmp_path / name
    folder.mkdir()
    for child in ("first", "second"):
        support.write(folder / child, {("w",): np.ones(3, np.float32)})
    assert ORBAX.detect(Glimpse(locate(folder))) is None
    assert opened(folder / "first").manifest.step is None


def test_bare_items_named_as_steps_leave_the_run_a_run(tmp_path):
    (tmp_path / "run").mkdir()
    support.write(tmp_path / "run" / "3", {("w",): np.ones(3, np.float32)})
    assert ORBAX.detect(Glimpse(locate(tmp_path / "run"))) is None
    assert opened(tmp_path / "run" / "3").manifest.step == 3


_MAKE = """
import sys, jax, numpy as np, orbax.checkpoint as ocp
from jax.sharding import NamedSharding, PartitionSpec as P
mesh = jax.make_mesh((4, 2), ("fsdp", "tensor"))
def put(x, *spec): return jax.device_put(x, NamedSharding(mesh, P(*spec)))
rng = np.random.default_rng(3)
big = rng.standard_normal((64, 48)).astype("f4")
tree = {"params": {"w": put(big, "fsdp", "tensor"), "v": put(big.astype(jax.numpy.bfloat16), None, "fsdp"),
        "layers": [put(big[:8], "fsdp"), put(big[:3])]}, "n": 7, "empty": {}, "host": big[:5] > 0}
for zarr3 in (False, True):
    for ocdbt in (False, True):
        path = f"{sys.argv[1]}/{zarr3}{ocdbt}"
        ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=ocdbt, use_zarr3=zarr3)).save(path, tree)
flat = {"params.w": big, "params.v": np.asarray(tree["params"]["v"]).view("u2"), "params.layers.0": big[:8],
        "params.layers.1": big[:3], "n": np.asarray(7), "host": big[:5] > 0}
np.savez(f"{sys.argv[1]}/wanted.npz", **flat)
"""


def test_what_the_installed_orbax_saves_from_eight_devices(tmp_path):
    env = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    subprocess.run([sys.executable, "-c", _MAKE, str(tmp_path)], check=True, env=env, capture_output=True)
    wanted = np.load(tmp_path / "wanted.npz")
    for name in ("FalseFalse", "FalseTrue", "TrueFalse", "TrueTrue"):
        found = opened(tmp_path / name)
        assert list(found.reader.absent()) == []
        assert set(map(".".join, found.manifest.tensors)) == set(wanted)
        for path, spec in found.manifest.tensors.items():
            array = read_array(found.reader, spec, spec.whole)
            assert array.tobytes() == wanted[".".join(path)].tobytes(), (name, path)
        assert found.manifest.tensors[("params", "w")].sharding.spec == ("fsdp", "tensor")
        assert found.manifest.tensors[("params", "w")].chunks == (16, 24)


def test_the_item_that_is_no_state_is_chosen(tmp_path):
    """Tunix saves the parameters of a model and the state of its optimizer as two items without usual names."""
    weights, moments = {"w": np.ones(3, np.float32)}, {"0": {"count": np.int32(1), "mu": {"w": np.ones(3)}}}
    with ocp.CheckpointManager(tmp_path / "run", item_names=("model_params", "optimizer_state")) as manager:
        args = {"model_params": ocp.args.PyTreeSave(weights), "optimizer_state": ocp.args.PyTreeSave(moments)}
        manager.save(1, args=ocp.args.Composite(**args))
    found = wherry.detect(tmp_path / "run")
    assert (found.verdict, found.uri.rpartition("/")[2], found.step) == ("ok", "model_params", 1)
    with ocp.CheckpointManager(tmp_path / "two", item_names=("actor", "critic")) as manager:
        args = {name: ocp.args.PyTreeSave(weights) for name in ("actor", "critic")}
        manager.save(1, args=ocp.args.Composite(**args))
    assert wherry.detect(tmp_path / "two").verdict == "unsupported"  # nothing says which


@needs_corpus
def test_the_nodes_that_only_msgpack_has():
    with wherry.open(CORPUS / "orbax-017-default" / "checkpoint" / "ckpt") as checkpoint:
        assert checkpoint.manifest.empties == {
            ("none",): "none", ("empty_dict",): "dict", ("empty_list",): "list"
        }  # fmt: skip
        assert checkpoint.manifest.lists == {("params", "list")}


@needs_corpus
@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("flax-linen-boxed-scan", "12 of 20 arrays are in linen partition boxes"),
        ("flax-nnx-state", "9 of 9 arrays are NNX variables (`value`"),
        ("orbax-0110-nnx-state", "7 of 7 arrays are NNX variables"),
        ("orbax-0523-nnx-state", "NNX variables"),
        ("penzai-llama-unroll-label-dict", "30 of 30 arrays are Penzai NamedArrays"),
    ],
)
def test_boxes_and_wrappers_are_named(case, words):
    found = wherry.detect(CORPUS / case / "checkpoint" / expectation(case)["uri"])
    assert any(words in row.seen for row in found.evidence), found.evidence
    plain = wherry.detect(CORPUS / "flax-nnx-pure" / "checkpoint" / expectation("flax-nnx-pure")["uri"])
    assert not any("arrays are" in row.seen for row in plain.evidence)


# Aggregates whose root is a tuple or a list, as brax and optax states are: complete, with and without
# `_METADATA`.


K = np.arange(6, dtype=np.float32).reshape(2, 3)
# Name → the tree as Orbax's msgpack file has it; a tuple is a list there, an empty NamedTuple is nil.
ROOTS: dict[str, Any] = {
    "brax": [{"mean": K[0]}, {"w": K}, {"w": -K}],
    "optax": [{"trace": {"w": K}}, None],
    "adam": [{"count": np.asarray(3, np.int32), "mu": {"w": K}, "nu": {"w": K}}, None],
    "chain": [None, [{"mu": {"w": K}}, None]],
    "nested": [[K], [{"b": K}]],
    "one": [K],
    "many": [K + number for number in range(20)],
    "scalars": [1, 2.5, K],
}


def _packed(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return msgpack.ExtType(1, msgpack.packb((value.shape, value.dtype.name, value.tobytes())))
    if isinstance(value, list):
        return [_packed(child) for child in value]
    return {key: _packed(child) for key, child in value.items()} if isinstance(value, dict) else value


def _leaves(
    value: Any, path: tuple[tuple[str, int], ...] = ()
) -> list[tuple[tuple[tuple[str, int], ...], Any]]:
    if isinstance(value, list):
        children = [(str(number), 1, child) for number, child in enumerate(value)]
    elif isinstance(value, dict):
        children = [(key, 2, child) for key, child in value.items()]
    else:
        return [(path, value)]
    return [leaf for key, kind, child in children for leaf in _leaves(child, (*path, (key, kind)))]


def _save(folder: Path, tree: Any, *, described: bool) -> None:
    folder.mkdir()
    (folder / "checkpoint").write_bytes(msgpack.packb(_packed(tree)))
    if described:
        rows = {
            repr(tuple(key for key, _ in path)): {
                "key_metadata": [{"key": key, "key_type": kind} for key, kind in path],
                "value_metadata": {
                    "value_type": "None"
                    if leaf is None
                    else "jax.Array"
                    if isinstance(leaf, np.ndarray)
                    else "scalar",
                    "skip_deserialize": True,
                },
            }
            for path, leaf in _leaves(tree)
        }
        (folder / "_METADATA").write_text(json.dumps({"tree_metadata": rows, "use_zarr3": False}))


@pytest.mark.parametrize("described", [True, False], ids=["with _METADATA", "msgpack only"])
@pytest.mark.parametrize("name", ROOTS)
def test_a_sequence_at_the_root(tmp_path, name, described):
    folder = tmp_path / "step"
    _save(folder, ROOTS[name], described=described)
    found = wherry.detect(folder)
    assert (found.verdict, found.format) == ("ok", "orbax"), found
    target = tmp_path / "out"
    wherry.convert(folder, target, to="orbax")
    with wherry.open(target) as checkpoint:
        assert () in checkpoint.manifest.lists
        for path, leaf in _leaves(ROOTS[name]):
            key = tuple(part for part, _ in path)
            if leaf is None:
                assert checkpoint.manifest.empties[key] == "none"
            else:
                np.testing.assert_array_equal(checkpoint.read(key), leaf)


@pytest.mark.parametrize(
    "data",
    [b"\x92\x93\xa1a\xa1b\xa1c\xc4\x01x", b"\x93ascii text", b"\x9a" + bytes(80)],
    ids=["EasyLM", "text", "zeros"],
)
def test_a_file_that_only_begins_as_an_array_is_not_orbax(tmp_path, data):
    (tmp_path / "step").mkdir()
    (tmp_path / "step" / "checkpoint").write_bytes(data)
    assert wherry.detect(tmp_path / "step").format != "orbax"
