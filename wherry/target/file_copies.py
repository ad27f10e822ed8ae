"""Copies files as they are into a target that is uploaded: in parts, from buffer to buffer, or by the store itself.

Objects of the bucket of the target are copied by the store, in the state in which they are found. What an interrupted
run has sent or copied is not sent again. The caller proves the result by its digests.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from wherry.runtime import threads
from wherry.storage.location import MOST_CONFIG
from wherry.storage.ranges import read_ranges
from wherry.target.uploaded_file import PART_BYTES, part_size

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from wherry.storage.location import Location
    from wherry.store.store import Entry
    from wherry.target.upload_run import UploadRun

CopiedFile: TypeAlias = "tuple[Location, Location, Entry]"
_THREADS = 4
_PROVED_BYTES = 1 << 20  # a smaller object is read back by itself: a sidecar, a config, an index


def copy_to_store(
    run: UploadRun, files: Sequence[CopiedFile], memory: int, report: Callable[[int, str], object]
) -> int:
    """Copy files into the target of a run, several at a time.

    Args:
        run: the objects of the target.
        files: source, place in the target, and the source's entry, each.
        memory: bytes that may be read and not yet sent.
        report: called with a number of bytes and the name of their file.

    Returns:
        Number of bytes that the store had before.

    Raises:
        IncompleteError: a source file was truncated during the copy.
        MismatchError: an object was replaced during the copy.
        TargetExistsError: an object was created at the target meanwhile.
        StorageError: the storage failed.
    """

    def copy(file: CopiedFile) -> int:
        source, place, entry = file
        if not place.store.capabilities.object_copy or bucket_of(source) != bucket_of(place):
            return _send(run, file, memory // _THREADS, report)
        # The store itself copies it.
        found = run.using.store.head(source.path)
        kept = run.copy(place.path, source.path, found.mark if found else "", kept=entry.size)
        report(entry.size, entry.name)
        return kept

    with threads.executor(_THREADS, "wherry-fetch", numbers=False) as pool:
        try:
            resumed = sum(pool.map(copy, files))
        except BaseException:
            run.using.sender.stop()
            pool.shutdown(cancel_futures=True)
            raise
    run.finish()
    return resumed


def bucket_of(place: Location) -> tuple[str, str]:
    """Protocol and name of the bucket of a place."""
    return place.store.protocol, place.path.partition("/")[0]


def _send(run: UploadRun, file: CopiedFile, memory: int, report: Callable[[int, str], object]) -> int:
    """Send a file; returns the bytes that the store had before."""
    source, place, entry = file
    if entry.size <= min(_PROVED_BYTES, PART_BYTES):
        run.put(place.path, source.read_whole(MOST_CONFIG) if entry.size else b"")
        report(entry.size, entry.name)
        return 0
    sending, step = run.file(place.path, entry.size), part_size(entry.size, run.using.store.part_limits)
    ranges = [(start, min(start + step, entry.size)) for start in range(0, entry.size, step)]
    missing = [one for one in ranges if not sending.holds(*one)]
    resumed = entry.size - sum(stop - start for start, stop in missing)
    report(resumed, entry.name)
    for part in read_ranges(source, missing, memory):
        sending.write(missing[part.number][0] + part.offset, part.data)
        report(len(part.data), entry.name)
    return resumed
