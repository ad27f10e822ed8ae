"""Flax files of every generation: what flax writes here, arrays next to the file, and damage to them."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

import wherry
from tests.support.formats import CORPUS, cases, opened, place
from wherry.errors import CorruptError, HostileError, IncompleteError

FLAX = ("flax-msgpack", "flax-gda")
OK = cases(*FLAX)
needs_corpus = pytest.mark.skipif(not OK, reason="the corpus is not here; set WHERRY_CORPUS to its folder")
serialization = pytest.importorskip("flax.serialization", reason="flax is not installed")


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


# The multi-process variant of flax checkpoints: zarr arrays next to the file, made here as flax 0.7 lays
# them out.


def save_with_arrays(folder, arrays, inline, name="checkpoint_7", **zarr):
    import tensorstore

    tree: dict = dict(inline)
    for path, array in arrays.items():
        node = tree
        *above, last = path.split("/") if path else [""]
        for part in above:
            node = node.setdefault(part, {})
        node[last] = f"//GDAPlaceholder:{path}"
        spec = {
            "driver": "zarr",
            "kvstore": {"driver": "file", "path": str(folder / f"{name}_gda" / path)},
            "metadata": {
                "shape": array.shape,
                "dtype": array.dtype.str,
                "chunks": [max(n // 2, 1) for n in array.shape],
                "compressor": {"id": "gzip"},
                **zarr,
            },
        }
        tensorstore.open(spec, create=True, open=True).result().write(array).result()
    (folder / name).write_bytes(serialization.msgpack_serialize(tree[""] if "" in arrays else tree))
    return folder / name


ARRAYS = {
    "params/dense/kernel": np.arange(48, dtype="<f4").reshape(8, 6) + 1,
    "params/dense/bias": np.arange(1, 9),
}


def test_arrays_next_to_the_file(tmp_path):
    path = save_with_arrays(tmp_path, ARRAYS, {"step": 7, "host": np.ones(5)})
    tensors, manifest, detection = contents(path)
    assert (detection.format, detection.step, manifest.values) == ("flax-gda", 7, {})
    np.testing.assert_array_equal(tensors["params", "dense", "kernel"], ARRAYS["params/dense/kernel"])
    np.testing.assert_array_equal(tensors["params", "dense", "bias"], ARRAYS["params/dense/bias"])
    np.testing.assert_array_equal(tensors["host",], np.ones(5))
    wherry.convert(path, tmp_path / "out", to="orbax", lineage=False)
    with wherry.open(tmp_path / "out") as found:
        np.testing.assert_array_equal(
            found.read(("params", "dense", "kernel")), ARRAYS["params/dense/kernel"]
        )


def test_a_root_that_is_one_array_next_to_the_file(tmp_path):
    tensors, _, detection = contents(save_with_arrays(tmp_path, {"": np.arange(1, 7.0)}, {}))
    assert detection.format == "flax-gda"
    np.testing.assert_array_equal(tensors[()], np.arange(1, 7.0))


def test_a_placeholder_that_lies_far_into_the_file(tmp_path):
    path = save_with_arrays(tmp_path, {"z": np.ones(4)}, {"big": np.ones(5000)})
    assert wherry.detect(path).format == "flax-gda"


def test_a_missing_chunk_is_named(tmp_path):
    path = save_with_arrays(tmp_path, ARRAYS, {})
    (tmp_path / "checkpoint_7_gda/params/dense/kernel/1.0").unlink()
    found = wherry.detect(path)
    assert found.verdict == "incomplete"
    assert "1.0" in found.reason
    assert "params/dense/kernel" in found.reason


@pytest.mark.parametrize("lost", ["", "params/dense/bias", "params/dense/bias/.zarray"])
def test_missing_arrays_are_incomplete(tmp_path, lost):
    path = save_with_arrays(tmp_path, ARRAYS, {})
    gone = tmp_path / "checkpoint_7_gda" / lost
    gone.unlink() if gone.is_file() else shutil.rmtree(gone)
    assert wherry.detect(path).verdict == "incomplete"
    with pytest.raises(IncompleteError):
        wherry.open(path)


@pytest.mark.parametrize("outside", ["../other", "/etc", "a/../../b"])
def test_placeholders_stay_in_their_folder(tmp_path, outside):
    path = save_with_arrays(tmp_path, ARRAYS, {"x": f"//GDAPlaceholder:{outside}"})
    with pytest.raises(HostileError):
        wherry.open(path)
    assert wherry.detect(path).verdict == "malicious"


def test_the_folder_of_arrays_alone_says_where_to_look(tmp_path):
    save_with_arrays(tmp_path, ARRAYS, {})
    found = wherry.detect(tmp_path / "checkpoint_7_gda")
    assert found.verdict == "incomplete"
    assert "../checkpoint_7" in found.reason
    assert [one.uri for one in wherry.discover(tmp_path)] == [str(tmp_path / "checkpoint_7")]


def test_arrays_whose_file_was_never_renamed(tmp_path):
    save_with_arrays(tmp_path, ARRAYS, {}).rename(tmp_path / "checkpoint_tmp")
    assert wherry.detect(tmp_path / "checkpoint_7_gda").verdict == "incomplete"
    skipped = []
    assert list(wherry.discover(tmp_path, on_skip=skipped.append)) == []
    assert len(skipped) == 2


def test_a_change_of_the_arrays_changes_the_fingerprint(tmp_path):
    path = save_with_arrays(tmp_path, ARRAYS, {})
    found = opened(path, "flax-gda")
    names = {entry.name for entry in found.reader.members()}
    assert {"checkpoint_7", "checkpoint_7_gda/params/dense/kernel/0.0"} <= names


def test_a_step_of_a_run_of_files(tmp_path):
    for step in (3, 12):
        save(tmp_path, {"w": np.ones(3, "f4")}, step)
    assert wherry.detect(tmp_path).step == 12
    assert wherry.detect(tmp_path, step=3).step == 3
