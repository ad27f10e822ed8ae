"""Snapshot: the bytes of a live training state, copied so that training may overwrite or donate its own at once.

A snapshot is one file of boxes, each in C order, one after another: writing it is the only thing that training waits
for, so nothing is transposed, assembled or hashed meanwhile. The file lies in memory (an anonymous file, `host`) or in
a folder (`disk`); either is read by its name, so the mover takes it as raw bytes like any other file. While it is
taken, no more than one box for each of a few threads is held beside it.
"""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING, NamedTuple

from wherry.core import dtypes
from wherry.errors import StorageError, storage_error
from wherry.runtime import threads
from wherry.runtime.memory import available_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from pathlib import Path

    from wherry.core.keypath import KeyPath
    from wherry.core.tensorspec import TensorSpec

_ALIGNED = 64  # boxes begin where any element type can be mapped
_THREADS = 4
_SPARE = 256 << 20  # what a snapshot in memory must leave to the process


class Box(NamedTuple):
    """A part of a tensor that this process has.

    Attributes:
        offsets: of its first element in the tensor.
        sizes: its extents.
        load: gives its canonical bytes (C order, little endian); valid until training goes on.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    load: Callable[[], memoryview]


class PlacedBox(NamedTuple):
    """A box of a snapshot: where it lies in the tensor, and where its bytes lie."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int


class LiveTensor(NamedTuple):
    """A tensor of a live state.

    Attributes:
        spec: what it is.
        boxes: the parts of it that this process has.
        shared: whether other processes have the other parts; else each of them has it whole.
        alias: key path of an earlier tensor that is the very same memory (tied weights), which is copied once.
    """

    spec: TensorSpec
    boxes: tuple[Box, ...]
    shared: bool = False
    alias: KeyPath | None = None


class Snapshot:
    """One process's copy of a live state; close it, which frees the memory or removes the file.

    Attributes:
        file: the path by which it is read.
        placed: key path → where its boxes lie, once `take` has returned.
        nbytes: its size.
    """

    def __init__(self, path: Path | None) -> None:
        """Open the file.

        Args:
            path: where it shall lie, in a folder that is there; None for memory.

        Raises:
            StorageError: it cannot be made.
        """
        self._path = path
        self._public: Path | None = None
        self.placed: dict[KeyPath, tuple[PlacedBox, ...]] = {}
        self.nbytes = 0
        try:
            self._descriptor, self.file = _in_memory() if path is None else _in_folder(path)
        except OSError as error:
            raise storage_error(error, str(path or "a file in memory")) from error

    def take(self, tensors: Iterable[LiveTensor]) -> None:
        """Copy every box.

        Raises:
            StorageError: there is not enough memory or space; training was not touched.
        """
        work = list(self._layout(tensors))
        self._make_room()
        with threads.executor(_THREADS, "wherry-snapshot") as executor:
            try:
                list(executor.map(self._copy, *zip(*work, strict=True))) if work else None
            except OSError as error:
                raise storage_error(error, self.file) from error

    def publish(self, path: Path) -> Mapping[KeyPath, tuple[PlacedBox, ...]]:
        """The boxes as another process can read them; a snapshot in memory is copied to `path` for that.

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
        """Free what is held; it may be called again."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.ftruncate(
                descriptor, 0
            )  # a child that was forked meanwhile may hold the file for as long as it lives
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
        """Refuse before anything is copied what would not fit."""
        free = available_memory() if self._path is None else None
        if free is not None and self.nbytes + _SPARE > free:
            raise StorageError(
                f"a snapshot of {self.nbytes:,} bytes does not fit into {free:,} bytes of free memory",
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
            raise AssertionError(f"a box of {box.sizes} gave {len(data)} bytes, {length} were expected")
        while data:
            done = os.pwrite(self._descriptor, data, start)
            data, start = data[done:], start + done


def _in_memory() -> tuple[int, str]:
    descriptor = os.memfd_create("wherry-snapshot", os.MFD_CLOEXEC)
    return descriptor, f"/proc/self/fd/{descriptor}"


def _in_folder(path: Path) -> tuple[int, str]:
    """A file in a folder that must be there: one made anew here would be seen by no other process."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), str(path)


def _copy_file(descriptor: int, nbytes: int, path: Path) -> None:
    target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        done = 0
        while done < nbytes:
            done += os.sendfile(target, descriptor, done, min(nbytes - done, 1 << 30))
        os.fsync(target)
    finally:
        os.close(target)
