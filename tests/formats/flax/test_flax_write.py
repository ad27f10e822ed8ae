"""What we write as flax msgpack, read by flax itself; and what flax cannot hold, refused before a byte is written."""

from __future__ import annotations

import os
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import wherry
from tests.support.formats import (
    assert_as_expected,
    canonical,
    cases,
    copy,
    create,
    expected,
    opened,
    place,
    write_all,
)
from wherry.core import dtypes
from wherry.core.manifest import Manifest
from wherry.core.tensorspec import Span, TensorSpec
from wherry.errors import UnrepresentableError, UsageError, WherryError
from wherry.formats.registry import checked_options, find_format
from wherry.integrations.containers.msgpack import layout
from wherry.integrations.containers.msgpack.contents import SCALAR_TAG
from wherry.testing import samples, writers

serialization = pytest.importorskip("flax.serialization", reason="flax is not installed")
ROW = find_format("flax-msgpack")


def restored(path):
    return serialization.msgpack_restore(path.read_bytes())


def at(tree, path):
    for part in path:
        tree = tree[part]
    return tree


def written(folder, sample):
    staging = writers.staging_place(folder)
    writer = writers.start(sample, staging)
    writers.write_pieces(writer, writers.repeat_parts(samples.pieces(sample)))
    writer.finish()
    writer.close()
    return Path(staging.path)


def test_flax_restores_every_dtype_bit_equal(tmp_path):
    sample = samples.sample(ROW, large=False)
    tree = restored(written(tmp_path, sample))
    for path, data in sample.contents.items():
        spec, found = sample.manifest.tensors[path], at(tree, path)
        assert (found.shape, found.dtype) == (spec.shape, dtypes.numpy_dtype(spec.dtype)), path
        assert found.tobytes() == data, path
    for path, value in sample.manifest.values.items():
        assert at(tree, path) == value
        assert type(at(tree, path)) is type(value)
    for path, kind in sample.manifest.empties.items():
        assert at(tree, path) == (None if kind == "none" else {})
    assert set(tree["blocks"]) == {str(number) for number in range(len(tree["blocks"]))}


def test_chunks_are_cut_as_flax_cuts_them(tmp_path, monkeypatch):
    monkeypatch.setattr(layout, "CHUNK_LIMIT", 1000)
    monkeypatch.setattr(serialization, "MAX_CHUNK_SIZE", 1000)
    sample = samples.sample(ROW, large=False)
    big = {
        ("big", name): TensorSpec(("big", name), shape, name)
        for name, shape in (
            ("float32", (11, 50)),
            ("int8", (1001,)),
            ("complex128", (5, 5, 5)),
            ("uint8", (1000,)),
        )
    }
    generator = random.Random(7)
    contents = {path: samples.random_bytes(spec, generator) for path, spec in big.items()}
    sample = replace(
        sample,
        manifest=replace(sample.manifest, tensors={**sample.manifest.tensors, **big}),
        contents={**sample.contents, **contents},
    )
    for check in (writers.check_writer, writers.check_kill_between):
        folder = tmp_path / check.__name__
        folder.mkdir()
        check(sample, folder)
    tree = restored(Path(writers.staging_place(folder).path))
    for path, data in contents.items():
        assert at(tree, path).tobytes() == data
        assert at(tree, path).shape == big[path].shape
    arrays = {name: at(tree, path) for path in contents for name in path[1:]}
    tree = Manifest(tensors={path[1:]: replace(big[path], path=path[1:]) for path in contents})
    ours = layout.lay_out({".": tree}).files[0].body
    # One byte of difference for each byte by which the head of our first key is longer.
    assert ours.nbytes == len(serialization.msgpack_serialize(arrays)) + 4


def test_the_limit_is_that_of_flax():
    assert layout.CHUNK_LIMIT == serialization.MAX_CHUNK_SIZE


@pytest.mark.parametrize("size", [(1 << 30) - 4, 1 << 30, (1 << 30) + 4, 5 << 30])
def test_where_flax_would_cut_arrays_of_gigabytes(size):
    spec = TensorSpec(("w",), (size // 4,), "float32")
    file_map = layout.lay_out({".": Manifest(tensors={("w",): spec})})
    chunks = file_map.places(("w",), Span(0, size))
    assert [place.stop - place.start for place in chunks] == [
        min(1 << 30, size - start) for start in range(0, size, 1 << 30)
    ]
    body = file_map.files[0].body
    heads = [body[number] for number in range(len(body)) if not body.tensors[number]]
    assert sum(len(head.data) for head in heads) == body.nbytes - size


@pytest.mark.skipif(
    not cases("flax-msgpack"), reason="the corpus is not here; set WHERRY_CORPUS to its folder"
)
@pytest.mark.parametrize("case", cases("flax-msgpack", "flax-gda"))
def test_the_corpus_written_again(case, tmp_path):
    row = expected(case)
    source = opened(place(case), row["format"])
    copy(source, tmp_path / "checkpoint_5", "flax-msgpack")
    found = opened(tmp_path / "checkpoint_5", "flax-msgpack")
    assert_as_expected(found, row)
    assert found.manifest.values == source.manifest.values
    assert found.manifest.empties == source.manifest.empties
    tree = restored(tmp_path / "checkpoint_5")
    for path in source.manifest.tensors:
        assert np.asarray(at(tree, path)).tobytes() == canonical(source, path)


def test_restore_checkpoint_takes_it_up(tmp_path):
    """A train state goes through us and back into flax's own template, and the run goes on."""
    import jax
    import optax
    from flax import config
    from flax.training import checkpoints, train_state

    def fresh(seed):
        key = jax.random.key(seed)
        params = {"dense": {"kernel": jax.random.normal(key, (3, 4)), "bias": jax.random.normal(key, (4,))}}
        return train_state.TrainState.create(apply_fn=None, params=params, tx=optax.adamw(1e-3))

    with config.temp_flip_flag("use_orbax_checkpointing", False):
        state = fresh(0).apply_gradients(grads=fresh(1).params)
        first = checkpoints.save_checkpoint(tmp_path / "flax", state, 1)
        wherry.convert(first, tmp_path / "run", to="flax-msgpack", into=True, lineage=False)
        assert (tmp_path / "run" / "checkpoint_1").is_file()
        sidecar = tmp_path / "run" / ".checkpoint_1.wherry.json"
        assert sidecar.is_file(), "under any name that begins like a step flax would take it for one"
        assert checkpoints.available_steps(tmp_path / "run") == [1]
        assert wherry.verify(tmp_path / "run" / "checkpoint_1", level="digest").ok
        again = checkpoints.restore_checkpoint(tmp_path / "run", fresh(2))
        assert checkpoints.latest_checkpoint(tmp_path / "run") == str(tmp_path / "run" / "checkpoint_1")
    for read, saved in zip(jax.tree.leaves(again), jax.tree.leaves(state), strict=True):
        assert np.asarray(read).tobytes() == np.asarray(saved).tobytes()
        assert np.asarray(read).dtype == np.asarray(saved).dtype


def test_numpy_scalars_stay_scalars(tmp_path):
    source = tmp_path / "a.msgpack"
    source.write_bytes(serialization.to_bytes({"lr": np.float32(0.5), "w": np.ones((), "f4")}))
    wherry.convert(source, tmp_path / "b.msgpack", to="flax-msgpack", lineage=False)
    tree = restored(tmp_path / "b.msgpack")
    assert isinstance(tree["lr"], np.float32)
    assert isinstance(tree["w"], np.ndarray)
    with wherry.open(tmp_path / "b.msgpack") as found:
        assert found.spec("lr").tags == SCALAR_TAG
        assert found.detection.writer == "wherry (as flax)"


def test_there_and_back_keeps_the_weights(tmp_path):
    source = tmp_path / "a.msgpack"
    tree = {
        "params": {"w": np.arange(12, dtype="f4").reshape(3, 4), "b": np.ones(3, "f2")},
        "step": 3,
        "none": None,
    }
    source.write_bytes(serialization.to_bytes(tree))
    one = wherry.convert(source, tmp_path / "orbax", to="orbax", lineage=False)
    two = wherry.convert(tmp_path / "orbax", tmp_path / "c.msgpack", to="flax-msgpack", lineage=False)
    first, second = wherry.inspect(source, sha256=True), wherry.inspect(tmp_path / "c.msgpack", sha256=True)
    assert first.sha256 == second.sha256
    assert (one, two) != (None, None)


def manifest(tensors=None, **rest):
    return Manifest(
        tensors={spec.path: spec for spec in tensors or [TensorSpec(("w",), (2,), "int8")]}, **rest
    )


@pytest.mark.parametrize(
    "wrong",
    [
        manifest([TensorSpec(("a",), (1,), "int8"), TensorSpec(("a", "b"), (1,), "int8")]),
        manifest(values={("w", "x"): "text"}),
        manifest(values={("w",): "text"}),
        manifest(empties={(): "dict"}),
        manifest(values={("n",): 1 << 64}),
        manifest(values={("n",): -(1 << 63) - 1}),
        manifest(values={("n",): "\ud800"}),
        manifest([TensorSpec(("\ud800",), (1,), "int8")]),
        manifest([TensorSpec(("k" * 70_000,), (1,), "int8")]),
        manifest([TensorSpec(("k",) * 300, (1,), "int8")]),
        manifest([TensorSpec(("__msgpack_chunked_array__", "w"), (1,), "int8")]),
        Manifest(tensors={}, values={(): 7}),
    ],
)
def test_what_flax_cannot_hold_is_refused_before_a_byte(wrong):
    with pytest.raises(UnrepresentableError) as caught:
        ROW.prepare(wrong, checked_options(ROW, {}))
    assert caught.value.exit_code == 7
    assert caught.value.cure


def test_nil_values_are_nil(tmp_path):
    prepared = ROW.prepare(manifest(values={("x",): None}), checked_options(ROW, {}))
    assert (prepared.values, prepared.empties) == ({}, {("x",): "none"})
    write_all(create(tmp_path / "a.msgpack", "flax-msgpack", prepared), {("w",): b"\1\2"})
    assert restored(tmp_path / "a.msgpack")["x"] is None


@pytest.mark.parametrize("empty", ["dict", "list", "tuple"])
def test_roots_without_children(tmp_path, empty):
    write_all(
        create(tmp_path / "checkpoint_1", "flax-msgpack", Manifest(tensors={}, empties={(): empty})), {}
    )
    assert restored(tmp_path / "checkpoint_1") == {}


def test_a_root_that_is_a_list(tmp_path):
    specs = [TensorSpec(("0",), (2,), "int8"), TensorSpec(("1", "a"), (1,), "int8")]
    wanted = manifest(specs, lists=frozenset([()]), values={("1", "n"): 3})
    write_all(create(tmp_path / "checkpoint_1", "flax-msgpack", wanted), {("0",): b"\1\2", ("1", "a"): b"\3"})
    found = opened(tmp_path / "checkpoint_1", "flax-msgpack").manifest
    assert (found.lists, found.values) == (wanted.lists, wanted.values)


def test_a_root_that_is_one_array(tmp_path):
    write_all(
        create(tmp_path / "checkpoint_1", "flax-msgpack", manifest([TensorSpec((), (2,), "int8")])),
        {(): b"\1\2"},
    )
    assert restored(tmp_path / "checkpoint_1").tolist() == [1, 2]
    assert opened(tmp_path / "checkpoint_1", "flax-msgpack").manifest.tensors[()].shape == (2,)


@pytest.mark.parametrize("where", [Span(0, 3), Span(1, 2), Span(3, 1), (slice(0, 2),)])
def test_spans_that_do_not_fit(tmp_path, where):
    writer = create(tmp_path / "a.msgpack", "flax-msgpack", manifest())
    try:
        with pytest.raises(UsageError):
            writer.write(("w",), where, memoryview(b"\1\2\3" if where == Span(0, 3) else b"\1\2"))
    finally:
        writer.close()


def test_a_name_of_a_run_is_never_the_newest_by_accident(tmp_path):
    """flax's `overwrite=True` deletes what is newer; `--into` never touches its neighbours."""
    for step in (3, 12):
        (tmp_path / "run").mkdir(exist_ok=True)
        (tmp_path / "run" / f"checkpoint_{step}").write_bytes(
            serialization.to_bytes({"w": np.ones(step, "f4")})
        )
    before = {name: (tmp_path / "run" / name).read_bytes() for name in os.listdir(tmp_path / "run")}
    source = tmp_path / "checkpoint_7"
    source.write_bytes(serialization.to_bytes({"w": np.ones(7, "f4")}))
    wherry.convert(source, tmp_path / "run", to="flax-msgpack", into=True, lineage=False)
    for name, data in before.items():
        assert (tmp_path / "run" / name).read_bytes() == data
    with pytest.raises(WherryError) as caught:
        (tmp_path / "run" / "checkpoint_7").write_bytes(b"foreign")
        wherry.convert(source, tmp_path / "run", to="flax-msgpack", into=True, lineage=False)
    assert caught.value.exit_code == 8
