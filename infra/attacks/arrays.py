"""Arrays that lie: metadata of zarr and Orbax, chunks of every codec, nodes of OCDBT with cycles and false lengths."""

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

from infra.attacks import lies, pickles
from infra.attacks.bombs import names_of, ocdbt_item, varint
from infra.attacks.case import TOUCH, Case, Make, as_json, named, write_files
from infra.attacks.lies import DIGITS

# ---- Arrays of zarr and their codecs

ZARRAY = {
    "zarr_format": 2, "shape": [4], "chunks": [4], "dtype": "<f4", "order": "C", "fill_value": 0.0, "filters": None,
    "compressor": None, "dimension_separator": ".",
}  # fmt: skip
_BYTES = {"name": "bytes", "configuration": {"endian": "little"}}
ZARR3 = {
    "zarr_format": 3, "node_type": "array", "shape": [4], "data_type": "float32", "fill_value": 0.0, "attributes": {},
    "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [4]}},
    "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
    "codecs": [_BYTES, {"name": "zstd", "configuration": {"level": 1}}],
}  # fmt: skip
_CODECS3 = {
    "zstd": {"level": 1}, "gzip": {"level": 1},
    "blosc": {"cname": "lz4", "clevel": 1, "shuffle": "noshuffle", "blocksize": 0, "typesize": 4},
}  # fmt: skip
_TREE = {
    "tree_metadata": {
        "('w',)": {
            "key_metadata": [{"key": "w", "key_type": 2}],
            "value_metadata": {"value_type": "jax.Array", "skip_deserialize": False},
        }
    },
    "use_ocdbt": False,
}


def orbax_array(
    document: bytes, chunk: bytes = bytes(16), version: int = 2, more: dict[str, bytes] | None = None
) -> Callable[[Path], Path]:
    """An Orbax item of one array in a folder of its own, with other files or more of them."""
    metadata = as_json({**_TREE, "use_zarr3": version == 3})
    array = (
        {"w/zarr.json": document, "w/c/0": chunk} if version == 3 else {"w/.zarray": document, "w/0": chunk}
    )
    return write_files({"_METADATA": metadata, **array, **(more or {})})


def codec_chunks() -> dict[str, tuple[dict[str, Any], list[bytes]]]:
    """Codec → its metadata, and chunks that lie about what they become."""
    import zstandard

    sound, large = bytes(16), bytes(1 << 26)
    zstd, zipped, packed = zstandard.compress(sound), gzip.compress(sound), zlib.compress(sound)
    heads = (
        b"\x00\x58", b"\x20\xff", b"\xa0\xff\xff\xff\xff", b"\xe0" + b"\xff" * 8, b"\x00\xff", b"\x40\xf8\xff\xff",
    )  # fmt: skip
    frames = [b"\x28\xb5\x2f\xfd" + head + bytes(24) for head in heads]
    lengths = (
        (16, 16, 80), (2**31, 16, 80), (16, 2**31, 80), (2**32 - 1, 2**32 - 1, 2**32 - 1), (0, 0, 0), (16, 0, 16),
    )  # fmt: skip
    blosc = [
        struct.pack("<BBBBIII", version, 1, flags, size, *stated) + bytes(64)
        for version in (2, 9)
        for flags in (0, 1, 2, 0x10, 0xFF)
        for size in (0, 4)
        for stated in lengths
    ]
    gzips = [gzip.compress(large), zipped[:-4] + b"\xff" * 4, zipped * 2, gzip.compress(b"")]
    cut = [b"", b"\0", sound[:3]]
    return {
        "none": ({}, [*cut, large[: 1 << 20]]),
        "zstd": (
            {"id": "zstd", "level": 1},
            [*cut, *frames, zstandard.compress(large), zstd[:-2], zstd + zstd, zstd + b"x"],
        ),
        "gzip": ({"id": "gzip", "level": 1}, [*cut, *gzips]),
        "zlib": ({"id": "zlib", "level": 1}, [*cut, zlib.compress(large), packed[:-1], packed + b"x"]),
        "bz2": ({"id": "bz2", "level": 1}, [*cut, bz2.compress(large), bz2.compress(sound)[:-1]]),
        "blosc": ({"id": "blosc", "cname": "lz4", "clevel": 1, "shuffle": 1, "blocksize": 0}, [*cut, *blosc]),
        "pickle": ({"id": "pickle", "protocol": 2}, [*pickles.forms("os", "system", TOUCH).values()][:8]),
    }


def _zarr() -> Iterator[Case]:
    for codec, (metadata, chunks) in codec_chunks().items():
        evil, document = codec == "pickle", {**ZARRAY, "compressor": metadata or None}
        giant = as_json({**document, "shape": [1 << 40], "chunks": [1 << 40]})
        for number, chunk in enumerate(chunks):
            yield Case(f"zarr-{codec}/chunk-{number}", orbax_array(as_json(document), chunk), evil)
            yield Case(f"zarr-{codec}/giant-{number}", orbax_array(giant, chunk), evil)
            if codec in _CODECS3:
                codecs = [_BYTES, {"name": codec, "configuration": _CODECS3[codec]}]
                third = as_json({**ZARR3, "codecs": codecs})
                yield Case(f"zarr3-{codec}/chunk-{number}", orbax_array(third, chunk, 3))
    for kind, sound, count, seed, version in (
        ("zarr", ZARRAY, 120, "zarray", 2),
        ("zarr3", ZARR3, 160, "zarr3", 3),
    ):
        for number, found in enumerate(lies.documents(sound, count, seed)):
            yield Case(f"{kind}/metadata-{number}", orbax_array(as_json(found), version=version))


# ---- OCDBT


def node(height: int, entries: list[tuple[bytes, int, int]], file: bytes = b"d/0") -> bytes:
    """A node: of leaves, keys with inline values; of inner nodes, keys with offset and length of a child."""
    count, files = len(entries), names_of([file] if height else [])
    lengths = b"".join(varint(len(key)) for key, _, _ in entries)
    keys = b"".join(key for key, _, _ in entries)
    head = bytes([height & 255]) + files + varint(count) + bytes(max(count - 1, 0)) + lengths
    if not height:
        return head + keys + bytes(2 * count)
    offsets = b"".join(varint(offset) for _, offset, _ in entries)
    sizes = b"".join(varint(size) for _, _, size in entries)
    return head + bytes(count) + keys + bytes(count) + offsets + sizes + bytes(3 * count)


def database(body: bytes, **stated: Any) -> Callable[[Path], Path]:
    """An Orbax item whose database has this root, and says so or lies; see `ocdbt_item`."""
    return lambda folder: ocdbt_item(folder / "item", body, **stated)


def _ocdbt() -> Iterator[tuple[str, Make]]:
    leaf = node(0, [(b"w/.zarray", 0, 0)])
    for height in (0, 1, 2, 16, 17, 255):
        yield f"cycle-{height}", database(node(height, [(b"a", 0, 90), (b"b", 0, 90)]), height=height)
        yield f"height-{height}", database(leaf, height=height)
    for field, values in (
        ("offset", (*lies.NUMBERS, 2**70)),
        ("length", (*lies.NUMBERS, 2**70)),
        ("versions", (0, 2, 200, 2**31, 2**63)),
    ):
        for value in values:
            yield f"{field}={value}", database(leaf, **{field: value})
    for number, name in enumerate(lies.NAMES):
        raw = name.encode("utf-8", "surrogatepass")
        yield f"file-{number}", database(leaf, file=raw)
        yield f"key-{number}", database(node(0, [(raw, 0, 0)]))
    for fan in (2, 200, 5000):
        yield f"fan-{fan}", database(node(3, [(b"%08d" % number, 0, 60) for number in range(fan)]), height=3)
    for count in (2**20, 2**31, 2**63):
        yield f"entries={count}", database(b"\0\0" + varint(count) + bytes(64))
    for step in range(0, len(leaf), 2):
        yield f"cut-{step}", database(leaf[:step])
        yield f"flip-{step}", database(leaf[:step] + bytes([leaf[step] ^ 0xFF]) + leaf[step + 1 :])
    for exponent in (20, 24, 26):
        yield f"shared-prefix-{exponent}", database(_long_keys(1 << exponent))


def _long_keys(size: int) -> bytes:
    """Keys that share all of a long first key."""
    count, first = min(4096, math.isqrt(size)), b"k" * (size >> 8)
    lengths = varint(len(first)) * count + b"\x01" * (count - 1)  # what each shares, and its own
    rest = bytes(number & 127 for number in range(count - 1))
    return b"\0\0" + varint(count) + lengths + first + rest + bytes(2 * count)


# ---- Digits


def _digits() -> Iterator[Case]:
    for version, sound in ((2, ZARRAY), (3, ZARR3)):
        for name, text in lies.texts_of_digits(sound):
            yield Case(f"digits-zarr/{version}-{name}", orbax_array(text, version=version))
    metadata = {
        "tree_metadata": {
            "('w', '0')": {
                "key_metadata": [{"key": "w", "key_type": 2}, {"key": "0", "key_type": 1}],
                "value_metadata": {"value_type": "jax.Array", "skip_deserialize": False, "write_shape": [4]},
            }
        },
        "use_ocdbt": False, "store_array_data_equal_to_fill_value": True,
    }  # fmt: skip
    steps = {
        "item_handlers": None, "init_timestamp_nsecs": 1, "commit_timestamp_nsecs": 2, "custom_metadata": {},
    }  # fmt: skip
    sharding = {"shape": [1], "axis_names": ["x"], "partition_spec": [["x"]], "device_mesh": {"mesh": [[0]]}}
    item = as_json(ZARRAY)
    for form, digits in DIGITS.items():
        for field, value in {"fill_value": digits, "dtype": f"<f{digits}"}.items():
            yield Case(f"digits-zarr/2-{field}-{form}", orbax_array(as_json({**ZARRAY, field: value})))
        keys = json.dumps(metadata).replace('"0"', f'"{digits}"').encode()
        yield Case(f"digits-orbax/key-{form}", orbax_array(item, more={"_METADATA": keys}))
    for kind, file, sound in (("metadata", "_METADATA", metadata), ("steps", "_CHECKPOINT_METADATA", steps)):
        for name, text in lies.texts_of_digits(sound):
            yield Case(f"digits-orbax/{kind}-{name}", orbax_array(item, more={file: text}))
    for name, text in lies.texts_of_digits(sharding, ("long", "product", "wide")):
        shards = {"_sharding": as_json({"dw==": text.decode()})}
        yield Case(f"digits-orbax/sharding-{name}", orbax_array(item, more=shards))


def cases() -> Iterator[Case]:
    """Arrays of zarr, and databases of OCDBT."""
    yield from _zarr()
    yield from named("ocdbt", _ocdbt())
    yield from _digits()
