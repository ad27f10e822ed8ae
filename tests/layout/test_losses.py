"""What casts and scales do to values is counted, in any parts, as a definition in plain Python has it."""

from __future__ import annotations

import math
from itertools import pairwise

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wherry.core import dtypes
from wherry.core.account import Losses
from wherry.core.tally import counting
from wherry.core.tensorspec import TensorSpec
from wherry.layout.copies import Copy, scatter
from wherry.layout.losses import losses_of, note
from wherry.layout.words import Scale, Shift, WordStep, apply_steps, chain, loss

FLOATS = ("float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")
ANY = st.floats(width=32, allow_nan=True, allow_infinity=True)
CHAINS = [
    (),
    chain([], [Scale(0.125)]),
    chain([Scale(8.0)], []),
    chain([], [Scale(1 / 3)]),
    chain([], [Shift(1.0)]),
]


def as_type(numbers, name):
    with np.errstate(all="ignore"):
        return np.array(numbers, "float32").astype(dtypes.numpy_dtype(name))


def smallest_normal(name):
    return float(ml_dtypes.finfo(dtypes.numpy_dtype(name)).smallest_normal)


def one_by_one(values, made, back, source, target):
    """The losses by their definition, value by value."""
    counts = dict.fromkeys(("infinite", "zero", "subnormal", "nan"), 0)
    error = 0.0
    for value, result, again in zip(values.tolist(), made.tolist(), back.tolist(), strict=True):
        counts["nan"] += math.isnan(value)
        counts["infinite"] += math.isfinite(value) and not math.isfinite(result)
        if math.isfinite(value) and math.isfinite(result):
            counts["zero"] += result == 0 and again != value
            tiny = 0 < abs(result) < smallest_normal(target)
            counts["subnormal"] += tiny and abs(value) >= smallest_normal(source)
            error = max(error, abs(np.float32(value) - np.float32(again)))
    return Losses(**counts, error=float(error))


@settings(max_examples=150, deadline=None)
@given(
    st.lists(ANY, min_size=1, max_size=40),
    st.sampled_from(FLOATS),
    st.sampled_from(FLOATS),
    st.sampled_from(CHAINS),
)
def test_every_loss_is_counted(numbers, source, target, steps):
    values = as_type(numbers, source)
    with np.errstate(all="ignore"):
        made = apply_steps(steps, values, target)
        back = made.astype("float32")
        for step in reversed(steps):
            back = step.undo(back)
        expected = one_by_one(values.astype("f4"), made.astype("f4"), back, source, target)
    assert losses_of(values, made, steps) == expected


@settings(max_examples=150, deadline=None)
@given(
    st.lists(ANY, min_size=1, max_size=40),
    st.sampled_from(FLOATS),
    st.sampled_from(FLOATS),
    st.sampled_from(CHAINS),
)
def test_no_finite_value_leaves_its_bound(numbers, source, target, steps):
    """Underflow included: float16 keeps nothing of 2⁻²⁶, which no share of the value covers."""
    values = as_type(numbers, source)
    made = apply_steps(steps, values, target)
    undo = tuple(WordStep(step.word, forward=not step.forward) for step in reversed(steps))
    back = apply_steps(undo, made, source).astype("f8")
    values, finite = values.astype("f8"), np.isfinite(made.astype("f8")) & np.isfinite(back)
    values, back = values[finite], back[finite]
    bound = loss(steps, source, target)
    if bound is None:
        assert (values == back).all()
    else:
        assert (np.abs(values - back) <= bound.relative * np.abs(values) + bound.absolute).all()


@given(st.lists(ANY, min_size=1, max_size=40), st.lists(st.integers(0, 40)), st.sampled_from(FLOATS))
def test_losses_of_parts_add_up(numbers, cuts, target):
    values = as_type(numbers, "float32")
    made = as_type(numbers, target)
    ends = sorted({0, len(numbers), *(cut for cut in cuts if cut < len(numbers))})
    parts = [losses_of(values[a:b], made[a:b]) for a, b in pairwise(ends)]
    assert sum(parts, Losses()) == losses_of(values, made)


def test_large_arrays_are_counted_whole():
    values = np.zeros(1 << 19, "f4")
    values[[0, 1 << 17, -1]] = 1e6, 1e-6, 1e-9
    assert losses_of(values, as_type(values, "float16")) == Losses(1, 1, 1, 0, pytest.approx(2e-8, rel=1))


def test_nothing_is_counted_without_a_tally_or_where_nothing_can_change():
    values = as_type([1e6, math.nan], "float32")
    note(values, as_type(values, "float16"))
    with counting() as tally:
        note(values, values)
        note(as_type([1.0], "bfloat16"), as_type([1.0], "float32"))
    assert not tally.losses


@pytest.mark.parametrize(("strides", "taken"), [((2,), [0, 2]), ((0,), [0, 0])])
def test_only_elements_that_are_written_count_each_as_often(strides, taken):
    """A copy may read more than it takes, and may write an element several times."""
    part, out = as_type([1e6, 1e6, 1e-9, 0.5], "float32"), np.empty(2, "float16")
    copy = Copy(TensorSpec(("w",), (4,), "float32"), (slice(0, 4),), (2,), strides, (1,), 0, ())
    with counting() as tally:
        scatter(copy, part, out)
    assert tally.losses == losses_of(part[taken], out)
