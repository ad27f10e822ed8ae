"""TensorFlow bundles: what an index says is checked against itself and against the data."""

from __future__ import annotations

import numpy as np
import pytest

import wherry
from tests.support import tf_bundle
from wherry.errors import CorruptError

ARRAYS = {"a": np.arange(12, dtype="f4").reshape(3, 4), "b/c": np.arange(5), "step": np.array(7, "i4")}


def test_tensors_lie_where_the_index_says(tmp_path):
    tf_bundle.write(tmp_path / "ckpt", ARRAYS)
    assert wherry.detect(tmp_path / "ckpt").format == "tf-bundle"
    with wherry.open(tmp_path / "ckpt") as found:
        assert {path[0] for path in found.manifest.tensors} == set(ARRAYS)
        for name, array in ARRAYS.items():
            np.testing.assert_array_equal(found.read((name,)), array)


def test_a_size_that_is_not_that_of_the_shape_is_corrupt(tmp_path):
    tf_bundle.write(tmp_path / "ckpt", ARRAYS, sizes={"a": 44})
    with pytest.raises(CorruptError, match=r"a has 44 bytes; expected 48 for float32\[3, 4\]"):
        wherry.open(tmp_path / "ckpt")


def test_every_flipped_bit_of_the_rows_is_found(tmp_path):
    index = tf_bundle.write(tmp_path / "ckpt", ARRAYS) / "ckpt.index"
    whole = index.read_bytes()
    for at in range(len(tf_bundle.block({})), 60):
        index.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        assert wherry.detect(tmp_path / "ckpt").verdict == "corrupt", at
