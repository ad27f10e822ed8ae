"""Copies the files of a checkpoint as they are into a staging area: of a disk, or of a store, where they stream.

To a store, files go in parts from buffer to buffer, and no byte lies on a local disk. Objects of the bucket itself are
copied by the store, in the state that was seen. What an interrupted run has sent is not sent again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from wherry.core.digest import sha256_of
from wherry.core.progress import Meter
from wherry.objects.stores import object_store
from wherry.runtime import threads
from wherry.staging.copied_staging import CopiedStaging, open_staging
from wherry.staging.object_staging import ObjectStaging
from wherry.staging.staging import Staging
from wherry.storage.copy import copy_files
from wherry.storage.location import MOST_CONFIG
from wherry.storage.ranges import read_ranges
from wherry.upload.sender import parts_share, reading_share
from wherry.upload.uploaded_file import PART_BYTES, part_size

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from wherry.core.progress import OnProgress
    from wherry.storage.location import Entry, Location
    from wherry.upload.run import UploadRun

CopyStaging: TypeAlias = Staging | CopiedStaging | ObjectStaging
CopiedFile: TypeAlias = "tuple[Location, Location, Entry]"
_THREADS = 4
_PROVED_BYTES = 1 << 20  # a smaller object is read back by itself: a sidecar, a config, an index


def open_copy(
    target: Location, header: Mapping[str, str], members: tuple[str, ...], nbytes: int, memory: int
) -> CopyStaging:
    """The staging area of a copy; use it in a `with` statement.

    Args:
        target: what will be committed.
        header: what identifies the copy; the same copy is resumed.
        members: names of commit members, relative to the target.
        nbytes: of all files.
        memory: budget in bytes.

    Raises:
        UsageError: the target's storage is read-only.
    """
    identity = sha256_of("fetch", header)[:8]
    if object_store(target.store) is None:
        return open_staging(target, identity, members)
    return ObjectStaging(target, identity, header, members, nbytes, held=parts_share(memory))


def copy_staged(
    staging: CopyStaging, files: Sequence[CopiedFile], memory: int, progress: OnProgress | None
) -> int:
    """Copy files into a staging area, and resume what an earlier run began.

    Args:
        staging: the area.
        files: source, place in the area, and the source's entry, each.
        memory: budget in bytes.
        progress: called a few times a second.

    Returns:
        Number of bytes that were already there.

    Raises:
        IncompleteError: a source file was truncated during the copy.
        MismatchError: an object was replaced during the copy.
        TargetExistsError: an object was created at the target meanwhile.
        StorageError: the storage failed.
    """
    if not isinstance(staging, ObjectStaging):
        return copy_files(files, progress)
    run = staging.run
    meter = Meter("fetch", sum(entry.size for _source, _place, entry in files), progress)
    share = reading_share(memory) // _THREADS

    def copy(file: CopiedFile) -> int:
        return _copied(run, file, meter) if _in_one_bucket(file) else _sent(run, file, share, meter)

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


def _in_one_bucket(file: CopiedFile) -> bool:
    """Whether the store itself copies a file."""
    source, place, _entry = file
    return place.store.capabilities.object_copy and bucket_of(source) == bucket_of(place)


def _copied(run: UploadRun, file: CopiedFile, meter: Meter) -> int:
    """Let the store copy a file in its present state, which the digests prove; returns the bytes that were there."""
    source, place, entry = file
    found = run.using.store.head(source.path)
    resumed = run.copy(place.path, source.path, found.mark if found else "", kept=entry.size)
    meter.add(entry.size, entry.name)
    return resumed


def _sent(run: UploadRun, file: CopiedFile, memory: int, meter: Meter) -> int:
    """Send a file; returns the bytes that the store had before."""
    source, place, entry = file
    if entry.size <= min(_PROVED_BYTES, PART_BYTES):
        run.put(place.path, source.read_whole(MOST_CONFIG) if entry.size else b"")
        meter.add(entry.size, entry.name)
        return 0
    sending, step = run.file(place.path, entry.size), part_size(entry.size, run.using.store.part_limits)
    ranges = [(start, min(start + step, entry.size)) for start in range(0, entry.size, step)]
    missing = [one for one in ranges if not sending.holds(*one)]
    resumed = entry.size - sum(stop - start for start, stop in missing)
    meter.add(resumed, entry.name)
    for part in read_ranges(source, missing, memory):
        sending.write(missing[part.number][0] + part.offset, part.data)
        meter.add(len(part.data), entry.name)
    return resumed
