"""Carrying: files that go over as they are, sharing their storage with the source where the file system can.

A reflink (FICLONE) costs nothing and takes no space; `copy_file_range` lets the kernel or the file server copy;
where neither works, bytes are copied here. Every file is durable when its call returns, and as long as it was listed.
"""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path
from typing import TYPE_CHECKING

from wherry.errors import CorruptError, MismatchError, storage_error
from wherry.storage.folders import make_folders
from wherry.storage.stores import open_local

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from wherry.core.progress import Meter
    from wherry.storage.location import Entry, Location

REFLINK, COPY = "reflink", "copy"
_FICLONE = 0x40049409  # linux/fs.h
_PIECE = 64 << 20
_BUFFER = 8 << 20
# What says that a way is not open here, and not that the storage failed.
_NOT_HERE = (
    errno.EXDEV,
    errno.EINVAL,
    errno.ENOSYS,
    errno.EOPNOTSUPP,
    errno.ENOTTY,
    errno.EPERM,
    errno.ETXTBSY,
)


def listed(folder: Location) -> dict[str, Entry]:
    """Every file below a folder by its relative name.

    Raises:
        CorruptError: a link that leads nowhere.
        HostileError: something below must not be opened.
    """
    found = {entry.name: entry for entry in folder.walk()}
    lost = next((name for name, entry in found.items() if entry.size < 0), None)
    if lost is not None:
        raise CorruptError(
            "a link that leads nowhere",
            uri=folder.join(lost).uri,
            cure="restore the file, or remove the link",
        )
    return found


def carry(source: Location, target: Location, names: Mapping[str, str], meter: Meter) -> dict[str, int]:
    """Carry files from one local folder to another.

    Args:
        source, target: the folders.
        names: file of the source → its name in the target.
        meter: counts the bytes.

    Returns:
        `reflink` and `copy`, each with the bytes that went over so.

    Raises:
        MismatchError: a file grew or shrank on the way.
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
    """Make a new file of the same bytes, durably.

    Args:
        source, target: the files.
        report: called with the bytes of each piece.

    Returns:
        `reflink` or `copy`, and the number of bytes.

    Raises:
        MismatchError: the source is being changed.
        HostileError: the source is no regular file, or a link leads where it must not.
        OSError: the storage failed, or the target exists.
    """
    with (
        os.fdopen(open_local(source), "rb", buffering=0) as reading,
        target.open("xb", buffering=0) as writing,
    ):
        size = os.fstat(reading.fileno()).st_size
        way = REFLINK if _cloned(reading.fileno(), writing.fileno()) else COPY
        pieces = [size] if way == REFLINK else _copied(reading.fileno(), writing.fileno(), 0, size)
        for count in pieces:
            report(count)
        os.fsync(writing.fileno())
        if not size == os.fstat(writing.fileno()).st_size == os.fstat(reading.fileno()).st_size:
            raise MismatchError(
                "the file changed while it was carried over",
                uri=source.uri,
                cure="wait until nothing writes to the source",
            )
    return way, size


def _cloned(reading: int, writing: int) -> bool:
    try:
        fcntl.ioctl(writing, _FICLONE, reading)
    except OSError as error:
        if error.errno in _NOT_HERE:
            return False
        raise
    return True


def copy_written(source: Path, target: Path) -> None:
    """Make a new file with everything that was written to another, durably; what was not written stays a hole.

    The source may be written to meanwhile.

    Args:
        source, target: the files.

    Raises:
        OSError: the storage failed, or the target exists.
    """
    with source.open("rb", buffering=0) as reading, target.open("xb", buffering=0) as writing:
        size = os.fstat(reading.fileno()).st_size
        if not _cloned(reading.fileno(), writing.fileno()):
            for start, stop in _written(reading.fileno(), size):
                for _count in _copied(reading.fileno(), writing.fileno(), start, stop):
                    pass
            os.ftruncate(writing.fileno(), size)
        os.fsync(writing.fileno())


def _written(descriptor: int, size: int) -> Iterator[tuple[int, int]]:
    """The ranges of a file that hold data; all of it where the file system does not say."""
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


def _copied(reading: int, writing: int, at: int, stop: int) -> Iterator[int]:
    """Copy piece by piece; the bytes of each."""
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
    """Bytes that the kernel copied; None where it cannot."""
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
