"""Flax files of every generation: the corpus, what flax writes here, the multi-process variant, and damage to them."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

import wherry
from tests.support.formats import CORPUS, assert_as_expected, cases, expected, opened, place
from wherry.errors import CorruptError, WherryError

FLAX = ("flax-msgpack", "flax-gda")
OK = cases(*FLAX)
DAMAGED = cases(*FLAX, verdicts=("corrupt", "incomplete", "malicious", "unsupported"))
needs_corpus = pytest.mark.skipif(not OK, reason="the corpus is not here; set WHERRY_CORPUS to its folder")
serialization = pytest.importorskip("flax.serialization", reason="flax is not installed")


@needs_corpus
@pytest.mark.parametrize("case", OK)
def test_contents_of_the_corpus(case):
    row = expected(case)
    found = opened(place(case), row["format"])
    assert_as_expected(found, row)
    assert found.manifest.step == row["step"]
    assert found.manifest.kind == row["kind"]


@needs_corpus
@pytest.mark.parametrize("case", [*OK, *DAMAGED])
def test_detection_of_the_corpus(case):
    row = expected(case)
    for uri in (row["uri"], *row.get("alternative_uris", ())):
        found = wherry.detect(CORPUS / case / "checkpoint" / uri)
        assert found.verdict in {row["verdict"], *row.get("accepted_verdicts", ())}, found.reason
        assert found.format in {row["format"], *row.get("format_accepts", ())}
        assert found.step == row["step"]
        assert found.evidence
        assert found.reason if found.verdict != "ok" else found.kind == row["kind"]


DISCOVERY = [case for case in (*OK, *DAMAGED) if "discovery" in expected(case)]


@needs_corpus
@pytest.mark.parametrize("case", DISCOVERY)
def test_runs_of_files(case):
    row = expected(case)
    run = CORPUS / case / "checkpoint" / row["discovery"]["uri"]
    steps = [one.step for one in wherry.discover(run, on_skip=lambda _skipped: None)]
    assert sorted(steps) == row["discovery"]["steps"]
    assert wherry.detect(run).step == row["discovery"]["latest"]
    first = row["discovery"]["steps"][0]
    assert wherry.detect(run, step=first).step == first


@needs_corpus
@pytest.mark.parametrize("case", DAMAGED)
def test_damage_ends_a_conversion(case, tmp_path):
    with pytest.raises(WherryError) as caught:
        wherry.convert(place(case), tmp_path / "out", to="orbax", lineage=False)
    assert caught.value.exit_code == 5
    assert not (tmp_path / "out").exists()


@needs_corpus
def test_texts_nil_and_empties():
    found = opened(place("flax-msgpack-step3"), "flax-msgpack")
    assert found.manifest.values == {("s",): "hello"}
    assert found.manifest.empties == {("none",): "none", ("empty",): "dict"}


def save(folder, tree, step=3, **options):
    import jax
    from flax import config
    from flax.training import checkpoints

    del jax
    with config.temp_flip_flag("use_orbax_checkpointing", False):
        return checkpoints.save_checkpoint(folder, tree, step, overwrite=True, keep=9, **options)


def contents(path):
    with wherry.open(path) as found:
        return {key: found.read(key) for key in found.manifest.tensors}, found.manifest, found.detection


@pytest.mark.parametrize(
    ("prefix", "step", "wanted"),
    [("checkpoint_", 3, 3), ("checkpoint_", 2.5, None), ("model_", 12, 12), ("checkpoint_", 4.0, 4)],
)
def test_names_of_steps(tmp_path, prefix, step, wanted):
    path = save(tmp_path, {"w": np.ones(3, "f4")}, step, prefix=prefix)
    found = wherry.detect(path)
    assert (found.format, found.verdict, found.step) == ("flax-msgpack", "ok", wanted)


def test_the_step_is_taken_from_the_tree_where_the_name_has_none(tmp_path):
    place = tmp_path / "state.msgpack"
    place.write_bytes(serialization.to_bytes({"step": np.int32(40), "params": {"w": np.ones(3, "f4")}}))
    assert wherry.detect(place).step == 40


def test_name_and_tree_may_disagree(tmp_path):
    path = save(tmp_path, {"step": 9, "w": np.ones(3, "f4")}, 4)
    found = wherry.detect(path)
    assert found.step == 4
    assert any("step 4 in the name, step 9 in the tree" in one.seen for one in found.evidence)


def test_a_real_train_state(tmp_path):
    """Boxes, an optimizer, scalars of numpy and of Python: as flax restores it."""
    import flax.linen as nn
    import jax
    import optax
    from flax.training import train_state

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            init = nn.with_logical_partitioning(nn.initializers.normal(), ("embed", "mlp"))
            return nn.Dense(4, kernel_init=init)(x)

    model = Model()
    params = model.init(jax.random.key(0), np.ones((1, 3), "f4"))["params"]
    state = train_state.TrainState.create(apply_fn=model.apply, params=params, tx=optax.adamw(1e-3))
    path = save(tmp_path, state, 5)
    tensors, manifest, detection = contents(path)
    tree = serialization.msgpack_restore(Path(path).read_bytes())
    assert manifest.kind == detection.kind == "train-state"
    assert ("params", "Dense_0", "kernel", "value") in tensors
    assert any("linen box" in one.seen for one in detection.evidence)
    for key, data in tensors.items():
        node = tree
        for part in key:
            node = node[part]
        np.testing.assert_array_equal(np.asarray(node), data)
    assert sum(len(k) > 0 for k in tensors) == len(jax.tree.leaves(tree))


@pytest.mark.parametrize("box", ["value", "raw_value"])
def test_nnx_variables_are_seen(tmp_path, box):
    place = tmp_path / "state.msgpack"
    place.write_bytes(serialization.to_bytes({"a": {"kernel": {box: np.ones(3, "f4")}}}))
    found = wherry.detect(place)
    assert any(f"`{box}`" in one.seen and "NNX" in one.seen for one in found.evidence)


def test_a_parameter_that_is_called_value_is_no_box(tmp_path):
    place = tmp_path / "state.msgpack"
    place.write_bytes(serialization.to_bytes({"a": {"value": np.ones(3, "f4"), "query": np.ones(3, "f4")}}))
    assert not any("`value`" in one.seen for one in wherry.detect(place).evidence)


def test_chunked_arrays_of_flax(tmp_path, monkeypatch):
    monkeypatch.setattr(serialization, "MAX_CHUNK_SIZE", 1000)
    array = np.arange(3 * 7 * 50, dtype="f4").reshape(3, 7, 50)
    path = save(tmp_path, {"w": array, "small": np.ones(2, "i8")})
    with wherry.open(path) as found:
        spec = found.spec(("w",))
        assert len(found.reader.access(spec).extents) == 5
        np.testing.assert_array_equal(found.read(("w",)), array)
        np.testing.assert_array_equal(
            found.read(("w",), (slice(1, 3), slice(2, 6), slice(11, 45))), array[1:3, 2:6, 11:45]
        )
    receipt = wherry.convert(path, tmp_path / "out", to="orbax", lineage=False)
    assert receipt is not None
    with wherry.open(tmp_path / "out") as found:
        np.testing.assert_array_equal(found.read(("w",)), array)


def test_a_single_array_is_a_checkpoint_too(tmp_path):
    path = save(tmp_path, np.arange(3000, dtype="f4"), 1)
    tensors, _, detection = contents(path)
    assert detection.format == "flax-msgpack"
    np.testing.assert_array_equal(tensors[()], np.arange(3000, dtype="f4"))


def test_a_file_that_flax_has_not_renamed_yet(tmp_path):
    path = save(tmp_path / "run", {"w": np.ones(3, "f4")})
    shutil.move(path, tmp_path / "run" / "checkpoint_tmp")
    found = wherry.detect(tmp_path / "run" / "checkpoint_tmp")
    assert (found.verdict, found.format) == ("incomplete", "flax-msgpack")


@pytest.mark.parametrize("keep", [10, 100, -1])
def test_every_cut_is_corrupt(tmp_path, keep):
    path = save(tmp_path, {"params": {"w": np.ones((20, 30), "f4")}})
    data = Path(path).read_bytes()
    Path(path).write_bytes(data[:keep])
    found = wherry.detect(path)
    assert (found.verdict, found.format) == ("corrupt", "flax-msgpack")


def test_tensorflow_state_files_and_pickles_are_not_flax(tmp_path):
    for name, data in {
        "checkpoint": b'model_checkpoint_path: "model.ckpt-1"\n',
        "checkpoint_7": b"\x80\x02}q\x00X\x01\x00\x00\x00aq\x01K\x01s.",
        "data_3": b"\x83\xa4" + bytes(range(200)),
        "config.msgpack": b"\x81\xa4name\xa3abc",
    }.items():
        (tmp_path / name).write_bytes(data)
        assert wherry.detect(tmp_path / name).format != "flax-msgpack", name


def test_a_large_tree_is_opened_in_seconds_of_a_processor(tmp_path):
    import time

    tree = {str(n): {"w": np.ones(4, "f4"), "b": np.ones((), "i4")} for n in range(20_000)}
    place = tmp_path / "many.msgpack"
    place.write_bytes(serialization.msgpack_serialize(tree))
    start = time.process_time()
    with wherry.open(place) as found:
        assert len(found.manifest.tensors) == 40_000
    assert time.process_time() - start < 20


def test_corrupt_trees_are_errors_of_ours(tmp_path):
    place = tmp_path / "checkpoint_1"
    good = serialization.msgpack_serialize({"a": np.ones(4, "f4")})
    place.write_bytes(good.replace(b"\xa7float32", b"\xa7floatXX"))
    assert wherry.detect(place).verdict == "unsupported"
    place.write_bytes(good.replace(b"\x91\x04", b"\x91\x05"))
    with pytest.raises(CorruptError):
        wherry.open(place)


@needs_corpus
def test_the_flat_hash_that_inspect_prints():
    row = json.loads((CORPUS / "flax-gda" / "expected.json").read_text())
    found = wherry.inspect(place("flax-gda"), sha256=True)
    assert found.sha256 == {tuple(one["path"]): one["sha256"] for one in row["tensors"]}
    assert hashlib.sha256(b"").hexdigest() not in found.sha256.values()


def test_files_that_are_named_by_a_metric_are_listed(tmp_path):
    for value in (-10.5, -1.5):
        (tmp_path / f"checkpoint_{value}").write_bytes(
            serialization.to_bytes({"params": {"w": np.full(3, value)}})
        )
    found = wherry.detect(tmp_path)
    assert found.verdict == "not-a-checkpoint"
    for value in (-10.5, -1.5):
        assert f"{tmp_path}/checkpoint_{value}" in found.cure
        assert wherry.detect(tmp_path / f"checkpoint_{value}").verdict == "ok"
