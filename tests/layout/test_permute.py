"""The transposition kernel agrees with numpy for every order, and never loses or changes a byte."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wherry.layout.copies import permute

WORDS = {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "c16"}


def check(shape, itemsize, order, seed=0):
    data = np.random.default_rng(seed).integers(0, 256, size=(*shape, itemsize), dtype=np.uint8)
    view = data.reshape(-1).view(WORDS[itemsize]).reshape(shape).transpose(order)
    out = np.zeros(view.shape, dtype=WORDS[itemsize])
    permute(view, out)
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
