"""The multi-process variant of flax checkpoints: zarr arrays next to the file, made here as flax 0.7 lays them out."""

from __future__ import annotations

import shutil

import numpy as np
import pytest

import wherry
from tests.support.formats import opened
from wherry.errors import HostileError, IncompleteError

serialization = pytest.importorskip("flax.serialization", reason="flax is not installed")


def contents(path):
    with wherry.open(path) as found:
        return {key: found.read(key) for key in found.manifest.tensors}, found.manifest, found.detection


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
