"""Files with a head that lies about what follows: safetensors, GGUF, msgpack, .npy, TensorFlow, zarr, OCDBT."""

from __future__ import annotations

import bz2
import gzip
import json
import math
import struct
import zlib
from typing import TYPE_CHECKING, Any

from attacks import bombs, lies, pickles
from attacks.archives import written
from attacks.case import Case

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

_U64 = 0xFFFFFFFFFFFFFFFF


def _json(document: Any) -> bytes:
    return json.dumps(document).encode("utf-8", "surrogatepass")


# ---- safetensors

_ENTRY = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}
_HEADER = {"__metadata__": {"format": "pt"}, "a": _ENTRY, "b": {**_ENTRY, "data_offsets": [16, 32]}}


def safetensors(header: bytes, length: int | None = None) -> bytes:
    """A file with this header, which says that it is so long."""
    return struct.pack("<Q", (len(header) if length is None else length) & _U64) + header + bytes(32)


def _safetensors() -> Iterator[Case]:
    def case(name: str, data: bytes) -> Case:
        return Case(f"safetensors/{name}", written("model.safetensors", data))

    for number in (*lies.NUMBERS, -1):
        yield case(f"length={number}", safetensors(_json(_HEADER), number))
    for number, document in lies.documents(_HEADER, 160, "safetensors"):
        yield case(f"header-{number}", safetensors(_json(document)))
    for number, name in enumerate(lies.NAMES):
        yield case(
            f"name-{number}", safetensors(_json({name: _ENTRY, "z": {**_ENTRY, "data_offsets": [16, 32]}}))
        )
        yield case(f"metadata-{number}", safetensors(_json({**_HEADER, "__metadata__": {name: name}})))
    for number, text in enumerate(
        (
            b'{"a":' * 3000,
            b"[" * 90_000,
            b'{"a":1,"a":2}',
            b"\xff" * 90,
            b"{}" * 9,
            b" " * 4096,
            b"",
            b'{"a":{"dtype":"F32","shape":[NaN],"data_offsets":[0,4]}}',
        )
    ):
        yield case(f"text-{number}", safetensors(text))


# ---- GGUF


def gguf(
    version: int = 3, tensors: int = 1, pairs: int = 1, body: bytes | None = None, **field: int
) -> bytes:
    """A file with one pair and one tensor; each number of it can be another."""
    number = {
        "key": 20,
        "type": 8,
        "text": 5,
        "name": 1,
        "dims": 1,
        "dim": 4,
        "kind": 0,
        "offset": 0,
        **field,
    }
    pair = struct.pack(
        "<Q20sIQ5s",
        number["key"] & _U64,
        b"general.architecture",
        number["type"] & 0xFFFFFFFF,
        number["text"] & _U64,
        b"llama",
    )
    tensor = struct.pack(
        "<Q1sIQIQ",
        number["name"] & _U64,
        b"a",
        number["dims"] & 0xFFFFFFFF,
        number["dim"] & _U64,
        number["kind"] & 0xFFFFFFFF,
        number["offset"] & _U64,
    )
    head = b"GGUF" + struct.pack("<IQQ", version & 0xFFFFFFFF, tensors & _U64, pairs & _U64)
    data = head + (pair + tensor if body is None else body)
    return data + bytes(-len(data) % 32) + bytes(64)


def _gguf() -> Iterator[Case]:
    for field in (
        "version",
        "tensors",
        "pairs",
        "key",
        "type",
        "text",
        "name",
        "dims",
        "dim",
        "kind",
        "offset",
    ):
        for value in (*lies.NUMBERS, -1):
            yield Case(f"gguf/{field}={value}", written("model.gguf", gguf(**{field: value})))
    for depth in (2, 10, 1000):
        nested = (
            struct.pack("<Q1sI", 1, b"a", 9) + struct.pack("<IQ", 9, 1) * depth + struct.pack("<IQ", 8, _U64)
        )
        yield Case(f"gguf/nested-{depth}", written("model.gguf", gguf(tensors=0, body=nested)))
    for number, name in enumerate(lies.NAMES):
        raw = name.encode("utf-8", "surrogatepass")
        pair = struct.pack("<Q", len(raw)) + raw + struct.pack("<IQ", 8, len(raw)) + raw
        tensor = struct.pack("<Q", len(raw)) + raw + struct.pack("<IQIQ", 1, 4, 0, 0)
        yield Case(f"gguf/name-{number}", written("model.gguf", gguf(body=pair + tensor)))


# ---- msgpack, as flax writes it


def _msgpack() -> Iterator[Case]:
    def case(name: str, data: bytes) -> Case:
        return Case(f"flax/{name}", written("checkpoint_1", data))

    head = b"\x82\xa4step\x01\xa6params\x81\xa1w"
    for code, form in (
        (0xD9, ">B"),
        (0xDA, ">H"),
        (0xDB, ">I"),
        (0xC4, ">B"),
        (0xC5, ">H"),
        (0xC6, ">I"),
        (0xDC, ">H"),
        (0xDD, ">I"),
        (0xDE, ">H"),
        (0xDF, ">I"),
        (0xC7, ">B"),
        (0xC8, ">H"),
        (0xC9, ">I"),
    ):
        for share in (0, 1, 0.5, 1.0):
            value = int(((1 << 8 * struct.calcsize(form)) - 1) * share) if isinstance(share, float) else share
            yield case(f"{code:x}-{value}", head + bytes([code]) + struct.pack(form, value) + b"\x01" * 40)
    for code in (0, 1, 2, 3, 4, 127, 128, 255):
        for body in (
            b"\x93\x91\x02\xa7float32\xc4\x08" + bytes(8),
            b"\x93\x91\xcf" + b"\xff" * 8 + b"\xa7float32\xc4\x08" + bytes(8),
            b"\x93\x91\x02\xa6object\xc4\x08" + bytes(8),
            b"\x93\xc0\xc0\xc0",
            b"\x92\x01\x02",
            b"",
            b"\x93\x90\xa2|V\xc4\x00",
        ):
            yield case(
                f"ext-{code}-{len(body)}-{body[:2].hex()}", head + b"\xc7" + bytes([len(body), code]) + body
            )
    for depth in (100, 5000, 1_000_000):
        yield case(f"maps-{depth}", b"\x81\xa1a" * depth + b"\x01")
        yield case(f"lists-{depth}", b"\x81\xa6params" + b"\x91" * depth + b"\x01")
    for number, name in enumerate(lies.NAMES):
        raw = name.encode("utf-8", "surrogatepass")
        key = b"\xda" + struct.pack(">H", len(raw)) + raw
        array = b"\xc7\x16\x01\x93\x91\x02\xa7float32\xc4\x08" + bytes(8)
        yield case(f"name-{number}", b"\x82\xa4step\x01\xa6params\x81" + key + array)
    for code in range(0xC0, 0x100, 3):
        yield case(f"key-{code:x}", b"\x82" + bytes([code]) + bytes(8) + b"\x01\xa6params\x80")


# ---- arrays of NumPy


def _numpy() -> Iterator[Case]:
    heads = (
        [
            f"{{'descr': {descr}, 'fortran_order': False, 'shape': (2,), }}"
            for descr in (
                "'|O'",
                "'<f4'" * 99,
                "[('a', '<f4', (2**40,))]",
                "'|V4294967296'",
                "'<U4294967295'",
                "'|S0'",
                "'<M8[s]'",
                "None",
                "'<f99'",
                "'; import os'",
                "('<f4', (9**9,))",
                "[]",
                "{'names': ['a'], 'formats': ['O']}",
                "'>f4'",
                "'<i1'",
            )
        ]
        + [
            f"{{'descr': '<f4', 'fortran_order': {order}, 'shape': {shape}, }}"
            for order in ("False", "True", "1", "None")
            for shape in (
                "(2,)",
                "(-1,)",
                f"({2**63},)",
                f"({2**40}, {2**40})",
                "(0, -1)",
                "()",
                "2",
                "(2.0,)",
                "(True,)",
                "(1,) * 99",
                "(" + "1, " * 70 + ")",
                "__import__('os').system('touch EVIL_MARKER')",
            )
        ]
        + [
            "(" * 200,
            "{" * 9000,
            "[" * 9000,
            "1 +" * 3000 + "1",
            "'a'" * 3000,
            "{**{}}",
            "lambda: 0",
            "x" * 60_000,
            "9" * 5000,
            "",
        ]
    )
    for number, head in enumerate(heads):
        raw = head.encode() + b"\n"
        data = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(raw) & 0xFFFF) + raw + bytes(64)
        yield Case(f"numpy/head-{number}", written("model.npy", data))
        yield Case(f"npz/head-{number}", written("model.npz", pickles.archive({"a.npy": data})))
        yield Case(f"equinox/head-{number}", written("model.eqx", data * 2))
    for version in ((0, 0), (1, 1), (2, 0), (3, 0), (9, 9), (255, 255)):
        for length in (0, 1, 0xFFFF, 0xFFFFFFFF):
            data = b"\x93NUMPY" + bytes(version) + struct.pack("<I", length) + b"{'descr'" + bytes(99)
            yield Case(f"numpy/version-{version[0]}.{version[1]}-{length}", written("model.npy", data))


# ---- TensorFlow's tables


def _tables() -> Iterator[Case]:
    for number in range(40):
        footer = bytearray(48)
        footer[40:] = struct.pack("<Q", 0xDB4775248B80FB57)
        footer[: len(handle)] = (handle := _handle(number))
        yield Case(f"tf-bundle/footer-{number}", _bundle(bytes(number * 7) + bytes(footer)))


def _handle(number: int) -> bytes:
    values = (0, 1, 47, 2**31, 2**63 - 1, 2**64 - 1)
    four = [values[number % 6], values[number // 6 % 6], values[(number + 3) % 6], values[(number * 5) % 6]]
    return b"".join(map(bombs.varint, four))[:40]


def _bundle(index: bytes) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        (folder / "model.index").write_bytes(index)
        (folder / "model.data-00000-of-00001").write_bytes(bytes(64))
        return folder / "model.index"

    return make


# ---- Arrays of zarr and their codecs

_ZARRAY = {
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
_ZARR3 = {
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
            document = {**_ZARRAY, "compressor": metadata or None}
            yield Case(f"zarr-{codec}/chunk-{number}", orbax_array(document, chunk), evil=codec == "pickle")
            giant = {**document, "shape": [1 << 40], "chunks": [1 << 40]}
            yield Case(f"zarr-{codec}/giant-{number}", orbax_array(giant, chunk), evil=codec == "pickle")
            if codec in ("zstd", "gzip", "blosc"):
                yield Case(f"zarr3-{codec}/chunk-{number}", orbax_array(_zarr3(codec), chunk, 3))
    for number, document in lies.documents(_ZARRAY, 120, "zarray"):
        yield Case(f"zarr/metadata-{number}", orbax_array(document, bytes(16)))
    for number, document in lies.documents(_ZARR3, 160, "zarr3"):
        yield Case(f"zarr3/metadata-{number}", orbax_array(document, bytes(16), 3))


def _zarr3(codec: str) -> dict[str, Any]:
    configuration = (
        {"cname": "lz4", "clevel": 1, "shuffle": "noshuffle", "blocksize": 0, "typesize": 4}
        if codec == "blosc"
        else {"level": 1}
    )
    return {**_ZARR3, "codecs": [_ZARR3["codecs"][0], {"name": codec, "configuration": configuration}]}


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
        root = bombs.sealed(0x0CDB20DE, body)
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
        (folder / "item" / "manifest.ocdbt").write_bytes(bombs.sealed(0x0CDB3A2A, manifest))
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
    """Every head."""
    for make in (_safetensors, _gguf, _msgpack, _numpy, _tables, _zarr, _ocdbt):
        yield from make()
