r"""The `.npy` record: a header that says dtype, order and shape, then the elements.

On disk: `\x93NUMPY`, major and minor version, the header's length (two bytes in version 1.0, four in 2.0 and 3.0),
and the header, a Python literal `{'descr': ..., 'fortran_order': ..., 'shape': ...}`, padded with spaces and a line
feed so that the elements begin at a multiple of 64 (of 16 before numpy 1.14). Version 3.0 is UTF-8 instead of Latin-1.
Python 2 wrote extents as `3L`. Source: numpy.lib.format of numpy 2.4 (NEP 1), and files that it wrote.

numpy has no name for the types of ml_dtypes: it writes bfloat16 as `<V2`, two untyped bytes. bfloat16 is the only
two-byte type of ml_dtypes, so `V2` is read and written as bfloat16; with numpy alone, `.view(ml_dtypes.bfloat16)`
restores it. One untyped byte (`V1`) may be any 8-bit float or 4-bit integer and is refused, except float8_e5m2, which
numpy calls `<f1` (and cannot load). Object arrays contain a pickle and are refused too.
"""

from __future__ import annotations

import ast
import math
import re
import struct
from collections.abc import Callable
from typing import Any, NamedTuple, cast
from zlib import crc32

from wherry.core.tensorspec import c_strides
from wherry.errors import CorruptError, UnsupportedError

MAGIC = b"\x93NUMPY"
ALIGNMENT = 64
_SHORTEST = 12  # magic, version and length of version 2.0
_FIRST = 4096
_LARGEST = 1 << 17
_MAX_RANK = 64  # numpy's own limit
_MAX_EXTENT = (1 << 63) - 1  # also numpy's
_MOST_DIGITS = 10  # of the size of an element
_KEYS = {"descr", "fortran_order", "shape"}
_PLAIN = re.compile(
    r"\{'descr': '([^'\\]{1,16})', 'fortran_order': (True|False), "
    r"'shape': \(((?:[0-9]{1,19}, ?)*+(?:[0-9]{1,19})?)\), \} *\n?"
)
_LONG = re.compile(r"(?<=\d)L(?=[,)\s])")
_DESCR = re.compile(r"([<>|=]?)([A-Za-z])(\d*)(?:\[.*\])?")

# numpy's kind and bytes → our name.
TO_OURS = {
    "b1": "bool",
    **{f"i{size}": f"int{8 * size}" for size in (1, 2, 4, 8)},
    **{f"u{size}": f"uint{8 * size}" for size in (1, 2, 4, 8)},
    **{f"f{size}": f"float{8 * size}" for size in (2, 4, 8)},
    **{f"c{size}": f"complex{8 * size}" for size in (8, 16)},
    "V2": "bfloat16",
    "f1": "float8_e5m2",
}
_TO_STORED = {ours: stored for stored, ours in TO_OURS.items() if stored != "f1"}
WRITABLE = frozenset(_TO_STORED)
# kind → what an unsupported array is, and the cure.
_REFUSED = {
    "O": ("an object array contains a pickle", "save it as plain arrays; wherry never unpickles objects"),
    "U": ("an array of strings", "remove it from the archive, or save it in another file"),
    "S": ("an array of byte strings", "remove it from the archive, or save it in another file"),
    "M": ("an array of dates", "save it as int64"),
    "m": ("an array of time differences", "save it as int64"),
    "V": ("an array of untyped bytes", "save it as uint8, or in a container that names its dtypes"),
}


class NpyHeader(NamedTuple):
    """The parsed header of a record.

    Attributes:
        dtype: the name in wherry; `str` or `bytes` for a single string.
        shape: its extents.
        fortran: whether the first axis varies fastest.
        big_endian: whether the elements are stored big endian.
        length: bytes of magic, version, length and header: where the elements begin.
        nbytes: bytes of the elements.
        version: `1.0`, `2.0` or `3.0`.
        descr: the dtype as numpy wrote it.
        crc: CRC-32 of the header's bytes.
        plain: whether the header is written as numpy writes it; another takes ten times as long to read.
    """

    dtype: str
    shape: tuple[int, ...]
    fortran: bool
    big_endian: bool
    length: int
    nbytes: int
    version: str
    descr: str
    crc: int
    plain: bool = True

    @property
    def strides(self) -> tuple[int, ...]:
        """Strides in elements, as stored."""
        return c_strides(self.shape[::-1])[::-1] if self.fortran else c_strides(self.shape)


def read_header(read: Callable[[int, int], bytes], uri: str, name: str) -> NpyHeader:
    """Read the header of a record.

    Args:
        read: returns bytes [start, stop) of the record, fewer at its end.
        uri: the file, for errors.
        name: the record, for errors.

    Raises:
        CorruptError: it is not a `.npy` record, or is truncated.
        UnsupportedError: the version or the dtype is not supported.
    """
    head = read(0, _FIRST)
    if len(head) < _SHORTEST or not head.startswith(MAGIC):
        raise CorruptError(
            f"{name} is not a .npy record",
            uri=uri,
            cure="restore the file from a backup or download it again",
        )
    version = f"{head[6]}.{head[7]}"
    if version == "1.0":
        start, size = 10, struct.unpack_from("<H", head, 8)[0]
    elif version in ("2.0", "3.0"):
        start, size = 12, struct.unpack_from("<I", head, 8)[0]
    else:
        raise UnsupportedError(
            f"unsupported .npy version {version} in {name}", uri=uri, cure="upgrade wherry"
        )
    if size > _LARGEST:
        raise CorruptError(
            f"header of {size} bytes in {name} exceeds the limit of {_LARGEST}",
            uri=uri,
            cure="do not use this file",
        )
    if start + size > len(head):
        head = read(0, start + size)
    text = head[start : start + size]
    if len(text) != size:
        raise CorruptError(
            f"{name} is truncated: expected a header of {size} bytes, got {len(text)}",
            uri=uri,
            cure="restore the file from a backup or download it again",
        )
    return _interpret(text, version, start + size, crc32(head[: start + size]), uri, name)


def _interpret(text: bytes, version: str, length: int, crc: int, uri: str, name: str) -> NpyHeader:
    try:
        source = text.decode("utf-8" if version == "3.0" else "latin-1")
        plain = _plain_literal(source)
        said: Any = plain or ast.literal_eval(_LONG.sub("", source.strip()))
    except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError) as error:
        raise CorruptError(
            f"invalid header in {name}: not a Python literal",
            uri=uri,
            cure="restore the file from a backup or download it again",
        ) from error
    if not isinstance(said, dict) or set(cast("dict[Any, Any]", said)) != _KEYS:
        raise CorruptError(
            f"invalid header in {name}: expected a dict with the keys {', '.join(sorted(_KEYS))}", uri=uri
        )
    fortran: Any = said["fortran_order"]
    if not isinstance(fortran, bool):
        raise CorruptError(
            f"invalid fortran_order in {name}: expected True or False, got {_text(fortran)}",
            uri=uri,
            cure="restore the file from a backup or download it again",
        )
    extents = _extents(said["shape"], uri, name)
    dtype, big, width = _element(said["descr"], extents, uri, name)
    nbytes = width * math.prod(extents)
    return NpyHeader(
        dtype, extents, fortran, big, length, nbytes, version, str(said["descr"]), crc, plain is not None
    )


def _plain_literal(source: str) -> dict[str, Any] | None:
    """The header as numpy writes it; None if it is written in another way."""
    found = _PLAIN.fullmatch(source)
    if found is None:
        return None
    descr, fortran, shape = found.groups()
    extents = [one for one in shape.replace(" ", "").split(",") if one]
    if (len(extents) == 1) != shape.endswith(",") or any(one[0] == "0" != one for one in extents):
        return None  # `(3)` is no tuple, and `07` no number
    return {"descr": descr, "fortran_order": fortran == "True", "shape": tuple(map(int, extents))}


def _extents(shape: Any, uri: str, name: str) -> tuple[int, ...]:
    extents = cast("tuple[Any, ...]", shape)
    if not isinstance(shape, tuple) or not all(type(extent) is int and extent >= 0 for extent in extents):
        raise CorruptError(
            f"invalid shape in {name}: expected a tuple of non-negative integers, got {_text(shape)}",
            uri=uri,
            cure="restore the file from a backup or download it again",
        )
    if max(extents, default=0) > _MAX_EXTENT:
        raise CorruptError(
            f"an extent in {name} exceeds the limit of {_MAX_EXTENT}", uri=uri, cure="do not use this file"
        )
    if len(extents) > _MAX_RANK:
        raise CorruptError(
            f"{len(extents)} dimensions in {name} exceed the limit of {_MAX_RANK}",
            uri=uri,
            cure="do not use this file",
        )
    return extents


def _element(descr: Any, shape: tuple[int, ...], uri: str, name: str) -> tuple[str, bool, int]:
    """The name in wherry, whether it is stored big endian, and its size in bytes."""
    found = _DESCR.fullmatch(descr) if isinstance(descr, str) else None
    if found is None:
        what = "a structured array" if isinstance(descr, list) else "an array of an unknown dtype"
        raise _refusal(what, descr, "save each field as a separate array", uri, name)
    order, kind, digits = found.groups()
    size = int(digits[:_MOST_DIGITS] or 0)
    if kind + digits in TO_OURS:
        return TO_OURS[kind + digits], order == ">", size
    if kind in "US" and not shape and size and len(digits) < _MOST_DIGITS:
        return {"U": "str", "S": "bytes"}[kind], order == ">", 4 * size if kind == "U" else size
    if kind == "V" and size == 1:
        raise _refusal("one untyped byte per element may be any 8-bit float or 4-bit integer", descr,
                "save it as uint8 with its dtype in the name, or as safetensors", uri, name)  # fmt: skip
    what, cure = _REFUSED.get(kind, ("an array of an unknown dtype", "save it with another dtype"))
    raise _refusal(what, descr, cure, uri, name)


def _text(value: Any) -> str:
    """A value of a header, cut; Python converts no integer of over 4,300 digits to text."""
    try:
        return f"{value!r:.200}"
    except ValueError:
        return "a number of thousands of digits"


def _refusal(what: str, descr: Any, cure: str, uri: str, name: str) -> UnsupportedError:
    return UnsupportedError(f"unsupported dtype {_text(descr)} in {name}: {what}", uri=uri, cure=cure)


def text_of(header: NpyHeader, data: bytes) -> str | None:
    """The text of a record that holds a single string; None if it cannot be decoded."""
    try:
        if header.dtype == "bytes":
            return data.rstrip(b"\0").decode()
        return data.decode("utf-32-be" if header.big_endian else "utf-32-le").rstrip("\0")
    except UnicodeDecodeError:
        return None


def build_header(dtype: str, shape: tuple[int, ...]) -> bytes:
    """The header that numpy writes for an array in C order; its length is a multiple of 64.

    Args:
        dtype: the name in wherry, one of `WRITABLE`.
        shape: the extents.
    """
    stored = _TO_STORED[dtype]
    order = "|" if stored in ("b1", "i1", "u1") else "<"
    text = f"{{'descr': '{order}{stored}', 'fortran_order': False, 'shape': {shape!r}, }}".encode("latin-1")
    total = -(-(10 + len(text) + 1) // ALIGNMENT) * ALIGNMENT
    padded = text.ljust(total - 11) + b"\n"
    return MAGIC + b"\x01\x00" + struct.pack("<H", len(padded)) + padded
