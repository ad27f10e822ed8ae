"""The computed places of chunks: those of a row for each chunk, whatever the arrays."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from wherry.integrations.containers.ocdbt.write import Reference
from wherry.integrations.containers.zarr import new
from wherry.integrations.containers.zarr.metadata import parse
from wherry.integrations.containers.zarr.places import ChunkPlaces, data_file, start_after

VERSIONS = st.sampled_from([2, 3])
UNHURRIED = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])


@st.composite
def arrays(draw):
    """Some arrays, by what the keys of their chunks begin with."""
    names = draw(
        st.lists(st.sampled_from(["", "a/", "a/c/", "a/c/0/", "b.c/", "0/"]), unique=True, max_size=4)
    )
    version, found = draw(VERSIONS), {}
    for name in names:
        shape = tuple(draw(st.lists(st.integers(1, 5), max_size=2)))
        chunks = tuple(draw(st.integers(1, extent)) for extent in shape)
        wide = draw(
            st.sampled_from([1, 40_000])
        )  # below and above the size from which chunks begin on a block
        shape, chunks = (*shape, wide), (*chunks, wide)
        if draw(st.booleans()):
            shape, chunks = (), ()
        found[name] = parse(new.text("float32", shape, chunks, version, "none"), version, name)
    return found


def placed_one_by_one(found, file_bytes):
    places, number, end = {}, 0, 0
    for name, array in found.items():
        for key in array.keys():  # noqa: SIM118  of chunks
            start = start_after(end, array.chunk_nbytes)
            if end and start + array.chunk_nbytes > file_bytes:
                number, start = number + 1, 0
            places[f"{name}{key}"] = Reference(data_file(number), start, array.chunk_nbytes)
            end = start + array.chunk_nbytes
    return places


@UNHURRIED
@given(arrays(), st.integers(1, 1 << 20))
def test_chunks_lie_where_they_are_placed_one_by_one(found, file_bytes):
    places, wanted = ChunkPlaces(found, file_bytes), placed_one_by_one(found, file_bytes)
    if len(wanted) != sum(array.chunk_count for array in found.values()):
        return  # two arrays have chunks of one key, which a writer refuses
    assert dict(places) == wanted
    assert len(places) == len(wanted)
    ends = {data_file(0): 0}
    for place in wanted.values():
        ends[place.file] = place.offset + place.length
    assert places.ends == ends
    rows = [*wanted.items(), ("", Reference("", 0, 0))]
    for (key, place), (_key, after) in pairwise(rows):
        assert places.stop(key) == (after.offset if after.file == place.file else ends[place.file])


@pytest.mark.parametrize(
    "key", ["a/c/3", "a/c/00", "a/c/-1", "a/c/0/0", "a/c", "b/c/0", "c/0", "", "a/c/x", "a/d/0"]
)
def test_a_key_of_no_chunk_has_no_place(key):
    places = ChunkPlaces({"a/": parse(new.text("uint8", (6,), (2,), 3, "none"), 3, "a")})
    assert key not in places
    assert list(places) == ["a/c/0", "a/c/1", "a/c/2"]
