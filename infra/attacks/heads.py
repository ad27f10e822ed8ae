"""Files with a head that lies about what follows: safetensors, GGUF, msgpack, .npy, TensorFlow."""

from __future__ import annotations

import struct
from collections.abc import Iterator

from infra.attacks import bombs, lies, pickles
from infra.attacks.case import Case, Make, as_json, named, write_file, write_files

_U64, _U32 = 0xFFFFFFFFFFFFFFFF, 0xFFFFFFFF
_RAW_NAMES = [name.encode("utf-8", "surrogatepass") for name in lies.NAMES]
_NUMBERS = (*lies.NUMBERS, -1)

# ---- safetensors

_ENTRY = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}
HEADER = {"__metadata__": {"format": "pt"}, "a": _ENTRY, "b": {**_ENTRY, "data_offsets": [16, 32]}}
_TEXTS = (
    b'{"a":' * 3000, b"[" * 90_000, b'{"a":1,"a":2}', b"\xff" * 90, b"{}" * 9, b" " * 4096, b"",
    b'{"a":{"dtype":"F32","shape":[NaN],"data_offsets":[0,4]}}',
)  # fmt: skip


def safetensors(header: bytes, length: int | None = None) -> bytes:
    """A file with this header, which says that it is so long."""
    return struct.pack("<Q", (len(header) if length is None else length) & _U64) + header + bytes(32)


SOUND = safetensors(as_json(HEADER))


def _safetensors() -> Iterator[tuple[str, bytes]]:
    for number in _NUMBERS:
        yield f"length={number}", safetensors(as_json(HEADER), number)
    for number, document in enumerate(lies.documents(HEADER, 160, "safetensors")):
        yield f"header-{number}", safetensors(as_json(document))
    for number, name in enumerate(lies.NAMES):
        tensors = {name: _ENTRY, "z": {**_ENTRY, "data_offsets": [16, 32]}}
        yield f"name-{number}", safetensors(as_json(tensors))
        yield f"metadata-{number}", safetensors(as_json({**HEADER, "__metadata__": {name: name}}))
    for number, text in enumerate(_TEXTS):
        yield f"text-{number}", safetensors(text)


# ---- GGUF

_GGUF = {
    "version": 3, "tensors": 1, "pairs": 1, "key": 20, "type": 8, "text": 5, "name": 1, "dims": 1, "dim": 4, "kind": 0,
    "offset": 0,
}  # fmt: skip


def gguf(body: bytes | None = None, **field: int) -> bytes:
    """A file with one pair and one tensor; each number of it can be another."""
    number = {name: value & _U64 for name, value in {**_GGUF, **field}.items()}
    small = {name: value & _U32 for name, value in number.items()}
    pair = struct.pack(
        "<Q20sIQ5s", number["key"], b"general.architecture", small["type"], number["text"], b"llama"
    )
    tensor = struct.pack(
        "<Q1sIQIQ", number["name"], b"a", small["dims"], number["dim"], small["kind"], number["offset"]
    )
    data = b"GGUF" + struct.pack("<IQQ", small["version"], number["tensors"], number["pairs"])
    data += pair + tensor if body is None else body
    return data + bytes(-len(data) % 32) + bytes(64)


def _ggufs() -> Iterator[tuple[str, bytes]]:
    for field in _GGUF:
        for value in _NUMBERS:
            yield f"{field}={value}", gguf(**{field: value})
    for depth in (2, 10, 1000):
        nested = (
            struct.pack("<Q1sI", 1, b"a", 9) + struct.pack("<IQ", 9, 1) * depth + struct.pack("<IQ", 8, _U64)
        )
        yield f"nested-{depth}", gguf(tensors=0, body=nested)
    for number, raw in enumerate(_RAW_NAMES):
        text = struct.pack("<Q", len(raw)) + raw
        pair = text + struct.pack("<I", 8) + text
        yield f"name-{number}", gguf(body=pair + text + struct.pack("<IQIQ", 1, 4, 0, 0))


# ---- msgpack, as flax writes it

_MESSAGE = b"\x82\xa4step\x01\xa6params\x81\xa1w"
_LENGTHS = {
    ">B": (0xD9, 0xC4, 0xC7), ">H": (0xDA, 0xC5, 0xDC, 0xDE, 0xC8), ">I": (0xDB, 0xC6, 0xDD, 0xDF, 0xC9),
}  # fmt: skip
_BODIES = (
    b"\x93\x91\x02\xa7float32\xc4\x08" + bytes(8), b"\x93\x91\xcf" + b"\xff" * 8 + b"\xa7float32\xc4\x08" + bytes(8),
    b"\x93\x91\x02\xa6object\xc4\x08" + bytes(8), b"\x93\xc0\xc0\xc0", b"\x92\x01\x02", b"", b"\x93\x90\xa2|V\xc4\x00",
)  # fmt: skip


def _msgpack() -> Iterator[tuple[str, bytes]]:
    for form, codes in _LENGTHS.items():
        most = (1 << 8 * struct.calcsize(form)) - 1
        for code in codes:
            for value in (0, 1, int(most * 0.5), most):
                yield f"{code:x}-{value}", _MESSAGE + bytes([code]) + struct.pack(form, value) + b"\x01" * 40
    for code in (0, 1, 2, 3, 4, 127, 128, 255):
        for body in _BODIES:
            name = f"ext-{code}-{len(body)}-{body[:2].hex()}"
            yield name, _MESSAGE + b"\xc7" + bytes([len(body), code]) + body
    for depth in (100, 5000, 1_000_000):
        yield f"maps-{depth}", b"\x81\xa1a" * depth + b"\x01"
        yield f"lists-{depth}", b"\x81\xa6params" + b"\x91" * depth + b"\x01"
    for number, raw in enumerate(_RAW_NAMES):
        key = b"\xda" + struct.pack(">H", len(raw)) + raw
        array = b"\xc7\x16\x01\x93\x91\x02\xa7float32\xc4\x08" + bytes(8)
        yield f"name-{number}", b"\x82\xa4step\x01\xa6params\x81" + key + array
    for code in range(0xC0, 0x100, 3):
        yield f"key-{code:x}", b"\x82" + bytes([code]) + bytes(8) + b"\x01\xa6params\x80"


# ---- arrays of NumPy

_DESCRIPTIONS = (
    "'|O'", "'<f4'" * 99, "[('a', '<f4', (2**40,))]", "'|V4294967296'", "'<U4294967295'", "'|S0'", "'<M8[s]'", "None",
    "'<f99'", "'; import os'", "('<f4', (9**9,))", "[]", "{'names': ['a'], 'formats': ['O']}", "'>f4'", "'<i1'",
)  # fmt: skip
_SHAPES = (
    "(2,)", "(-1,)", f"({2**63},)", f"({2**40}, {2**40})", "(0, -1)", "()", "2", "(2.0,)", "(True,)", "(1,) * 99",
    "(" + "1, " * 70 + ")", "__import__('os').system('touch EVIL_MARKER')",
)  # fmt: skip


def _head(descr: str, order: str, shape: str) -> str:
    return f"{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}, }}"


_NUMPY_HEADS = (
    *(_head(descr, "False", "(2,)") for descr in _DESCRIPTIONS),
    *(_head("'<f4'", order, shape) for order in ("False", "True", "1", "None") for shape in _SHAPES),
    *(
        "(" * 200, "{" * 9000, "[" * 9000, "1 +" * 3000 + "1", "'a'" * 3000, "{**{}}", "lambda: 0",
        "x" * 60_000,
    ),
    *("9" * 5000, ""),
)  # fmt: skip


def _numpy() -> Iterator[tuple[str, Make]]:
    for number, head in enumerate(_NUMPY_HEADS):
        raw = head.encode() + b"\n"
        data = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(raw) & 0xFFFF) + raw + bytes(64)
        yield f"numpy/head-{number}", write_file("model.npy", data)
        yield f"npz/head-{number}", write_file("model.npz", pickles.archive({"a.npy": data}))
        yield f"equinox/head-{number}", write_file("model.eqx", data * 2)
    for version in ((0, 0), (1, 1), (2, 0), (3, 0), (9, 9), (255, 255)):
        for length in (0, 1, 0xFFFF, 0xFFFFFFFF):
            data = b"\x93NUMPY" + bytes(version) + struct.pack("<I", length) + b"{'descr'" + bytes(99)
            yield f"numpy/version-{version[0]}.{version[1]}-{length}", write_file("model.npy", data)


# ---- TensorFlow's tables


def _tables() -> Iterator[tuple[str, Make]]:
    values = (0, 1, 47, 2**31, 2**63 - 1, 2**64 - 1)
    for number in range(40):
        four = (number % 6, number // 6 % 6, (number + 3) % 6, number * 5 % 6)
        handle = b"".join(bombs.varint(values[at]) for at in four)[:40]
        footer = handle.ljust(40, b"\0") + struct.pack("<Q", 0xDB4775248B80FB57)
        files = {"model.index": bytes(number * 7) + footer, "model.data-00000-of-00001": bytes(64)}
        yield f"footer-{number}", write_files(files, "model.index")


# ---- Digits


def _digits() -> Iterator[tuple[str, Make]]:
    for name, text in lies.texts_of_digits(HEADER):
        yield f"digits-safetensors/{name}", write_file("model.safetensors", safetensors(text))
    for form, digits in lies.DIGITS.items():
        for kind, shape in enumerate((f"({digits},)", f"({digits}, {digits})", f"(0, {digits})")):
            head = _head("'<f4'", "False", shape).encode() + b"\n"
            data = b"\x93NUMPY\x02\x00" + struct.pack("<I", len(head)) + head + bytes(64)
            yield f"digits-numpy/{form}-{kind}", write_file("model.npy", data)
            yield f"digits-npz/{form}-{kind}", write_file("model.npz", pickles.archive({"a.npy": data}))


def cases() -> Iterator[Case]:
    """Every head."""
    for kind, file, found in (
        ("safetensors", "model.safetensors", _safetensors()),
        ("gguf", "model.gguf", _ggufs()),
        ("flax", "checkpoint_1", _msgpack()),
    ):
        for name, data in found:
            yield Case(f"{kind}/{name}", write_file(file, data))
    yield from named("tf-bundle", _tables())
    for name, make in (*_numpy(), *_digits()):
        yield Case(name, make)
