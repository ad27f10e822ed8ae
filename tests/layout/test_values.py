"""Value words: there and back, exact or within their bound; what casts and scales lose is counted."""

from __future__ import annotations

import math
from itertools import pairwise

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.value_words import Concat, Pad, Tie
from wherry.core import dtypes
from wherry.core.account import Losses, counting
from wherry.core.tensorspec import TensorSpec
from wherry.errors import UnrepresentableError, UsageError
from wherry.layout.copies import Copy, scatter
from wherry.layout.losses import losses_of, note
from wherry.layout.words import Cast, Scale, Shift, WordStep, apply_steps, chain, loss, parse_word, widens

FLOATS = ("float64", "float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")
NORMAL = st.floats(0.03125, 200, width=32) | st.floats(-200, -0.03125, width=32)


def there_and_back(word, values, target):
    stored = apply_steps([WordStep(word, forward=True)], values, target)
    return apply_steps([WordStep(word, forward=False)], stored, values.dtype.name)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(NORMAL, min_size=1, max_size=50),
    st.sampled_from(
        [Scale(1 / math.sqrt(128)), Scale(0.125), Scale(math.sqrt(2304)), Shift(1.0), Shift(-1.0)]
    ),
    st.sampled_from(["float32", "bfloat16", "float16"]),
    st.sampled_from(["float32", "bfloat16", "float16"]),
)
def test_there_and_back_within_the_bound(numbers, word, source, target):
    values = np.array(numbers, "float32").astype(dtypes.numpy_dtype(source))
    back = there_and_back(word, values, target)
    wide, error = np.abs(values.astype("float64")), np.abs(back.astype("float64") - values.astype("float64"))
    if word.exact(source, target):
        assert (back.view("u1") == values.view("u1")).all()
    bound = word.bound(source, target)
    assert (error <= bound.relative * wide + bound.absolute).all()


def test_bounds_are_not_empty_words():
    values = np.random.default_rng(0).normal(size=20000).astype(ml_dtypes.bfloat16)
    scaled = there_and_back(Scale(1 / math.sqrt(128)), values, "bfloat16")
    small = (values.astype("f4") * 0.05).astype(ml_dtypes.bfloat16)
    shifted = there_and_back(Shift(1.0), small, "bfloat16")
    assert 0.05 < (scaled != values).mean() < 0.3  # 14.6 % by the measurements of MaxText's own hook
    assert (shifted != small).mean() > 0.8
    relative = np.abs(scaled.astype("f8") - values.astype("f8")) / np.abs(values.astype("f8"))
    assert relative.max() > Scale(1 / math.sqrt(128)).bound("bfloat16", "bfloat16").relative / 8


def test_a_wider_target_makes_a_scale_exact():
    values = np.random.default_rng(1).normal(size=20000).astype(ml_dtypes.bfloat16)
    word = Scale(1 / math.sqrt(96))
    assert word.exact("bfloat16", "float32")
    assert not word.exact("bfloat16", "bfloat16")
    np.testing.assert_array_equal(there_and_back(word, values, "float32"), values)


@pytest.mark.parametrize("source", FLOATS)
@pytest.mark.parametrize("target", FLOATS)
def test_casts(source, target):
    word = Cast(source, target)
    bits = np.arange(1 << 16).astype("u2") if dtypes.bits(source) == 16 else np.arange(256).astype("u1")
    values = (
        bits.view(dtypes.numpy_dtype(source))
        if dtypes.bits(source) < 32
        else np.linspace(-9, 9, 999).astype(source)
    )
    values = values[np.isfinite(values.astype("float64"))]
    with np.errstate(over="ignore"):
        same = (word.inverse(word.forward(values)).astype("f8") == values.astype("f8")).all()
    assert same or not word.exact
    assert word.exact == widens(source, target)
    if source in ("float16", "bfloat16") or source.startswith("float8"):
        assert same == word.exact  # every value of the type was tried


def test_arithmetic_is_wide():
    values = np.full(8, 3.0, ml_dtypes.bfloat16)
    wide = apply_steps(
        [WordStep(Scale(1 / 3), forward=True), WordStep(Scale(1 / 3), forward=False)], values, "bfloat16"
    )
    np.testing.assert_array_equal(wide, values)
    assert apply_steps([WordStep(Shift(1e-12), forward=True)], np.ones(1), "float64")[0] == 1 + 1e-12


def test_words_of_both_sides_cancel():
    query, norm = Scale(0.3), Shift(1.0)
    assert chain([query, norm], [query, norm]) == ()
    assert chain([query], [query, norm]) == (WordStep(norm, forward=True),)
    assert chain([query, norm], [query]) == (WordStep(norm, forward=False),)
    assert chain([norm], [query]) == (WordStep(norm, forward=False), WordStep(query, forward=True))
    assert chain([Scale(1.0)], []) == ()


def test_loss():
    assert loss((), "float32", "float32") is None
    assert loss((), "bfloat16", "float32") is None
    assert loss((), "float32", "bfloat16").relative == 2.0**-8
    assert loss(chain([], [Scale(0.125)]), "bfloat16", "bfloat16").exact
    assert not loss(chain([], [Scale(0.3)]), "bfloat16", "bfloat16").exact
    assert loss(chain([], [Scale(0.125)]), "float32", "bfloat16").relative > 0


def test_moments_scale_as_gradients_do():
    assert Scale(0.25).moment(1) == Scale(4.0)
    assert Scale(0.25).moment(2) == Scale(16.0)
    assert Shift(1.0).moment(1) == Scale(1.0)


def test_integers_are_not_scaled():
    with pytest.raises(UnrepresentableError):
        apply_steps([WordStep(Scale(2.0), forward=True)], np.arange(3), "int64")


@pytest.mark.parametrize(
    ("text", "value"), [("scale", 0.0), ("scale", math.inf), ("turn", 1.0), ("shift", math.nan)]
)
def test_impossible_words(text, value):
    with pytest.raises(UsageError):
        parse_word(text, value)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.integers(0, 1))
def test_concat_and_split(parts, dimension):
    arrays = [np.random.default_rng(n).random((n, 3) if dimension == 0 else (3, n)) for n in parts]
    word = Concat(dimension, tuple(parts))
    for one, other in zip(word.inverse(word.forward(arrays)), arrays, strict=True):
        np.testing.assert_array_equal(one, other)
    with pytest.raises(UnrepresentableError):
        Concat(dimension, (*parts, 1)).inverse(word.forward(arrays))
    with pytest.raises(UnrepresentableError):
        Concat(dimension, (9, *parts[1:])).forward(arrays)


def test_pad_and_crop():
    word, array = Pad(0, 5, 8), np.random.default_rng(0).random((5, 2))
    assert word.forward(array).shape == (8, 2)
    assert not word.forward(array)[5:].any()
    np.testing.assert_array_equal(word.inverse(word.forward(array)), array)


def test_tie():
    array = np.array([1.0, np.nan, -0.0], "float32")
    assert Tie("embedding").inverse(Tie("embedding").forward(array)) is array
    with pytest.raises(UnrepresentableError):
        Tie("embedding").inverse((array, np.array([1.0, np.nan, 0.0], "float32")))


@pytest.mark.parametrize(
    ("word", "source", "target"),
    [
        (None, "float32", "int8"), (None, "bfloat16", "bool"), (None, "int64", "int8"), (None, "complex64", "float32"),
        (None, "float32", "int4"), (None, "bfloat16", "uint64"), (None, "complex128", "complex64"),
        (Scale(0.5), "int8", "float32"), (Scale(0.5), "int8", "int8"), (Scale(0.3), "bool", "bfloat16"),
        (Shift(1.0), "int64", "float32"), (Shift(1.0), "float32", "int64"), (Scale(0.5), "complex64", "complex64"),
    ],
)  # fmt: skip
def test_values_that_are_no_floats_have_no_bound(word, source, target):
    steps = chain([], [word]) if word else ()
    with pytest.raises(UnrepresentableError, match="it needs floating point") as raised:
        loss(steps, source, target, "model.norm.weight")
    assert raised.value.path == "model.norm.weight"


def test_integers_as_floats_are_rounded():
    assert loss((), "int8", "float32") is None
    assert loss((), "int64", "float32").relative == 2.0**-24
    assert loss((), "int8", "int8") is None


# What casts and scales do to values is counted, in any parts, as a definition in plain Python has it.


FLOATS_OF_LOSSES = ("float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")
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
    st.sampled_from(FLOATS_OF_LOSSES),
    st.sampled_from(FLOATS_OF_LOSSES),
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
    st.sampled_from(FLOATS_OF_LOSSES),
    st.sampled_from(FLOATS_OF_LOSSES),
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


@given(
    st.lists(ANY, min_size=1, max_size=40), st.lists(st.integers(0, 40)), st.sampled_from(FLOATS_OF_LOSSES)
)
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
