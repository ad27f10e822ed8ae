"""Blocks that are written have the bits that the `gguf` package gives them, and errors within their bounds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from wherry.quantized.ggml import values_of
from wherry.quantized.ggml_encode import BLOCK, BOUNDS, encode_blocks

gguf = pytest.importorskip("gguf")
KINDS = sorted(BOUNDS)


def by_package(values, kind):
    with np.errstate(all="ignore"):
        return gguf.quantize(values, gguf.GGMLQuantizationType[kind.removeprefix("ggml:")])


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=300, deadline=None)
@given(values=arrays("f4", (3, BLOCK), elements=st.floats(allow_nan=False, allow_infinity=False, width=32)))
def test_any_finite_values(kind, values):
    np.testing.assert_array_equal(encode_blocks(values, kind), by_package(values, kind))


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=100, deadline=None)
@given(steps=arrays("i2", (4, BLOCK), elements=st.integers(-254, 254)), scale=st.integers(-20, 10))
def test_halves_between_codes(kind, steps, scale):
    """Values that lie on codes and in the middle between them, at any scale that is a power of two."""
    values = (steps / 2).astype("f4")
    values[:, 0] = 127 if kind == "ggml:Q8_0" else -8
    values = values.clip(-127 if kind == "ggml:Q8_0" else -8, values[0, 0].__abs__()) * np.float32(2.0**scale)
    np.testing.assert_array_equal(encode_blocks(values, kind), by_package(values, kind))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("exponent", [-45, -40, -38, -30, -10, -4, 0, 3, 5])
def test_all_magnitudes_stay_within_the_bound(kind, exponent):
    values = (np.random.default_rng(exponent + 50).standard_normal((2000, BLOCK)) * 10.0**exponent).astype(
        "f4"
    )
    blocks = encode_blocks(values, kind)
    np.testing.assert_array_equal(blocks, by_package(values, kind))
    bound = BOUNDS[kind]
    largest = np.abs(values.astype("f8")).max(axis=1, keepdims=True)
    error = np.abs(values.astype("f8") - values_of(blocks, kind))
    assert (error <= bound.block * largest + bound.absolute).all()


@pytest.mark.parametrize("kind", KINDS)
def test_zeros_of_both_signs_and_one_value_alone(kind):
    values = np.zeros((3, BLOCK), "f4")
    values[1] = -0.0
    values[2, 5] = -3.25
    np.testing.assert_array_equal(encode_blocks(values, kind), by_package(values, kind))
