"""checkpoint["path"]: the same parts as NumPy's indexing, and only these are read."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

import wherry
from wherry.errors import NotFoundError, UsageError

ARRAY = np.arange(2 * 3 * 5, dtype="f4").reshape(2, 3, 5)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    place = tmp_path_factory.mktemp("tensor") / "a.safetensors"
    save_file({"a/w": ARRAY, "scalar": np.array(4, "i4")}, place)
    with wherry.open(place) as opened:
        yield opened


def _part(extent):
    bounds = st.one_of(st.none(), st.integers(-extent - 2, extent + 2))
    return st.one_of(st.integers(-extent, extent - 1), st.builds(slice, bounds, bounds))


INDICES = st.one_of(
    st.tuples(*map(_part, ARRAY.shape)),
    st.tuples(_part(2)),
    st.tuples(_part(2), st.just(...)),
    st.tuples(st.just(...), _part(5)),
    st.just((...,)),
    st.just(()),
)


@settings(deadline=None)
@given(index=INDICES)
def test_a_part_is_what_numpy_would_take(checkpoint, index):
    found, expected = checkpoint["a~1w"][index], ARRAY[index]
    assert found.shape == expected.shape
    assert np.array_equal(found, expected)


def test_only_the_part_is_read(checkpoint, monkeypatch):
    regions, read = [], type(checkpoint).read

    def seen(self, path, region=None):
        regions.append(region)
        return read(self, path, region)

    monkeypatch.setattr(type(checkpoint), "read", seen)
    assert checkpoint["a~1w"][1, :, -2:].shape == (3, 2)
    assert regions == [(slice(1, 2), slice(0, 3), slice(3, 5))]


def test_it_is_an_array_for_numpy_and_says_what_it_is(checkpoint):
    tensor = checkpoint["a~1w"]
    assert np.array_equal(np.asarray(tensor), ARRAY)
    assert np.asarray(tensor, dtype="f8").dtype == "f8"
    assert (tensor.shape, tensor.dtype, tensor.nbytes, len(tensor)) == ((2, 3, 5), "float32", 120, 2)
    assert repr(tensor) == "<LazyTensor 'a~1w' float32[2, 3, 5]>"
    assert checkpoint["scalar"][()] == 4


@pytest.mark.parametrize("index", [(0, 0, 0, 0), (5,), (..., 0, ...), (0, -4)])
def test_an_index_outside_the_tensor_is_an_index_error(checkpoint, index):
    with pytest.raises(IndexError):
        checkpoint["a~1w"][index]


def test_a_step_and_an_unknown_key_path_are_refused(checkpoint):
    with pytest.raises(UsageError, match="has a step"):
        checkpoint["a~1w"][::2]
    with pytest.raises(NotFoundError, match="tensor not found"):
        checkpoint["a/w"]


def test_a_checkpoint_is_a_collection_of_key_paths(checkpoint):
    assert sorted(checkpoint) == [("a/w",), ("scalar",)]
    assert "a~1w" in checkpoint
    assert ("scalar",) in checkpoint
    assert "b" not in checkpoint
