"""Moves tile each tensor exactly, in order, and never cut a chunk twice."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wherry.core.tensorspec import TensorSpec, checked_region, row_bands
from wherry.errors import UsageError
from wherry.mover import move
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
