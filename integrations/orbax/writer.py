"""Writing an Orbax item through tensorstore: what Orbax would have written, without Orbax and in bounded memory.

Whole chunks are written as they come, without a transaction (one would hold everything in memory). Arrays go into
`ocdbt.process_0/`; `finish` links them into the top database by reference and writes the small files, the marker
`commit_success.txt` last. tensorstore does not sync its files here: `sync` waits for what is pending and syncs the
new files as a group, which is three times as fast as a sync per file.

Two names that Orbax would join to one are refused: it would lose one of the tensors without a word.
"""

from __future__ import annotations

import json
import threading
import time
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wherry import __version__, dtypes
from wherry.errors import UsageError, storage_error
from wherry.integrations.containers import kvstore, zarr, zarr_new
from wherry.integrations.orbax import layout
from wherry.integrations.orbax.pending import Buffers, DatabaseSync, Pending, sync_everything, sync_file
from wherry.integrations.orbax.representable import chunks_of, refuse_unrepresentable
from wherry.integrations.orbax.tree import stored_name, tree_json
from wherry.keypath import KeyPath, render
from wherry.staging import sync_folder
from wherry.tensorspec import Region, Span, TensorSpec, region_shape

if TYPE_CHECKING:
    from collections.abc import Iterator

    from wherry.format import Options
    from wherry.location import Location
    from wherry.manifest import Manifest

_OPEN_ARRAYS = 64
_PROCESS = f"{layout.PROCESS_PREFIX}0"
_HANDLER = "orbax.checkpoint._src.handlers.standard_checkpoint_handler.StandardCheckpointHandler"
_SCALARS: dict[type, str] = {bool: "bool", int: "int64", float: "float64"}


class OrbaxWriter:
    """Writes one item into a local staging folder; see Writer."""

    def __init__(self, staging: Location, manifest: Manifest, options: Options) -> None:
        refuse_unrepresentable(manifest, options, staging.uri)
        self._staging = staging
        self._manifest = manifest
        self._ocdbt: bool = options["ocdbt"]
        self._version = int(options["zarr"])
        self._using = kvstore.context()
        self._pending = Pending(staging.uri)
        self._buffers = Buffers()
        self._handles: OrderedDict[KeyPath, kvstore.Array] = OrderedDict()
        self._lock = threading.Lock()
        self._sync_database = DatabaseSync(Path(staging.path) / _PROCESS)
        self._touched: set[str] = set()
        self._finished = False
        self._started = time.time_ns()
        self._chunks = {
            path: spec.chunks or chunks_of(spec, options["chunks"]) for path, spec in manifest.tensors.items()
        }
        self._metadata = {
            path: zarr_new.build(
                spec.dtype,
                spec.shape,
                self._chunks[path],
                version=self._version,
                compression=options["compression"],
            )
            for path, spec in manifest.tensors.items()
        }
        self._scalars = {path: value for path, value in manifest.values.items() if type(value) in _SCALARS}
        self._stored = bool(self._metadata or self._scalars)
        self._store_spec = self._start()

    def grid(self, path: KeyPath) -> tuple[int, ...]:
        """See Writer: extents of the tensor's chunk."""
        return self._chunks[path]

    def write(self, path: KeyPath, where: Region | Span, data: memoryview) -> None:
        """See Writer. The data is copied; the call blocks while more than 32 MiB wait to be written.

        Raises:
            UsageError: the region is not one whole chunk (shorter at the edge).
            StorageError: this or an earlier write failed.
        """
        spec = self._manifest.tensors[path]
        if isinstance(where, Span):
            raise UsageError("Orbax arrays are written by chunks, not spans", path=spec.name)
        _require_one_chunk(spec, where, self._chunks[path])
        self._pending.reserve(len(data))
        try:
            private = self._buffers.copy(data, region_shape(where), dtypes.numpy_dtype(spec.dtype))
            handle = self._handle(path)
            part = handle[where] if where else handle
            future = part.write(private, can_reference_source_data_indefinitely=True)
        except BaseException:
            self._pending.release(len(data))
            raise
        self._pending.add(future.commit, len(data))
        if not self._ocdbt:
            self._touch(path, where)

    def sync(self) -> None:
        """See Writer."""
        with self._lock:  # before the wait: whatever is named here is pending or there
            touched, self._touched = self._touched, set()
        self._pending.wait()
        try:
            if self._ocdbt and self._stored:
                self._sync_database()
            for name in touched:
                sync_file(Path(self._staging.path) / name)
        except OSError as error:
            raise storage_error(error, self._staging.uri) from error

    def finish(self) -> None:
        """See Writer: links the arrays into the top database, writes the small files, syncs everything."""
        if self._finished:
            return
        self.sync()
        if self._ocdbt and self._stored:
            source = kvstore.open_store(self._store_spec, self._using, self._staging.uri)
            target = kvstore.store_spec(self._staging, ocdbt=True, writable=True)
            kvstore.link_all(
                source, kvstore.open_store(target, self._using, self._staging.uri), self._staging.uri
            )
        for name, text in self._small_files():
            self._staging.join(name).put(text.encode())
        try:
            sync_everything(Path(self._staging.path))
        except OSError as error:
            raise storage_error(error, self._staging.uri) from error
        self._finished = True

    def close(self) -> None:
        """See Writer."""
        self._pending.wait(quietly=True)
        self._handles.clear()

    def _start(self) -> dict[str, Any]:
        """Make the folder and store the metadata of all arrays in one step; numbers are stored here too."""
        home = self._staging.join(_PROCESS) if self._ocdbt else self._staging
        try:
            Path(self._staging.path).mkdir(exist_ok=True)
            if self._ocdbt and self._stored:
                Path(home.path).mkdir(exist_ok=True)
        except OSError as error:
            raise storage_error(error, self._staging.uri) from error
        spec = kvstore.store_spec(home, ocdbt=self._ocdbt, writable=True)
        values = {
            f"{self._prefix(path)}{zarr.METADATA_NAMES[self._version]}": json.dumps(metadata).encode()
            for path, metadata in self._metadata.items()
        }
        values.update(self._scalar_values())
        if values:
            kvstore.put_all(
                kvstore.open_store(spec, self._using, self._staging.uri), values, self._staging.uri
            )
            self._touched.update(() if self._ocdbt else values)
        return spec

    def _scalar_values(self) -> Iterator[tuple[str, bytes]]:
        import numpy  # noqa: ICN001

        for path, value in self._scalars.items():
            dtype = _SCALARS[type(value)]
            metadata = zarr_new.build(dtype, (), (), version=self._version, compression="none")
            data = numpy.asarray(value, dtypes.numpy_dtype(dtype)).tobytes()
            key = self._parsed(metadata).key(())
            yield f"{self._prefix(path)}{zarr.METADATA_NAMES[self._version]}", json.dumps(metadata).encode()
            yield f"{self._prefix(path)}{key}", data

    def _parsed(self, metadata: zarr.JsonObject) -> zarr.ZarrArray:
        return zarr.parse(json.dumps(metadata).encode(), self._version, self._staging.uri)

    def _prefix(self, path: KeyPath) -> str:
        name = stored_name(path)
        return f"{name}/" if name else ""

    def _handle(self, path: KeyPath) -> kvstore.Array:
        with self._lock:
            if path not in self._handles:
                spec = kvstore.array_spec(
                    self._store_spec, stored_name(path), self._version, self._metadata[path]
                )
                self._handles[path] = kvstore.open_to_write(
                    spec, self._using, self._staging.uri, render(path)
                )
                while len(self._handles) > _OPEN_ARRAYS:
                    self._handles.popitem(last=False)
            self._handles.move_to_end(path)
            return self._handles[path]

    def _touch(self, path: KeyPath, where: Region) -> None:
        index = tuple(part.start // chunk for part, chunk in zip(where, self._chunks[path], strict=True))
        with self._lock:
            self._touched.add(f"{self._prefix(path)}{self._parsed(self._metadata[path]).key(index)}")

    def _small_files(self) -> Iterator[tuple[str, str]]:
        manifest = self._manifest
        strings = {
            stored_name(path): value for path, value in manifest.values.items() if isinstance(value, str)
        }
        if strings:
            yield layout.STRINGS, json.dumps(strings)
        custom = {**(manifest.custom.get("item") or {}), "wherry": self._notes()}
        metadata = tree_json(manifest, zarr3=self._version == 3, ocdbt=self._ocdbt, custom=custom)  # noqa: PLR2004
        yield layout.TREE, json.dumps(metadata)
        yield layout.CHECKPOINT, checkpoint_json(_HANDLER, self._started, manifest)
        yield layout.COMMITTED, "Written by wherry.\n"

    def _notes(self) -> dict[str, Any]:
        """What Orbax has no place for: provenance, the numbers among the arrays, PRNG keys, foreign metadata."""
        manifest = self._manifest
        tensors = manifest.tensors.items()
        notes: dict[str, Any] = {
            "version": __version__,
            "kind": manifest.kind,
            "scalars": [stored_name(path) for path in self._scalars],
            "prng": {
                stored_name(path): spec.tags["prng"]
                for path, spec in tensors
                if spec.tags and "prng" in spec.tags
            },
            "custom": {
                key: value for key, value in manifest.custom.items() if key not in ("item", "checkpoint")
            },
        }
        return {key: value for key, value in notes.items() if value}


def checkpoint_json(handlers: str | dict[str, str], started: int, manifest: Manifest) -> str:
    """`_CHECKPOINT_METADATA`, committed now."""
    return json.dumps(
        {
            "item_handlers": handlers,
            "metrics": {},
            "performance_metrics": {},
            "init_timestamp_nsecs": started,
            "commit_timestamp_nsecs": time.time_ns(),
            "custom_metadata": dict(manifest.custom.get("checkpoint") or {}),
        }
    )


def finish_step(folder: Location, manifest: Manifest, item: str) -> None:
    """Complete a step folder of a CheckpointManager around its one item."""
    text = checkpoint_json({item: _HANDLER}, time.time_ns(), manifest)
    folder.join(layout.CHECKPOINT).put(text.encode())
    folder.join(layout.COMMITTED).put(b"Written by wherry.\n")
    try:
        sync_folder(Path(folder.path))
    except OSError as error:
        raise storage_error(error, folder.uri) from error


def _require_one_chunk(spec: TensorSpec, where: Region, chunks: tuple[int, ...]) -> None:
    for part, chunk, extent in zip(where, chunks, spec.shape, strict=True):
        if part.start % chunk or part.stop != min(part.start + chunk, extent):
            raise UsageError(f"{where} is not one chunk of {chunks}", path=spec.name)
