"""MaxText: the corpus, which trees are its own, and Orbax restoring what we write."""

from __future__ import annotations

import json
import shutil

import jax
import numpy as np
import orbax.checkpoint as ocp
import orbax.checkpoint.experimental.v1 as ocp1
import pytest

import wherry
from tests.support.formats import CORPUS, cases, expected, opened, place
from tests.support.formats import assert_as_expected as as_expected
from wherry.errors import UnrepresentableError
from wherry.mover.read import read_array

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


@pytest.mark.parametrize("case", cases("maxtext"))
def test_contents(case):
    found = opened(place(case), "maxtext")
    as_expected(found, expected(case))
    assert found.manifest.custom["maxtext"]["scan_layers"] is expected(case)["scan_layers"]
    found.reader.close()


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
