"""Copies files from any store into a staging area, so that a killed run can go on where it stopped.

A file grows from its start and is synced at its end, so its size says how far an earlier run came. (What a loss of
power tears is found when the copy is proved.) Each thread holds one buffer of 8 MiB at most.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from wherry.core.progress import Meter
from wherry.errors import IncompleteError, storage_error
from wherry.runtime import threads
from wherry.storage.folders import make_folders
from wherry.storage.open_file import open_regular

if TYPE_CHECKING:
    from collections.abc import Sequence

    from wherry.core.progress import OnProgress
    from wherry.storage.location import Entry, Location

_BUFFER = 8 << 20
_THREADS = 4
_TIMED = ("file",)  # stores whose change marks are times in nanoseconds


@dataclass(frozen=True, slots=True)
class _Copying:
    """What the threads of one copy share."""

    meter: Meter
    stop: threading.Event = field(default_factory=threading.Event)


def copy_files(files: Sequence[tuple[Location, Location, Entry]], progress: OnProgress | None) -> int:
    """Copy files, going on with those that are begun.

    Args:
        files: source, target (local) and the source's entry, each.
        progress: called a few times a second.

    Returns:
        Bytes that were there already.

    Raises:
        IncompleteError: a file became shorter meanwhile.
        StorageError: the storage failed.
    """
    copying = _Copying(Meter("fetch", sum(entry.size for _source, _target, entry in files), progress))
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


def _copy_file(source: Location, target: Path, entry: Entry, copying: _Copying) -> int:
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
        if source.store.protocol in _TIMED and entry.mark:
            os.utime(
                target, ns=(int(entry.mark), int(entry.mark))
            )  # the recorded fingerprint holds for the copy
    except OSError as error:
        raise storage_error(error, source.uri) from error
    return done


def _append(source: Location, file: BinaryIO, entry: Entry, done: int, copying: _Copying) -> None:
    buffer = memoryview(bytearray(min(_BUFFER, max(entry.size - done, 1))))
    while done < entry.size and not copying.stop.is_set():
        part = buffer[: min(len(buffer), entry.size - done)]
        count = source.store.readinto(source.path, done, part)
        if not count:
            raise IncompleteError(
                f"it became shorter meanwhile: {done} of {entry.size} bytes", uri=source.uri, stage="fetch"
            )
        file.write(part[:count])
        done += count
        copying.meter.add(count, entry.name)
