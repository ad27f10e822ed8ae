"""Databases and bundles of other software: OCDBT and TensorFlow."""

from __future__ import annotations

import fsspec
import numpy as np
import pytest

import wherry
from tests.support import tf_bundle
from tests.support.ocdbt import write
from tests.support.orbax import copied, needs_corpus
from wherry.core.request import SourceRequest
from wherry.errors import CorruptError, DamagedError, IncompleteError
from wherry.testing import readers

ARRAYS = {
    "model/embeddings/weight": np.arange(24, dtype=np.float32).reshape(6, 4) + 1,
    "model/layers/0/w": np.full((3, 5), 7, np.int32),
    "opt_state/mu/model/embeddings/weight": np.full((6, 4), 2, np.float32),
}


@pytest.mark.parametrize("driver", ["zarr3", "zarr"])
@pytest.mark.parametrize("name", ["step-1000", "model", "anything", "state"])
def test_arrays_have_the_names_in_the_database(tmp_path, name, driver):
    place = write(tmp_path / "run" / name, ARRAYS, driver)
    (place / "metadata.json").write_text('{"step": 1000}')
    found = wherry.detect(place)
    assert (found.verdict, found.format, found.step) == ("ok", "ocdbt", 1000 if name == "step-1000" else None)
    with wherry.open(place) as checkpoint:
        assert {"/".join(path) for path in checkpoint} == set(ARRAYS)
        for path, array in ARRAYS.items():
            np.testing.assert_array_equal(checkpoint.read(tuple(path.split("/"))), array)
    wherry.convert(place, tmp_path / "out", to="orbax")
    assert wherry.verify(tmp_path / "out", level="roundtrip", against=place).ok


def test_the_contract_of_readers(tmp_path):
    from wherry.formats.detect import resolve_source
    from wherry.formats.registry import find_format

    location, found = resolve_source(SourceRequest(str(write(tmp_path / "a", ARRAYS))))
    readers.check_reader(find_format("ocdbt").open(location, found), regions=3)


def test_the_newest_step_of_a_run_is_taken(tmp_path):
    for step in (5, 60):
        write(tmp_path / f"step-{step}", ARRAYS)
    assert wherry.detect(tmp_path).step == 60
    assert [one.step for one in wherry.discover(tmp_path)] == [5, 60]


def test_damage(tmp_path):
    place = write(tmp_path / "a", {"w": np.arange(40_000, dtype=np.float32)})
    for file in (place / "d").iterdir():
        file.write_bytes(file.read_bytes()[:100])
    assert wherry.detect(place).verdict in ("incomplete", "corrupt")
    with pytest.raises(DamagedError):
        wherry.convert(place, tmp_path / "out", to="orbax")


def test_an_array_inside_of_another_is_refused(tmp_path):
    place = write(tmp_path / "a", {"w": np.ones(3), "w/b": np.ones(3)})
    with pytest.raises(CorruptError, match="inside of another array"):
        wherry.convert(place, tmp_path / "out", to="orbax")


def test_a_chunk_of_zeros_that_was_left_out_is_no_chunk(tmp_path):
    place = write(tmp_path / "a", {"w": np.zeros((3, 4), np.float32)})
    assert wherry.detect(place).verdict == "incomplete"


@needs_corpus
@pytest.mark.parametrize("case", ["orbax-0128-ocdbt-zarr3", "orbax-041-ocdbt", "orbax-0523-ocdbt"])
def test_an_item_of_orbax_that_lost_its_tree_is_not_read_by_names(tmp_path, case):
    folder = copied(case, tmp_path)
    for name in ("_METADATA", "checkpoint"):
        (folder / name).unlink(missing_ok=True)
    found = wherry.detect(folder)
    assert (found.verdict, found.format) == ("incomplete", "orbax")
    with pytest.raises(IncompleteError):
        wherry.convert(folder, tmp_path / "out", to="safetensors")


@needs_corpus
@pytest.mark.parametrize("case", ["orbax-0128-ocdbt-zarr3", "orbax-041-ocdbt"])
def test_a_database_alone_of_orbax_is_a_save_that_was_never_finished(tmp_path, case):
    """A killed save on a store, of which nothing but the arrays was written yet."""
    item = copied(case, tmp_path)
    place = tmp_path / "alone"
    place.mkdir()
    for name in ("manifest.ocdbt", "d"):
        (item / name).rename(place / name)
    assert wherry.detect(place).verdict == "incomplete"
    with pytest.raises(IncompleteError, match="_METADATA"):
        wherry.convert(place, tmp_path / "out", to="safetensors")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("names", "on_disk"), [(("w", "b"), "ok"), (("w", "layer.b"), "incomplete")])
def test_names_that_orbax_writes_too(names, on_disk, tmp_path):
    """Where nothing is renamed, an unfinished save has its final name, and such names prove no other writer."""
    place = write(tmp_path / "a", {name: np.ones((2, 3), np.float32) for name in names})
    assert wherry.detect(place).verdict == on_disk
    target = f"memory://ocdbt{tmp_path}/a"
    fsspec.filesystem("memory").put(str(place), target.removeprefix("memory://"), recursive=True)
    assert wherry.detect(target).verdict == "incomplete"


# TensorFlow bundles: what an index says is checked against itself and against the data.


ARRAYS_OF_BUNDLE = {
    "a": np.arange(12, dtype="f4").reshape(3, 4),
    "b/c": np.arange(5),
    "step": np.array(7, "i4"),
}


def test_tensors_lie_where_the_index_says(tmp_path):
    tf_bundle.write(tmp_path / "ckpt", ARRAYS_OF_BUNDLE)
    assert wherry.detect(tmp_path / "ckpt").format == "tf-bundle"
    with wherry.open(tmp_path / "ckpt") as found:
        assert {path[0] for path in found.manifest.tensors} == set(ARRAYS_OF_BUNDLE)
        for name, array in ARRAYS_OF_BUNDLE.items():
            np.testing.assert_array_equal(found.read((name,)), array)


def test_a_size_that_is_not_that_of_the_shape_is_corrupt(tmp_path):
    tf_bundle.write(tmp_path / "ckpt", ARRAYS_OF_BUNDLE, sizes={"a": 44})
    with pytest.raises(CorruptError, match=r"a has 44 bytes; expected 48 for float32\[3, 4\]"):
        wherry.open(tmp_path / "ckpt")


def test_every_flipped_bit_of_the_rows_is_found(tmp_path):
    index = tf_bundle.write(tmp_path / "ckpt", ARRAYS_OF_BUNDLE) / "ckpt.index"
    whole = index.read_bytes()
    for at in range(len(tf_bundle.block({})), 60):
        index.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        assert wherry.detect(tmp_path / "ckpt").verdict == "corrupt", at
