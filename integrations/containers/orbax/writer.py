"""Writes an Orbax item as Orbax would, without Orbax and in bounded memory.

Chunks are encoded by the thread that has their bytes, and written into a chunk store: the data files of an OCDBT
database (`d/`, with the tree built once at the end), or one file each, on a local disk or in a store of objects.
`finish` writes the small files, the marker `commit_success.txt` last. Systems with other files around their arrays
subclass the writer and override `_small_files` and `_notes`.

Two key paths with the same stored name are refused, because Orbax would silently lose one of the tensors.
"""

from __future__ import annotations

import json
import math
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from wherry.core import dtypes
from wherry.core.tensorspec import Region, Span, TensorSpec, region_shape
from wherry.core.units import parse_size
from wherry.errors import UsageError
from wherry.formats.reader import Extent
from wherry.formats.writer import Writer
from wherry.integrations.containers.orbax import layout, partitioning
from wherry.integrations.containers.orbax.representable import chunks_of, refuse_unrepresentable
from wherry.integrations.containers.orbax.small_files import HANDLER, WRITTEN, checkpoint_json, notes
from wherry.integrations.containers.orbax.tree import (
    array_metadatas_json,
    key_data,
    shardings_json,
    stored_name,
    tree_json,
)
from wherry.integrations.containers.zarr import metadata as zarr
from wherry.integrations.containers.zarr import new
from wherry.integrations.containers.zarr.encode import ChunkEncoder
from wherry.integrations.containers.zarr.store import open_chunks, sync_everything
from wherry.integrations.containers.zarr.stream import StoredChunk, encoded_chunk
from wherry.runtime.threads import carrier_count
from wherry.storage.stores import make_folder
from wherry.upload.staged_objects import is_staged, run_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from wherry.core.keypath import KeyPath
    from wherry.core.manifest import Manifest
    from wherry.formats.format import Options
    from wherry.formats.reader import EncodedChunk
    from wherry.integrations.containers.zarr.chunk_store import ChunkStore
    from wherry.storage.location import Location

_SCALARS: dict[type, str] = {bool: "bool", int: "int64", float: "float64"}


class OrbaxWriter(Writer):
    """Writes one item into a staging folder; see Writer.

    Attributes:
        typed_keys: whether typed PRNG keys are written as such; a system may always restore their plain data.
    """

    typed_keys = True

    def __init__(self, staging: Location, manifest: Manifest, options: Options) -> None:
        refuse_unrepresentable(manifest, options, staging.uri)
        self._staging = staging
        self._manifest = manifest
        self._ocdbt: bool = options["ocdbt"]
        self._version = int(options["zarr"])
        self._file_bytes = parse_size(options.get("data_file_size", layout.DATA_FILE_SIZE))
        self._finished = False
        self._syncing = threading.Lock()
        self._started = time.time_ns()
        self._chunks = {
            path: spec.chunks or chunks_of(spec, options["chunks"]) for path, spec in manifest.tensors.items()
        }
        compression = options["compression"]
        self._metadata = {
            path: new.text(spec.dtype, spec.shape, self._chunks[path], self._version, compression)
            for path, spec in manifest.tensors.items()
        }
        self._arrays = {path: self._parse_array(text) for path, text in self._metadata.items()}
        self._scalars = {path: value for path, value in manifest.values.items() if type(value) in _SCALARS}
        self._encoder = ChunkEncoder(options["compression"], self._version)
        make_folder(staging)
        if is_staged(staging) and not self._encoder.plain:
            chunks = [array.chunk_nbytes for array in self._arrays.values()]
            run_of(staging).using.sender.set_aside(carrier_count() * max(chunks, default=0))
        self._store = self._open_store()

    def grid(self, path: KeyPath) -> tuple[int, ...]:
        """Extents of the tensor's chunk."""
        return self._chunks[path]

    def place(self, path: KeyPath, where: Region | Span) -> int | None:
        """Large chunks begin on a block of their file."""
        del path, where
        return 0 if self._encoder.plain else None

    def extents(self, path: KeyPath, where: Region | Span) -> tuple[Extent, ...] | None:
        """The byte range of a chunk that is stored as it is; None for a compressed or padded one."""
        spec, chunks = self._manifest.tensors[path], self._chunks[path]
        if isinstance(where, Span) or not self._encoder.unchanged(where, chunks):
            return None
        stored = self._store.place(self._key(path, where))
        nbytes = dtypes.canonical_size(spec.dtype, math.prod(region_shape(where)))
        return (Extent(self._staging.join(stored.file), stored.offset, nbytes),)

    def home(self, path: KeyPath, where: Region | Span) -> Location | None:
        """The file of a chunk; None where chunks are compressed, and appended as they come."""
        if isinstance(where, Span) or not self._encoder.plain:
            return None
        return self._staging.join(self._store.place(self._key(path, where)).file)

    def encoded(self, path: KeyPath, where: Region) -> EncodedChunk | None:
        """A compressed chunk; None for one that is stored as it is."""
        if self._encoder.plain:
            return None
        key = self._key(path, where)
        found = self._store.place(key)
        stored = StoredChunk(self._staging.join(found.file), found.offset, found.length, key)
        return encoded_chunk(self._arrays[path], where, stored)

    def write(self, path: KeyPath, where: Region | Span, data: memoryview) -> None:
        """Write one chunk.

        Raises:
            UsageError: the region is not one whole chunk (shorter at the edge).
            StorageError: the storage failed.
        """
        spec, chunks = self._manifest.tensors[path], self._chunks[path]
        if isinstance(where, Span):
            raise UsageError("Orbax arrays are written by chunks, not spans", path=spec.name)
        _require_one_chunk(spec, where, chunks)
        array = self._arrays[path]
        if self._encoder.plain and len(data) == array.chunk_nbytes:  # nothing is encoded or padded
            self._store.put(self._key(path, where), data, len(data))
            return
        size = array.chunk_nbytes if self._encoder.plain else 0
        self._store.put(self._key(path, where), self._encoder.encode(data, where, chunks, spec.dtype), size)

    def stored(self, path: KeyPath, where: Region | Span) -> bool:
        """Whether a chunk that was written is durable after a `sync`; on a disk every chunk is."""
        if isinstance(where, Span):
            return False
        return not is_staged(self._staging) or self._store.stored(self._key(path, where))

    def sync(self) -> None:
        """Make everything that was written durable; a second call waits for the first, which may sync its chunks."""
        with self._syncing:
            self._store.sync()

    def finish(self) -> None:
        """Complete the store, write the small files, and sync everything."""
        if self._finished:
            return
        if values := dict(self._values()):
            self._store.finish(values)
        for name, text in self._small_files():
            place = self._staging.join(name)
            make_folder(place.parent)
            place.put(text.encode())
        sync_everything(self._staging)
        self._finished = True

    def close(self) -> None:
        """Close the store."""
        self._store.close()

    def _key(self, path: KeyPath, where: Region) -> str:
        chunks = self._chunks[path]
        index = tuple([part.start // chunk for part, chunk in zip(where, chunks, strict=True)])
        return f"{_prefix(path)}{self._arrays[path].key(index)}"

    def _open_store(self) -> ChunkStore:
        packed = self._ocdbt and bool(self._metadata or self._scalars)
        placed = {_prefix(path): array for path, array in self._arrays.items()}
        return open_chunks(
            self._staging,
            ocdbt=packed,
            arrays=placed if self._encoder.plain else None,
            file_bytes=self._file_bytes,
        )

    def _values(self) -> Iterator[tuple[str, bytes]]:
        """The values beside the chunks: metadata of the arrays, and numbers as arrays of rank 0."""
        import numpy  # noqa: ICN001

        name = zarr.METADATA_NAMES[self._version]
        for path, metadata in self._metadata.items():
            yield f"{_prefix(path)}{name}", metadata
        for path, value in self._scalars.items():
            spec = TensorSpec(path, (), _SCALARS[type(value)])
            metadata = new.text(spec.dtype, (), (), self._version, "none")
            yield f"{_prefix(path)}{name}", metadata
            data = numpy.asarray(value, dtypes.numpy_dtype(spec.dtype)).tobytes()
            yield f"{_prefix(path)}{self._parse_array(metadata).key(())}", data

    def _parse_array(self, metadata: bytes) -> zarr.ZarrArray:
        return zarr.parse(metadata, self._version, self._staging.uri)

    def _small_files(self) -> Iterator[tuple[str, str]]:
        manifest = self._manifest
        strings = {
            stored_name(path): value for path, value in manifest.values.items() if isinstance(value, str)
        }
        if strings:
            yield layout.STRINGS, json.dumps(strings)
        custom = {**partitioning.item_metadata(manifest), "wherry": self._notes()}
        keys = key_data(manifest) if self.typed_keys else {}
        if keys:
            specs = {path: replace(manifest.tensors[path], chunks=self._chunks[path]) for path in keys}
            yield layout.SHARDING, json.dumps(shardings_json(keys))
            yield f"{layout.ARRAY_METADATAS}/process_0", json.dumps(array_metadatas_json(keys, specs))
        metadata = tree_json(
            manifest,
            zarr3=self._version == 3,  # noqa: PLR2004  zarr 3
            ocdbt=self._ocdbt,
            custom=custom,
            keys=keys,
        )
        yield layout.TREE, json.dumps(metadata)
        yield layout.CHECKPOINT, checkpoint_json(HANDLER, self._started, manifest)
        yield layout.COMMITTED, WRITTEN.decode()

    def _notes(self) -> dict[str, Any]:
        """Facts that Orbax cannot store."""
        return notes(self._manifest, self._scalars)


def _prefix(path: KeyPath) -> str:
    name = stored_name(path)
    return f"{name}/" if name else ""


def _require_one_chunk(spec: TensorSpec, where: Region, chunks: tuple[int, ...]) -> None:
    for part, chunk, extent in zip(where, chunks, spec.shape, strict=True):
        if part.start % chunk or part.stop != min(part.start + chunk, extent):
            raise UsageError(f"region {where} is not one whole chunk of {chunks}", path=spec.name)
