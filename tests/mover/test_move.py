"""Moves and stored boxes tile each tensor exactly, and never cut a chunk twice."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wherry.core import dtypes
from wherry.core.tensorspec import TensorSpec, checked_region, row_bands
from wherry.errors import UsageError
from wherry.mover import decode, move
from wherry.mover.decode import StoredBox, fill_from_boxes, is_scattered
from wherry.mover.move import Way, cells, chunk_count, moves_of, region_span

shapes = st.lists(st.integers(1, 9), max_size=3).map(tuple)


def grids(shape):
    return st.tuples(*(st.integers(1, extent) for extent in shape))


@settings(deadline=None)
@given(st.data(), shapes, st.integers(1, 200))
def test_row_bands_tile_the_tensor_and_are_contiguous(data, shape, limit):
    spec = TensorSpec(("t",), shape, "float32")
    array = np.arange(spec.size, dtype="<f4").reshape(shape)
    position = 0
    for region, span in row_bands(spec, limit):
        assert span.start == position
        assert array[region].tobytes() == array.tobytes()[span.start : span.stop]
        assert region_span(spec, region) == span
        assert span.nbytes <= max(limit, 4)
        position = span.stop
    assert position == spec.nbytes


@settings(deadline=None)
@given(shapes, st.integers(1, 40))
def test_cuts_never_fall_inside_a_byte_of_two_elements(shape, limit):
    spec = TensorSpec(("t",), shape, "float4_e2m1fn")
    spans = [span for _region, span in row_bands(spec, limit)]
    assert [span.start for span in spans] == [0, *(span.stop for span in spans[:-1])]
    assert spans[-1].stop == spec.nbytes
    assert all(span.start % 2 == 0 for span in spans)


@settings(deadline=None)
@given(st.data(), shapes)
def test_moves_of_gridded_tensors_consist_of_whole_chunks(data, shape):
    source_grid = data.draw(st.none() | grids(shape))
    target_grid = data.draw(st.none() | grids(shape))
    source = TensorSpec(("t",), shape, "int16", chunks=source_grid)
    target = TensorSpec(("t",), shape, "int16", chunks=target_grid)
    seen = np.zeros(shape, dtype=int)
    position = 0
    for one in moves_of(source, [target], raw=source_grid is None):
        assert one.span.start == position
        position = one.span.stop
        if target_grid is None:
            continue
        for cell in cells(one.region, target_grid):
            seen[cell] += 1
            for part, chunk, extent in zip(cell, target_grid, shape, strict=True):
                assert part.start % chunk == 0
                assert part.stop == min(part.start + chunk, extent)
    assert position == source.nbytes
    assert target_grid is None or (seen == 1).all()


def test_raw_to_flat_moves_are_two_leaves(monkeypatch):
    monkeypatch.setattr(move, "RAW_BYTES", 10)
    spec = TensorSpec(("t",), (25,), "int8")
    spans = [tuple(one.span) for one in moves_of(spec, [spec], raw=True)]
    assert spans == [(0, 10), (10, 20), (20, 25)]
    way = Way(())
    assert (way.count(spec, [spec]), way.largest(spec, [spec])) == (len(spans), 10)


def test_a_pass_that_only_hashes_reads_regions_in_larger_parts():
    """Where the runs of a region lie far apart, half the part means twice as many reads."""
    spec = TensorSpec(("t",), (move.DECODED_BYTES * 2,), "int8")
    hashed = [one.span.nbytes for one in moves_of(spec, (), raw=False, regions=True)]
    carried = [one.span.nbytes for one in moves_of(spec, [spec], raw=False, regions=True)]
    assert hashed == [move.DECODED_BYTES] * 2
    assert set(carried) == {move.RAW_BYTES}


def test_a_tensor_without_elements_needs_no_move():
    spec = TensorSpec(("t",), (3, 0), "int8")
    assert list(moves_of(spec, [spec], raw=True)) == []


def test_chunk_count_rounds_up():
    assert chunk_count((5, 4), (2, 4)) == 3
    assert chunk_count((), ()) == math.prod([])


@pytest.mark.parametrize(
    "region", [(slice(0, 3),), (slice(0, 3), slice(0, 2, 2)), (slice(-1, 3), slice(0, 2))]
)
def test_regions_that_do_not_fit_are_refused(region):
    with pytest.raises(UsageError):
        checked_region(TensorSpec(("t",), (3, 2), "int8"), region)


def test_grids_of_both_sides_meet_at_their_least_common_multiple():
    assert move.common_grid((24, 5), [(4, 5), (6, 5)]) == (12, 5)
    assert move.common_grid((24, 6), [(1, 2), (1, 3)]) == (1, 6)
    assert move.common_grid((10,), [(4,), (6,)]) == (10,)


# Stored boxes: any region comes out of any boxes that cover a tensor, and only short runs are kept so.


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
