"""Writes the chunks of zarr arrays: one file per chunk, or the data files of an OCDBT database.

Both are written from several threads, in any order, and made durable in groups, like every other container here. In a
database, uncompressed chunks have a known offset before the first byte is written; compressed ones are appended as
they arrive. A log, which is synced after the chunks, records their positions: an interrupted run resumes from it, and a
chunk that was never written is absent from the tree instead of being zeros.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from wherry.errors import UnsupportedError, storage_error, storage_errors
from wherry.integrations.containers.flat.files import FlatFiles, require_local
from wherry.integrations.containers.ocdbt.read import MANIFEST
from wherry.integrations.containers.ocdbt.write import Reference, Value
from wherry.integrations.containers.zarr import places
from wherry.integrations.containers.zarr.chunk_log import LOG, append_to_log, read_log
from wherry.integrations.containers.zarr.listing import list_ocdbt
from wherry.integrations.containers.zarr.object_chunks import AppendedChunks, ObjectChunks, PlacedChunks
from wherry.integrations.containers.zarr.places import (
    DATA,
    ChunkPlaces,
    data_file,
    encoded_database,
    ends_of,
    start_after,
)
from wherry.integrations.containers.zarr.unit_chunks import DatabasePart, FilesPart, kept_keys
from wherry.storage.folders import DRAFT, PREFIX, make_folders, sync_folder
from wherry.storage.open_file import open_regular
from wherry.storage.stores import locate
from wherry.upload.selection import is_selected
from wherry.upload.staged_objects import is_staged

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from wherry.integrations.containers.zarr.chunk_store import ChunkStore
    from wherry.integrations.containers.zarr.metadata import ZarrArray
    from wherry.storage.location import Location


class _LocalChunks:
    """What stores on a local disk have in common: every chunk is durable after a `sync`."""

    def stored(self, key: str) -> bool:  # noqa: ARG002  of the protocol
        """See ChunkStore."""
        return True


class FileChunks(_LocalChunks):
    """One file for each key, below a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._fresh: set[str] = set()
        self._lock = threading.Lock()
        self._syncing = threading.Lock()

    def put(self, key: str, data: memoryview, size: int = 0) -> None:
        """See ChunkStore."""
        path = self._folder / key
        try:
            make_folders(path.parent)
            _write_file(path, data, size)
        except OSError as error:
            raise storage_error(error, str(path)) from error
        with self._lock:
            self._fresh.add(key)

    def place(self, key: str) -> Reference:
        """See ChunkStore."""
        with storage_errors(str(self._folder)):
            return Reference(key, 0, (self._folder / key).stat().st_size)

    def sync(self) -> None:
        """See ChunkStore; new folders become durable too."""
        with self._syncing:  # a second caller returns when the chunks of the first are durable
            with self._lock:
                fresh, self._fresh = self._fresh, set()
            try:
                _sync_files(self._folder, fresh)
            except OSError as error:
                with self._lock:
                    self._fresh |= fresh
                raise storage_error(error, str(self._folder)) from error

    def finish(self, values: Mapping[str, bytes]) -> None:
        """See ChunkStore."""
        for key, data in values.items():
            self.put(key, memoryview(data))
        self.sync()

    def close(self) -> None:
        """See ChunkStore; there is nothing to release."""


class DatabaseChunks(_LocalChunks):
    """Data files of an OCDBT database."""

    def __init__(
        self,
        folder: Path,
        chunk_places: ChunkPlaces | None = None,
        file_bytes: int = places.FILE_BYTES,
    ) -> None:
        """Create the files, or continue those of an interrupted run.

        Args:
            folder: of the database.
            chunk_places: key → where the chunk lies, if known in advance; else chunks are appended as they arrive.
            file_bytes: size of a data file to which chunks are appended.
        """
        self._folder = folder
        self._file_bytes = file_bytes
        self._places: Mapping[str, Reference] = chunk_places or {}
        self._known = _recall(folder)
        self._fresh: dict[str, Reference] = {}
        self._lock = threading.Lock()
        self._syncing = threading.Lock()
        ends = chunk_places.ends if chunk_places else ends_of(self._known)
        _make(folder / DATA)
        self._files = FlatFiles(folder, ends)
        self._number = self._named = len(ends) - 1
        self._end = ends[data_file(self._number)]

    def put(self, key: str, data: memoryview, size: int = 0) -> None:
        """See ChunkStore; a chunk that was already appended is not appended again."""
        planned = self._places.get(key)
        with self._lock:
            place = planned or self._known.get(key) or self._reserve(max(len(data), size))
        if planned or key not in self._known:
            self._files.write(place.file, place.offset, data)
            with self._lock:
                self._fresh[key] = place

    def place(self, key: str) -> Reference:
        """See ChunkStore."""
        with self._lock:
            return self._places.get(key) or self._known.get(key) or self._fresh[key]

    def sync(self) -> None:
        """See ChunkStore."""
        with self._syncing:
            self._sync()

    def _sync(self) -> None:
        with self._lock:
            fresh, number = dict(self._fresh), self._number
        self._files.sync()
        if number > self._named:
            self._sync_names(number)
        new = {key: place for key, place in fresh.items() if key not in self._known}
        try:
            if new:
                append_to_log(self._folder / LOG, new)
        except OSError as error:
            raise storage_error(error, str(self._folder)) from error
        with self._lock:
            self._known |= new
            for key in fresh:
                self._fresh.pop(key, None)

    def _sync_names(self, number: int) -> None:
        """Make the names of the data files up to this one durable, before the log refers to them."""
        with storage_errors(str(self._folder)):
            sync_folder(self._folder / DATA)
        self._named = number

    def finish(self, values: Mapping[str, bytes]) -> None:
        """See ChunkStore; a chunk that was never written is not in the tree."""
        self.sync()
        self._files.finish()
        write_database(self._folder, {**self._known, **values})
        (self._folder / LOG).unlink(missing_ok=True)

    def close(self) -> None:
        """See ChunkStore."""
        self._files.close()

    def _reserve(self, nbytes: int) -> Reference:
        start = start_after(self._end, nbytes)
        if self._end and start + nbytes > self._file_bytes:
            self._number, start = self._number + 1, 0
            self._files.add(data_file(self._number), 0)
        place = Reference(data_file(self._number), start, nbytes)
        self._end = start + nbytes
        self._files.grow(place.file, self._end)
        return place


def open_chunks(
    folder: Location,
    *,
    ocdbt: bool,
    arrays: Mapping[str, ZarrArray] | None = None,
    file_bytes: int = places.FILE_BYTES,
) -> ChunkStore:
    """The chunk store in a local folder, in the staged objects of a run, or in the files of one unit of a target.

    Args:
        folder: of the arrays.
        ocdbt: whether chunks lie in an OCDBT database.
        arrays: what the keys of an array's chunks begin with → the array, if their sizes are known in advance.
        file_bytes: size of a data file of a database.

    Raises:
        UnsupportedError: the folder is none of them, or the chunks of a unit have no known sizes.
        StorageError: the storage is full or failed.
    """
    placed = None if arrays is None else ChunkPlaces(arrays, file_bytes)
    if is_selected(folder):
        return _of_unit(folder, placed, ocdbt=ocdbt)
    if is_staged(folder):
        if not ocdbt:
            return ObjectChunks(folder)
        return AppendedChunks(folder) if placed is None else PlacedChunks(folder, placed)
    require_local(folder)
    local = Path(folder.path)
    return DatabaseChunks(local, placed, file_bytes) if ocdbt else FileChunks(local)


def _of_unit(folder: Location, placed: ChunkPlaces | None, *, ocdbt: bool) -> ChunkStore:
    if placed is None:
        raise UnsupportedError(
            "the sizes of compressed chunks are not known before they are written",
            uri=folder.uri,
            cure="omit --set compression",
        )
    if ocdbt:
        return DatabasePart(folder, placed)
    sizes = {key: place.length for key, place in placed.items()}
    kept = kept_keys(folder, sizes)
    inner = None
    if kept:
        inner = ObjectChunks(folder) if is_staged(folder) else FileChunks(Path(folder.path))
    return FilesPart(sizes, kept, inner)


def write_database(folder: Path, values: Mapping[str, Value]) -> None:
    """Write the tree over values whose data files exist, then the manifest, durably.

    Raises:
        StorageError: the storage failed.
    """
    made = encoded_database(values)
    try:
        _make(folder / DATA)
        for file, data in ((made.nodes, made.tree), (MANIFEST, made.manifest)):
            _replace_file(folder / file, memoryview(data))
            _sync_files(folder, [file])
    except OSError as error:
        raise storage_error(error, str(folder)) from error


def _recall(folder: Path) -> dict[str, Reference]:
    """Positions of the chunks of an interrupted run, from its log, or from its database if that exists."""
    if (folder / LOG).exists():
        return read_log(folder / LOG)
    if not (folder / MANIFEST).exists():
        return {}
    values = list_ocdbt(locate(folder)).values
    return {
        key: Reference(value.file, value.offset, value.length)
        for key, value in values.items()
        if value.file is not None
    }


def sync_everything(folder: Location) -> None:
    """Sync every file and folder below a local folder; what a store of objects has confirmed is durable.

    Raises:
        StorageError: the storage failed.
    """
    if is_staged(folder) or not folder.store.capabilities.local:
        return
    with storage_errors(folder.uri):
        for home, _folders, files in os.walk(folder.path):
            for name in files:
                _sync_file(Path(home) / name)
            sync_folder(Path(home))


def _sync_file(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def _make(folder: Path) -> None:
    try:
        make_folders(folder)
    except OSError as error:
        raise storage_error(error, str(folder)) from error


def _write_file(path: Path, data: memoryview, size: int = 0) -> None:
    descriptor = open_regular(str(path), flags=os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        done = 0
        while done < len(data):
            done += os.pwrite(descriptor, data[done:], done)
        os.ftruncate(descriptor, max(len(data), size))
    finally:
        os.close(descriptor)


def _replace_file(path: Path, data: memoryview) -> None:
    """Write a file in one step; a run that is killed here and resumed reads the database of before.

    The draft has the same name in every run, so that the one that completes the database leaves none.
    """
    draft = path.with_name(f"{PREFIX}{path.name}{DRAFT}")
    _write_file(draft, data)
    _sync_file(draft)
    draft.replace(path)


def _sync_files(folder: Path, keys: Iterable[str]) -> None:
    """Sync files and the folders above them: a new file is durable only when its name is."""
    parents = {folder}
    for key in keys:
        path = folder / key
        _sync_file(path)
        parents |= set(path.parents) - set(folder.parents)
    for parent in sorted(parents, reverse=True):
        sync_folder(parent)
