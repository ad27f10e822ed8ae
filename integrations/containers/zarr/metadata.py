"""Parses zarr 2 and zarr 3 array metadata, and derives the chunks that an array must have.

Facts (zarr specifications 2 and 3, and what Orbax, T5X, PaxML and MaxText write through tensorstore):

- zarr 2: `.zarray`; chunk keys `0.1` (or `0/1`), a scalar's only chunk is `0`. Edge chunks are stored whole,
  padded. Types that numpy lacks appear under their ml_dtypes name (`bfloat16`, `int4`).
- zarr 3: `zarr.json`; chunk keys `c/0/1`, a scalar's only chunk is `c`. Orbax wraps each chunk in
  `sharding_indexed` with one inner chunk: the data, then an index of 16 bytes and 4 of CRC-32C.
- The meaning of an absent chunk depends on the fill value: with `null` every chunk was stored, so absence is loss.

Metadata is untrusted: ranks, extents and chunk sizes are limited, and nothing is allocated from these numbers here.

The codec chain of an array decides whether its chunks are stored raw, and if not, whether they can be decoded piece by
piece in the order of the elements. The latter is possible for zstd, gzip, zlib and no codec, with little-endian
elements in C order; blosc and bz2 need (nearly) whole chunks in memory, and other orders need a whole chunk for the
transposition.

Shards (zarr 3 `sharding_indexed`): the inner chunks, then 16 bytes for each (offset, length), then a CRC-32C of
that index. Orbax writes one inner chunk in each shard, unless smaller chunks are requested.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, cast

from wherry.core import dtypes
from wherry.core.json_document import parse_json
from wherry.core.lazy_dataclass import dataclass
from wherry.core.limits import JsonLimits
from wherry.core.numbers import decimal_number
from wherry.errors import (
    CorruptError,
    HostileError,
    IncompleteError,
    UnsupportedError,
    WherryError,
    describe_exception,
)

if TYPE_CHECKING:
    from wherry.core.tensorspec import Region


JsonObject: TypeAlias = dict[str, Any]

SHARD_INDEX_BYTES = 16 + 4  # offset and length of the one inner chunk, and a CRC-32C
STREAMED = frozenset({"none", "zstd", "gzip", "zlib"})
_LIMITS = JsonLimits(nbytes=8 << 20, nodes=1 << 17)
_REMEMBERED_BYTES = 1 << 12  # of metadata that is parsed once
_CODECS = frozenset({"zstd", "gzip", "blosc"})


def extents(values: object) -> tuple[int, ...]:
    """A shape from JSON; TypeError if it is not a shape."""
    found = tuple(cast("list[Any]", values))
    if any(isinstance(extent, bool) or not isinstance(extent, int) for extent in found):
        raise TypeError(f"expected a list of integers, got {values!r}")
    return cast("tuple[int, ...]", found)


class Encoding(NamedTuple):
    """The meaning of the codecs of a zarr 3 array; the fields are those of `ZarrArray`."""

    codec: str
    raw: bool
    trailer: int
    streams: bool
    inner: tuple[int, ...] | None = None


def encoding3(codecs: list[JsonObject], chunks: tuple[int, ...]) -> Encoding:
    """Interpret a zarr 3 codec chain.

    Raises:
        UnsupportedError: a codec is not supported.
    """
    names = [codec["name"] for codec in codecs]
    if names == ["sharding_indexed"]:
        return _shards(codecs[0]["configuration"], chunks)
    unknown = [name for name in names if name not in {"bytes", "transpose", "crc32c", *_CODECS}]
    if unknown:
        raise UnsupportedError(f"unsupported zarr codec {unknown[0]!r}")
    little = all(
        (codec.get("configuration") or {}).get("endian", "little") == "little"
        for codec in codecs
        if codec["name"] == "bytes"
    )
    codec = next((name for name in names if name in _CODECS), "none")
    ordered = little and names == ["bytes"] + [codec] * (codec != "none")
    return Encoding(codec, ordered and codec == "none", 0, ordered and codec in STREAMED)


def _shards(configuration: JsonObject, chunks: tuple[int, ...]) -> Encoding:
    inside, inner = encoding3(configuration["codecs"], chunks), extents(configuration["chunk_shape"])
    index = [part["name"] for part in configuration["index_codecs"]] == ["bytes", "crc32c"]
    known = index and configuration.get("index_location", "end") == "end" and inside.inner is None
    whole = len(inner) == len(chunks) and all(
        one > 0 and chunk % one == 0 for chunk, one in zip(chunks, inner, strict=True)
    )
    return Encoding(
        codec=inside.codec,
        raw=inside.raw and inner == chunks and known,
        trailer=SHARD_INDEX_BYTES,
        streams=inside.streams and known and whole,
        inner=inner,
    )


METADATA_NAMES = {2: ".zarray", 3: "zarr.json"}
MAX_RANK = 32
MAX_BYTES = 1 << 62
MAX_CHUNK_BYTES = 1 << 40
_SPARE = 1 << 20  # bytes of headers, indices and checksums
MAX_EXPANSION = 1 << 15  # zstd, the densest codec here, needs 4 bytes for a block of 128 KiB

# Dtype in wherry → zarr 2 string. Types without a numpy string use their name; zarr 3 always uses names.
ZARR2_STRINGS: dict[str, str] = {
    "bool": "|b1",
    "int8": "|i1",
    "uint8": "|u1",
    **{
        f"{kind}int{8 * size}": f"<{code}{size}"
        for kind, code in (("", "i"), ("u", "u"))
        for size in (2, 4, 8)
    },
    **{f"float{8 * size}": f"<f{size}" for size in (2, 4, 8)},
    "complex64": "<c8",
    "complex128": "<c16",
    **{name: name for name in ("bfloat16", "int2", "int4", "float4_e2m1fn")},
    **{
        f"float8_{kind}": f"float8_{kind}"
        for kind in ("e3m4", "e4m3b11fnuz", "e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz", "e8m0fnu")
    },
}
_NAMES = {string: name for name, string in ZARR2_STRINGS.items()}
STORABLE = frozenset(ZARR2_STRINGS)

_COMPRESSORS = frozenset({"zstd", "gzip", "zlib", "bz2", "blosc"})


@dataclass(frozen=True, slots=True)
class ZarrArray:
    """The metadata of one array.

    Attributes:
        version: 2 or 3.
        shape: extents.
        chunks: extents of one stored chunk (of a shard, where there are shards).
        dtype: numpy or ml_dtypes name.
        fill: the fill value; None if there is none and every chunk was stored.
        raw: whether the stored bytes of a chunk begin with its elements in C order, little endian.
        codec: the compressor, or `none`.
        prefix: the prefix of chunk keys (`c` in zarr 3).
        separator: the separator between the numbers of a chunk key.
        trailer: bytes after the elements of a raw chunk.
        streams: whether a chunk can be decoded piece by piece, in the order of its elements.
        inner: extents of the chunks inside a shard; None if chunks are not shards.
    """

    version: int
    shape: tuple[int, ...]
    chunks: tuple[int, ...]
    dtype: str
    fill: Any
    raw: bool
    codec: str
    prefix: str
    separator: str
    trailer: int = 0
    streams: bool = False
    inner: tuple[int, ...] | None = None

    @property
    def chunk_nbytes(self) -> int:
        """Bytes of one decoded chunk, padding included."""
        return dtypes.canonical_size(self.dtype, math.prod(self.chunks))

    @property
    def most_stored(self) -> int:
        """The largest size of a stored chunk: codecs and the index of a shard add bytes to incompressible data."""
        parts = math.prod(self.chunks) // math.prod(self.inner) if self.inner else 1
        return 2 * self.chunk_nbytes + (parts << 10) + _SPARE

    @property
    def grid(self) -> tuple[int, ...]:
        """Number of chunks along each axis."""
        return tuple(-(-extent // chunk) for extent, chunk in zip(self.shape, self.chunks, strict=True))

    @property
    def chunk_count(self) -> int:
        """Number of chunks of the array."""
        return math.prod(self.grid)

    def key(self, index: tuple[int, ...]) -> str:
        """Key of a chunk, relative to the array."""
        numbers = self.separator.join(map(str, index))
        if not self.prefix:
            return numbers or "0"
        return f"{self.prefix}{self.separator}{numbers}" if index else self.prefix

    def number(self, key: str) -> int | None:
        """The number of a chunk in C order, by its key relative to the array; None for any other key."""
        if not self.shape:
            return 0 if key == self.key(()) else None
        start = f"{self.prefix}{self.separator}" if self.prefix else ""
        parts, grid = key[len(start) :].split(self.separator), self.grid
        if not key.startswith(start) or len(parts) != len(grid):
            return None
        number = 0
        for text, count in zip(parts, grid, strict=True):
            at = decimal_number(text)
            if at is None or at >= count or str(at) != text:
                return None
            number = number * count + at
        return number

    def keys(self, region: Region | None = None) -> Iterator[str]:
        """Keys of the chunks that a region touches (all by default), lazily, in C order."""
        for index in _indices([self._touched_chunks(axis, region) for axis in range(len(self.shape))]):
            yield self.key(index)

    def _touched_chunks(self, axis: int, region: Region | None) -> range:
        if region is None:
            return range(self.grid[axis])
        start, stop, chunk = region[axis].start, region[axis].stop, self.chunks[axis]
        return range(start // chunk, -(-stop // chunk)) if stop > start else range(0)

    def contiguous_axis(self) -> int | None:
        """The axis along which the chunks, in order, are the tensor's bytes; None if there is none.

        Chunks must be one element thick before that axis and span every axis after it exactly.
        """
        for axis in range(len(self.shape) or 1):
            before = all(chunk == 1 for chunk in self.chunks[:axis])
            if before and self.chunks[axis + 1 :] == self.shape[axis + 1 :]:
                return axis
        return None


def _indices(axes: list[range]) -> Iterator[tuple[int, ...]]:
    """Every index of a grid in C order. Unlike `itertools.product`, this makes no tuple of every range."""
    if not axes:
        yield ()
        return
    for first in axes[0]:
        for rest in _indices(axes[1:]):
            yield (first, *rest)


def parse(data: bytes, version: int, uri: str) -> ZarrArray:
    """Read the metadata of an array.

    Args:
        data: contents of `.zarray` or `zarr.json`.
        version: 2 or 3.
        uri: the array, for errors.

    Raises:
        IncompleteError: the file is empty.
        CorruptError: it is not valid metadata.
        UnsupportedError: a dtype, codec or grid is not supported.
        HostileError: a size exceeds its limit.
    """
    try:
        return _remembered(data, version) if len(data) <= _REMEMBERED_BYTES else _parse(data, version)
    except WherryError as error:
        error.uri = uri
        raise


def _parse(data: bytes, version: int) -> ZarrArray:
    """Parse the metadata; the caller adds the array to errors."""
    if not data.strip():
        raise IncompleteError(
            "zarr metadata file is empty", cure="copy the checkpoint again, or use another step"
        )
    try:
        fields = parse_json(data, f"zarr {version} metadata", limits=_LIMITS)
        array = _parse2(fields) if version == 2 else _parse3(fields)  # noqa: PLR2004  zarr 2
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        if isinstance(error, (CorruptError, IncompleteError)):
            raise
        raise CorruptError(f"invalid zarr {version} metadata: {describe_exception(error)}") from error
    _check_sizes(array)
    return array


_remembered = lru_cache(1 << 12)(_parse)  # arrays of one form have equal metadata


def dtype_name(string: object) -> tuple[str, bool]:
    """The dtype in wherry for a zarr 2 dtype string, and whether it is big endian.

    Raises:
        UnsupportedError: the dtype is unknown.
    """
    text = string if isinstance(string, str) else json.dumps(string)
    big = text.startswith(">")
    name = _NAMES.get(f"<{text[1:]}" if big else text)
    if name is None:
        raise UnsupportedError(f"unsupported zarr dtype {text!r}")
    return name, big


def _parse2(fields: JsonObject) -> ZarrArray:
    name, big = dtype_name(fields["dtype"])
    compressor = fields["compressor"]
    codec = "none" if compressor is None else compressor["id"]
    if codec != "none" and codec not in _COMPRESSORS:
        raise UnsupportedError(f"unsupported zarr compressor {codec!r}")
    if fields.get("filters"):
        raise UnsupportedError(f"unsupported zarr filters {fields['filters']!r}")
    if fields["order"] not in ("C", "F") or fields["zarr_format"] != 2:  # noqa: PLR2004
        raise CorruptError(
            f"invalid zarr 2 metadata: order {fields['order']!r}, zarr_format {fields['zarr_format']!r}",
        )
    plain = fields["order"] == "C" and not big
    return ZarrArray(
        version=2,
        shape=extents(fields["shape"]),
        chunks=extents(fields["chunks"]),
        dtype=name,
        fill=fields["fill_value"],
        raw=codec == "none" and plain,
        codec=codec,
        prefix="",
        separator=_separator(fields.get("dimension_separator", ".")),
        streams=codec in STREAMED and plain,
    )


def _parse3(fields: JsonObject) -> ZarrArray:
    if fields["zarr_format"] != 3 or fields["node_type"] != "array":  # noqa: PLR2004
        raise CorruptError(
            f"invalid zarr 3 metadata: zarr_format {fields['zarr_format']!r}, node_type {fields['node_type']!r}",
        )
    name, grid, encoding = fields["data_type"], fields["chunk_grid"], fields["chunk_key_encoding"]
    if name not in STORABLE:
        raise UnsupportedError(f"unsupported zarr dtype {name!r}")
    if grid["name"] != "regular" or encoding["name"] not in ("default", "v2"):
        raise UnsupportedError(
            f"unsupported zarr chunk grid {grid['name']!r} or chunk key encoding {encoding['name']!r}",
        )
    default = encoding["name"] == "default"
    chunks = extents(grid["configuration"]["chunk_shape"])
    codecs = encoding3(fields["codecs"], chunks)
    return ZarrArray(
        version=3,
        shape=extents(fields["shape"]),
        chunks=chunks,
        dtype=name,
        fill=fields["fill_value"],
        prefix="c" if default else "",
        separator=_separator((encoding.get("configuration") or {}).get("separator", "/" if default else ".")),
        **codecs._asdict(),
    )


def _separator(value: object) -> str:
    if value not in (".", "/"):
        raise UnsupportedError(f"unsupported zarr dimension separator {value!r}")
    return str(value)


def _check_sizes(array: ZarrArray) -> None:
    if len(array.shape) != len(array.chunks):
        raise CorruptError(f"rank mismatch in zarr metadata: shape {array.shape}, chunks {array.chunks}")
    if any(extent < 0 for extent in array.shape) or any(chunk < 1 for chunk in array.chunks):
        raise CorruptError(f"invalid zarr metadata: shape {array.shape}, chunks {array.chunks}")
    if len(array.shape) > MAX_RANK or max((*array.shape, *array.chunks), default=0) > MAX_BYTES:
        raise _hostile(
            f"array of rank {len(array.shape)} exceeds the limits of {MAX_RANK} axes of {MAX_BYTES} elements"
        )
    total = dtypes.canonical_size(array.dtype, math.prod(array.shape))
    if total > MAX_BYTES or array.chunk_nbytes > MAX_CHUNK_BYTES:
        raise _hostile(
            f"array of {total} bytes and chunks of {array.chunk_nbytes} bytes exceeds the limits of {MAX_BYTES} and "
            f"{MAX_CHUNK_BYTES}"
        )


def _hostile(what: str) -> HostileError:
    return HostileError(what, cure="do not use this checkpoint; no training system writes such arrays")
