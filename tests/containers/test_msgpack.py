"""The msgpack index: every form that packers of any age make, and every way in which a file can lie."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.msgpack import array, msgpack, plain
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
from wherry.storage.stores import LocalStore, locate


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
