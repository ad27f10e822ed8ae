"""Writing PaxML: what a restore by paxml's own rules finds, with tensorstore for 1.1 and Orbax for 1.2, bit-equal.

paxml itself does not install here. Version 1.1 is read as its `PaxCheckpointHandler` does: the names come from the
requested train state, each array is opened by its name with tensorstore, nothing else is looked at. Version
1.2 goes through Orbax's PyTree handler, and by orbax 0.5.9's rule every leaf of `_METADATA` must be in the msgpack.
"""

from __future__ import annotations

import json
import shutil

import msgpack
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore as ts
from flax.serialization import msgpack_serialize

import wherry
from tests.support.formats import either, opened, place
from tests.support.paxml import flat_name, leaves
from wherry.core.manifest import Manifest
from wherry.core.tensorspec import TensorSpec
from wherry.errors import UnrepresentableError
from wherry.formats.registry import checked_options, find_format
from wherry.mover.read import read_array

PAXML = find_format("paxml")
V11 = either("paxml-gpt3-l3-v11-gda-zarr", "made-paxml-v11")
V12 = either("paxml-gpt3-l3-v12-gda-ocdbt", "made-paxml-v12")
SOURCES = V11 + V12
OPTIONS = [
    {"version": version, "compression": codec} for version in ("1.1", "1.2") for codec in ("none", "zstd")
]


# As praxis names the arrays of the GPT-3 of these cases.
FLAT_NAMES = {flat_name(path) for path in leaves()}


def train_state(manifest):
    """The tree of a manifest as Python holds it: dicts and lists, arrays at the leaves' places."""
    tree = {}
    for path in manifest.tensors:
        node = tree
        for part in path[:-1]:
            node = node.setdefault(part, {})
        node[path[-1]] = path
    return _lists(tree, (), manifest.lists)


def _lists(node, path, lists):
    if not isinstance(node, dict):
        return node
    children = {key: _lists(child, (*path, key), lists) for key, child in node.items()}
    return [children[str(number)] for number in range(len(children))] if path in lists else children


def prefixed(node, prefix=""):
    """Names as praxis makes them: `.` before a key, `_<i>` for an index."""
    if isinstance(node, dict):
        for key, child in node.items():
            yield from prefixed(child, f"{prefix}.{key}" if prefix else key)
    elif isinstance(node, list):
        for number, child in enumerate(node):
            yield from prefixed(child, f"{prefix}_{number}")
    else:
        yield prefix, node


def zarr(folder, name):
    spec = {"driver": "zarr", "kvstore": {"driver": "file", "path": f"{folder}/{name}"}}
    return ts.open(spec, open=True).result().read().result()


def metadata_item(folder):
    return ocp.Checkpointer(ocp.JsonCheckpointHandler()).restore(folder / "metadata")


@pytest.mark.parametrize("options", [option for option in OPTIONS if option["version"] == "1.1"], ids=str)
@pytest.mark.parametrize("case", SOURCES)
def test_version_1_1_is_restored_by_name(tmp_path, case, options):
    folder = tmp_path / "checkpoint_00004000"
    receipt = wherry.convert(place(case), folder, to="paxml", options=options, lineage=False)
    assert receipt.source.weights_digest == receipt.target.weights_digest
    source = opened(place(case), "paxml")
    names = dict(prefixed(train_state(source.manifest)))
    assert set(names) == FLAT_NAMES
    for name, path in names.items():
        spec = source.manifest.tensors[path]
        wanted, array = read_array(source.reader, spec, spec.whole), zarr(folder / "state", name)
        assert (array.dtype, array.shape, array.tobytes()) == (wanted.dtype, wanted.shape, wanted.tobytes())
        assert json.loads((folder / "state" / name / ".zarray").read_text())["fill_value"] is None
    assert {entry.name for entry in (folder / "state").iterdir()} == set(names)


@pytest.mark.parametrize("options", [option for option in OPTIONS if option["version"] == "1.2"], ids=str)
@pytest.mark.parametrize("case", SOURCES)
def test_version_1_2_is_restored_by_orbax(tmp_path, case, options):
    folder = tmp_path / "checkpoint_00004000"
    receipt = wherry.convert(place(case), folder, to="paxml", options=options, lineage=False)
    assert receipt.source.weights_digest == receipt.target.weights_digest
    source = opened(place(case), "paxml")
    restored = ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=True)).restore(folder / "state")
    for path, spec in source.manifest.tensors.items():
        node = restored
        for part in path:
            node = node[int(part)] if isinstance(node, (list, tuple)) else node[part]
        wanted, array = read_array(source.reader, spec, spec.whole), np.asarray(node)
        assert (array.dtype, array.shape, array.tobytes()) == (wanted.dtype, wanted.shape, wanted.tobytes())
    state = folder / "state"
    assert {"manifest.ocdbt", "d", "_METADATA", "checkpoint"} <= {entry.name for entry in state.iterdir()}


def flattened(node, path=()):
    """Key paths of a msgpack tree, empty nodes included, as orbax flattens it."""
    if isinstance(node, dict) and node:
        for key, child in node.items():
            yield from flattened(child, (*path, key))
    elif isinstance(node, list) and node:
        for number, child in enumerate(node):
            yield from flattened(child, (*path, str(number)))
    else:
        yield path, node


@pytest.mark.parametrize("case", V12)
def test_the_msgpack_tree_is_the_real_one(tmp_path, case):
    wherry.convert(
        place(case), tmp_path / "checkpoint_00004000", to="paxml", options={"version": "1.2"}, lineage=False
    )
    trees = [
        dict(flattened(msgpack.unpackb((folder / "state" / "checkpoint").read_bytes())))
        for folder in (place(case), tmp_path / "checkpoint_00004000")
    ]
    assert trees[0] == trees[1]
    metadata = json.loads((tmp_path / "checkpoint_00004000" / "state" / "_METADATA").read_text())
    named = {tuple(key["key"] for key in row["key_metadata"]) for row in metadata["tree_metadata"].values()}
    assert named == set(trees[1])


@pytest.mark.parametrize("case", SOURCES)
def test_the_metadata_item_is_the_real_one(tmp_path, case):
    version = "1.2" if "v12" in case else "1.1"
    wherry.convert(
        place(case), tmp_path / "checkpoint_1", to="paxml", options={"version": version}, lineage=False
    )
    real, ours = metadata_item(place(case)), metadata_item(tmp_path / "checkpoint_1")
    assert ours.pop("wherry")["kind"] == "train-state"
    assert ours == real


@pytest.mark.parametrize("case", V12)
def test_there_and_back_between_the_versions(tmp_path, case):
    first = wherry.convert(place(case), tmp_path / "a", to="paxml", options={"version": "1.1"}, lineage=False)
    second = wherry.convert(
        tmp_path / "a", tmp_path / "b", to="paxml", options={"version": "1.2"}, lineage=False
    )
    assert first.source.weights_digest == first.target.weights_digest == second.target.weights_digest
    source, found = (wherry.inspect(folder).manifest for folder in (place(case), tmp_path / "b"))
    assert (found.lists, found.empties, found.kind) == (source.lists, source.empties, "train-state")
    assert found.custom["paxml"]["optimizer_groups"] == source.custom["paxml"]["optimizer_groups"]


@pytest.mark.parametrize("case", V11)
def test_a_lost_folder_of_ours_is_missed(tmp_path, case):
    wherry.convert(place(case), tmp_path / "checkpoint_1", to="paxml", lineage=False)
    shutil.rmtree(tmp_path / "checkpoint_1" / "state" / "opt_states_0.no_prefix_2.count")
    found = wherry.detect(tmp_path / "checkpoint_1")
    assert found.verdict == "incomplete"
    assert "opt_states_0.no_prefix_2.count" in found.reason


@pytest.mark.parametrize("case", V11)
def test_into_a_run(tmp_path, case):
    wherry.convert(place(case), tmp_path / "checkpoints", to="paxml", into=True, lineage=False)
    found = wherry.detect(tmp_path)
    assert found.uri == str(tmp_path / "checkpoints" / "checkpoint_00004000")
    assert (found.step, found.kind, found.verdict) == (4000, "train-state", "ok")
    assert found.writer.startswith("wherry")
    assert wherry.verify(tmp_path, level="digest").ok


def small(*paths, lists=(), values=None):
    specs = {path: TensorSpec(path, (2,), "float32") for path in paths}
    return Manifest(tensors=specs, lists=frozenset(lists), values=values or {})


@pytest.mark.parametrize(
    ("manifest", "words"),
    [
        (small(("a", "b"), ("a.b",)), "key collision"),
        (small(("a", "0"), ("a_0",), lists=[("a",)]), "key collision"),
        (small(()), "cannot name a bare leaf"),
        (small(("0",), lists=[()]), "cannot name a bare leaf"),
        (small(("a", "..", "x/../y")), "cannot be the folder of an array"),
        (small(("assets",)), "cannot be the folder of an array"),
    ],
)
def test_what_flat_names_cannot_spell_is_refused(manifest, words):
    with pytest.raises(UnrepresentableError, match=words):
        PAXML.prepare(manifest, checked_options(PAXML, {}))


def test_version_1_2_refuses_a_leaf_below_a_leaf():
    manifest = small(("a",), ("a", "b"))
    with pytest.raises(UnrepresentableError, match="leaf"):
        PAXML.prepare(manifest, checked_options(PAXML, {"version": "1.2"}))


@pytest.mark.parametrize("version", ["1.1", "1.2"])
def test_many_and_long_names(tmp_path, version):
    tree = {f"block {number:03d}" * 6: np.full((2,), number, "f4") for number in range(70)}
    source = tmp_path / "plain.msgpack"
    source.write_bytes(msgpack_serialize({"mdl_vars": {"params": tree}}))
    receipt = wherry.convert(source, tmp_path / "3", to="paxml", options={"version": version}, lineage=False)
    assert receipt.source.weights_digest == receipt.target.weights_digest
    if version == "1.2":
        restored = ocp.PyTreeCheckpointer().restore(tmp_path / "3" / "state")
        assert {name: array.tobytes() for name, array in restored["mdl_vars"]["params"].items()} == {
            name: array.tobytes() for name, array in tree.items()
        }
        assert (
            len(msgpack.unpackb((tmp_path / "3" / "state" / "checkpoint").read_bytes())["mdl_vars"]["params"])
            == 70
        )
