"""The msgpack index: every form that packers of any age make, and files that lie."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.msgpack import array, ext, msgpack, payload, plain
from wherry.errors import CorruptError, HostileError, UnsupportedError
from wherry.integrations.containers.msgpack.contents import gather
from wherry.integrations.containers.msgpack.index import (
    Array,
    Blob,
    BytePiece,
    Glance,
    Scalar,
    canonical,
    glance,
    index_bytes,
    index_file,
    leaves,
    sequences,
)
from wherry.store.local_store import LocalStore, locate


def test_arrays_are_placed_and_not_read():
    data = np.arange(6, dtype="<f4").tobytes()
    packed = msgpack.packb(
        {"a": {"b": array((2, 3), "float32", data)}, "n": array((), "int8", b"\x05", code=3)}
    )
    found = dict(leaves(index_bytes(packed)))
    leaf = found["a", "b"]
    assert isinstance(leaf, Array)
    assert (leaf.shape, leaf.dtype, leaf.code) == ((2, 3), "float32", 1)
    (piece,) = leaf.pieces
    assert packed[piece.offset : piece.offset + piece.length] == data
    assert found["n",].code == 3
    assert found["n",].shape == ()


@pytest.mark.parametrize("size", [0, 1, 2, 4, 5, 8, 16, 17, 250, 300, 70_000])
def test_every_width_of_ext_and_bin(size):
    packed = msgpack.packb({"k" * (size // 200 + 1): array((size,), "uint8", bytes(size))})
    ((_, leaf),) = leaves(index_bytes(packed))
    assert leaf.shape == (size,)
    assert leaf.pieces[0].length == size


def test_an_array_whose_payload_fits_a_fixed_ext():
    # [1], "int8", one byte: 9 bytes of payload; [1] uint32: 16 bytes, a fixext 16.
    packed = msgpack.packb({"x": array((1,), "uint32", b"\1\0\0\0")})
    assert b"\xd8\x01" in packed
    ((_, leaf),) = leaves(index_bytes(packed))
    assert (leaf.shape, leaf.dtype) == ((1,), "uint32")


def test_bytes_of_old_packers():
    """Before `use_bin_type` bytes and texts were one raw family, keys too."""
    old = {
        b"w": array((2,), b"float16", b"\0\1\2\3", use_bin_type=False),
        b"name": b"caf\xc3\xa9",
        b"raw": b"\xff\xfe",
    }
    packed = msgpack.packb(old, use_bin_type=False)
    found = dict(leaves(index_bytes(packed)))
    assert found["w",].shape == (2,)
    assert found["name",] == Scalar("café")
    assert isinstance(found["raw",], Blob)
    assert found["raw",].piece.length == 2
    assert gather(index_bytes(packed), locate("file")).values == {("name",): "café", ("raw",): "<bytes of 2>"}


def test_keys_of_every_type():
    packed = msgpack.packb({1: 1, -2: 2, b"b": 3, "s": 4, "": 5})
    assert plain(index_bytes(packed)) == {"1": 1, "-2": 2, "b": 3, "s": 4, "": 5}


@pytest.mark.parametrize("tree", [{1: 0, "1": 0}, {b"a": 0, "a": 0}])
def test_two_keys_that_print_alike(tree):
    with pytest.raises(CorruptError, match="duplicate key"):
        index_bytes(msgpack.packb(tree))


def test_the_same_key_twice():
    with pytest.raises(CorruptError, match="duplicate key"):
        index_bytes(b"\x82\xa1a\x01\xa1a\x02")


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(1 << 63), (1 << 64) - 1),
    st.floats(allow_nan=False),
    st.text(max_size=80),
)
TREES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=20), st.dictionaries(st.text(max_size=40), inner, min_size=1, max_size=20)
    ),
    max_leaves=40,
).filter(lambda tree: "__msgpack_chunked_array__" not in str(tree))


@given(TREES)
@settings(max_examples=150, deadline=None)
def test_it_reads_what_the_reference_codec_packs(tree):
    packed = msgpack.packb(tree)
    assert plain(index_bytes(packed)) == tree


@given(TREES, st.data())
@settings(max_examples=150, deadline=None)
def test_every_cut_is_damage(tree, data):
    packed = msgpack.packb({"root": tree})
    stop = data.draw(st.integers(0, len(packed) - 1))
    with pytest.raises(CorruptError):
        index_bytes(packed[:stop])


@given(st.binary(max_size=300))
@settings(max_examples=300, deadline=None)
def test_noise_ends_in_one_of_our_errors(noise):
    try:
        root = index_bytes(noise)
    except (CorruptError, UnsupportedError, HostileError):
        root = None
    else:
        msgpack.unpackb(noise, strict_map_key=False, raw=True, ext_hook=lambda code, _data: code)
        assert root is not None
    for size in (len(noise), len(noise) * 9):
        assert isinstance(glance(noise, size), Glance | None)


def test_bytes_after_the_end():
    with pytest.raises(CorruptError, match="3 trailing bytes"):
        index_bytes(msgpack.packb({"a": 1}) + b"abc")


def test_a_sparse_file_is_indexed_without_reading_its_arrays(tmp_path, monkeypatch):
    """Two arrays of 3 GiB that nobody stored: the index reads a few kilobytes."""
    size, place = 3 << 30, tmp_path / "big.msgpack"
    with place.open("wb") as file:
        file.write(b"\x82")
        for name in (b"a", b"b"):
            inner = b"\x93\x91\xce" + struct.pack(">I", size) + b"\xa5uint8\xc6" + struct.pack(">I", size)
            file.write(b"\xa1" + name + b"\xc9" + struct.pack(">I", len(inner) + size) + b"\x01" + inner)
            file.seek(size, 1)
        file.truncate()
    read, fetch = [], LocalStore.read

    def counted(store, path, start, stop):
        read.append(stop - start)
        return fetch(store, path, start, stop)

    monkeypatch.setattr(LocalStore, "read", counted)
    found = dict(leaves(index_file(locate(place))))
    assert [leaf.shape for leaf in found.values()] == [(size,), (size,)]
    assert sum(read) < 8192


def test_sequences_and_what_gather_makes_of_a_tree():
    packed = msgpack.packb(
        {"l": [array((1,), "int8", b"\1"), []], "e": {}, "n": None, "t": True, "i": 1 << 63, "f": 0.5}
    )
    root = index_bytes(packed)
    assert set(sequences(root)) == {("l",), ("l", "1")}
    found = gather(root, locate("file"))
    assert not found.marked
    assert found.lists == {("l",)}
    assert found.empties == {("l", "1"): "list", ("e",): "dict", ("n",): "none"}
    assert {path: spec.dtype for path, spec in found.specs.items()} == {
        ("l", "0"): "int8", ("t",): "bool", ("i",): "uint64", ("f",): "float64",
    }  # fmt: skip
    assert found.places["f",] == struct.pack("<d", 0.5)


@pytest.mark.parametrize("value", [True, 7, -7, (1 << 64) - 1, 0.25, 1 - 2j])
def test_canonical_bytes_are_those_of_numpy(value):
    dtype, data = canonical(value)
    assert np.asarray(value).dtype == dtype
    assert np.asarray(value).tobytes() == data


def test_glance_follows_the_head_only():
    packed = msgpack.packb({"a": {"b": array((2000,), "float32", bytes(8000))}, "c": 1})
    look = glance(packed[:4096], len(packed))
    assert look is not None
    assert look.paths == (("a",), ("a", "b"))
    assert (look.arrays, look.state) == (1, "more")
    assert glance(packed, len(packed)).state == "whole"
    assert glance(packed[:5000], 5000).state == "cut"
    assert glance(b"\x80\x02}q\x00.", 6) is None
    assert glance(b"PK\x03\x04", 4) is None
    assert BytePiece(0, 1) == (0, 1)


# msgpack files that lie: chunked arrays, dtypes, sizes, depth and counts.


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
