"""The safetensors byte container: its header, read and written.

On disk: the length of the header as a little-endian u64, at most 100,000,000; the header, a JSON object that
begins with `{` and may end in spaces; the tensors' bytes, C order, little endian. An entry of the header is
`name: {dtype, shape, data_offsets: [start, stop]}` with offsets from the end of the header; `__metadata__` is an
object of strings. The rules are those of the reference implementation (safetensors 0.8, `tensor.rs`): entries
sorted by offset tile the buffer from 0 to the end of the file without hole or overlap, each is exactly as long
as its dtype and shape say, sub-byte types fill whole bytes, no name occurs twice. Its writer orders tensors by
dtype, widest first, then by name, so that all are aligned, and pads the header to 8 bytes with spaces.

`parse` reads header bytes only, and 100,000 entries within about a second. A violation of a rule raises an error that
names the tensor. `build` produces the same bytes as the reference writer.

Element types: `Dtype` of the reference implementation (safetensors 0.8, `tensor.rs`). F4 is packed two per byte on
disk, low nibble first, and one byte per element in canonical form; the 6-bit floats are opaque.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache, partial
from operator import attrgetter
from sys import intern
from typing import TYPE_CHECKING, Any, NamedTuple

from wherry.core.json_document import file_pieces, scan_json
from wherry.core.keypath import render
from wherry.core.lazy_dataclass import dataclass
from wherry.core.limits import JsonLimits
from wherry.core.tensorspec import TensorSpec
from wherry.core.threads import without_collection
from wherry.cures import Argument, Cure
from wherry.errors import CorruptError, IncompleteError, NotFoundError, UnrepresentableError, UnsupportedError
from wherry.formats.format import Option

if TYPE_CHECKING:
    from wherry.store.location import Location


METADATA_FORMAT = Option("pt", "value of `format` in `__metadata__`", ("pt", "np", "flax", "tf", "mlx"))
# (name on disk, bits on disk, our name) in the order of the reference implementation, which is the writing order
# reversed.
_DTYPES: tuple[tuple[str, int, str], ...] = (
    ("BOOL", 8, "bool"),
    ("F4", 4, "float4_e2m1fn"),
    ("F6_E2M3", 6, "float6_e2m3fn"),
    ("F6_E3M2", 6, "float6_e3m2fn"),
    ("U8", 8, "uint8"),
    ("I8", 8, "int8"),
    ("F8_E5M2", 8, "float8_e5m2"),
    ("F8_E4M3", 8, "float8_e4m3fn"),
    ("F8_E8M0", 8, "float8_e8m0fnu"),
    ("F8_E4M3FNUZ", 8, "float8_e4m3fnuz"),
    ("F8_E5M2FNUZ", 8, "float8_e5m2fnuz"),
    ("I16", 16, "int16"),
    ("U16", 16, "uint16"),
    ("F16", 16, "float16"),
    ("BF16", 16, "bfloat16"),
    ("I32", 32, "int32"),
    ("U32", 32, "uint32"),
    ("F32", 32, "float32"),
    ("C64", 64, "complex64"),
    ("F64", 64, "float64"),
    ("I64", 64, "int64"),
    ("U64", 64, "uint64"),
)
BITS = {stored: bits for stored, bits, _ in _DTYPES}
TO_OURS = {stored: ours for stored, _, ours in _DTYPES}
TO_STORED = {ours: stored for stored, _, ours in _DTYPES}
RANK = {stored: rank for rank, (stored, _, _) in enumerate(_DTYPES)}
DTYPES = frozenset(TO_STORED)


MAX_HEADER = 100_000_000
_LIMITS = JsonLimits(nbytes=MAX_HEADER)
_WHAT, _CURE = "the safetensors header", "restore the file from a backup or download it again"
METADATA = "__metadata__"
_ALIGNMENT = 8
_MAX_RANK = 64  # numpy's
_MAX_BITS = 1 << 63
_FIELDS = frozenset({"dtype", "shape", "data_offsets"})
_LFS_POINTER = b"version https://git-lfs"


class HeaderEntry(NamedTuple):
    """One tensor of a header; `start` and `stop` are offsets in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Header:
    """A header: its tensors in the order of their bytes, and its `__metadata__` (None if there is none)."""

    slots: tuple[HeaderEntry, ...]
    metadata: Mapping[str, str] | None


def plausible(head: bytes, size: int) -> bool:
    """Whether a file with these first bytes and this size can be safetensors."""
    if size < 10 or len(head) < 9:  # noqa: PLR2004  length field and `{}`; length field and `{`
        return False
    (length,) = struct.unpack_from("<Q", head)
    return head[8:9] == b"{" and 2 <= length <= min(MAX_HEADER, size - 8)  # noqa: PLR2004  `{}`


def parse(location: Location) -> Header:
    """Read and check the header of a file.

    Raises:
        NotFoundError: the file does not exist.
        IncompleteError: it is a git-lfs pointer, not the file.
        CorruptError: the file violates a rule of the format.
        UnsupportedError: the dtype is unknown, or there are more dimensions than numpy supports.
    """
    uri, entry = location.uri, location.stat()
    if entry is None:
        raise NotFoundError(f"file not found: {location.name}", uri=uri)
    base = 8 + _header_length(location, entry.size)
    with without_collection():
        rows = scan_json(
            file_pieces(location.read, 8, base), _WHAT, partial(_slot, base, uri), uri=uri, limits=_LIMITS,
            unique=True, constants=False, cure=_CURE,
        )  # fmt: skip
        metadata = rows.pop(METADATA, None)
        slots: list[HeaderEntry] = list(rows.values())
        slots.sort(key=attrgetter("start", "stop"))
        _require_tiled(slots, base, entry.size, uri)
        return Header(tuple(slots), metadata)


def _header_length(location: Location, size: int) -> int:
    head = location.read(0, 64)
    if head.startswith(_LFS_POINTER):
        raise IncompleteError(
            f"{location.name} is a git-lfs pointer, not the file itself",
            uri=location.uri,
            cure="run `git lfs pull`",
        )
    if len(head) < 8:  # noqa: PLR2004  the length field
        raise _corrupt(f"safetensors file is truncated: expected at least 8 bytes, got {size}", location.uri)
    (length,) = struct.unpack_from("<Q", head)
    if length > MAX_HEADER:
        raise _corrupt(
            f"safetensors header of {length} bytes exceeds the limit of {MAX_HEADER}", location.uri
        )
    if length > size - 8:
        raise _corrupt(
            f"safetensors file is truncated: expected at least {8 + length} bytes, got {size}", location.uri
        )
    if head[8:9] != b"{" or length < 2:  # noqa: PLR2004  `{}`
        raise _corrupt("invalid safetensors header: it does not begin with {", location.uri)
    return length


def _metadata(found: Any, uri: str) -> dict[str, str] | None:
    if found is None:
        return None
    if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
        raise _corrupt(f"invalid {METADATA}: expected an object of strings", uri)
    for text in (*found, *found.values()):
        if not text.isascii():
            _require_unicode(text, uri, METADATA)
    return found


def _slot(base: int, uri: str, name: str, fields: Any) -> HeaderEntry | dict[str, str] | None:
    """One entry, its fields checked, or `__metadata__`; `base` is the end of the header in the file."""
    if name == METADATA:
        return _metadata(fields, uri)
    if type(fields) is not dict or fields.keys() != _FIELDS:
        raise _corrupt(
            "invalid header entry: expected exactly the keys dtype, shape and data_offsets", uri, name
        )
    dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if type(dtype) is not str or dtype not in BITS:
        raise UnsupportedError(
            f"unsupported safetensors dtype {str(dtype)[:40]!r}", uri=uri, path=render((name,))
        )
    lists = type(shape) is list and type(offsets) is list and len(offsets) == 2  # noqa: PLR2004
    if not lists or not _naturals(shape + offsets):
        raise _corrupt("invalid shape or data_offsets: expected non-negative integers", uri, name)
    if not name.isascii():
        _require_unicode(name, uri, "tensor name")
    start, stop = offsets
    size, extents = _stored_size(dtype, tuple(shape)) if len(shape) <= _MAX_RANK else (None, ())
    if stop - start != size:
        expected = _stored_bytes(shape, dtype, uri, name)
        raise _corrupt(
            f"size mismatch for {dtype} of shape {shape}: expected {expected} bytes, got {stop - start}",
            uri,
            name,
        )
    return HeaderEntry(intern(name), dtype, extents, base + start, base + stop)


def _naturals(numbers: list[Any]) -> bool:
    for number in numbers:  # noqa: SIM110  a generator takes twice as long, for every tensor
        if type(number) is not int or not 0 <= number < _MAX_BITS:
            return False
    return True


@lru_cache(1 << 12)
def _stored_size(dtype: str, shape: tuple[int, ...]) -> tuple[int | None, tuple[int, ...]]:
    """The bytes of a tensor, None if no file can hold it; and the shape, one object for all tensors that have it."""
    bits = math.prod(shape) * BITS[dtype]
    largest = math.prod([extent for extent in shape if extent]) * BITS[dtype]
    return (bits // 8 if largest < _MAX_BITS and bits % 8 == 0 else None), shape


def _require_unicode(text: str, uri: str, what: str) -> None:
    """Refuse half of a surrogate pair, as the library does."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise _corrupt(f"{what} is not valid Unicode: {text!a}", uri) from error


def _stored_bytes(shape: list[int], dtype: str, uri: str, name: str) -> int:
    if len(shape) > _MAX_RANK:
        raise UnsupportedError(
            f"{len(shape)} dimensions exceed the limit of {_MAX_RANK}", uri=uri, path=render((name,))
        )
    if math.prod([extent for extent in shape if extent]) * BITS[dtype] >= _MAX_BITS:
        raise _corrupt(f"shape {shape} exceeds the size of any file", uri, name)
    bits = math.prod(shape) * BITS[dtype]
    if bits % 8:
        raise _corrupt(f"{bits} bits of {dtype} are not a whole number of bytes", uri, name)
    return bits // 8


def _require_tiled(slots: list[HeaderEntry], base: int, size: int, uri: str) -> None:
    end = base
    for slot in slots:
        if slot.start != end:
            what = "gap before the tensor" if slot.start > end else "tensor overlaps another tensor"
            raise _corrupt(
                f"{what}: expected data offset {end - base}, got {slot.start - base}", uri, slot.name
            )
        if slot.stop > size:
            raise _corrupt(
                f"safetensors file is truncated: expected at least {slot.stop} bytes, got {size}",
                uri,
                slot.name,
            )
        end = slot.stop
    if end != size:
        raise _corrupt(f"{size - end} trailing bytes after the last tensor", uri)


def _corrupt(what: str, uri: str, name: str | None = None) -> CorruptError:
    path = None if name is None else render((name,)).encode("utf-8", "backslashreplace").decode()
    return CorruptError(what, uri=uri, path=path, cure=_CURE)


def in_order(tensors: Iterable[TensorSpec]) -> list[TensorSpec]:
    """Tensors in the order of a file: those of the largest elements first, then by name.

    Raises:
        UnrepresentableError: the container cannot hold a dtype, key path or size.
    """
    specs = sorted(tensors, key=lambda spec: (-RANK[_stored_dtype(spec)], spec.path))
    for spec in specs:
        stored_bytes(spec)
    return specs


def build(specs: Iterable[TensorSpec], metadata: Mapping[str, str]) -> bytes:
    """The bytes of a file up to the first tensor.

    Args:
        specs: the tensors, `in_order`.
        metadata: the `__metadata__`; left out if empty.

    Raises:
        UnrepresentableError: the header is too large, or has text that is not Unicode.
    """
    header: dict[str, Any] = {METADATA: dict(sorted(metadata.items()))} if metadata else {}
    end = 0
    for spec in specs:
        start, end = end, end + stored_bytes(spec)
        dtype = _stored_dtype(spec)
        header[spec.path[0]] = {"dtype": dtype, "shape": list(spec.shape), "data_offsets": [start, end]}
    try:
        text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError as error:
        raise UnrepresentableError(
            f"safetensors cannot hold text that is not valid Unicode: {error.object[error.start : error.end]!a}",
            cure=Cure("rename it with {}, or choose another format", Argument("rename")),
        ) from error
    text += b" " * (-len(text) % _ALIGNMENT)
    if len(text) > MAX_HEADER:
        raise UnrepresentableError(
            f"safetensors header of {len(text)} bytes exceeds the limit of {MAX_HEADER}"
        )
    return struct.pack("<Q", len(text)) + text


def _stored_dtype(spec: TensorSpec) -> str:
    if len(spec.path) != 1 or spec.path[0] == METADATA:
        raise UnrepresentableError(
            f"safetensors requires key paths of one part, other than {METADATA}",
            path=spec.name,
            cure=Cure("pass `{}` to join the parts with a dot", Argument("set", "join=.")),
        )
    if spec.dtype not in TO_STORED:
        raise UnrepresentableError(f"safetensors does not support dtype {spec.dtype}", path=spec.name)
    return TO_STORED[spec.dtype]


def stored_bytes(spec: TensorSpec) -> int:
    """Bytes of a tensor in a file.

    Raises:
        UnrepresentableError: they are not whole.
    """
    dtype = _stored_dtype(spec)
    bits = spec.size * BITS[dtype]
    if bits % 8:
        raise UnrepresentableError(f"{bits} bits of {dtype} are not a whole number of bytes", path=spec.name)
    return bits // 8


def placed_tensors(header: Header) -> Iterator[tuple[TensorSpec, int, int]]:
    """The tensors of one safetensors file in the order of their bytes, each with its offset and number of bytes."""
    for name, dtype, shape, start, stop in header.slots:
        yield TensorSpec((name,), shape, TO_OURS[dtype]), start, stop - start
