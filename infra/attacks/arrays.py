"""Arrays that lie: metadata of zarr, chunks of every codec, and nodes of OCDBT with cycles and false lengths."""

from __future__ import annotations

import bz2
import gzip
import json
import math
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from attacks import bombs, lies, pickles
from attacks.case import Case


def _json(document: Any) -> bytes:
    return json.dumps(document).encode("utf-8", "surrogatepass")


# ---- Arrays of zarr and their codecs

ZARRAY = {
    "zarr_format": 2,
    "shape": [4],
    "chunks": [4],
    "dtype": "<f4",
    "order": "C",
    "fill_value": 0.0,
    "filters": None,
    "compressor": None,
    "dimension_separator": ".",
}
ZARR3 = {
    "zarr_format": 3,
    "node_type": "array",
    "shape": [4],
    "data_type": "float32",
    "fill_value": 0.0,
    "attributes": {},
    "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [4]}},
    "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
    "codecs": [
        {"name": "bytes", "configuration": {"endian": "little"}},
        {"name": "zstd", "configuration": {"level": 1}},
    ],
}


def orbax_array(document: Any, chunk: bytes, version: int = 2) -> Callable[[Path], Path]:
    """An Orbax item of one array in a folder of its own."""
    row = {
        "key_metadata": [{"key": "w", "key_type": 2}],
        "value_metadata": {"value_type": "jax.Array", "skip_deserialize": False},
    }
    metadata = {"tree_metadata": {"('w',)": row}, "use_ocdbt": False, "use_zarr3": version == 3}

    def make(folder: Path) -> Path:
        (folder / "_METADATA").write_bytes(_json(metadata))
        place = folder / "w" / "c" if version == 3 else folder / "w"
        place.mkdir(parents=True)
        (folder / "w" / ("zarr.json" if version == 3 else ".zarray")).write_bytes(_json(document))
        (place / "0").write_bytes(chunk)
        return folder

    return make


def codec_chunks() -> dict[str, tuple[dict[str, Any], list[bytes]]]:
    """Codec → its metadata, and chunks that lie about what they become."""
    import zstandard

    sound, large = bytes(16), bytes(1 << 26)
    zstd = zstandard.compress(sound)
    frames = [
        b"\x28\xb5\x2f\xfd" + head + bytes(24)
        for head in (
            b"\x00\x58",
            b"\x20\xff",
            b"\xa0\xff\xff\xff\xff",
            b"\xe0" + b"\xff" * 8,
            b"\x00\xff",
            b"\x40\xf8\xff\xff",
        )
    ]
    blosc = [
        struct.pack("<BBBBIII", version, 1, flags, size, nbytes, block, length) + bytes(64)
        for version in (2, 9)
        for flags in (0, 1, 2, 0x10, 0xFF)
        for size in (0, 4)
        for nbytes, block, length in (
            (16, 16, 80),
            (2**31, 16, 80),
            (16, 2**31, 80),
            (2**32 - 1, 2**32 - 1, 2**32 - 1),
            (0, 0, 0),
            (16, 0, 16),
        )
    ]
    cut = [b"", b"\0", sound[:3]]
    return {
        "none": ({}, [*cut, large[: 1 << 20]]),
        "zstd": (
            {"id": "zstd", "level": 1},
            [*cut, *frames, zstandard.compress(large), zstd[:-2], zstd + zstd, zstd + b"x"],
        ),
        "gzip": (
            {"id": "gzip", "level": 1},
            [
                *cut,
                gzip.compress(large),
                gzip.compress(sound)[:-4] + b"\xff" * 4,
                gzip.compress(sound) * 2,
                gzip.compress(b""),
            ],
        ),
        "zlib": (
            {"id": "zlib", "level": 1},
            [*cut, zlib.compress(large), zlib.compress(sound)[:-1], zlib.compress(sound) + b"x"],
        ),
        "bz2": ({"id": "bz2", "level": 1}, [*cut, bz2.compress(large), bz2.compress(sound)[:-1]]),
        "blosc": ({"id": "blosc", "cname": "lz4", "clevel": 1, "shuffle": 1, "blocksize": 0}, [*cut, *blosc]),
        "pickle": (
            {"id": "pickle", "protocol": 2},
            [*pickles.forms("os", "system", "touch EVIL_MARKER").values()][:8],
        ),
    }


def _zarr() -> Iterator[Case]:
    for codec, (metadata, chunks) in codec_chunks().items():
        for number, chunk in enumerate(chunks):
            document = {**ZARRAY, "compressor": metadata or None}
            yield Case(f"zarr-{codec}/chunk-{number}", orbax_array(document, chunk), evil=codec == "pickle")
            giant = {**document, "shape": [1 << 40], "chunks": [1 << 40]}
            yield Case(f"zarr-{codec}/giant-{number}", orbax_array(giant, chunk), evil=codec == "pickle")
            if codec in ("zstd", "gzip", "blosc"):
                yield Case(f"zarr3-{codec}/chunk-{number}", orbax_array(_zarr3(codec), chunk, 3))
    for number, document in lies.documents(ZARRAY, 120, "zarray"):
        yield Case(f"zarr/metadata-{number}", orbax_array(document, bytes(16)))
    for number, document in lies.documents(ZARR3, 160, "zarr3"):
        yield Case(f"zarr3/metadata-{number}", orbax_array(document, bytes(16), 3))


def _zarr3(codec: str) -> dict[str, Any]:
    configuration = (
        {"cname": "lz4", "clevel": 1, "shuffle": "noshuffle", "blocksize": 0, "typesize": 4}
        if codec == "blosc"
        else {"level": 1}
    )
    return {**ZARR3, "codecs": [ZARR3["codecs"][0], {"name": codec, "configuration": configuration}]}


# ---- OCDBT


def _names(names: list[bytes]) -> bytes:
    count = bombs.varint(len(names))
    return (
        count
        + bytes(max(len(names) - 1, 0))
        + b"".join(bombs.varint(len(name)) for name in names)
        + bytes(len(names))
        + b"".join(names)
    )


def node(height: int, entries: list[tuple[bytes, int, int]], file: bytes = b"d/0") -> bytes:
    """A node: of leaves, keys with inline values; of inner nodes, keys with offset and length of a child."""
    keys = b"".join(key for key, _, _ in entries)
    lengths = b"".join(bombs.varint(len(key)) for key, _, _ in entries)
    head = (
        bytes([height & 255])
        + _names([file] if height else [])
        + bombs.varint(len(entries))
        + bytes(max(len(entries) - 1, 0))
        + lengths
    )
    if not height:
        return head + keys + bytes(2 * len(entries))
    offsets = b"".join(bombs.varint(offset) for _, offset, _ in entries)
    sizes = b"".join(bombs.varint(size) for _, _, size in entries)
    return head + bytes(len(entries)) + keys + bytes(len(entries)) + offsets + sizes + bytes(3 * len(entries))


def database(
    body: bytes,
    *,
    height: int = 0,
    file: bytes = b"d/0",
    offset: int = 0,
    length: int | None = None,
    versions: int = 1,
) -> Callable[[Path], Path]:
    """An Orbax item whose database has this root, and says so or lies."""

    def make(folder: Path) -> Path:
        (folder / "item" / "d").mkdir(parents=True)
        root = bombs.seal_node(0x0CDB20DE, body)
        (folder / "item" / "d" / "0").write_bytes(root)
        row = {"key_metadata": [{"key": "w", "key_type": 2}], "value_metadata": {"value_type": "jax.Array"}}
        (folder / "item" / "_METADATA").write_bytes(
            _json({"tree_metadata": {"('w',)": row}, "use_ocdbt": True})
        )
        config = bytes(17) + bombs.varint(1024) + bombs.varint(1 << 20) + b"\x04\x01" + bytes(4)
        size = len(root) if length is None else length
        tail = (
            bombs.varint(versions)
            + bytes([1]) * min(versions, 9)
            + bytes([height & 255])
            + b"\0"
            + bombs.varint(offset)
            + bombs.varint(size)
            + bytes(3)
            + bytes(8)
            + b"\0"
        )
        manifest = config + _names([file]) + tail
        (folder / "item" / "manifest.ocdbt").write_bytes(bombs.seal_node(0x0CDB3A2A, manifest))
        return folder / "item"

    return make


def _ocdbt() -> Iterator[Case]:
    leaf = node(0, [(b"w/.zarray", 0, 0)])
    for height in (0, 1, 2, 16, 17, 255):
        cycle = node(height, [(b"a", 0, 90), (b"b", 0, 90)])
        yield Case(f"ocdbt/cycle-{height}", database(cycle, height=height))
        yield Case(f"ocdbt/height-{height}", database(leaf, height=height))
    for field in ("offset", "length"):
        for value in (*lies.NUMBERS, 2**70):
            yield Case(f"ocdbt/{field}={value}", database(leaf, **{field: value}))
    for versions in (0, 2, 200, 2**31, 2**63):
        yield Case(f"ocdbt/versions={versions}", database(leaf, versions=versions))
    for number, name in enumerate(lies.NAMES):
        raw = name.encode("utf-8", "surrogatepass")
        yield Case(f"ocdbt/file-{number}", database(leaf, file=raw))
        yield Case(f"ocdbt/key-{number}", database(node(0, [(raw, 0, 0)])))
    for fan in (2, 200, 5000):
        entries = [(b"%08d" % number, 0, 60) for number in range(fan)]
        yield Case(f"ocdbt/fan-{fan}", database(node(3, entries), height=3))
    for count in (2**20, 2**31, 2**63):
        yield Case(f"ocdbt/entries={count}", database(b"\0\0" + bombs.varint(count) + bytes(64)))
    for step in range(0, len(leaf), 2):
        yield Case(f"ocdbt/cut-{step}", database(leaf[:step]))
        flipped = bytearray(leaf)
        flipped[step] ^= 0xFF
        yield Case(f"ocdbt/flip-{step}", database(bytes(flipped)))
    for exponent in (20, 24, 26):
        yield Case(f"ocdbt/shared-prefix-{exponent}", database(_long_keys(1 << exponent)))


def _long_keys(size: int) -> bytes:
    """Keys that share all of a long first key."""
    count = min(4096, math.isqrt(size))
    shared = bombs.varint(size >> 8)
    first = b"k" * (size >> 8)
    return (
        b"\0\0"
        + bombs.varint(count)
        + shared * (count - 1)
        + bombs.varint(len(first))
        + b"\x01" * (count - 1)
        + first
        + bytes(number & 127 for number in range(count - 1))
        + bytes(2 * count)
    )


def cases() -> Iterator[Case]:
    """Arrays of zarr, and databases of OCDBT."""
    yield from _zarr()
    yield from _ocdbt()
