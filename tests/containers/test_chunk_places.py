"""The computed places of chunks: those of a row for each chunk, whatever the tensors."""

from __future__ import annotations

import math
from itertools import pairwise

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from wherry.core.tensorspec import TensorSpec
from wherry.integrations.containers.zarr.layout import ChunkPlaces, data_file, number_of_data_file
from wherry.target.files import start_after
from wherry.target.grids import Grids, chunk_bytes, counts_of

UNHURRIED = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])


@st.composite
def tensors(draw):
    """Some tensors with grids, with chunks below and above the size from which they begin on a block."""
    found = []
    for number in range(draw(st.integers(0, 4))):
        shape = tuple(draw(st.lists(st.integers(1, 5), max_size=2)))
        chunks = tuple(draw(st.integers(1, extent)) for extent in shape)
        wide = draw(st.sampled_from([1, 40_000]))
        shape, chunks = (*shape, wide), (*chunks, wide)
        if draw(st.booleans()):
            shape, chunks = (), ()
        found.append(TensorSpec((f"t{number}",), shape, "float32", chunks))
    return found


def placed_one_by_one(specs, file_bytes):
    places, number, end = [], 0, 0
    for spec in specs:
        size = chunk_bytes(spec)
        for _chunk in range(math.prod(counts_of(spec))):
            start = start_after(end, size)
            if end and start + size > file_bytes:
                number, start = number + 1, 0
            places.append((data_file(number), start, size))
            end = start + size
    return places


@UNHURRIED
@given(tensors(), st.integers(1, 1 << 20))
def test_chunks_lie_where_they_are_placed_one_by_one(specs, file_bytes):
    places, wanted = ChunkPlaces(specs, file_bytes), placed_one_by_one(specs, file_bytes)
    found = [places.at(number) for number in range(len(Grids(specs)))]
    assert [place[:3] for place in found] == wanted
    ends = {data_file(0): 0}
    for file, offset, size in wanted:
        ends[file] = offset + size
    assert places.ends == ends
    for place, after in pairwise([*found, None]):
        same = after is not None and after.file == place.file
        assert place.stop == (after.offset if same else ends[place.file])


@UNHURRIED
@given(tensors())
def test_a_chunk_has_one_number(specs):
    grids = Grids(specs)
    held = {spec.path: 0 for spec in specs}
    for number in range(len(grids)):
        chunk = grids[number]
        assert grids.number(chunk.spec.path, chunk.region) == number
        held[chunk.spec.path] += math.prod(part.stop - part.start for part in chunk.region)
    assert held == {spec.path: spec.size for spec in specs}


def test_only_data_files_with_chunks_have_a_number():
    assert [number_of_data_file(data_file(number)) for number in (0, 17, 1 << 40)] == [0, 17, 1 << 40]
    for name in (f"d/{'f' * 32}", "manifest.ocdbt", "0" * 32, "d/", f"d/{'0' * 31}", f"e/{'0' * 32}"):
        assert number_of_data_file(name) is None, name
