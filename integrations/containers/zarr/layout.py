"""The layout of arrays in a folder: one file for each chunk, or the data files of an OCDBT database.

Metadata and chunk sizes of new zarr arrays.

Chunks are 4 to 8 MiB (decision 005), cut along the first axes only, so that they are contiguous in the tensor: a chunk
is written from one span, and read back as one. The last chunk along an axis is stored as large as the others, so the
extents are chosen such that little of it is padding. zarr 2 gets `fill_value` null, which zarr 3 does not allow; there
`store_array_data_equal_to_fill_value` in `_METADATA` states that every chunk was stored.

Encodes chunks of zarr arrays as tensorstore would: whole chunks, padded at the edge, then compressed; and decodes.

Output goes into a buffer that each thread reuses, because fresh memory costs more than the compression.

Where the chunks of an OCDBT database lie in its data files, on a disk and in a store alike.
"""

from __future__ import annotations

import json
import math
import mmap
import re
import threading
from array import array
from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import cache, lru_cache, partial
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

from wherry.core import dtypes
from wherry.core.digest import LEAF, sha256_of
from wherry.core.keypath import KeyPath
from wherry.core.lazy_dataclass import dataclass
from wherry.core.tensorspec import Region, TensorSpec, region_shape
from wherry.formats.format import Block
from wherry.integrations.containers.ocdbt.read import MANIFEST
from wherry.integrations.containers.ocdbt.write import Reference, Value, encode_database
from wherry.integrations.containers.zarr import metadata as zarr
from wherry.integrations.containers.zarr.metadata import ZARR2_STRINGS, JsonObject, ZarrArray, parse
from wherry.integrations.containers.zarr.stream import StoredChunk, blocks, codec_of
from wherry.mover.output import as_array, as_bytes
from wherry.target.file_map import Chunks, File, PackedChunks, PlacedChunks, SeparateChunks
from wherry.target.files import start_after
from wherry.target.grids import ChunkPlace, Grids, chunk_bytes, counts_of

Compression: TypeAlias = Literal["none", "zstd", "gzip"]
IN_STORE = "store"  # the chunk size for stores, where each chunk is an object
_LEVEL = 1
_MIB = 1 << 20
_MOST_IN_STORE = 32 * _MIB
_ALIGNED, _EVEN = (
    40,
    256,
)  # parts of a tensor of which one may be padding: where chunks end with leaves, and else


def build_metadata(
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
def metadata_text(
    dtype: str, shape: tuple[int, ...], chunks: tuple[int, ...], version: int, compression: Compression
) -> bytes:
    """The metadata of `build_metadata` as the bytes that are stored."""
    return json.dumps(build_metadata(dtype, shape, chunks, version=version, compression=compression)).encode()


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


_GZIP = 31  # window bits that mean a gzip header
_SLACK = 1 << 16


class _Compress(Protocol):
    def __call__(self, data: memoryview, into: memoryview) -> memoryview:
        """The compressed data, in `into` or in new memory."""
        ...


class ChunkEncoder:
    """Encodes the chunks of one checkpoint; see ChunkCodec."""

    def __init__(self, compression: Compression, version: int) -> None:
        """Set up.

        Args:
            compression: how chunks are compressed.
            version: of zarr; in version 3, zstd frames have a checksum.
        """
        self.plain = compression == "none"
        self._compression: Compression = compression
        self._version, self._checksum = version, version == 3  # noqa: PLR2004  zarr 3
        self._own = threading.local()

    def unchanged(self, region: Region, spec: TensorSpec) -> bool:
        """See ChunkCodec."""
        if not self.plain:
            return False
        # Whether it is a prefix of the chunk's elements: only the first axis that is cut may be shorter.
        shape, chunks = region_shape(region), spec.chunks or ()
        cut = next((axis for axis, chunk in enumerate(chunks) if chunk > 1), 0)
        return shape[cut + 1 :] == chunks[cut + 1 :]

    def encode(self, data: memoryview, region: Region, spec: TensorSpec) -> memoryview:
        """See ChunkCodec."""
        if self.unchanged(region, spec):
            return data
        whole = pad_chunk(data, region, spec.chunks or (), spec.dtype)
        if self.plain:
            return whole
        own = self._own
        if not hasattr(own, "compress"):
            own.compress = _zstd(checksum=self._checksum) if self._compression == "zstd" else _gzip
            own.buffer = memoryview(b"")
        bound = len(whole) + len(whole) // 8 + _SLACK
        if len(own.buffer) < bound:
            own.buffer = memoryview(mmap.mmap(-1, bound))  # page-aligned, for direct I/O
        return own.compress(whole, own.buffer)

    def decoding(self, spec: TensorSpec) -> Hashable:
        """See ChunkCodec."""
        return codec_of(self._array(spec))

    def decode(self, data: memoryview, region: Region, spec: TensorSpec, name: str) -> Iterator[Block]:
        """See ChunkCodec."""
        return blocks(self._array(spec), region, StoredChunk(None, 0, len(data), name, bytes(data)))

    def _array(self, spec: TensorSpec) -> ZarrArray:
        return array_of(spec.dtype, spec.shape, spec.chunks or (), self._version, self._compression)


@lru_cache(1 << 12)
def array_of(
    dtype: str, shape: tuple[int, ...], chunks: tuple[int, ...], version: int, compression: Compression
) -> ZarrArray:
    """A new array, as its metadata describes it."""
    return parse(metadata_text(dtype, shape, chunks, version, compression), version, "")


def pad_chunk(data: memoryview, region: Region, chunks: tuple[int, ...], dtype: str) -> memoryview:
    """A chunk as it is stored: at the edge of the tensor it is padded with zeros."""
    shape = region_shape(region)
    if shape == chunks:
        return data
    import numpy as np

    whole = np.zeros(chunks, dtypes.numpy_dtype(dtype))
    whole[tuple(slice(0, extent) for extent in shape)] = as_array(data, dtype, shape)
    return as_bytes(whole)


def _zstd(*, checksum: bool) -> _Compress:
    import zstandard

    compressor = zstandard.ZstdCompressor(level=_LEVEL, write_checksum=checksum)

    def compress(data: memoryview, into: memoryview) -> memoryview:
        reader, done = compressor.stream_reader(data, size=len(data)), 0
        while got := reader.readinto(into[done:]):  # pyright: ignore[reportArgumentType]
            done += got
        return into[:done]

    return compress


def _gzip(data: memoryview, into: memoryview) -> memoryview:
    from isal import isal_zlib

    engine, done = isal_zlib.compressobj(_LEVEL, isal_zlib.DEFLATED, _GZIP), 0
    for start in range(0, len(data) + 1, _SLACK):
        part = engine.compress(data[start : start + _SLACK]) if start < len(data) else engine.flush()
        into[done : done + len(part)] = part
        done += len(part)
    tail = engine.flush() if len(data) % _SLACK else b""
    into[done : done + len(tail)] = tail
    return into[: done + len(tail)]


DATA = "d"
_NUMBERED = re.compile(r"0{16}[0-9a-f]{16}")  # those with trees are digests


class _ChunkRun(NamedTuple):
    """Chunks of one array, one after another in one data file.

    Attributes:
        first: number of the first, counted over all arrays.
        chunks: their number.
        file: number of the data file.
        start: offset of the first.
        size: bytes of each.
        stride: bytes from the start of one to the start of the next.
    """

    first: int
    chunks: int
    file: int
    start: int
    size: int
    stride: int

    @property
    def end(self) -> int:
        """The end of the last chunk in the file."""
        return self.start + (self.chunks - 1) * self.stride + self.size


class ChunkPlaces:
    """The places of chunks of some tensors, all of a tensor's of the same size, one after another; they are computed.

    Attributes:
        ends: the size of each data file, the first of which always exists.
    """

    def __init__(self, specs: Sequence[TensorSpec], file_bytes: int) -> None:
        """Place the chunks.

        Args:
            specs: the tensors.
            file_bytes: size of a data file; a larger chunk has a file of its own.
        """
        self._firsts, self._fields = array("q"), array("q")  # of all runs: the first chunk, and everything
        self.ends = {data_file(0): 0}
        number = file = end = 0
        for spec in specs:
            size, left = chunk_bytes(spec), math.prod(counts_of(spec))
            stride = start_after(size, size)
            while left:
                start = start_after(end, size)
                room = (file_bytes - start - size) // stride + 1
                if end and room <= 0:
                    file, end = file + 1, 0
                    continue
                run = _ChunkRun(number, min(left, max(room, 1)), file, start, size, stride)
                self._firsts.append(run.first)
                self._fields.extend(run)
                self.ends[data_file(run.file)] = run.end
                number, left, end = number + run.chunks, left - run.chunks, run.end

    def at(self, number: int) -> ChunkPlace:
        """The place of a chunk, by its number."""
        row = bisect_right(self._firsts, number) - 1
        run = self._run(row)
        file, offset = data_file(run.file), run.start + (number - run.first) * run.stride
        if number + 1 < run.first + run.chunks:
            stop = offset + run.stride
        else:
            after = self._run(row + 1) if row + 1 < len(self._firsts) else None
            stop = after.start if after is not None and after.file == run.file else self.ends[file]
        return ChunkPlace(file, offset, run.size, stop)

    def _run(self, row: int) -> _ChunkRun:
        width = len(_ChunkRun._fields)
        return _ChunkRun(*self._fields[row * width : (row + 1) * width])


@lru_cache(1 << 12)  # chunks share the name, of which a giant has a thousand
def data_file(number: int) -> str:
    """A deterministic name: with random names, as in tensorstore, two conversions of a checkpoint would differ."""
    return f"{DATA}/{number:032x}"


def number_of_data_file(name: str) -> int | None:
    """The number of a data file with chunks, by its name; None of any other file, such as one with a tree."""
    digits = name.removeprefix(f"{DATA}/")
    return int(digits, 16) if _NUMBERED.fullmatch(digits) and name != digits else None


SCALARS: dict[type, str] = {bool: "bool", int: "int64", float: "float64"}


@dataclass(frozen=True, slots=True)
class ArrayForm:
    """How arrays are stored.

    Attributes:
        version: of zarr.
        compression: of chunks.
        file_bytes: most bytes of a data file of an OCDBT database; None for a file for each chunk.
    """

    version: int
    compression: Compression
    file_bytes: int | None = None


def lay_out(
    specs: Iterable[TensorSpec],
    form: ArrayForm,
    name: Callable[[KeyPath], str],
    scalars: Mapping[KeyPath, Any],
    created_ns: int,
) -> Chunks | None:
    """The files of arrays.

    Args:
        specs: the tensors, with their grids.
        form: how they are stored.
        name: the name of an array, from its key path.
        scalars: numbers that are stored as arrays of rank 0, by their key paths.
        created_ns: when a database was made, in nanoseconds of the Unix epoch.

    Returns:
        The files; None if there are no arrays.
    """
    arrays = _Arrays(Grids(specs), form, name, scalars)
    grids, codec = arrays.grids, ChunkEncoder(form.compression, form.version)
    if not grids.specs and not scalars:
        return None
    if form.file_bytes is None:
        return SeparateChunks(grids, codec, arrays.key, lambda _place: arrays.files())
    index = partial(_database, arrays, created_ns)
    if codec.plain:
        places = ChunkPlaces(grids.specs, form.file_bytes)
        return PlacedChunks(grids, codec, arrays.key, index, place=places.at, sizes=places.ends)
    return PackedChunks(
        grids,
        codec,
        arrays.key,
        index,
        file=data_file,
        number_of=number_of_data_file,
        file_bytes=form.file_bytes,
    )


@dataclass(frozen=True, slots=True)
class _Arrays:
    """The arrays of a folder, under keys; see `lay_out`."""

    grids: Grids
    form: ArrayForm
    name: Callable[[KeyPath], str]
    scalars: Mapping[KeyPath, Any]

    def key(self, number: int) -> str:
        """The key of a chunk."""
        spec, cell = self.grids[number]
        array = array_of(spec.dtype, spec.shape, spec.chunks or (), self.form.version, self.form.compression)
        return f"{self._prefix(spec.path)}{array.key(cell)}"

    def files(self) -> Iterator[File]:
        """The values next to the chunks, as files."""
        for key, data in self.values():
            yield File(key, lambda data=data: data)

    def values(self) -> Iterator[tuple[str, bytes]]:
        """The values next to the chunks: metadata of the arrays, and numbers as arrays of rank 0."""
        import numpy  # noqa: ICN001

        form = self.form
        metadata = zarr.METADATA_NAMES[form.version]
        for spec in self.grids.specs:
            text = metadata_text(spec.dtype, spec.shape, spec.chunks or (), form.version, form.compression)
            yield f"{self._prefix(spec.path)}{metadata}", text
        for path, value in self.scalars.items():
            dtype, prefix = SCALARS[type(value)], self._prefix(path)
            yield f"{prefix}{metadata}", metadata_text(dtype, (), (), form.version, "none")
            data = numpy.asarray(value, dtypes.numpy_dtype(dtype)).tobytes()
            yield f"{prefix}{array_of(dtype, (), (), form.version, 'none').key(())}", data

    def _prefix(self, path: KeyPath) -> str:
        name = self.name(path)
        return f"{name}/" if name else ""


def _database(arrays: _Arrays, created_ns: int, place: Callable[[int], ChunkPlace]) -> Iterable[File]:
    """The tree over values and chunks, then the manifest."""
    keys = [key for key, _data in arrays.values()] + [
        arrays.key(number) for number in range(len(arrays.grids))
    ]
    # With a random name, as in tensorstore, two conversions of a checkpoint would differ.
    name = sha256_of("ocdbt", sorted(keys))[:32]
    nodes = f"{DATA}/{name}"

    @cache
    def encoded() -> tuple[bytes, bytes]:
        values: dict[str, Value] = {}
        for number in range(len(arrays.grids)):
            file, offset, nbytes, _stop = place(number)
            values[arrays.key(number)] = Reference(file, offset, nbytes)
        values |= arrays.values()
        return encode_database(values, nodes, bytes.fromhex(name), created_ns)

    return (File(nodes, lambda: encoded()[0]), File(MANIFEST, lambda: encoded()[1]))
