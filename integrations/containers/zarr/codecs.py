"""zarr codecs: what the codec chain of an array means for its stored chunks.

Two questions are answered here: do a chunk's bytes lie raw, and if not, can they be decoded piece by piece in the
order of the elements. The second holds for zstd, gzip, zlib and no codec, of little-endian elements in C order;
blosc and bz2 need (nearly) whole chunks in memory, other orders a whole chunk to turn.

Shards (zarr 3 `sharding_indexed`): the inner chunks, then 16 bytes for each (offset, length), then a CRC-32C of
that index. Orbax writes one inner chunk in each shard, unless chunks were asked to be smaller.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias, cast

from wherry.errors import UnsupportedError

JsonObject: TypeAlias = dict[str, Any]

SHARD_INDEX_BYTES = 16 + 4  # offset and length of the one inner chunk, and a CRC-32C
STREAMED = frozenset({"none", "zstd", "gzip", "zlib"})
_CODECS = frozenset({"zstd", "gzip", "blosc"})


def extents(values: object) -> tuple[int, ...]:
    """A shape that JSON gave; TypeError where it is none."""
    found = tuple(cast("list[Any]", values))
    if any(isinstance(extent, bool) or not isinstance(extent, int) for extent in found):
        raise TypeError(f"not a shape: {values!r}")
    return cast("tuple[int, ...]", found)


class Encoding(NamedTuple):
    """What the codecs of a zarr 3 array say; the fields are those of `ZarrArray`."""

    codec: str
    raw: bool
    trailer: int
    streams: bool
    inner: tuple[int, ...] | None = None


def encoding3(codecs: list[JsonObject], chunks: tuple[int, ...], uri: str) -> Encoding:
    """What a zarr 3 codec chain means.

    Raises:
        UnsupportedError: a codec that is not known.
    """
    names = [codec["name"] for codec in codecs]
    if names == ["sharding_indexed"]:
        return _shards(codecs[0]["configuration"], chunks, uri)
    unknown = [name for name in names if name not in {"bytes", "transpose", "crc32c", *_CODECS}]
    if unknown:
        raise UnsupportedError(f"zarr codec {unknown[0]!r} is not known", uri=uri)
    little = all(
        (codec.get("configuration") or {}).get("endian", "little") == "little"
        for codec in codecs
        if codec["name"] == "bytes"
    )
    codec = next((name for name in names if name in _CODECS), "none")
    ordered = little and names == ["bytes"] + [codec] * (codec != "none")
    return Encoding(codec, ordered and codec == "none", 0, ordered and codec in STREAMED)


def _shards(configuration: JsonObject, chunks: tuple[int, ...], uri: str) -> Encoding:
    inside, inner = encoding3(configuration["codecs"], chunks, uri), extents(configuration["chunk_shape"])
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
