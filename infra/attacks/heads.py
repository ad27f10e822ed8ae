"""Files with a head that lies about what follows: safetensors, GGUF, msgpack, .npy, TensorFlow."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from attacks import bombs, lies, pickles
from attacks.archives import write_file
from attacks.case import Case

_U64 = 0xFFFFFFFFFFFFFFFF


def _json(document: Any) -> bytes:
    return json.dumps(document).encode("utf-8", "surrogatepass")


# ---- safetensors

_ENTRY = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}
HEADER = {"__metadata__": {"format": "pt"}, "a": _ENTRY, "b": {**_ENTRY, "data_offsets": [16, 32]}}


def safetensors(header: bytes, length: int | None = None) -> bytes:
    """A file with this header, which says that it is so long."""
    return struct.pack("<Q", (len(header) if length is None else length) & _U64) + header + bytes(32)


def _safetensors() -> Iterator[Case]:
    def case(name: str, data: bytes) -> Case:
        return Case(f"safetensors/{name}", write_file("model.safetensors", data))

    for number in (*lies.NUMBERS, -1):
        yield case(f"length={number}", safetensors(_json(HEADER), number))
    for number, document in lies.documents(HEADER, 160, "safetensors"):
        yield case(f"header-{number}", safetensors(_json(document)))
    for number, name in enumerate(lies.NAMES):
        yield case(
            f"name-{number}", safetensors(_json({name: _ENTRY, "z": {**_ENTRY, "data_offsets": [16, 32]}}))
        )
        yield case(f"metadata-{number}", safetensors(_json({**HEADER, "__metadata__": {name: name}})))
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
            yield Case(f"gguf/{field}={value}", write_file("model.gguf", gguf(**{field: value})))
    for depth in (2, 10, 1000):
        nested = (
            struct.pack("<Q1sI", 1, b"a", 9) + struct.pack("<IQ", 9, 1) * depth + struct.pack("<IQ", 8, _U64)
        )
        yield Case(f"gguf/nested-{depth}", write_file("model.gguf", gguf(tensors=0, body=nested)))
    for number, name in enumerate(lies.NAMES):
        raw = name.encode("utf-8", "surrogatepass")
        pair = struct.pack("<Q", len(raw)) + raw + struct.pack("<IQ", 8, len(raw)) + raw
        tensor = struct.pack("<Q", len(raw)) + raw + struct.pack("<IQIQ", 1, 4, 0, 0)
        yield Case(f"gguf/name-{number}", write_file("model.gguf", gguf(body=pair + tensor)))


# ---- msgpack, as flax writes it


def _msgpack() -> Iterator[Case]:
    def case(name: str, data: bytes) -> Case:
        return Case(f"flax/{name}", write_file("checkpoint_1", data))

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


_NUMPY_HEADS = (
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


def _numpy() -> Iterator[Case]:
    for number, head in enumerate(_NUMPY_HEADS):
        raw = head.encode() + b"\n"
        data = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(raw) & 0xFFFF) + raw + bytes(64)
        yield Case(f"numpy/head-{number}", write_file("model.npy", data))
        yield Case(f"npz/head-{number}", write_file("model.npz", pickles.archive({"a.npy": data})))
        yield Case(f"equinox/head-{number}", write_file("model.eqx", data * 2))
    for version in ((0, 0), (1, 1), (2, 0), (3, 0), (9, 9), (255, 255)):
        for length in (0, 1, 0xFFFF, 0xFFFFFFFF):
            data = b"\x93NUMPY" + bytes(version) + struct.pack("<I", length) + b"{'descr'" + bytes(99)
            yield Case(f"numpy/version-{version[0]}.{version[1]}-{length}", write_file("model.npy", data))


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


def cases() -> Iterator[Case]:
    """Every head."""
    for make in (_safetensors, _gguf, _msgpack, _numpy, _tables):
        yield from make()
