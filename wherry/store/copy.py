"""Copies files within a file system, and downloads files from any store so that an interrupted copy can be resumed.

A reflink (FICLONE) costs nothing and takes no space; `copy_file_range` lets the kernel or the file server copy;
if neither works, this process copies the bytes. A file is durable when its call returns, and has the size that was
listed.

A file from another store is written from its start and synced at its end, so its size tells a later run where to
resume. (Data that a power failure damaged is found when the copy is verified.) Each thread holds at most one buffer of
8 MiB.
"""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import BinaryIO

from wherry.core import threads
from wherry.core.lazy_dataclass import dataclass
from wherry.core.progress import Meter, OnProgress
from wherry.errors import CorruptError, IncompleteError, MismatchError, storage_error
from wherry.store.folders import NO_LINKS, make_folders
from wherry.store.local_store import LocalStore, locate
from wherry.store.location import Location
from wherry.store.open_file import open_regular, opened_regular
from wherry.store.store import Entry

REFLINK, COPY = "reflink", "copy"
_FICLONE = 0x40049409  # linux/fs.h
_PIECE = 64 << 20
_BUFFER = 8 << 20
# Errors that mean that a method is not supported here, and not that the storage failed.
_NOT_HERE = (
    errno.EXDEV,
    errno.EINVAL,
    errno.ENOSYS,
    errno.EOPNOTSUPP,
    errno.ENOTTY,
    errno.EPERM,
    errno.ETXTBSY,
)


def list_files(folder: Location) -> dict[str, Entry]:
    """Every file below a folder by its relative name.

    Raises:
        CorruptError: a symbolic link is broken.
        HostileError: something below must not be opened.
    """
    found = {entry.name: entry for entry in folder.walk()}
    lost = next((name for name, entry in found.items() if entry.size < 0), None)
    if lost is not None:
        raise CorruptError(
            "broken symbolic link",
            uri=folder.join(lost).uri,
            cure="restore the file that the link points to, or remove the link",
        )
    return found


def carry(source: Location, target: Location, names: Mapping[str, str], meter: Meter) -> dict[str, int]:
    """Copy files from one local folder to another.

    Args:
        source, target: the folders.
        names: file of the source → its name in the target.
        meter: counts the bytes.

    Returns:
        `reflink` and `copy`, each with the number of bytes that were copied that way.

    Raises:
        MismatchError: a file changed its size during the copy.
        StorageError: the storage failed.
    """
    done = {REFLINK: 0, COPY: 0}
    for old, new in sorted(names.items()):
        place = Path(target.member(new).path)
        try:
            make_folders(place.parent)
            way, nbytes = carry_file(source.member(old), place, lambda n, old=old: meter.add(n, old))
        except OSError as error:
            raise storage_error(error, place.as_posix()) from error
        done[way] += nbytes
    return done


def carry_file(
    source: Location, target: Path, report: Callable[[int], object] = lambda _count: None
) -> tuple[str, int]:
    """Copy a file to a new, durable file.

    Args:
        source, target: the files.
        report: called with the bytes of each piece.

    Returns:
        `reflink` or `copy`, and the number of bytes.

    Raises:
        MismatchError: the source changed during the copy.
        HostileError: the source is not a regular file, or a link points to a forbidden place.
        OSError: the storage failed, or the target exists.
    """
    assert isinstance(source.store, LocalStore)
    with (
        opened_regular(source.path, root=source.store.root) as reading,
        target.open("xb", buffering=0) as writing,
    ):
        size = os.fstat(reading).st_size
        way = REFLINK if _clone(reading, writing.fileno()) else COPY
        pieces = [size] if way == REFLINK else _copy_range(reading, writing.fileno(), 0, size)
        for count in pieces:
            report(count)
        os.fsync(writing.fileno())
        if not size == os.fstat(writing.fileno()).st_size == os.fstat(reading).st_size:
            raise MismatchError(
                "the file changed while it was copied",
                uri=source.uri,
                cure="wait until no process writes to the source, then try again",
            )
    return way, size


def add_name(file: Path, name: Path) -> None:
    """Give a file a second name, in one step; make a copy if the file system has no hard links.

    Raises:
        FileExistsError: something has the name.
        OSError: the storage failed.
    """
    try:
        name.hardlink_to(file)
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        carry_file(locate(file), name)


def _clone(reading: int, writing: int) -> bool:
    try:
        fcntl.ioctl(writing, _FICLONE, reading)
    except OSError as error:
        if error.errno in _NOT_HERE:
            return False
        raise
    return True


def copy_written(source: Path, target: Path) -> None:
    """Copy a sparse file to a new, durable file; its holes stay holes.

    The source may be written to meanwhile.

    Args:
        source, target: the files.

    Raises:
        OSError: the storage failed, or the target exists.
    """
    with source.open("rb", buffering=0) as reading, target.open("xb", buffering=0) as writing:
        size = os.fstat(reading.fileno()).st_size
        if not _clone(reading.fileno(), writing.fileno()):
            for start, stop in _written_ranges(reading.fileno(), size):
                for _count in _copy_range(reading.fileno(), writing.fileno(), start, stop):
                    pass
            os.ftruncate(writing.fileno(), size)
        os.fsync(writing.fileno())


def _written_ranges(descriptor: int, size: int) -> Iterator[tuple[int, int]]:
    """The ranges of a file that hold data; the whole file if the file system cannot report them."""
    start = 0
    while start < size:
        try:
            start = os.lseek(descriptor, start, os.SEEK_DATA)
            stop = os.lseek(descriptor, start, os.SEEK_HOLE)
        except OSError as error:
            if error.errno == errno.ENXIO:
                return
            if error.errno not in _NOT_HERE:
                raise
            stop = size
        yield start, min(stop, size)
        start = stop


def _copy_range(reading: int, writing: int, at: int, stop: int) -> Iterator[int]:
    """Copy piece by piece; yields the number of bytes of each piece."""
    inside = True
    while at < stop:
        count = _in_kernel(reading, writing, at, stop - at) if inside else None
        if count is None:
            inside, count = False, _through_here(reading, writing, at, stop - at)
        if count == 0:
            return
        at += count
        yield count


def _in_kernel(reading: int, writing: int, at: int, left: int) -> int | None:
    """Number of bytes that the kernel copied; None if it cannot copy between these files."""
    try:
        return os.copy_file_range(reading, writing, min(_PIECE, left), at, at)
    except OSError as error:
        if error.errno in _NOT_HERE:
            return None
        raise


def _through_here(reading: int, writing: int, at: int, left: int) -> int:
    data = os.pread(reading, min(_BUFFER, left), at)
    view, written = memoryview(data), 0
    while written < len(data):
        written += os.pwrite(writing, view[written:], at + written)
    return len(data)


_THREADS = 4


@dataclass(frozen=True, slots=True)
class _CopyState:
    """State that the threads of one copy share."""

    meter: Meter
    stop: threading.Event = field(default_factory=threading.Event)


def copy_files(files: Sequence[tuple[Location, Location, Entry]], progress: OnProgress | None) -> int:
    """Copy files, and resume those that an earlier run began.

    Args:
        files: source, target (local) and the source's entry, each.
        progress: called a few times a second.

    Returns:
        Number of bytes that were already copied.

    Raises:
        IncompleteError: a source file was truncated during the copy.
        StorageError: the storage failed.
    """
    copying = _CopyState(Meter("fetch", sum(entry.size for _source, _target, entry in files), progress))
    with threads.executor(_THREADS, "wherry-fetch", numbers=False) as pool:
        try:
            begun = [
                pool.submit(_copy_file, source, Path(target.path), entry, copying)
                for source, target, entry in files
            ]
            return sum(one.result() for one in begun)
        except BaseException:
            copying.stop.set()
            pool.shutdown(cancel_futures=True)
            raise


def _copy_file(source: Location, target: Path, entry: Entry, copying: _CopyState) -> int:
    try:
        make_folders(target.parent)
        there = target.stat().st_size if target.exists() else 0
        done = there if there <= entry.size else 0
        copying.meter.add(done, entry.name)
        with os.fdopen(open_regular(str(target), flags=os.O_RDWR | os.O_CREAT), "r+b") as file:
            file.truncate(done)
            file.seek(done)
            _append(source, file, entry, done, copying)
            file.flush()
            os.fsync(file.fileno())
        if source.store.capabilities.local and entry.mark:  # the recorded fingerprint holds for the copy
            os.utime(target, ns=(int(entry.mark), int(entry.mark)))
    except OSError as error:
        raise storage_error(error, source.uri) from error
    return done


def _append(source: Location, file: BinaryIO, entry: Entry, done: int, copying: _CopyState) -> None:
    buffer = memoryview(bytearray(min(_BUFFER, max(entry.size - done, 1))))
    while done < entry.size and not copying.stop.is_set():
        part = buffer[: min(len(buffer), entry.size - done)]
        count = source.store.readinto(source.path, done, part)
        if not count:
            raise IncompleteError(
                f"the source was truncated during the copy: expected {entry.size} bytes, got {done}",
                uri=source.uri,
                stage="fetch",
            )
        file.write(part[:count])
        done += count
        copying.meter.add(count, entry.name)
