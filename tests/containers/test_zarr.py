"""zarr metadata: dtype table, chunk keys, chunk sizes, and what hostile metadata gets."""

from __future__ import annotations

import json
import math
import tracemalloc

import pytest
import tensorstore as ts
from hypothesis import given
from hypothesis import strategies as st

from wherry.core import dtypes
from wherry.errors import CorruptError, HostileError, IncompleteError, UnsupportedError
from wherry.integrations.containers.zarr import metadata
from wherry.integrations.containers.zarr.layout import auto_chunks, build_metadata

MIB = 1 << 20


def array(**changes):
    fields = build_metadata("float32", (10, 7), (4, 3), version=2, compression="none")
    return json.dumps(fields | changes).encode()


def array3(**changes):
    fields = build_metadata("float32", (10, 7), (4, 3), version=3, compression="none")
    return json.dumps(fields | changes).encode()


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("name", sorted(metadata.STORABLE))
def test_every_storable_dtype_is_what_tensorstore_writes_and_reads(name, version):
    driver = {2: "zarr", 3: "zarr3"}[version]
    made = ts.open(
        {"driver": driver, "kvstore": "memory://"}, create=True, dtype=ts.dtype(name), shape=[4]
    ).result()
    stored = made.kvstore.read(metadata.METADATA_NAMES[version]).result().value
    assert metadata.parse(stored, version, "").dtype == name
    ours = build_metadata(name, (4,), (4,), version=version, compression="zstd")
    opened = ts.open({"driver": driver, "kvstore": "memory://", "metadata": ours}, create=True).result()
    assert opened.dtype.name == name
    assert dtypes.numpy_dtype(name).itemsize == opened.dtype.numpy_dtype.itemsize


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("shape", [(), (5,), (10, 7), (3, 1, 4)])
def test_expected_keys_are_the_ones_that_tensorstore_writes(version, shape):
    chunks = tuple(max(extent // 2, 1) for extent in shape)
    fields = build_metadata("int32", shape, chunks, version=version, compression="none")
    parsed = metadata.parse(json.dumps(fields).encode(), version, "")
    store = ts.open(
        {
            "driver": {2: "zarr", 3: "zarr3"}[version],
            "kvstore": "memory://",
            "metadata": fields,
            "store_data_equal_to_fill_value": True,
        },
        create=True,
    ).result()
    store.write(0).result()
    written = {key.decode() for key in store.kvstore.list().result()} - {metadata.METADATA_NAMES[version]}
    assert set(parsed.keys()) == written
    assert len(written) == parsed.chunk_count


def test_keys_of_a_region_are_the_chunks_it_touches():
    parsed = metadata.parse(array(), 2, "")
    assert list(parsed.keys((slice(3, 5), slice(6, 7)))) == ["0.2", "1.2"]
    assert list(parsed.keys((slice(2, 2), slice(0, 7)))) == []
    assert metadata.parse(array(dimension_separator="/"), 2, "").key((1, 2)) == "1/2"
    assert metadata.parse(array3(chunk_key_encoding={"name": "v2"}), 3, "").key((1, 2)) == "1.2"


@pytest.mark.parametrize("digits", ["9" * 19, "9" * 5000])
def test_a_key_with_a_number_of_too_many_digits_is_no_chunk(digits):
    stored = metadata.parse(array(), 2, "")
    assert stored.number("0.2") == 2
    assert stored.number(f"0.{digits}") is None


def test_keys_are_lazy_however_many_there_are():
    """`itertools.product` would hold a tuple of 2^40 numbers before the first key."""
    fields = build_metadata("bool", (1 << 40, 2), (1, 1), version=2, compression="none")
    parsed = metadata.parse(json.dumps(fields).encode(), 2, "")
    tracemalloc.start()
    try:
        assert [key for key, _ in zip(parsed.keys(), range(3), strict=False)] == ["0.0", "0.1", "1.0"]
        assert tracemalloc.get_traced_memory()[1] < MIB
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("shape", "chunks", "axis"),
    [
        ((8, 4), (2, 4), 0),
        ((8, 4), (3, 4), 0),
        ((8, 4), (2, 2), None),
        ((8, 4), (1, 2), 1),
        ((), (), 0),
        ((3, 4, 5), (1, 2, 5), 1),
    ],
)
def test_which_grids_are_contiguous(shape, chunks, axis):
    fields = build_metadata("int8", shape, chunks, version=2, compression="none")
    assert metadata.parse(json.dumps(fields).encode(), 2, "").contiguous_axis() == axis


@pytest.mark.parametrize(
    ("changes", "error", "named"),
    [
        ({"compressor": {"id": "lz77"}}, UnsupportedError, "lz77"),
        ({"dtype": "|O"}, UnsupportedError, r"\|O"),
        ({"dtype": [["a", "<f4"]]}, UnsupportedError, "a"),
        ({"filters": [{"id": "delta"}]}, UnsupportedError, "delta"),
        ({"dimension_separator": "-"}, UnsupportedError, "-"),
        ({"order": "K"}, CorruptError, "K"),
        ({"shape": [-1, 7]}, CorruptError, "-1"),
        ({"shape": [10]}, CorruptError, "10"),
        ({"shape": [1.5, 2]}, CorruptError, "1.5"),
        ({"shape": [True, 2]}, CorruptError, "True"),
        ({"chunks": [0, 3]}, CorruptError, "0"),
        ({"shape": [1 << 40, 1 << 40]}, HostileError, "bytes"),
        ({"chunks": [1 << 30, 1 << 30]}, HostileError, "bytes"),
        ({"shape": [1] * 40, "chunks": [1] * 40}, HostileError, "rank 40"),
        ({"shape": "77"}, CorruptError, "77"),
        ({"shape": [10**4200, 10**4200]}, HostileError, "limits"),
        ({"chunks": [10**4200, 10**4200]}, HostileError, "limits"),
        ({"shape": [1 << 61] * 2000, "chunks": [1] * 2000}, HostileError, "rank 2000"),
    ],
)
def test_hostile_and_unknown_zarr2(changes, error, named):
    with pytest.raises(error, match=named):
        metadata.parse(array(**changes), 2, "here")


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"codecs": [{"name": "bytes"}, {"name": "pcodec"}]}, UnsupportedError),
        ({"data_type": "r16"}, UnsupportedError),
        ({"chunk_grid": {"name": "rectangular"}}, UnsupportedError),
        ({"node_type": "group"}, CorruptError),
        ({"codecs": 3}, CorruptError),
    ],
)
def test_hostile_and_unknown_zarr3(changes, error):
    with pytest.raises(error):
        metadata.parse(array3(**changes), 3, "here")


def test_broken_json():
    with pytest.raises(IncompleteError, match="empty"):
        metadata.parse(b"", 2, "here")
    with pytest.raises(HostileError, match="JSON values"):
        metadata.parse(b"[" * 200_000, 2, "here")
    with pytest.raises(CorruptError):
        metadata.parse(b'{"dtype": "<f4"}', 2, "here")


def test_big_endian_and_fortran_order_are_not_raw():
    assert metadata.parse(array(), 2, "").raw
    assert not metadata.parse(array(dtype=">f4"), 2, "").raw
    assert not metadata.parse(array(order="F"), 2, "").raw
    assert not metadata.parse(array(compressor={"id": "zstd", "level": 1}), 2, "").raw


@given(
    shape=st.lists(st.integers(1, 1 << 14), min_size=1, max_size=4).map(tuple),
    dtype=st.sampled_from(["int8", "bfloat16", "float32", "float64"]),
)
def test_chunks_are_4_to_8_mib_and_contiguous(shape, dtype):
    chunks = auto_chunks(shape, dtype)
    nbytes = dtypes.canonical_size(dtype, math.prod(chunks))
    fields = build_metadata(dtype, shape, chunks, version=2, compression="none")
    assert nbytes <= 8 * MIB
    assert nbytes >= min(4 * MIB, dtypes.canonical_size(dtype, math.prod(shape)))
    assert metadata.parse(json.dumps(fields).encode(), 2, "").contiguous_axis() is not None


def test_chunks_are_multiples_of_a_leaf_where_that_is_possible():
    assert auto_chunks((32000, 4096), "bfloat16") == (1024, 4096)
    assert auto_chunks((1000, 4097), "float32")[0] * 4097 * 4 > 7 * MIB
    assert auto_chunks((3072, 2048), "bfloat16") == (1024, 2048)
    assert auto_chunks((), "float32") == ()


@pytest.mark.parametrize("most", [8 * MIB, 32 * MIB])
@pytest.mark.parametrize("extent", [5632, 17408, 28672, 32000, 50257, 151936])
@pytest.mark.parametrize("width", [1088, 2048, 5120])
def test_little_of_the_last_chunk_is_padding(extent, width, most):
    rows, *_rest = auto_chunks((extent, width), "bfloat16", most)
    assert rows == extent or most // 2 <= rows * width * 2 <= most
    assert -extent % rows <= extent / 40
