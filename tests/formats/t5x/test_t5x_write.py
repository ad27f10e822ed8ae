"""What we write as T5X is read by T5X's contract (flax, tensorstore) and, in the Orbax form, by Orbax itself."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import serialization, traverse_util

import wherry
from tests.support import t5x
from wherry.core.manifest import Manifest
from wherry.core.tensorspec import TensorSpec
from wherry.errors import IncompleteError, TargetExistsError, UnrepresentableError, UsageError
from wherry.formats.registry import checked_options, find_format
from wherry.testing import samples, writers

EMPTIES = {"state/param_states/untouched": None, "flax_mutables/empty": {}}


def convert(source, target, to, **options):
    wherry.convert(source, target, to=to, options=options, lineage=False)
    return target


def wanted() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    return t5x.arrays() | {
        "target/big/kernel": rng.standard_normal((700, 900)).astype(np.float32),
        "state/param_states/big/kernel/v_col": rng.standard_normal((200, 100)).astype(np.float32),
    }


@pytest.fixture
def source(tmp_path):
    folder = t5x.save(tmp_path / "source" / "checkpoint_7", wanted(), extra=EMPTIES)
    (folder / "train_ds-000-of-001.index").write_bytes(b"iterator")
    return folder


OPTIONS = [
    {},
    {"compression": "gzip"},
    {"compression": "zstd"},
    {"inline": "none"},
    {"inline": "all"},
    {"chunks": "1"},
    {"chunks": "whole", "compression": "gzip", "inline": "none"},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_t5x_reads_the_legacy_form(source, tmp_path, options):
    folder = convert(source, tmp_path / "checkpoint_7", "t5x-legacy", **options)
    found = t5x.load(folder)
    assert found.pop("state/param_states/untouched") is None
    assert found.pop("flax_mutables/empty") == traverse_util.empty_node
    t5x.assert_same(found, wanted())
    assert (folder / "train_ds-000-of-001.index").read_bytes() == b"iterator"
    stored = {file.parent.name: json.loads(file.read_text()) for file in folder.rglob(".zarray")}
    if options.get("inline") == "all":
        assert not stored
        return
    assert "target.big.kernel" in stored
    assert ("state.param_states.encoder.mlp.wi.kernel.v_row" in stored) == (options.get("inline") == "none")
    assert "state.param_states.big.kernel.v_col" in stored  # more than 64 KiB
    kind = options.get("compression", "none")
    compressors = {json.dumps(one["compressor"]) for one in stored.values()}
    assert compressors == ({"null"} if kind == "none" else {json.dumps({"id": kind, "level": 1})})


def test_the_envelope_is_as_t5x_writes_it(source, tmp_path):
    folder = convert(source, tmp_path / "checkpoint_7", "t5x-legacy", compression="gzip")
    content = serialization.msgpack_restore((folder / "checkpoint").read_bytes())
    assert list(content) == ["version", "optimizer"]
    assert content["version"] == 3
    assert content["optimizer"]["target"]["big"]["kernel"] == {
        "driver": "zarr",
        "dtype": "float32",
        "kvstore": {"driver": "file", "path": "target.big.kernel/"},
        "metadata": {"chunks": [700, 900], "compressor": {"id": "gzip", "level": 1}, "shape": [700, 900]},
    }
    found = wherry.detect(folder)
    assert (found.format, found.format_version) == ("t5x-legacy", "t5x v3, zarr2 directories")
    assert found.writer == "wherry (as t5x)"


def restored(tree) -> dict[str, np.ndarray]:
    flat = traverse_util.flatten_dict(tree, sep="/")
    return {name: np.asarray(leaf) for name, leaf in flat.items() if leaf is not None}


@pytest.mark.parametrize("options", [{}, {"ocdbt": False}, {"compression": "zstd"}, {"chunks": "1"}], ids=str)
def test_orbax_restores_the_orbax_form(source, tmp_path, options):
    folder = convert(source, tmp_path / "run" / "checkpoint_7", "t5x-orbax", **options)
    t5x.assert_same(restored(ocp.PyTreeCheckpointer().restore(folder / "state")), wanted())
    t5x.assert_same(restored(ocp.StandardCheckpointer().restore(folder / "state")), wanted())
    manager = ocp.CheckpointManager(
        tmp_path / "run",
        options=ocp.CheckpointManagerOptions(step_prefix="checkpoint", read_only=True),
        item_handlers={"state": ocp.PyTreeCheckpointHandler()},
    )
    assert manager.latest_step() == 7
    found = manager.restore(7, args=ocp.args.Composite(state=ocp.args.PyTreeRestore()))
    manager.close()
    t5x.assert_same(restored(found["state"]), wanted())
    handlers = json.loads((folder / "_CHECKPOINT_METADATA").read_text())["item_handlers"]
    assert handlers["dataset"] == "t5x.checkpoints.DatasetCheckpointHandler"
    assert (folder / "train_ds-000-of-001.index").read_bytes() == b"iterator"


def test_every_path_leads_to_the_orbax_form(source, tmp_path):
    folder = convert(source, tmp_path / "run" / "checkpoint_7", "t5x-orbax")
    for uri in (tmp_path / "run", folder, folder / "state"):
        found = wherry.detect(uri)
        assert (found.uri, found.format, found.step, found.kind) == (
            str(folder),
            "t5x-orbax",
            7,
            "train-state",
        )
    with pytest.raises(TargetExistsError):
        wherry.convert(source, folder, to="t5x-orbax", lineage=False, if_exists="fail")
    again = wherry.convert(source, folder, to="t5x-orbax", lineage=False)
    assert again.already


@pytest.mark.parametrize("between", ["t5x-orbax", "orbax", "flax-msgpack"])
def test_there_and_back(source, tmp_path, between):
    ignore = ("companions",) if between == "flax-msgpack" else ()
    there = tmp_path / "there"
    first = wherry.convert(source, there, to=between, lineage=False, ignore=ignore)
    back = wherry.convert(there, tmp_path / "back", to="t5x-legacy", lineage=False)
    assert first.source.weights_digest == back.target.weights_digest
    with wherry.open(source) as one, wherry.open(tmp_path / "back") as two:
        assert (one.manifest.values, one.manifest.empties) == (two.manifest.values, two.manifest.empties)
    assert wherry.verify(tmp_path / "back", level="digest").ok


def test_orbax_writes_it_and_we_read_it(tmp_path):
    tree = traverse_util.unflatten_dict(wanted(), sep="/")
    for number, ocdbt in enumerate((True, False)):
        item = tmp_path / str(number) / "checkpoint_7" / "state"
        ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=ocdbt)).save(item, tree)
        with wherry.open(item.parent) as found:
            assert found.detection.format == "t5x-orbax"
            seen = {"/".join(path): found.read(path) for path in found.manifest.tensors}
        t5x.assert_same(seen, wanted())


@pytest.mark.parametrize("dot_files", [True, False])
def test_parameters_without_the_state(tmp_path, dot_files):
    """The era of placeholders: msgpack without a version, in the item `state`; T5X itself refuses it (#1524)."""
    home = tmp_path / "run" / "checkpoint_7"
    item = t5x.save(home / "state", wanted(), version=None, placeholders=True)
    uris = (tmp_path / "run", home, item, item / "checkpoint")
    assert {wherry.detect(uri).uri for uri in uris} == {str(home)}
    with wherry.open(item / "checkpoint") as found:
        assert (found.detection.format, found.manifest.step) == ("t5x-orbax", 7)
        t5x.assert_same({"/".join(path): found.read(path) for path in found.manifest.tensors}, wanted())
    for folder in item.glob("state.*"):
        shutil.rmtree(folder) if not dot_files else (folder / "0").unlink(missing_ok=True)
    for uri in uris:
        found = wherry.detect(uri)
        assert (found.verdict, "state/param_states/decoder/norm/scale/v" in found.reason) == (
            "incomplete",
            True,
        )
        with wherry.open(uri) as opened:
            kernel = opened.read("target/big/kernel")
        assert (kernel == wanted()["target/big/kernel"]).all()
    with pytest.raises(IncompleteError):
        wherry.convert(home, tmp_path / "all", to="t5x-legacy", lineage=False)
    wherry.convert(home, tmp_path / "params", to="t5x-legacy", only="params", lineage=False)
    t5x.assert_same(
        t5x.load(tmp_path / "params"), {k: v for k, v in wanted().items() if k.startswith("target/")}
    )
    shutil.rmtree(item / "target.decoder.norm.scale")
    with pytest.raises(IncompleteError):
        wherry.convert(home, tmp_path / "none", to="t5x-legacy", only="params", lineage=False)


@pytest.mark.parametrize("form", ["t5x-legacy", "t5x-orbax"])
def test_the_name_states_the_true_step(source, tmp_path, form):
    with pytest.raises(UsageError, match="step mismatch: 8 in"):
        convert(source, tmp_path / "checkpoint_8", form)
    assert not (tmp_path / "checkpoint_8").exists()
    wherry.convert(source, tmp_path / "run", to=form, into=True, lineage=False)
    assert wherry.detect(tmp_path / "run").uri == str(tmp_path / "run" / "checkpoint_7")


@pytest.mark.parametrize("inline", ["none", "all"])
def test_every_dtype_is_read_by_flax_and_tensorstore(tmp_path, inline):
    sample = samples.sample(find_format("t5x-legacy"), {"inline": inline}, large=False)
    place = writers.staging_place(tmp_path)
    writer = writers.start(sample, place)
    writers.write_pieces(writer, samples.pieces(sample))
    writers.finish_twice(writer)
    content = serialization.msgpack_restore((Path(place.path) / "checkpoint").read_bytes())
    for path, spec in sample.manifest.tensors.items():
        leaf = content["optimizer"]
        for part in path:
            leaf = leaf[part]
        array = t5x.read_leaf(Path(place.path), leaf)
        assert (array.dtype.name, array.shape) == (spec.dtype, spec.shape), path
        assert array.tobytes() == sample.contents[path], path


@pytest.mark.parametrize(
    "paths",
    [[("a", "b"), ("a.b",)], [("a/b",), ("a", "b")], [("x" * 300,)], [("checkpoint",)], [("..",)]],
    ids=str,
)
def test_names_that_t5x_would_lose_are_refused(paths):
    row = find_format("t5x-legacy")
    specs = {path: TensorSpec(path, (4,), "float32") for path in paths}
    options = checked_options(row, {"inline": "none"})
    with pytest.raises(UnrepresentableError):
        row.prepare(Manifest(tensors=specs), options)
    row.prepare(Manifest(tensors=specs), checked_options(row, {"inline": "all"}))
