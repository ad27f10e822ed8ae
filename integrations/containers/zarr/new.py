"""Metadata and chunk sizes of new zarr arrays.

Chunks are 4 to 8 MiB (decision 005), cut along the first axes only, so that they are contiguous in the tensor: a chunk
is written from one span, and read back as one. The last chunk along an axis is stored as large as the others, so the
extents are chosen such that little of it is padding. zarr 2 gets `fill_value` null, which zarr 3 does not allow; there
`store_array_data_equal_to_fill_value` in `_METADATA` states that every chunk was stored.
"""

from __future__ import annotations

import json
import math
from functools import lru_cache
from typing import Any, Literal, TypeAlias

from wherry.core import dtypes
from wherry.core.digest import LEAF
from wherry.integrations.containers.zarr.metadata import ZARR2_STRINGS, JsonObject

Compression: TypeAlias = Literal["none", "zstd", "gzip"]
IN_STORE = "store"  # the chunk size for stores, where each chunk is an object
_LEVEL = 1
_MIB = 1 << 20
_MOST_IN_STORE = 32 * _MIB
_ALIGNED, _EVEN = (
    40,
    256,
)  # parts of a tensor of which one may be padding: where chunks end with leaves, and else


def build(
    dtype: str, shape: tuple[int, ...], chunks: tuple[int, ...], *, version: int, compression: Compression
) -> JsonObject:
    """The metadata of a new array, in a form that Orbax and tensorstore accept."""
    if version == 2:  # noqa: PLR2004
        return {
            "zarr_format": 2,
            "shape": list(shape),
            "chunks": list(chunks),
            "dtype": ZARR2_STRINGS[dtype],
            "compressor": None if compression == "none" else {"id": compression, "level": _LEVEL},
            "fill_value": None,
            "filters": None,
            "order": "C",
            "dimension_separator": ".",
        }
    codecs: list[JsonObject] = [{"name": "bytes", "configuration": {"endian": "little"}}]
    if compression == "zstd":
        codecs.append({"name": "zstd", "configuration": {"level": _LEVEL, "checksum": True}})
    elif compression == "gzip":
        codecs.append({"name": "gzip", "configuration": {"level": _LEVEL}})
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": list(shape),
        "data_type": dtype,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(chunks)}},
        "chunk_key_encoding": {"name": "default"},
        "codecs": codecs,
        "fill_value": _zero(dtype),
    }


@lru_cache(1 << 12)  # large models have thousands of tensors of each shape
def text(
    dtype: str, shape: tuple[int, ...], chunks: tuple[int, ...], version: int, compression: Compression
) -> bytes:
    """The same as it is stored."""
    return json.dumps(build(dtype, shape, chunks, version=version, compression=compression)).encode()


@lru_cache(1 << 12)
def auto_chunks(shape: tuple[int, ...], dtype: str, most: int = 8 * _MIB) -> tuple[int, ...]:
    """Extents of a chunk of 4 to 8 MiB, cut along the first axes only.

    If possible a chunk is a multiple of 4 MiB, so that leaves of the digest do not cross chunks; but not where the
    padding would be more than a fortieth of the tensor.

    Args:
        shape: extents of the tensor.
        dtype: its dtype.
        most: largest size of a chunk in bytes; half of it is the smallest.
    """
    if not shape or dtypes.canonical_size(dtype, math.prod(shape)) <= most:
        return tuple(max(extent, 1) for extent in shape)
    row = dtypes.canonical_size(dtype, math.prod(shape[1:]))
    if row > most:
        return (1, *auto_chunks(shape[1:], dtype, most))
    return (_rows(shape[0], row, most), *shape[1:])


def _rows(extent: int, row: int, most: int) -> int:
    """Rows of a chunk of between half of `most` and `most` bytes.

    Args:
        extent: rows of the tensor, which are more than `most` bytes.
        row: bytes of each.
        most: see `auto_chunks`.
    """

    def padding(rows: int) -> int:
        return -extent % rows

    unit = LEAF // math.gcd(row, LEAF)
    fewest = -(-most // (2 * unit * row))
    for times in range(most // (unit * row), fewest - 1, -1):
        if padding(times * unit) * _ALIGNED <= extent:
            return times * unit
    counts = range(-(-extent // (most // row)), extent * row // (most // 2) + 1)
    evenly = [-(-extent // count) for count in counts]
    return next((rows for rows in evenly if padding(rows) * _EVEN <= extent), min(evenly, key=padding))


def chunks_in_store(shape: tuple[int, ...], dtype: str) -> tuple[int, ...]:
    """Extents of a chunk of up to 32 MiB: as objects of 8 MiB, a terabyte would be more than a hundred thousand."""
    return auto_chunks(shape, dtype, _MOST_IN_STORE)


def _zero(dtype: str) -> Any:
    if dtype == "bool":
        return False
    if dtype.startswith("complex"):
        return [0.0, 0.0]
    return 0 if "int" in dtype else 0.0
