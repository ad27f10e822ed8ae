"""The header of a GGUF file: metadata, and the location of each tensor.

On disk, little endian: `GGUF`, version (uint32), number of tensors and of metadata pairs (uint64; uint32 in version
1), the pairs (key, type, value), then for each tensor its name, number of dimensions, extents (fastest first: the
reverse of wherry's), type and offset from the data section, which starts at the next multiple of `general.alignment`
(32).
Strings are a length and UTF-8. A big-endian file has its version in the upper bytes. Block-quantised tensors are
`ggml:<type>`: their canonical bytes are the stored blocks. Source: the specification in ggml's docs/gguf.md, and
GGUFReader and constants of gguf 0.19.
"""

from __future__ import annotations

import math
import struct
from dataclasses import field
from typing import Any, NamedTuple

from wherry.core import dtypes
from wherry.core.keypath import KeyPath
from wherry.core.lazy_dataclass import dataclass
from wherry.core.limits import MOST_TENSORS, beyond, exceeds, scale_limit
from wherry.core.tensorspec import TensorSpec
from wherry.errors import CorruptError, HostileError, UnsupportedError
from wherry.formats.format import Extent
from wherry.store.location import Location

MAGIC = b"GGUF"
VERSIONS = (1, 2, 3)
_PIECE = 1 << 20
_LONGEST_KEY = 1 << 16
_LONGEST_TEXT = 1 << 16  # longer metadata strings (chat templates are shorter) are listed by name, not kept
_MOST_RANK = 8
_MOST_PAIRS = 50_000
_MOST_TEXTS = 3_000_000  # strings in arrays: tokens and merges of the largest vocabularies are 800,000
_MOST_DEPTH = 4
_STRING, _ARRAY = 8, 9
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
# type number → its name in ggml.
TYPES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 10: "Q2_K", 11: "Q3_K", 12: "Q4_K",
    13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL",
    21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M",
    30: "BF16", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4", 41: "Q1_0",
}  # fmt: skip
_PLAIN = {
    "F32": "float32", "F16": "float16", "BF16": "bfloat16", "F64": "float64",
    "I8": "int8", "I16": "int16", "I32": "int32", "I64": "int64",
}  # fmt: skip


_NAMES = {dtype: name for name, dtype in _PLAIN.items()}


def type_name(dtype: str) -> str:
    """Ggml's name of an element type."""
    return _NAMES.get(dtype) or dtype.removeprefix("ggml:")


class StoredList(NamedTuple):
    """Where a list of the metadata is.

    Attributes:
        kind: the number of its elements' type.
        length: the number of its elements.
        offset: of the first one.
    """

    kind: int
    length: int
    offset: int


class StoredText(NamedTuple):
    """Where a long text of the metadata is: the offset of its length, which its bytes follow."""

    offset: int


@dataclass(slots=True)
class GgufHeader:
    """Contents of a header.

    Attributes:
        location: the file.
        version: version of the container.
        metadata: its scalars and short strings.
        left: keys of values that are not kept: arrays (the tokenizer's vocabulary) and long strings.
        stored: the same keys → where the value is; None for a list of lists.
        specs: the tensors.
        places: the location of each tensor.
        types: ggml names of the types that occur, in the order of their numbers.
    """

    location: Location
    version: int
    metadata: dict[str, Any] = field(default_factory=dict[str, Any])
    left: list[str] = field(default_factory=list[str])
    stored: dict[str, StoredList | StoredText | None] = field(
        default_factory=dict[str, "StoredList | StoredText | None"]
    )
    specs: dict[KeyPath, TensorSpec] = field(default_factory=dict["KeyPath", TensorSpec])
    places: dict[KeyPath, tuple[Extent, ...]] = field(default_factory=dict["KeyPath", tuple[Extent, ...]])
    types: list[str] = field(default_factory=list[str])


def read_header(location: Location) -> GgufHeader:
    """Read everything except the tensors.

    Raises:
        CorruptError: the file is truncated or inconsistent.
        UnsupportedError: an unsupported version, byte order or tensor type.
        HostileError: impossible sizes, or tensors that overlap.
    """
    cursor = _Cursor(location)
    if cursor.take(len(MAGIC)) != MAGIC:
        raise cursor.corrupt("missing magic GGUF at its start")
    header = GgufHeader(location, cursor.number("I"))
    if header.version not in VERSIONS:
        big = struct.unpack(">I", struct.pack("<I", header.version))[0] in VERSIONS
        what = "unsupported big-endian GGUF file" if big else f"unsupported GGUF version {header.version}"
        raise UnsupportedError(what, uri=location.uri, cure="convert it with the gguf package")
    cursor.size = "I" if header.version == 1 else "Q"
    tensors, pairs = cursor.number(cursor.size), cursor.number(cursor.size)
    for count, most, what in ((pairs, _MOST_PAIRS, "metadata keys"), (tensors, MOST_TENSORS, "tensors")):
        if exceeds(count, most):
            raise beyond("the GGUF header", scale_limit(most), what, uri=location.uri)
    for _ in range(cursor.plausible(pairs, 12)):
        key = cursor.text(_LONGEST_KEY)
        kind = cursor.number("I")
        stored = cursor.peek(kind)
        value = cursor.value(kind, 0)
        if key in header.metadata or key in header.stored:
            raise CorruptError(f"duplicate metadata key {key!r}", uri=cursor.uri, cure="restore the file")
        if value is None:
            header.left.append(key)
            header.stored[key] = stored
        else:
            header.metadata[key] = value
    rows = [_row(cursor) for _ in range(cursor.plausible(tensors, 24))]
    _place(header, rows, cursor)
    return header


def read_texts(header: GgufHeader, stored: StoredList, longest: int, most: int) -> list[str]:
    """The texts of a list.

    Args:
        header: of the file.
        stored: the list.
        longest: bytes of one text.
        most: bytes of all texts.

    Raises:
        CorruptError: the elements are no texts, or not valid UTF-8.
        HostileError: they exceed a limit.
    """
    cursor = _Cursor(header.location, stored.offset, "I" if header.version == 1 else "Q")
    if stored.kind != _STRING:
        raise cursor.corrupt("a list of texts has elements of another type")
    found: list[str] = []
    rest = scale_limit(most)
    for _ in range(stored.length):
        text = cursor.text(scale_limit(longest))
        rest -= len(text)
        if rest < 0:
            raise beyond("a list of the GGUF header", scale_limit(most), "bytes", uri=header.location.uri)
        found.append(text)
    return found


def read_numbers(header: GgufHeader, stored: StoredList) -> list[int | float | bool]:
    """The numbers of a list.

    Raises:
        CorruptError: the elements are no numbers.
    """
    cursor = _Cursor(header.location, stored.offset)
    if stored.kind not in _NUMBERS:
        raise cursor.corrupt("a list of numbers has elements of another type")
    form = f"<{stored.length}{_NUMBERS[stored.kind]}"
    return list(struct.unpack(form, cursor.take(struct.calcsize(form))))


def read_text(header: GgufHeader, stored: StoredText, most: int) -> str:
    """A long text.

    Raises:
        CorruptError: it is not valid UTF-8, or exceeds the limit.
    """
    return _Cursor(header.location, stored.offset, "I" if header.version == 1 else "Q").text(
        scale_limit(most)
    )


def _row(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    """Name, shape, type number and offset of one tensor."""
    name, rank = cursor.text(_LONGEST_KEY), cursor.number("I")
    if rank > _MOST_RANK:
        raise cursor.corrupt(f"tensor {name!r} has {rank} dimensions; expected at most {_MOST_RANK}")
    extents = [cursor.number(cursor.size) for _ in range(rank)]
    return name, tuple(reversed(extents)), cursor.number("I"), cursor.number("Q")


def _place(header: GgufHeader, rows: list[tuple[str, tuple[int, ...], int, int]], cursor: _Cursor) -> None:
    alignment = header.metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise cursor.corrupt(f"expected a positive alignment, got {alignment!r}")
    base = -(-cursor.at // alignment) * alignment
    end = 0
    for name, shape, number, offset in sorted(rows, key=lambda row: row[3]):
        spec = _spec(name, shape, number, cursor)
        if spec.path in header.specs or offset < end:
            raise HostileError(
                f"tensor {name!r} is duplicated, or overlaps another",
                uri=cursor.uri,
                cure="do not use this file",
            )
        end = offset + spec.nbytes
        if base + end > cursor.end:
            raise cursor.corrupt(
                f"truncated in tensor {name!r}: expected {base + end} bytes, got {cursor.end}"
            )
        header.specs[spec.path] = spec
        header.places[spec.path] = (Extent(header.location, base + offset, spec.nbytes),)
    header.types = [TYPES[number] for number in sorted({row[2] for row in rows})]


def _spec(name: str, shape: tuple[int, ...], number: int, cursor: _Cursor) -> TensorSpec:
    if number not in TYPES:
        raise UnsupportedError(
            f"unknown ggml type {number} of tensor {name!r}", uri=cursor.uri, cure="upgrade wherry"
        )
    kind = TYPES[number]
    dtype = _PLAIN.get(kind, f"ggml:{kind}")
    if (shape[-1] if shape else 1) % dtypes.block_elements(dtype):
        raise cursor.corrupt(f"the rows of tensor {name!r} of shape {shape} are not whole blocks of {kind}")
    if math.prod(shape) > 1 << 62:
        raise cursor.corrupt(f"tensor {name!r} of shape {shape} is too large")
    return TensorSpec((name,), shape, dtype)


class _Cursor:
    """The bytes of a file in order, read in pieces of 1 MiB; tracks its position and the size of the file."""

    def __init__(self, location: Location, at: int = 0, size: str = "Q") -> None:
        self.location = location
        self.uri = location.uri
        self.at = at
        self.size = size
        self._texts = 0
        entry = location.stat()
        self.end = entry.size if entry else 0
        self._piece, self._start = b"", at

    def take(self, count: int) -> bytes:
        """The next `count` bytes."""
        if count > self.end - self.at:
            raise self.corrupt("truncated header")
        inside = self.at - self._start
        if inside < 0 or inside + count > len(self._piece):
            self._piece = self.location.read(self.at, self.at + max(count, _PIECE))
            self._start, inside = self.at, 0
        data = self._piece[inside : inside + count]
        if len(data) != count:
            raise self.corrupt("truncated header")
        self.at += count
        return data

    def skip(self, count: int) -> None:
        """Skip `count` bytes."""
        if count > self.end - self.at:
            raise self.corrupt("truncated header")
        self.at += count
        if not self._start <= self.at <= self._start + len(self._piece):
            self._piece, self._start = b"", self.at

    def number(self, code: str) -> int:
        """The next number of a `struct` type."""
        return struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}")))[0]

    def plausible(self, count: int, least: int) -> int:
        """Check that the file has room for `count` entries of at least `least` bytes each."""
        if count * least > self.end - self.at:
            raise self.corrupt(f"{count} entries exceed the size of the file")
        return count

    def text(self, most: int) -> str:
        """The next string."""
        length = self.number(self.size)
        if length > most:
            raise self.corrupt(f"text of {length} bytes exceeds the limit of {most}")
        return self._decode(self.take(length))

    def peek(self, kind: int) -> StoredList | StoredText | None:
        """Where the next metadata value of a kind is, if it is a text or a list of values that are no lists."""
        if kind == _STRING:
            return StoredText(self.at)
        if kind != _ARRAY:
            return None
        start = self.at
        inner, count = self.number("I"), self.number(self.size)
        first, self.at = self.at, start
        return StoredList(inner, count, first) if inner != _ARRAY else None

    def value(self, kind: int, depth: int) -> Any:
        """The next metadata value; None for a skipped one."""
        if kind in _NUMBERS:
            return self.number(_NUMBERS[kind])
        if kind == _STRING:
            length = self.number(self.size)
            if length <= _LONGEST_TEXT:
                return self._decode(self.take(length))
            self.skip(length)
            return None
        if kind == _ARRAY and depth < _MOST_DEPTH:
            self._skip_array(depth)
            return None
        raise self.corrupt(f"unknown metadata type {kind}")

    def _skip_array(self, depth: int) -> None:
        kind, count = self.number("I"), self.number(self.size)
        if kind in _NUMBERS:
            self.skip(count * struct.calcsize(f"<{_NUMBERS[kind]}"))
        elif kind == _STRING:
            self._skip_strings(count)
        else:
            self._count(count)
            for _ in range(self.plausible(count, 12)):
                self.value(kind, depth + 1)

    def _count(self, entries: int) -> None:
        self._texts += entries
        if exceeds(self._texts, _MOST_TEXTS):
            raise beyond("the GGUF header", scale_limit(_MOST_TEXTS), "entries of arrays", uri=self.uri)

    def _skip_strings(self, count: int) -> None:
        """Skip strings; those in the present piece without a call for each."""
        form = struct.Struct(f"<{self.size}")
        self._count(self.plausible(count, form.size))
        while count:
            piece, inside = self._piece, self.at - self._start
            last = len(piece) - form.size
            while count and 0 <= inside <= last:
                inside += form.size + form.unpack_from(piece, inside)[0]
                count -= 1
            self.skip(self._start + inside - self.at)
            if count:
                self.skip(self.number(self.size))
                count -= 1

    def _decode(self, data: bytes) -> str:
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            raise self.corrupt("a text is not valid UTF-8") from error

    def corrupt(self, reason: str) -> CorruptError:
        """An error about invalid contents of the file."""
        return CorruptError(
            f"invalid GGUF: {reason}",
            uri=self.uri,
            cure="download the file again, or restore it from a backup",
        )
