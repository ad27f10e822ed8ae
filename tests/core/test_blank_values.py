"""NaN is counted in the words of each type, as numpy and ml_dtypes decide it; a filled tensor is recognised."""

from __future__ import annotations

import itertools
import tracemalloc

import numpy as np
import pytest

from wherry.core import dtypes
from wherry.core.blank_values import SeenValues, _one, nan_count, repeated_notes, zeros_notes
from wherry.core.digest import LeafHasher
from wherry.core.tensorspec import TensorSpec

FLOATS = sorted(name for name in dtypes.NUMPY if name.startswith(("float", "bfloat", "complex")))


@pytest.mark.parametrize("name", FLOATS)
def test_nan_is_counted_in_every_word_of_a_type(name):
    kind, rng = dtypes.numpy_dtype(name), np.random.default_rng(5)
    if kind.itemsize <= 2:
        words = np.arange(1 << (8 * kind.itemsize)).astype(f"<u{kind.itemsize}")
    else:
        words = rng.integers(0, 256, 8192 * kind.itemsize, "u1")
        words[: 64 * kind.itemsize] |= 0x7F  # high exponents, so that some are NaN
    if name == "float4_e2m1fn":
        words = words[:16]
    values = words.view(kind)
    with np.errstate(invalid="ignore"):
        wide = values if kind.kind == "c" else values.astype("f8")
    assert nan_count(name, memoryview(words).cast("B")) == np.isnan(wide).sum()
    assert nan_count(name, memoryview(np.ascontiguousarray(values[~np.isnan(wide)]).view("u1"))) == 0


@pytest.mark.parametrize("name", FLOATS)
def test_the_word_of_one(name):
    assert _one(name) == np.ones((), "f4").astype(dtypes.numpy_dtype(name)).tobytes()


def seen_notes(values, cuts=()):
    data = memoryview(np.ascontiguousarray(values).view("u1").reshape(-1))
    spec = TensorSpec(("a",), values.shape, values.dtype.name)
    hasher, seen = LeafHasher(spec, ("blake3",)), SeenValues()
    places = [0, *cuts, len(data)]
    for start, stop in itertools.pairwise(places):
        seen.see(spec, start, data[start:stop])
        hasher.update(start, data[start:stop])
    return repeated_notes({spec.path: spec}, {spec.path: hasher.digest("blake3")}, seen)


@pytest.mark.parametrize("cuts", [(), (4, 16), (6, 31)])
def test_only_a_filled_tensor_is_one(cuts):
    filled = np.full(1000, 0.5, "f4")
    assert len(seen_notes(filled, cuts)) == 1
    filled[500] = 2
    assert seen_notes(filled, cuts) == []
    assert seen_notes(np.ones(1000, "f4"), cuts) == []
    assert seen_notes(np.zeros(1000, "f4"), cuts) == []


def test_a_shape_that_no_disk_holds_takes_no_memory():
    """Metadata can state any shape; the digest of zeros of 20 TB has 300 MB of text."""
    spec, element = TensorSpec(("a",), (5 << 40,), "float32"), np.float32(7).tobytes()
    tracemalloc.start()
    digests = {("a",): f"blake3:{'0' * 64}"}
    assert not zeros_notes({("a",): spec}, digests)
    assert not repeated_notes({("a",): spec}, digests, SeenValues(repeated={("a",): element}))
    _now, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20
