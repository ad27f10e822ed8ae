"""Decoding chunks piece by piece: the same bytes as tensorstore's for every grid and codec, damage named."""

from __future__ import annotations

import gzip
import os
import struct
import zlib
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import zstandard
from google_crc32c import value as crc32c

import wherry
from tests.support.large_chunks import (
    BLOSC,
    BYTES3,
    GZIP,
    GZIP3,
    MIB,
    NONE,
    ZLIB,
    ZSTD,
    ZSTD3,
    shards,
    stored,
    values,
)
from wherry.core.tensorspec import Span, TensorSpec
from wherry.errors import CorruptError, IncompleteError
from wherry.integrations.containers.zarr import metadata, stream
from wherry.mover.pool import Pool
from wherry.mover.read import band_at, place
from wherry.mover.source import Source
from wherry.store.local_store import locate


def spilled_bytes(folder, budget=16 * MIB, step=3 * MIB + 1):
    """The bytes of `w` as the spill gives them, in spans of an odd length; and the most files at one time."""
    with wherry.open(folder) as checkpoint:
        spec = checkpoint.spec("w")
        result, most = bytearray(), 0
        with Source(checkpoint.reader, Pool(budget)) as source:
            assert source.way(spec).band is not None
            for start in range(0, spec.nbytes, step):
                span = Span(start, min(start + step, spec.nbytes))
                with source.at(spec, span) as extents:
                    result += read(extents, span, spec)
                    place_of = Path(extents[-1].file).parent
                    most = max(most, len(os.listdir(place_of)))
            assert os.listdir(place_of) == []
        assert not place_of.exists()
    return bytes(result), most


def read(extents, span, spec):
    from wherry.mover.read import read_span

    buffer = bytearray(span.nbytes)
    read_span(extents, span, memoryview(buffer), spec)
    return buffer


@pytest.mark.parametrize(
    ("shape", "chunks", "version", "changes"),
    [
        ((2048, 3000), (2048, 1100), 2, ZSTD),
        ((2048, 3000), (1500, 3000), 2, ZLIB),
        ((3, 1000, 1100), (2, 1000, 700), 3, {"codecs": [BYTES3, GZIP3]}),
        ((3, 5, 800_000), (1, 3, 600_000), 3, {"codecs": [BYTES3, ZSTD3]}),
        ((2048, 3000), (2048, 1200), 3, shards((512, 400), ZSTD3)),
        ((2048, 3000), (2048, 3000), 3, shards((1024, 3000))),
        ((2048, 3000), (1024, 750), 2, BLOSC),
        ((6_000_001,), (2_500_000,), 2, GZIP),
        ((4, 1_500_000), (4, 250_000), 2, {**ZSTD, "order": "F"}),
    ],
    ids=str,
)
def test_every_grid_and_codec_gives_the_bytes_that_tensorstore_gives(
    tmp_path, shape, chunks, version, changes
):
    array = values(shape, "float32")
    folder = stored(tmp_path / "in", array, chunks, version=version, **changes)
    found, most = spilled_bytes(folder)
    assert found == array.tobytes()
    assert most <= 2


@pytest.mark.parametrize(
    "region", [np.s_[3:700, 5:2999], np.s_[0:1000, 0:3000], np.s_[999:1000, 0:1]], ids=str
)
@pytest.mark.parametrize("chunks", [(1100, 3100), (7, 450), (300, 1)], ids=str)
def test_parts_of_raw_chunks_are_read_alone(tmp_path, chunks, region):
    array = values((1000, 3000), "float32")
    if chunks == (300, 1):
        array, region = array[:, :40].copy(), (region[0], slice(region[1].start, min(region[1].stop, 40)))
    folder = stored(tmp_path / "in", array, chunks, **NONE)
    with wherry.open(folder) as checkpoint:
        assert checkpoint.reader.access(checkpoint.spec("w")).decoder is None
        assert checkpoint.read("w", region).tobytes() == array[region].tobytes()


DAMAGE = {
    "cut in the middle": (ZSTD, lambda data, whole: data[: len(data) // 2], "decodes to|cannot be decoded"),
    "without its last byte": (
        ZSTD,
        lambda data, whole: data[:-1],
        "cannot be decoded|decodes to|is truncated",
    ),
    "one bit": (ZSTD, lambda data, whole: flipped(data), "cannot be decoded|decodes to"),
    "something behind": (ZSTD, lambda data, whole: data + b"more", "cannot be decoded"),
    "another frame": (ZSTD, lambda data, whole: data + zstandard.compress(b"x" * 9), "decodes to more"),
    "no zstd": (ZSTD, lambda data, whole: b"\0" * len(data), "cannot be decoded"),
    "an impossible window": (
        ZSTD,
        lambda data, whole: b"\x28\xb5\x2f\xfd\xa0" + b"\xff" * 4 + data[9:],
        "cannot be decoded: a window",
    ),
    "fewer": (ZSTD, lambda data, whole: zstandard.compress(whole[:-1]), "decodes to fewer"),
    "far fewer": (ZSTD, lambda data, whole: zstandard.compress(whole[: 1 << 20]), "decodes to fewer"),
    "one more": (ZSTD, lambda data, whole: zstandard.compress(whole + b"x"), "decodes to more"),
    "a bomb": (ZSTD, lambda data, whole: zstandard.compress(bytes(1 << 28)), "decodes to more"),
    "gzip cut": (GZIP, lambda data, whole: data[: len(data) // 2], "is truncated"),
    "gzip without its check": (GZIP, lambda data, whole: data[:-1], "is truncated"),
    "gzip bit": (GZIP, lambda data, whole: flipped(data), "cannot be decoded|decodes to"),
    "gzip behind": (GZIP, lambda data, whole: data + b"more", "trailing bytes"),
    "gzip fewer": (GZIP, lambda data, whole: gzip.compress(whole[:-1], 1), "decodes to"),
    "gzip bomb": (GZIP, lambda data, whole: gzip.compress(bytes(1 << 28), 1), "decodes to more"),
    "gzip end": (GZIP, lambda data, whole: data[:-8] + flipped(data[-8:]), "cannot be decoded|decodes to"),
    "two members": (GZIP, lambda data, whole: data + gzip.compress(b"more"), "trailing bytes"),
    "zlib bit": (ZLIB, lambda data, whole: flipped(data), "cannot be decoded|decodes to"),
    "zlib behind": (ZLIB, lambda data, whole: data + b"more", "trailing bytes"),
    "zlib end": (ZLIB, lambda data, whole: data[:-1] + bytes([data[-1] ^ 1]), "cannot be decoded"),
    "zlib for gzip": (GZIP, lambda data, whole: zlib.compress(whole, 1), "cannot be decoded"),
}


def flipped(data):
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 0x10]) + data[middle + 1 :]


@pytest.mark.parametrize("rows", [512, 1024], ids=["at once", "in pieces"])
@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_chunk_is_named_and_nothing_is_left(tmp_path, name, rows):
    changes, damage, reason = DAMAGE[name]
    array = values((rows, 6000))
    assert (array.nbytes <= stream.AT_ONCE) == (rows == 512)
    folder = stored(tmp_path / "in", array, array.shape, **changes)
    chunk = folder / "w" / "0.0"
    chunk.write_bytes(damage(chunk.read_bytes(), array.tobytes()))
    if (
        name == "one bit"
    ):  # without a checksum a flipped bit may decode to other numbers, which only digests tell
        chunk.write_bytes(flipped(zstandard.ZstdCompressor(write_checksum=True).compress(array.tobytes())))
    with pytest.raises(CorruptError, match=reason):
        memory = "64MiB" if "window" in name else "16MiB"  # zstd reserves 13.6 MB for such a frame, if it can
        wherry.convert(folder, tmp_path / "o.safetensors", to="safetensors", memory=memory, lineage=False)
    assert os.listdir(tmp_path) == ["in"]


def test_damaged_shards(tmp_path):
    array = values((1024, 6000))
    folder = stored(tmp_path / "in", array, array.shape, version=3, **shards((32, 6000), ZSTD3))
    chunk = folder / "w" / "c" / "0" / "0"
    data = chunk.read_bytes()
    size = 16 * 32 + 4
    index, check = data[-size:-4], data[-4:]
    assert crc32c(index) == int.from_bytes(check, "little")
    assert crc32c(b"123456789") == 0xE3069283, "the check value of CRC-32C's definition"
    for entry, error, reason in [
        ((0, len(data) + 1), CorruptError, "invalid index: .* out of range"),
        (((1 << 64) - 1,) * 2, IncompleteError, "missing inner chunk at"),
    ]:
        bad = struct.pack("<QQ", *entry) + index[16:]
        chunk.write_bytes(data[:-size] + bad + crc32c(bad).to_bytes(4, "little"))
        with pytest.raises(error, match=reason):
            spilled_bytes(folder)
    chunk.write_bytes(data[:-size] + index[::-1] + check)
    with pytest.raises(CorruptError, match="checksum mismatch in its index"):
        spilled_bytes(folder)
    chunk.write_bytes(data[-400:])
    with pytest.raises(CorruptError, match="truncated: expected an index of"):
        spilled_bytes(folder)


def test_a_value_inside_a_node_of_the_tree(tmp_path):
    array = np.zeros((2048, 6000), "uint8")
    folder = stored(tmp_path / "in", array, array.shape, ocdbt=True, **ZSTD)
    with wherry.open(folder) as checkpoint:
        (value,) = [value for key, value in checkpoint.reader.listing.values.items() if key == "w/0.0"]
        assert value.file is None
    assert spilled_bytes(folder)[0] == array.tobytes()


def test_bands_tile_a_tensor():
    for shape, cut in [((7, 5, 3), (2, 5, 3)), ((7, 5, 3), (1, 2, 3)), ((4, 3), (1, 1)), ((9,), (4,))]:
        spec = TensorSpec(("w",), shape, "float32")
        array, at, parts = np.arange(spec.size, dtype="f4").reshape(shape), 0, []
        while at < spec.nbytes:
            region, span = band_at(spec, cut, at)
            assert (region, span) == band_at(spec, cut, span.stop - 1)
            assert span.start == at
            parts.append(array[region].tobytes())
            assert len(parts[-1]) == span.nbytes
            at = span.stop
        assert b"".join(parts) == array.tobytes()


@pytest.mark.parametrize("piece", [1, 7, 64, 10_000])
@pytest.mark.parametrize(("shape", "chunks"), [((5, 7), (2, 3)), ((3, 4, 5), (2, 4, 2)), ((6,), (4,))])
def test_boxes_are_placed_whatever_the_pieces_are(shape, chunks, piece):
    array = np.arange(np.prod(shape, dtype=int), dtype="i2").reshape(shape)
    spec, out = TensorSpec(("w",), shape, "int16"), bytearray(array.nbytes)

    def put(data, offset):
        out[offset : offset + len(data)] = data

    padded = np.full([-(-s // c) * c for s, c in zip(shape, chunks, strict=True)], -1, "i2")
    padded[tuple(slice(0, extent) for extent in shape)] = array
    axes = [range(0, extent, chunk) for extent, chunk in zip(shape, chunks, strict=True)]
    for start in product(*axes):
        region = tuple(slice(first, first + chunk) for first, chunk in zip(start, chunks, strict=True))
        data = padded[region].tobytes()
        pieces = [memoryview(data)[at : at + piece] for at in range(0, len(data), piece)]
        place(spec, region, pieces, put)
    assert out == array.tobytes()


def test_which_chunks_stream():
    fields = {
        "zarr_format": 2,
        "shape": [4],
        "chunks": [4],
        "dtype": "<f4",
        "fill_value": None,
        "filters": None,
    }

    def parsed(**changes):
        import json

        return metadata.parse(
            json.dumps(fields | {"order": "C", "compressor": None} | changes).encode(), 2, ""
        )

    assert all(parsed(**codec).streams for codec in (ZSTD, GZIP, ZLIB, NONE))
    assert not any(parsed(**change).streams for change in (BLOSC, {"order": "F"}, {"dtype": ">f4"}))


def test_stored_bytes_of_a_file_that_shrinks(tmp_path):
    file = tmp_path / "chunk"
    file.write_bytes(bytes(100))
    shrunk = stream.StoredChunk(locate(file), 0, 200, "0.0")
    for codec in ("none", "zstd", "gzip"):
        with pytest.raises(CorruptError, match=r"chunk 0\.0"):
            list(stream._pieces(codec, shrunk, 200))
