"""Reads the arrays of an Orbax item: raw if they are stored raw, through tensorstore if they are encoded.

A missing chunk is an error, never a fill value. Presence is checked in one listing of the store; nothing is allocated
for a region before every chunk of it is known to exist and to be large enough for what its metadata promises.

Opens the arrays of a folder: reads the zarr metadata of stored names from one listing of the store.

Every system that keeps arrays under names in a folder (Orbax, T5X, PaxML, MaxText) opens them here, whether the
folder is an OCDBT database or has one folder per array. Arrays without metadata are returned and do not raise, because
only the caller knows whether the metadata may be elsewhere.

Describes what is missing from a sharded checkpoint: how many bytes, in how many arrays, and from which hosts.

"449 GB, expected 1,800" has one common cause: every host wrote to its own disk, and only one of these disks was
copied. Metadata alone can show it. `_sharding` says how each array was sharded over the devices, and therefore which
chunks each device wrote; an OCDBT tree says which process's data files it refers to. Sizes are those of decoded
elements, because files are compressed and `du` shows nothing.

Facts: with a NamedSharding a dimension is cut into as many equal parts as the mesh axes of its entry in the
partition spec have devices, the first of these axes varying slowest. Along the other mesh axes it is replicated: one of
the devices that hold a shard writes it, or, since Orbax 0.11.9, each of them writes a slice with separate chunks.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from functools import partial
from itertools import islice, product
from typing import TYPE_CHECKING, Any

from wherry.core import dtypes
from wherry.core.keypath import KeyPath, render
from wherry.core.lazy_dataclass import dataclass
from wherry.core.tensorspec import Region, Sharding, TensorSpec, region_shape
from wherry.errors import CorruptError, HostileError, IncompleteError
from wherry.formats.format import (
    Absent,
    Access,
    Block,
    ChunkDecoder,
    Chunked,
    Contents,
    ContentsOver,
    Extent,
    Stored,
)
from wherry.integrations.containers.flat.reader import companion_location
from wherry.integrations.containers.ocdbt.read import PROCESS_PREFIX
from wherry.integrations.containers.zarr import kvstore
from wherry.integrations.containers.zarr import metadata as zarr
from wherry.integrations.containers.zarr import stream as zarr_stream
from wherry.integrations.containers.zarr.listing import ASSETS, Listing
from wherry.integrations.containers.zarr.metadata import MAX_EXPANSION, JsonObject, ZarrArray
from wherry.mover.move import cells
from wherry.mover.output import as_array
from wherry.store.location import Location
from wherry.store.sidecar import FOLDER_NAME, SIGNATURE_NAME
from wherry.store.store import Entry

if TYPE_CHECKING:
    import numpy as np
    import tensorstore as ts

    from wherry.integrations.containers.flat.reader import FlatReader


_OPEN_ARRAYS = 64
_NAMED_PER_TENSOR = 1000
_SMALLEST_SUSPECT = 1 << 20
_SMALL = 64 << 10  # bytes of an array that is decoded without tensorstore where any region of it is read


@dataclass(frozen=True, slots=True)
class StoredArray:
    """One array of an item: its stored name and its zarr metadata.

    Attributes:
        name: the stored name.
        zarr: its metadata, as stored.
        metadata: the same as JSON, if no file of the store holds it.
    """

    name: str
    zarr: ZarrArray
    metadata: JsonObject | None = None

    def chunk_keys(self, region: Region | None = None) -> Iterator[str]:
        """Keys in the store of the chunks that a region touches."""
        prefix = f"{self.name}/" if self.name else ""
        return (prefix + key for key in self.zarr.keys(region))

    def spec(self, path: KeyPath, **facts: Any) -> TensorSpec:
        """The tensor at a key path.

        Args:
            path: the key path.
            facts: further fields of the spec.
        """
        return TensorSpec(path, self.zarr.shape, self.zarr.dtype, chunks=self.zarr.chunks, **facts)


class ArrayReader(Contents):
    """Reads one item.

    Attributes:
        location: the item folder.
        arrays: key path → the array.
        listing: the contents of the store; None if the item has no arrays.
        ocdbt: whether the store is an OCDBT database.
        zeros_stored: whether the writer stored chunks that equal the fill value.
        inline: reads the tensors in the msgpack tree; None if there are none.
        lost: leaves without metadata of shape and dtype on disk, with the reason; they are reported as absent.
    """

    def __init__(
        self,
        location: Location,
        arrays: Mapping[KeyPath, StoredArray],
        listing: Listing | None,
        using: ts.Context | None,
        *,
        ocdbt: bool,
        zeros_stored: bool,
        inline: FlatReader | None = None,
    ) -> None:
        self.location = location
        self.arrays = arrays
        self.listing = listing
        self.ocdbt = ocdbt
        self.zeros_stored = zeros_stored
        self.inline = inline
        self.lost: Mapping[KeyPath, str] = {}
        self._using = using
        self._lock = threading.Lock()
        self._handles: OrderedDict[str, kvstore.Array] = OrderedDict()

    def access(self, spec: TensorSpec) -> Access:
        """Stored if the chunks in order are the tensor's bytes, else as `access_in_chunks`."""
        if self.inline is not None and spec.path in self.inline.places:
            return self.inline.access(spec)
        extents = self._extents(spec)
        return self.access_in_chunks(spec) if extents is None else Stored(extents)

    def access_in_chunks(self, spec: TensorSpec) -> Chunked:
        """How the chunks of an array are read, whose bytes beyond the edge of the spec are padding."""
        array = self.arrays[spec.path]
        zarr, place, require = array.zarr, partial(self._place, array), partial(self._require, array, spec)
        if self._is_raw(array):
            return Chunked(zarr.chunks, None, place, require)
        decoder = ChunkDecoder(
            partial(self._fill, array, spec), zarr_stream.codec_of(zarr),
            partial(self._held, array, spec), partial(self._decode, array, spec),
        )  # fmt: skip
        return Chunked(zarr.chunks, decoder, place, require)

    def _extents(self, spec: TensorSpec) -> tuple[Extent, ...] | None:
        """The extents of raw chunks that in order are the tensor's bytes, none of them inside a B+tree node."""
        array = self.arrays[spec.path]
        listing = self.listing
        chunks = None if listing is None else _raw_chunks(array.zarr, len(listing.values))
        if listing is None or chunks is None:
            return None
        stored = array.zarr.chunk_nbytes + array.zarr.trailer
        extents: list[Extent] = []
        for key, length in chunks:
            name = f"{array.name}/{key}" if array.name else key
            value = listing.values.get(name)
            if value is None or value.file is None or value.length != stored or listing.lack(name):
                return None
            extents.append(Extent(listing.place(value.file), value.offset, length))
        return tuple(extents)

    def _is_raw(self, array: StoredArray) -> bool:
        """Whether an array's chunks are raw in files: tensorstore would read whole chunks, even for one row."""
        if not array.zarr.raw or self.listing is None or dtypes.opaque(array.zarr.dtype):
            return False
        first = self.listing.values.get(next(array.chunk_keys(), ""))
        return first is not None and first.file is not None

    def _place(self, array: StoredArray, cell: Region) -> Extent | None:
        """The byte range of the stored chunk of a cell; None if it is not in a file as its metadata says."""
        listing = self.listing
        (key,) = array.chunk_keys(cell)
        value = None if listing is None else listing.values.get(key)
        if listing is None or value is None or value.file is None or listing.lack(key):
            return None
        return Extent(listing.place(value.file), value.offset, value.length)

    def _fill(self, array: StoredArray, spec: TensorSpec, region: Region, out: memoryview) -> None:
        """Fill a buffer with a region of encoded chunks.

        Raises:
            CorruptError: a chunk cannot be decoded.
        """
        import numpy  # noqa: ICN001  a third of the time of `wherry --help`

        into, small = as_array(out, spec.dtype, region_shape(region)), self._small(array, spec)
        if small is not None:
            found = small[region]
        else:
            handle = self._handle(array, spec)
            try:
                found = numpy.asarray(kvstore.read_whole(handle, region, self.location.uri), order="C")
            except (ValueError, OSError) as error:
                raise kvstore.translate_error(error, self.location.uri, spec.name) from error
        into[...] = found if found.dtype == into.dtype else found.view(into.dtype)

    def _held(self, array: StoredArray, spec: TensorSpec, cell: Region) -> int | None:
        """Bytes of memory for decoding the one chunk of a cell in pieces; None if its codec is another one."""
        if not array.zarr.streams:
            return None
        return zarr_stream.held_bytes(array.zarr, self._stored_chunk(array, spec, cell))

    def _decode(self, array: StoredArray, spec: TensorSpec, cell: Region) -> Iterator[Block]:
        """Decode the one chunk of a cell piece by piece.

        Raises:
            IncompleteError: the chunk is missing.
            CorruptError: it does not decode to what its metadata promises.
        """
        return zarr_stream.blocks(array.zarr, cell, self._stored_chunk(array, spec, cell))

    def _stored_chunk(self, array: StoredArray, spec: TensorSpec, cell: Region) -> zarr_stream.StoredChunk:
        """The stored bytes of the one chunk of a cell."""
        self._require(array, spec, cell)
        assert self.listing is not None
        (key,) = array.chunk_keys(cell)
        value = self.listing.values[key]
        if value.file is not None:
            return zarr_stream.StoredChunk(self.listing.place(value.file), value.offset, value.length, key)
        if value.inline is not None:
            return zarr_stream.StoredChunk(None, 0, value.length, key, value.inline)
        store = kvstore.store_spec(self.location, ocdbt=self.ocdbt)
        uri = self.location.uri
        data = kvstore.read_value(kvstore.open_store(store, self._context(), uri), key, uri)
        return zarr_stream.StoredChunk(None, 0, len(data), key, data)

    def absent(self) -> Iterator[Absent]:
        """Missing chunks; of one tensor at most a thousand chunks are named, the rest is counted."""
        yield from (Absent(path, "metadata", reason) for path, reason in self.lost.items())
        for path, array in self.arrays.items():
            expected = array.zarr.chunk_count
            lacking = ((key, reason) for key in array.chunk_keys() if (reason := self._lack(key)) is not None)
            named = 0
            for key, reason in islice(lacking, _NAMED_PER_TENSOR):
                named += 1
                yield Absent(
                    path, key[len(array.name) + 1 :] if array.name else key, self._meaning(array, reason)
                )
            if named == _NAMED_PER_TENSOR:
                yield Absent(path, f"(up to {expected - named} more)", "not checked one by one")

    def companion(self, name: str) -> Location:
        """The location of a companion, in the folder of assets."""
        return self.location.join(ASSETS).member(name)

    def members(self) -> Iterator[Entry]:
        """The files of the folder; sidecar and signature are not part of the checkpoint."""
        return _walk_of("", self.location)

    def close(self) -> None:
        """Close the open arrays."""
        with self._lock:
            self._handles.clear()

    def _small(self, array: StoredArray, spec: TensorSpec) -> np.ndarray | None:
        """The elements of a small array with one chunk that is decoded here; None for any other."""
        import numpy  # noqa: ICN001  a third of the time of `wherry --help`

        zarr = array.zarr
        one = zarr.shape == zarr.chunks and zarr.inner is None and zarr.chunk_nbytes <= _SMALL
        if self.listing is None or not one or not zarr.streams or dtypes.opaque(zarr.dtype):
            return None
        (key,) = array.chunk_keys()
        value = self.listing.values[key]
        if value.file is None and value.inline is None:
            return None
        stored = self._stored_chunk(array, spec, spec.whole)
        (block,) = zarr_stream.blocks(zarr, spec.whole, stored)
        data = b"".join(bytes(piece) for piece in block.pieces)
        return numpy.frombuffer(data, dtypes.numpy_dtype(zarr.dtype)).reshape(zarr.shape)

    def _lack(self, key: str) -> str | None:
        return self.listing.lack(key) if self.listing is not None else "absent"

    def _meaning(self, array: StoredArray, reason: str) -> str:
        if reason != "absent":
            return reason
        if array.zarr.fill is None or self.zeros_stored:
            return "not found; its writer stored every chunk, so the data is lost"
        return "not found; either zeros that its writer left out, or lost data"

    def _require(self, array: StoredArray, spec: TensorSpec, region: Region) -> None:
        """Refuse a region with a missing chunk, or with a chunk that is too small or too large for its metadata."""
        for key in array.chunk_keys(region):
            reason = self._lack(key)
            if reason is not None:
                raise IncompleteError(
                    f"chunk {key}: {self._meaning(array, reason)}",
                    uri=self.location.uri,
                    path=spec.name,
                    cure="copy the missing files from the original checkpoint, or use another step",
                )
            assert self.listing is not None
            stored, decoded = self.listing.values[key].length, array.zarr.chunk_nbytes
            if array.zarr.raw and stored != decoded + array.zarr.trailer:
                raise CorruptError(
                    f"size mismatch in chunk {key}: expected {decoded + array.zarr.trailer} bytes, got {stored}",
                    uri=self.location.uri,
                    path=spec.name,
                )
            if stored > array.zarr.most_stored:
                raise HostileError(
                    f"chunk {key} of {decoded} bytes takes {stored:,} bytes of storage",
                    uri=self.location.uri,
                    path=spec.name,
                    cure="copy the chunk from the original checkpoint again",
                )
            if decoded > _SMALLEST_SUSPECT and decoded > stored * MAX_EXPANSION:
                raise HostileError(
                    f"chunk {key} of {stored} bytes claims to decode to {decoded}",
                    uri=self.location.uri,
                    path=spec.name,
                )

    def _context(self) -> ts.Context:
        """The tensorstore context, created when the first value is decoded with it; raw bytes do not need it."""
        with self._lock:
            self._using = self._using or kvstore.context()
            return self._using

    def _handle(self, array: StoredArray, spec: TensorSpec) -> kvstore.Array:
        with self._lock:
            if array.name in self._handles:
                self._handles.move_to_end(array.name)
                return self._handles[array.name]
        store = kvstore.store_spec(self.location, ocdbt=self.ocdbt)
        handle = kvstore.open_to_read(
            kvstore.array_spec(store, array.name, array.zarr.version, array.metadata),
            self._context(),
            self.location.uri,
            spec.name,
        )
        found = (tuple(handle.shape), handle.dtype.name)
        if found != (array.zarr.shape, array.zarr.dtype):
            raise CorruptError(
                f"metadata mismatch in {render(spec.path)}: tensorstore finds {found}, "
                f"expected {(array.zarr.shape, array.zarr.dtype)}",
                uri=self.location.uri,
            )
        with self._lock:
            self._handles[array.name] = handle
            while len(self._handles) > _OPEN_ARRAYS:
                self._handles.popitem(last=False)
        return handle


class WithinReader(ContentsOver):
    """Reads arrays that are a part of a larger checkpoint, such as a step folder around an item of Orbax."""

    def __init__(
        self,
        arrays: ArrayReader,
        parts: Mapping[str, Location],
        tensors: Mapping[KeyPath, TensorSpec] | None = None,
        *,
        companions: tuple[Location, Iterable[str]] | None = None,
        padded: Mapping[KeyPath, TensorSpec] | None = None,
    ) -> None:
        """Take over an opened reader of arrays.

        Args:
            arrays: reads all tensors.
            parts: the files and folders of the checkpoint, by their names in it (`` is its own folder); those that do
                not exist are ignored.
            tensors: with the writer's sharding over devices, which tells what is missing; None to say nothing of it.
            companions: a folder, and the names of the files without tensors in it; by default those of the arrays.
            padded: the stored specs of arrays that are larger on disk than the tensors.
        """
        self.base = self._arrays = arrays
        self._parts, self._tensors = parts, tensors
        self._companions = None if companions is None else (companions[0], frozenset(companions[1]))
        self._padded = padded or {}

    def access(self, spec: TensorSpec) -> Access:
        """How a tensor is read: as its array, but the stored bytes of a padded array are not those of the tensor."""
        stored = self._padded.get(spec.path)
        return self._arrays.access(spec) if stored is None else self._arrays.access_in_chunks(stored)

    def companion(self, name: str) -> Location:
        """The location of a companion."""
        if self._companions is None:
            return super().companion(name)
        return companion_location(self._companions[0], name, self._companions[1])

    def shortfall(self) -> str | None:
        """A text about missing parts, with the hosts that held them."""
        if self._tensors is None:
            return None
        found = {path: spec.sharding for path, spec in self._tensors.items() if spec.sharding is not None}
        return shortfall(self._arrays, found)

    def members(self) -> Iterator[Entry]:
        """The files of all parts; sidecar and signature are not among them."""
        for name, place in self._parts.items():
            is_arrays = place == self._arrays.location  # they are there, or that is an error
            yield from _walk_of(name, place) if is_arrays else _files_of(name, place)


def _files_of(name: str, place: Location) -> Iterator[Entry]:
    """A file, or the files of a folder without sidecar and signature, under a name."""
    entry = place.stat()
    if entry is not None and not entry.is_dir:
        yield replace(entry, name=name)
    elif entry is not None:
        yield from _walk_of(name, place)


def _walk_of(name: str, place: Location) -> Iterator[Entry]:
    """The files of a folder, which must exist, without sidecar and signature, under a name."""
    for one in place.walk():
        if one.name not in (FOLDER_NAME, SIGNATURE_NAME):
            yield replace(one, name=f"{name}/{one.name}") if name else one


def _raw_chunks(array: ZarrArray, most: int) -> Iterable[tuple[str, int]] | None:
    """The key and bytes of each chunk, if they are raw and in order the tensor's bytes, and not more than `most`."""
    if not array.raw:
        return None
    if array.shape == array.chunks:
        return ((array.key((0,) * len(array.shape)), array.chunk_nbytes),)
    axis = array.contiguous_axis()
    if axis is None or array.chunk_count > most:
        return None
    return zip(array.keys(), _lengths(array, axis), strict=True)


def _lengths(array: ZarrArray, axis: int) -> Iterator[int]:
    """Bytes of the tensor in each chunk of a contiguous grid, padding left out, in C order."""
    if not array.shape:
        yield array.chunk_nbytes
        return
    row = array.chunk_nbytes // array.chunks[axis]
    last = array.shape[axis] - (array.grid[axis] - 1) * array.chunks[axis]
    for index in range(array.chunk_count):
        at_edge = index % array.grid[axis] == array.grid[axis] - 1
        yield row * (last if at_edge else array.chunks[axis])


@dataclass(frozen=True, slots=True)
class Arrays:
    """The requested arrays of a folder.

    Attributes:
        found: key path → the array, for those that have metadata.
        without: key path → stored name, for those that have no metadata.
        listing: the contents of the store; None if no array was requested.
    """

    found: dict[KeyPath, StoredArray] = field(default_factory=dict["KeyPath", StoredArray])
    without: dict[KeyPath, str] = field(default_factory=dict["KeyPath", str])
    listing: Listing | None = None


def open_arrays(
    location: Location, names: Mapping[KeyPath, str], *, ocdbt: bool, listed: Listing | None = None
) -> Arrays:
    """Open arrays.

    Args:
        location: the folder.
        names: key path → stored name; without OCDBT the name of a folder.
        ocdbt: whether the folder is an OCDBT database.
        listed: the contents of the store, if the folder itself does not list them.

    Raises:
        IncompleteError: the manifest or a node of the database is missing.
        CorruptError: metadata is invalid.
        UnsupportedError: a dtype, codec or storage is not supported.
        HostileError: a name points outside the folder, or a size exceeds its limit.
    """
    if not names:
        return Arrays()
    from wherry.integrations.containers.zarr import listing

    if listed is None:
        listed = listing.list_ocdbt(location) if ocdbt else listing.list_files(location)
    arrays = Arrays(listing=listed)
    for path, name in names.items():
        if name and not ocdbt:
            location.member(name)
        metadata = array_metadata(listed, name, f"{location.uri}/{name}")
        if metadata is None:
            arrays.without[path] = name
        else:
            arrays.found[path] = StoredArray(name, metadata)
    return arrays


def array_metadata(listing: Listing, name: str, uri: str) -> zarr.ZarrArray | None:
    """The metadata of one array, zarr 2 or 3; None if there is none.

    Raises: what `open_arrays` does.
    """
    for version, file in zarr.METADATA_NAMES.items():
        data = listing.read(f"{name}/{file}" if name else file)
        if data is not None:
            return zarr.parse(data, version, uri)
    return None


_CHUNKS_LOOKED_AT = 1_000_000
_SHARES_LOOKED_AT = 2_000_000
_UNITS = ((10**9, "GB"), (10**6, "MB"), (10**3, "kB"), (1, "bytes"))
_NO_DECIMALS_FROM = 100


def shortfall(reader: ArrayReader, shardings: Mapping[KeyPath, Sharding]) -> str | None:
    """Describe what is missing.

    Args:
        reader: an opened item.
        shardings: how the writer sharded the arrays over devices, where known.

    Returns:
        One phrase; None if nothing is missing, or if there are too many chunks to check.
    """
    listing = reader.listing
    total = sum(array.zarr.chunk_count for array in reader.arrays.values())
    if listing is None or total > _CHUNKS_LOOKED_AT:
        return None
    present = expected = chunks = chunks_present = 0
    damaged: set[KeyPath] = set()
    files: set[str] = set()
    for path, array in reader.arrays.items():
        whole = tuple(slice(0, extent) for extent in array.zarr.shape)
        for region in cells(whole, array.zarr.chunks):
            nbytes = dtypes.canonical_size(array.zarr.dtype, math.prod(region_shape(region)))
            (key,) = islice(array.chunk_keys(region), 1)
            chunks += 1
            expected += nbytes
            if listing.lack(key) is None:
                chunks_present += 1
                present += nbytes
            else:
                damaged.add(path)
                value = listing.values.get(key)
                files |= {value.file} if value is not None and value.file else set()
    if not damaged:
        return None
    words = [
        f"{_amount(present, expected)} present",
        f"{chunks_present:,} of {chunks:,} chunks",
        f"{len(damaged):,} of {len(reader.arrays):,} arrays are incomplete",
    ]
    if files:
        more = f" and {len(files) - 1} more" if len(files) > 1 else ""
        words.append(f"data file {min(files)}{more} missing or truncated")
    hosts = _processes(reader, files) or _devices(reader, shardings)
    return ", ".join([*([hosts] if hosts else []), *words])


def _amount(present: int, expected: int) -> str:
    size, unit = next((size, unit) for size, unit in _UNITS if expected >= size or size == 1)
    return f"{_number(present / size)} of {_number(expected / size)} {unit}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= _NO_DECIMALS_FROM or value == int(value) else f"{value:.2f}"


def _processes(reader: ArrayReader, files: set[str]) -> str | None:
    """How many of the hosts' stores still exist next to a merged OCDBT database; None if all do, or if it has none."""
    if reader.listing is None or not files:
        return None
    parts = {value.file.split("/")[0] for value in reader.listing.values.values() if value.file}
    stores = {part for part in parts if part.startswith(PROCESS_PREFIX)}
    there = {entry.name for entry in reader.location.entries() if entry.is_dir}
    lost = stores - there
    return f"{len(stores) - len(lost)} of {len(stores)} hosts" if lost else None


def _devices(reader: ArrayReader, shardings: Mapping[KeyPath, Sharding]) -> str | None:
    """The devices whose chunks all exist, if those of all others are missing: the disks of some of the hosts."""
    meshes = {sharding.mesh for sharding in shardings.values()}
    if len(meshes) != 1:
        return None
    devices = list(_coordinates(meshes.pop()))
    if len(devices) * len(shardings) > _SHARES_LOOKED_AT:
        return None
    present, lost = [0] * len(devices), [0] * len(devices)
    for path, sharding in shardings.items():
        for device, keys in enumerate(_shares(reader.arrays[path], sharding, devices)):
            gone = sum(reader.listing is None or reader.listing.lack(key) is not None for key in keys)
            lost[device] += gone
            present[device] += len(keys) - gone
    if any(here and gone for here, gone in zip(present, lost, strict=True)):
        return None
    whole, empty = sum(map(bool, present)), sum(map(bool, lost))
    if not whole or not empty:
        return None
    share, total = math.gcd(whole, empty), whole + empty
    hosts = f"{whole // share} of {total // share} hosts"
    return f"{hosts} (the chunks of {whole} of {total} devices, as when each host wrote to its own disk)"


def _coordinates(mesh: tuple[tuple[str, int], ...]) -> Iterator[dict[str, int]]:
    """Every device of a mesh, by its index on each axis."""
    total = math.prod(extent for _name, extent in mesh)
    if total > _SHARES_LOOKED_AT:
        return
    names = [name for name, _extent in mesh]
    for numbers in product(*(range(extent) for _name, extent in mesh)):
        yield dict(zip(names, numbers, strict=True))


def _shares(array: StoredArray, sharding: Sharding, devices: list[dict[str, int]]) -> Iterator[list[str]]:
    """The chunks of an array that each device wrote.

    The first of the devices that hold a shard writes it, unless there is a chunk for each of them.
    """
    sizes, rank = dict(sharding.mesh), len(array.zarr.shape)
    named = [(axis,) if isinstance(axis, str) else axis or () for axis in sharding.spec[:rank]]
    parts = [math.prod(sizes.get(name, 1) for name in names) for names in named]
    others = [name for name in sizes if not any(name in names for names in named)]
    replicas = math.prod(sizes[name] for name in others)
    shards: dict[tuple[int, ...], list[str]] = {}
    for device in devices:
        shard = tuple(_place(names, device, sizes) for names in named)
        if shard not in shards:
            shards[shard] = list(array.chunk_keys(_shard_region(array.zarr.shape, parts, shard)))
        keys, replica = shards[shard], _place(others, device, sizes)
        if replicas > 1 and len(keys) % replicas == 0:
            each = len(keys) // replicas
            yield keys[replica * each : (replica + 1) * each]
        else:
            yield keys if replica == 0 else []


def _place(names: Sequence[str], device: Mapping[str, int], sizes: Mapping[str, int]) -> int:
    """The number of a device along several mesh axes, the first varying slowest."""
    number = 0
    for name in names:
        number = number * sizes.get(name, 1) + device.get(name, 0)
    return number


def _shard_region(shape: tuple[int, ...], parts: list[int], shard: tuple[int, ...]) -> Region:
    region = [slice(0, extent) for extent in shape]
    for axis, (part, number) in enumerate(zip(parts, shard, strict=True)):
        step = -(-shape[axis] // part)
        start = min(number * step, shape[axis])
        region[axis] = slice(start, min(start + step, shape[axis]))
    return tuple(region)
