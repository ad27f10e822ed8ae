"""Stored boxes: any region comes out of any boxes that cover a tensor, and only short runs are kept so."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wherry.core import dtypes
from wherry.core.tensorspec import TensorSpec
from wherry.mover import decode
from wherry.mover.decode import StoredBox, fill_from_boxes, is_scattered
from wherry.mover.move import cells

DTYPES = ("uint8", "bfloat16", "float32", "complex128")


@st.composite
def gridded(draw):
    """A tensor with a chunk grid, a region of it, and whether chunks at the edge are stored whole."""
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=4)))
    chunks = tuple(draw(st.integers(1, extent + 2)) for extent in shape)
    region = []
    for extent in shape:
        start = draw(st.integers(0, extent - 1))
        region.append(slice(start, draw(st.integers(start + 1, extent))))
    return (
        TensorSpec(("w",), shape, draw(st.sampled_from(DTYPES)), chunks),
        tuple(region),
        draw(st.booleans()),
    )


def stored(spec, values, *, whole):
    """A file of the tensor's chunks, one behind the other."""
    boxes, file = [], b""
    for inside in cells(spec.whole, spec.chunks):
        full = tuple(slice(at.start, at.start + step) for at, step in zip(inside, spec.chunks, strict=True))
        cell = full if whole else inside
        part = values[cell]
        padded = np.full([bounds.stop - bounds.start for bounds in cell], 0, values.dtype)
        padded[tuple(slice(0, extent) for extent in part.shape)] = part
        boxes.append(StoredBox(cell, len(file)))
        file += padded.tobytes()
    return tuple(boxes), file


@given(gridded())
@settings(max_examples=300, deadline=None)
def test_any_region_comes_out_of_any_boxes(case):
    spec, region, whole = case
    dtype = dtypes.numpy_dtype(spec.dtype)
    raw = np.random.default_rng(0).integers(0, 256, math.prod(spec.shape) * dtype.itemsize, np.uint8)
    values = raw.view(dtype).reshape(spec.shape)
    boxes, file = stored(spec, values, whole=whole)

    def read(at, buffer):
        assert at + len(buffer) <= len(file)
        buffer[:] = file[at : at + len(buffer)]

    out = bytearray(values[region].nbytes)
    fill_from_boxes(spec, region, boxes, read, memoryview(out))
    assert bytes(out) == values[region].tobytes()


@pytest.mark.parametrize(
    ("shape", "chunks", "dtype", "expected"),
    [
        ((4096, 4096), None, "float32", False),
        ((4096, 4096), (4096, 4096), "float32", False),
        ((4096, 4096), (64, 4096), "float32", False),
        ((4096, 4096), (4096, 512), "float32", True),
        ((64, 4096, 4096), (1, 2048, 4096), "float32", False),
        ((64, 4096, 4096), (64, 512, 4096), "float32", False),
        ((64, 4096, 16), (64, 512, 16), "float32", True),
        ((4096,), (16,), "float32", False),
        ((), (), "float32", False),
        ((4096, 4096), (4096, 512), "int4", True),
    ],
)
def test_only_short_runs_are_kept_as_boxes(shape, chunks, dtype, expected):
    assert is_scattered(TensorSpec(("w",), shape, dtype, chunks)) is expected


def test_what_is_held_of_a_large_region_is_small(monkeypatch):
    spec = TensorSpec(("w",), (64, 256), "float32", (64, 128))
    values = np.arange(64 * 256, dtype=np.float32).reshape(spec.shape)
    boxes, file = stored(spec, values, whole=False)
    monkeypatch.setattr(decode, "_TOGETHER", 4 << 10)
    lengths = []

    def read(at, buffer):
        lengths.append(len(buffer))
        buffer[:] = file[at : at + len(buffer)]

    out = bytearray(values.nbytes)
    fill_from_boxes(spec, spec.whole, boxes, read, memoryview(out))
    assert bytes(out) == values.tobytes()
    assert max(lengths) <= 4 << 10
