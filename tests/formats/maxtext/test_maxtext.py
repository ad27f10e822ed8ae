"""MaxText: which trees are its own, what is missing in words, and Orbax restoring what we write."""

from __future__ import annotations

import json
import shutil

import jax
import numpy as np
import orbax.checkpoint as ocp
import orbax.checkpoint.experimental.v1 as ocp1
import pytest
import tensorstore as ts

import wherry
from tests.support.formats import CORPUS, cases, expected, opened, place
from wherry.core.manifest import Manifest
from wherry.core.tensorspec import Sharding, TensorSpec
from wherry.errors import UnrepresentableError
from wherry.integrations.containers.orbax.tree import tree_json
from wherry.integrations.containers.zarr import kvstore
from wherry.integrations.containers.zarr import metadata as zarr
from wherry.integrations.containers.zarr import reader as shortfall
from wherry.integrations.containers.zarr.layout import build_metadata
from wherry.integrations.containers.zarr.listing import Listing, Value
from wherry.integrations.containers.zarr.reader import StoredArray
from wherry.integrations.formats import maxtext
from wherry.mover.read import read_array
from wherry.store.local_store import locate

VERDICTS = ("ok", "incomplete", "corrupt")
CASES = cases("maxtext", verdicts=VERDICTS)
SCAN = "maxtext-llama31-l3-scan"
needs_corpus = pytest.mark.skipif(not CASES, reason="the corpus is not here; set WHERRY_CORPUS to its folder")


@pytest.mark.parametrize("case", CASES)
def test_detection(case):
    row = expected(case)
    for uri in (row["uri"], *row["alternative_uris"]):
        found = wherry.detect(CORPUS / case / "checkpoint" / uri)
        assert (found.format, found.verdict, found.step, found.kind, found.format_version) == (
            "maxtext", row["verdict"], row["step"], row["kind"], row["layout_version"],
        )  # fmt: skip
        assert found.also == ("orbax",)
        assert found.uri == str(CORPUS / case / "checkpoint" / str(row["step"]))
        form = "scanned" if row["scan_layers"] else "unscanned"
        assert any(f"layers are {form}" in seen.seen for seen in found.evidence)


@needs_corpus
def test_scan_axis_and_aux_are_reported():
    custom = opened(place("maxtext-deepseek3-l4-scan"), "maxtext").manifest.custom["maxtext"]
    assert custom["nnx_aux"] is True
    assert custom["scanned"] == {
        "params/params/decoder/dense_layers": {"axis": 1, "layers": 1},
        "params/params/decoder/moe_layers": {"axis": 1, "layers": 3},
    }


@needs_corpus
def test_one_of_four_hosts_is_said_in_words():
    reason = wherry.detect(place("defect-maxtext-one-of-4-hosts")).reason
    assert reason.startswith("1 of 4 hosts")
    assert "108 of 433 kB present, 51 of 159 chunks, 36 of 51 arrays are incomplete" in reason


@needs_corpus
def test_what_is_whole_of_an_incomplete_checkpoint_is_read():
    case = "defect-maxtext-one-of-4-hosts"
    found = opened(place(case), "maxtext")
    for row in expected(case)["tensors"]:
        spec = found.manifest.tensors[tuple(row["path"])]
        if row["sha256"] is None:
            with pytest.raises(wherry.errors.IncompleteError):
                read_array(found.reader, spec, spec.whole)
        else:
            assert read_array(found.reader, spec, spec.whole).shape == spec.shape


@needs_corpus
def test_a_lost_data_file_is_named():
    reason = wherry.detect(place("defect-maxtext-gpt3-ocdbt-data-file-missing")).reason
    assert "3 of 62 arrays are incomplete" in reason
    assert "data file ocdbt.process_0/d/" in reason
    assert "hosts" not in reason


@needs_corpus
def test_a_single_lost_chunk_is_no_lost_host(tmp_path):
    whole = tmp_path / "run"
    shutil.copytree(CORPUS / "maxtext-llama31-l3-scan-zarr2-noocdbt" / "checkpoint", whole)
    (whole / "0" / "items" / "params.params.token_embedder.embedding" / "0.2").unlink()
    found = wherry.detect(whole / "0")
    assert found.verdict == "incomplete"
    assert "158 of 159 chunks, 1 of 51 arrays" in found.reason
    assert "hosts" not in found.reason


@needs_corpus
def test_an_item_by_itself_and_a_run(tmp_path):
    source = CORPUS / SCAN / "checkpoint" / "0" / "items"
    shutil.copytree(source, tmp_path / "alone" / "items")
    alone = wherry.detect(tmp_path / "alone" / "items")
    assert (alone.format, alone.uri, alone.verdict) == ("maxtext", str(tmp_path / "alone" / "items"), "ok")
    for step in (100, 200):
        shutil.copytree(source.parent, tmp_path / "run" / "checkpoints" / str(step))
    assert wherry.detect(tmp_path / "run").step == 200
    assert [(one.format, one.step) for one in wherry.discover(tmp_path / "run")] == [
        ("maxtext", 100),
        ("maxtext", 200),
    ]


FORMS = [{}, {"zarr": "2"}, {"ocdbt": False}, {"ocdbt": False, "zarr": "2", "compression": "zstd"}]


@pytest.mark.parametrize("options", FORMS, ids=str)
@pytest.mark.parametrize("case", [case for case in (SCAN, "maxtext-gpt3-l3-unscan") if case in CASES])
def test_orbax_restores_what_we_write(tmp_path, case, options):
    target = tmp_path / "run" / "7"
    receipt = wherry.convert(place(case), target, to="maxtext", options=options, lineage=False)
    assert receipt.source.weights_digest == receipt.target.weights_digest
    with ocp.CheckpointManager(tmp_path / "run", item_names=("items",)) as manager:
        assert manager.latest_step() == 7
        restored = manager.restore(7, args=ocp.args.Composite(items=ocp.args.PyTreeRestore()))["items"]
        metadata = manager.metadata(7)
    assert metadata.custom_metadata == {"scan_layers": expected(case)["scan_layers"]}
    by_path = ocp.Checkpointer(ocp.PyTreeCheckpointHandler()).restore(target / "items")
    for tree in (restored, by_path):
        same_as_source(case, tree)
    assert wherry.detect(target).uri == wherry.detect(target / "items").uri == str(target)
    assert wherry.verify(target, level="digest").ok


@pytest.mark.skipif(SCAN not in CASES, reason="the corpus is not here")
def test_orbax_v1_loads_what_we_write(tmp_path):
    target = tmp_path / "run" / "0"
    wherry.convert(place(SCAN), target, to="maxtext", lineage=False)
    same_as_source(SCAN, ocp1.load_checkpointables(target)["items"])


@needs_corpus
def test_the_step_folder_is_what_the_real_one_is(tmp_path):
    wherry.convert(place(SCAN), tmp_path / "0", to="maxtext", lineage=False)
    real = CORPUS / SCAN / "checkpoint" / "0"
    names = {entry.name for entry in (tmp_path / "0").iterdir()} - {"wherry.json"}
    assert names == {entry.name for entry in real.iterdir()}
    inside = {entry.name for entry in (tmp_path / "0" / "items").iterdir()}
    assert {"_METADATA", "commit_success.txt", "manifest.ocdbt", "d"} <= inside
    assert inside <= {entry.name for entry in (real / "items").iterdir()}
    wanted = json.loads((real / "_CHECKPOINT_METADATA").read_text())
    written = json.loads((tmp_path / "0" / "_CHECKPOINT_METADATA").read_text())
    assert written.keys() == wanted.keys()
    for key in ("item_handlers", "custom_metadata"):
        assert written[key] == wanted[key]


@needs_corpus
def test_into_a_run(tmp_path):
    wherry.convert(place(SCAN), tmp_path / "checkpoints", to="maxtext", into=True, as_step=40, lineage=False)
    found = wherry.detect(tmp_path)
    assert (found.format, found.step, found.uri) == ("maxtext", 40, str(tmp_path / "checkpoints" / "40"))


def is_key(node):
    return isinstance(node, jax.Array) and jax.numpy.issubdtype(node.dtype, jax.dtypes.prng_key)


def same_as_source(case, tree):
    source = opened(place(case), "maxtext")
    for path, spec in source.manifest.tensors.items():
        node = tree
        for part in path:
            node = node[int(part)] if isinstance(node, (list, tuple)) else node[part]
        wanted = read_array(source.reader, spec, spec.whole)
        array = np.asarray(jax.random.key_data(node) if is_key(node) else node)
        assert (array.dtype, array.shape, array.tobytes()) == (
            wanted.dtype,
            wanted.shape,
            wanted.tobytes(),
        ), path


def save(folder, tree):
    with ocp.CheckpointManager(folder, item_names=("items",)) as manager:
        manager.save(0, args=ocp.args.Composite(items=ocp.args.PyTreeSave(tree)))
        manager.wait_until_finished()


def decoder(layers):
    return {
        "decoder": {"decoder_norm": {"scale": np.ones(4, "f4")}, **layers},
        "token_embedder": {"embedding": np.eye(4)},
    }


def test_params_only_has_no_train_state(tmp_path):
    model = decoder({"layers": {"mlp": {"wo": {"kernel": np.zeros((4, 2, 3), "f4")}}}})
    save(tmp_path, {"params": {"params": model}, "opt_state": {}, "step": np.int32(0)})
    found = wherry.detect(tmp_path / "0")
    assert (found.format, found.kind, found.verdict) == ("maxtext", "params", "ok")
    assert found.format_version.endswith(", scan_layers")


@pytest.mark.parametrize("root", [(), ("base",), ("model_params",), ("params",)])
def test_trees_without_the_wrappers_need_the_items_name(tmp_path, root):
    model = decoder({"layers_0": {"mlp": {"wo": {"kernel": {"value": np.zeros((4, 3), "f4")}}}}})
    for part in reversed(root):
        model = {part: model}
    save(tmp_path / "run", model)
    found = wherry.detect(tmp_path / "run" / "0")
    assert (found.format, found.format_version) == (
        "maxtext",
        f"maxtext, {found.format_version[9:-11]}, unscanned",
    )
    ocp.PyTreeCheckpointer().save(tmp_path / "state", model)
    assert wherry.detect(tmp_path / "state").format == "orbax"


def test_other_trees_are_not_claimed(tmp_path):
    tree = {"target": {"encoder": {"w": np.ones(2)}, "decoder": {"layers_0": {"w": np.ones(2)}}}}
    save(tmp_path / "t5x", tree)
    assert wherry.detect(tmp_path / "t5x" / "0").format != "maxtext"
    save(tmp_path / "flax", {"params": {"Dense_0": {"kernel": np.ones((2, 2))}}, "step": np.int32(3)})
    assert wherry.detect(tmp_path / "flax" / "0").format == "orbax"


def test_a_flax_tree_that_maxtext_cannot_restore_is_refused(tmp_path):
    from flax.serialization import msgpack_serialize

    tree = {"params": {"Dense_0": {"w": np.arange(6, dtype="f4")}}}
    (tmp_path / "plain.msgpack").write_bytes(msgpack_serialize(tree))
    with pytest.raises(UnrepresentableError, match="maxtext has no layout for a tree") as caught:
        wherry.convert(tmp_path / "plain.msgpack", tmp_path / "5", to="maxtext", lineage=False)
    assert "--family" in caught.value.cure or "family=" in caught.value.cure
    assert not (tmp_path / "5").exists()


# MaxText's scan form from the tree alone, and what is missing of a sharded checkpoint in words.


def look(*shapes):
    specs = {
        tuple(path.split("/")): TensorSpec(tuple(path.split("/")), extents, "float32")
        for path, extents in shapes
    }
    return maxtext.look(specs, maxtext.WRAPPED)


D = "params/params/decoder"


@pytest.mark.parametrize(
    ("paths", "scanned", "aliases"),
    [
        ([f"{D}/layers/mlp/wo/kernel"], True, ()),
        ([f"{D}/layers/layers_0/mlp/wo/kernel"], True, ()),
        ([f"{D}/scanned_blocks/local_layers/w", f"{D}/layers_remainder/layers_0/w"], True, ()),
        ([f"{D}/pipeline_module/layers/mlp/wo/kernel"], True, ()),
        ([f"{D}/layers_0/mlp/wo/kernel", f"{D}/moe_layers_1/gate/kernel"], False, ()),
        ([f"{D}/layers/0/mlp/wo/kernel"], False, ("layers/0",)),
        ([f"{D}/dense_layer_0/mlp/wo/kernel"], False, ("dense_layer_0",)),
        ([f"{D}/layers/mlp/wo/kernel", f"{D}/layers_0/mlp/wo/kernel"], None, ()),
        ([f"{D}/decoder_norm/scale"], None, ()),
    ],
)
def test_scan_form(paths, scanned, aliases):
    seen = look(*((path, (4, 2, 3)) for path in paths))
    assert (seen.scanned, seen.aliases) == (scanned, aliases)


@pytest.mark.parametrize(
    ("shapes", "axis", "layers"),
    [
        ([(8, 3, 2, 4), (8, 3)], 1, 3),
        ([(3, 8, 4), (3, 5)], 0, 3),
        ([(3, 3, 8), (3, 3)], 1, 3),
        ([(8, 3), (5, 4)], None, None),
    ],
)
def test_scan_axis(shapes, axis, layers):
    seen = look(*((f"{D}/layers/part{number}/kernel", extents) for number, extents in enumerate(shapes)))
    assert seen.groups == {f"{D}/layers": (axis, layers)}


class Stored:
    """What `hosts` asks of a reader."""

    def __init__(self, arrays, keys):

        self.location = locate("/nowhere")
        self.arrays = arrays
        self.listing = Listing(self.location, {key: Value(4, None) for key in keys})


def stored(name, extents, chunks):

    metadata = build_metadata("float32", extents, chunks, version=2, compression="none")
    return StoredArray(name, zarr.parse(json.dumps(metadata).encode(), 2, name))


@pytest.mark.parametrize(
    ("present", "words"), [(2, "1 of 4 hosts"), (4, "1 of 2 hosts"), (6, "3 of 4 hosts")]
)
def test_shares_of_several_devices_each(present, words):
    sharding = Sharding(mesh=(("data", 4), ("model", 2)), spec=(("data", "model"), None))
    arrays = {(name,): stored(name, (8_000_000_000, 8), (1_000_000_000, 8)) for name in ("a", "b")}
    keys = [f"{name}/{index}.0" for name in ("a", "b") for index in range(present)]
    said = shortfall.shortfall(Stored(arrays, keys), dict.fromkeys(arrays, sharding))
    assert said.startswith(words)
    assert f"{present * 64} of 512 GB present" in said


def test_a_replicated_array_is_one_devices_work():
    sharding = Sharding(mesh=(("data", 2),), spec=(None,))
    arrays = {("a",): stored("a", (8,), (8,)), ("b",): stored("b", (8,), (8,))}
    said = shortfall.shortfall(Stored(arrays, ["a/0"]), dict.fromkeys(arrays, sharding))
    assert "hosts" not in said
    assert "32 of 64 bytes present, 1 of 2 chunks" in said


def two_processes(folder):
    """An item that two processes wrote and Orbax merged, made with tensorstore: each wrote one of the arrays."""

    item = folder / "0" / "items"
    paths = [("params", "params", "decoder", "layers", part, "kernel") for part in ("wi", "wo")]
    using, top = kvstore.context(), kvstore.store_spec(locate(item), ocdbt=True, writable=True)
    item.mkdir(parents=True)
    for process, path in enumerate(paths):
        own = locate(item / f"ocdbt.process_{process}")
        (item / own.name).mkdir()
        spec = kvstore.store_spec(own, ocdbt=True, writable=True)
        metadata = build_metadata("float32", (64, 3, 64), (64, 3, 64), version=2, compression="none")
        data = ts.open(
            kvstore.array_spec(spec, ".".join(path), 2, metadata), create=True, context=using
        ).result()
        data.write(np.full((64, 3, 64), process + 1, "f4")).result()
        source, target = (kvstore.open_store(one, using, str(item)) for one in (spec, top))
        source.experimental_copy_range_to(target).result()
    manifest = Manifest(tensors={path: TensorSpec(path, (64, 3, 64), "float32") for path in paths})
    (item / "_METADATA").write_text(json.dumps(tree_json(manifest, zarr3=False, ocdbt=True, custom={})))
    return item


def test_the_share_of_a_lost_process_is_said_in_words(tmp_path):
    item = two_processes(tmp_path)
    found = wherry.detect(tmp_path / "0")
    assert (found.format, found.verdict) == ("maxtext", "ok")
    shutil.rmtree(item / "ocdbt.process_1")
    reason = wherry.detect(tmp_path / "0").reason
    assert reason.startswith("1 of 2 hosts, 49.15 of 98.30 kB present, 1 of 2 chunks, 1 of 2 arrays")
