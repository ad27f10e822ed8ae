"""Snapshot: a copy of the bytes of a live training state, so that training may overwrite or donate its arrays.

A snapshot is one file of boxes, each in C order, one after another. Training waits only while it is written, so nothing
is transposed, assembled or hashed meanwhile. The file is in memory (an anonymous file, `host`) or in a folder (`disk`);
either is read by its name, so the mover reads it as raw bytes like any other file. While it is taken, at most one box
for each of a few threads is held in addition.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from wherry.core import dtypes, threads
from wherry.core.interpreter import available_memory
from wherry.errors import StorageError, storage_error

if TYPE_CHECKING:
    from wherry.core.keypath import KeyPath
    from wherry.core.tensorspec import TensorSpec

_ALIGNED = 64  # alignment of boxes, sufficient for any element type
_THREADS = 4
_SPARE = 256 << 20  # bytes of memory that a snapshot must leave free


class Box(NamedTuple):
    """A part of a tensor that this process has.

    Attributes:
        offsets: of its first element in the tensor.
        sizes: its extents.
        load: returns its canonical bytes (C order, little endian), which are valid until training continues.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    load: Callable[[], memoryview]


class PlacedBox(NamedTuple):
    """A box of a snapshot: its position in the tensor, and the location of its bytes."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int


class LiveTensor(NamedTuple):
    """A tensor of a live state.

    Attributes:
        spec: its spec.
        boxes: the parts of it that this process has.
        shared: whether other processes have the other parts; otherwise each of them has all of it.
        alias: key path of an earlier tensor in the same memory (tied weights), which is copied once.
    """

    spec: TensorSpec
    boxes: tuple[Box, ...]
    shared: bool = False
    alias: KeyPath | None = None


class Snapshot:
    """One process's copy of a live state; closing it frees the memory or removes the file.

    Attributes:
        file: the path from which it is read.
        placed: key path → its boxes, once `take` has returned.
        nbytes: its size.
    """

    def __init__(self, path: Path | None) -> None:
        """Open the file.

        Args:
            path: its path, in an existing folder; None for memory.

        Raises:
            StorageError: the file cannot be created.
        """
        self._path = path
        self._public: Path | None = None
        self.placed: dict[KeyPath, tuple[PlacedBox, ...]] = {}
        self.nbytes = 0
        try:
            if path is None:
                self._descriptor = os.memfd_create("wherry-snapshot", os.MFD_CLOEXEC)
                self.file = f"/proc/self/fd/{self._descriptor}"
            else:  # in an existing folder: no other process would see one that is created here
                self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
                self.file = str(path)
        except OSError as error:
            raise storage_error(error, str(path or "a file in memory")) from error

    def take(self, tensors: Iterable[LiveTensor]) -> None:
        """Copy every box.

        Raises:
            StorageError: there is not enough memory or disk space; training is not affected.
        """
        work = list(self._layout(tensors))
        self._make_room()
        with threads.executor(_THREADS, "wherry-snapshot") as executor:
            try:
                list(executor.map(self._copy, *zip(*work, strict=True))) if work else None
            except OSError as error:
                raise storage_error(error, self.file) from error

    def publish(self, path: Path) -> Mapping[KeyPath, tuple[PlacedBox, ...]]:
        """The boxes as other processes can read them; a snapshot in memory is copied to `path` first.

        Raises:
            StorageError: the storage failed.
        """
        if self._path is not None:
            return self.placed
        self._public = path
        try:
            _copy_file(self._descriptor, self.nbytes, path)
        except OSError as error:
            raise storage_error(error, str(path)) from error
        return {
            key: tuple(box._replace(file=str(path)) for box in boxes) for key, boxes in self.placed.items()
        }

    def close(self) -> None:
        """Free the memory or remove the file; idempotent."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.ftruncate(descriptor, 0)  # a child process that was forked meanwhile may keep the file open
            os.close(descriptor)
        for path in (self._path, self._public):
            if path is not None:
                path.unlink(missing_ok=True)

    def _layout(self, tensors: Iterable[LiveTensor]) -> Iterator[tuple[Box, int, int]]:
        for spec, boxes, _shared, alias in tensors:
            if alias in self.placed:
                self.placed[spec.path] = self.placed[alias]
                continue
            placed: list[PlacedBox] = []
            for box in boxes:
                placed.append(PlacedBox(box.offsets, box.sizes, self.file, self.nbytes))
                length = dtypes.canonical_size(spec.dtype, math.prod(box.sizes))
                yield box, self.nbytes, length
                self.nbytes += -(-length // _ALIGNED) * _ALIGNED
            self.placed[spec.path] = tuple(placed)

    def _make_room(self) -> None:
        """Check that the snapshot fits, before anything is copied."""
        free = available_memory() if self._path is None else None
        if free is not None and self.nbytes + _SPARE > free:
            raise StorageError(
                f"not enough memory for a snapshot of {self.nbytes:,} bytes: {free:,} bytes are free, "
                f"of which {_SPARE:,} must stay free",
                cure='export with snapshot="disk"',
            )
        try:
            os.ftruncate(self._descriptor, self.nbytes)
            if self._path is not None and self.nbytes:
                os.posix_fallocate(self._descriptor, 0, self.nbytes)
        except OSError as error:
            raise storage_error(error, self.file) from error

    def _copy(self, box: Box, start: int, length: int) -> None:
        data = box.load()
        if len(data) != length:
            raise AssertionError(f"expected {length} bytes of a box of {box.sizes}, got {len(data)}")
        while data:
            done = os.pwrite(self._descriptor, data, start)
            data, start = data[done:], start + done


def _copy_file(descriptor: int, nbytes: int, path: Path) -> None:
    target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        done = 0
        while done < nbytes:
            done += os.sendfile(target, descriptor, done, min(nbytes - done, 1 << 30))
        os.fsync(target)
    finally:
        os.close(target)
