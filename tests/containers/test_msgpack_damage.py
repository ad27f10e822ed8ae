"""msgpack files that lie: chunked arrays, dtypes, sizes, depth and counts."""

from __future__ import annotations

import pytest

from tests.support.msgpack import array, ext, msgpack, payload, plain
from wherry.errors import CorruptError, HostileError, UnsupportedError
from wherry.integrations.containers.msgpack.index import index_bytes, leaves

CHUNKS = {"0": array((4,), "int16", bytes(range(8))), "1": array((2,), "int16", bytes(4))}


def chunked(shape=None, chunks=None, **more):
    whole = {
        "__msgpack_chunked_array__": True,
        "shape": shape or {"0": 2, "1": 3},
        "chunks": chunks or CHUNKS,
    }
    return msgpack.packb({"w": {**whole, **more}})


def test_chunked_arrays_are_one_array():
    packed = chunked()
    ((path, leaf),) = leaves(index_bytes(packed))
    assert path == ("w",)
    assert (leaf.shape, leaf.dtype, leaf.chunked) == ((2, 3), "int16", True)
    assert b"".join(packed[p.offset : p.offset + p.length] for p in leaf.pieces) == bytes(range(8)) + bytes(4)


def test_chunks_are_taken_by_number_not_by_place():
    ((_, leaf),) = leaves(index_bytes(chunked(chunks=dict(reversed(CHUNKS.items())))))
    assert [piece.length for piece in leaf.pieces] == [8, 4]


def test_a_chunked_scalar():
    ((_, leaf),) = leaves(index_bytes(msgpack.packb({"w": {
        "__msgpack_chunked_array__": True, "shape": {}, "chunks": {"0": array((1,), "int8", b"\1")},
    }})))  # fmt: skip
    assert leaf.shape == ()


@pytest.mark.parametrize(
    ("packed", "what"),
    [
        (chunked(shape={"0": 7}), "6 elements"),
        (chunked(shape={"0": -2, "1": -3}), "non-negative integers"),
        (chunked(shape={"1": 6}), "numbered from 0"),
        (chunked(chunks={"0": 1}), "missing shape or chunks"),
        (chunked(chunks={"0": CHUNKS["0"], "1": array((2,), "uint16", bytes(4))}), "int16/uint16"),
        (chunked(extra=1), "missing shape or chunks"),
        (msgpack.packb({"w": {"__msgpack_chunked_array__": True}}), "numbered from 0"),
    ],
)
def test_chunked_arrays_that_lie(packed, what):
    with pytest.raises(CorruptError, match=what):
        index_bytes(packed)


@pytest.mark.parametrize(
    "dtype", ["void128", "str160", "object", "datetime64[ns]", "V2", "float6_e2m3fn", "key<fry>", ""]
)
def test_dtypes_that_are_not_numbers_are_named(dtype):
    with pytest.raises(UnsupportedError) as caught:
        index_bytes(msgpack.packb({"a": {"b": array((1,), dtype, bytes(16))}}))
    assert repr(dtype or "?") in caught.value.what
    assert caught.value.path == "a/b"


def test_the_old_name_of_a_dtype():
    ((_, leaf),) = leaves(index_bytes(msgpack.packb({"a": array((1,), "float8_e4m3b11", b"\1")})))
    assert leaf.dtype == "float8_e4m3b11fnuz"


@pytest.mark.parametrize(
    "payload_",
    [
        payload((2,), "int8", b"\1"),
        payload((-1,), "int8", b"\1"),
        payload((1.0,), "int8", b"\1"),
        payload((1,), "int8", b"\1") + b"\0",
        payload((1 << 40, 1 << 40), "int8", b"\1"),
        payload((1,) * 65, "int8", b"\1"),
        payload((1,), 5, b"\1"),
        msgpack.packb([[1], "int8"]),
        msgpack.packb("int8"),
        b"",
        b"\x93\x91\x01\xa4int8\xc6\xff\xff\xff\xff",
    ],
)
def test_arrays_that_contradict_themselves(payload_):
    with pytest.raises(CorruptError):
        index_bytes(msgpack.packb({"a": ext(1, payload_), "b": "x" * 40}))


def test_an_ext_type_of_somebody_else_is_named():
    with pytest.raises(UnsupportedError, match="ext type 42"):
        index_bytes(msgpack.packb({"a": ext(42, b"x")}))


def test_complex_numbers():
    packed = msgpack.packb({"c": ext(2, msgpack.packb((1.5, -2.0)))})
    assert plain(index_bytes(packed)) == {"c": 1.5 - 2j}
    with pytest.raises(CorruptError, match="complex"):
        index_bytes(msgpack.packb({"c": ext(2, msgpack.packb((1.5, "x")))}))


@pytest.mark.parametrize(
    "head",
    [
        b"\xdf\xff\xff\xff\xff",
        b"\xdd\xff\xff\xff\xff",
        b"\x81\xa1a\xdb\xff\xff\xff\xff",
        b"\x81\xa1a\xc9\xff\xff\xff\xff\x01",
    ],
)
def test_announced_sizes_are_compared_with_the_file_first(head):
    with pytest.raises(CorruptError):
        index_bytes(head)


def test_depth_is_capped():
    with pytest.raises(HostileError, match=r"limit of \d+ levels"):
        index_bytes(b"\x91" * 100_000 + b"\x01")


def test_nodes_are_capped(monkeypatch):
    monkeypatch.setattr("wherry.integrations.containers.msgpack.index._MOST_NODES", 1000)
    with pytest.raises(HostileError, match="limit of 1000 nodes"):
        index_bytes(msgpack.packb([None] * 2000))


def test_text_is_capped(monkeypatch):
    monkeypatch.setattr("wherry.integrations.containers.msgpack.index._MOST_TEXT", 1000)
    with pytest.raises(HostileError, match="bytes of text"):
        index_bytes(msgpack.packb({"a": "x" * 2000}))
