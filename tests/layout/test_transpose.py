"""The transposition kernel agrees with numpy for every order, and never loses or changes a byte."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wherry.layout.transpose import fuse_axes, transposed_into


def check(shape, itemsize, order, seed=0):
    data = np.random.default_rng(seed).integers(0, 256, size=(*shape, itemsize), dtype=np.uint8)
    out = np.zeros(data.size, dtype=np.uint8)
    transposed_into(memoryview(data.reshape(-1)), shape, itemsize, order, memoryview(out))
    assert out.tobytes() == np.ascontiguousarray(data.transpose(*order, len(shape))).tobytes()


@settings(deadline=None, max_examples=200)
@given(st.data(), st.lists(st.integers(1, 7), max_size=5), st.sampled_from([1, 2, 4, 8, 16]))
def test_small_arrays_of_any_rank(data, shape, itemsize):
    check(tuple(shape), itemsize, data.draw(st.permutations(range(len(shape)))))


@pytest.mark.parametrize(
    "shape", [(300, 257), (5, 200, 131), (129, 3, 140), (2, 130, 5, 64), (40, 40, 2, 33)]
)
@pytest.mark.parametrize("itemsize", [2, 8])
def test_arrays_larger_than_a_tile_in_every_order(shape, itemsize):
    for order in itertools.permutations(range(len(shape))):
        check(shape, itemsize, order)


def test_neighbours_that_stay_together_are_fused():
    assert fuse_axes((2, 3, 4, 5), (2, 3, 0, 1)) == ((6, 20), (1, 0))
    assert fuse_axes((2, 1, 4), (2, 1, 0)) == ((2, 4), (1, 0))
    assert fuse_axes((2, 3), (0, 1)) == ((6,), (0,))


def test_orders_and_sizes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="not a permutation of 2 axes"):
        transposed_into(memoryview(bytes(8)), (2, 4), 1, (0, 0), memoryview(bytearray(8)))
    with pytest.raises(ValueError, match=r"expected 8 bytes .* got 8 and 7"):
        transposed_into(memoryview(bytes(8)), (2, 4), 1, (1, 0), memoryview(bytearray(7)))
