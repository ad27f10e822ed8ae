"""Copies the files of a checkpoint as they are into a staging area: of a disk, or of a store, where they stream."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from wherry.core.digest import sha256_of
from wherry.core.progress import Meter
from wherry.objects.stores import object_store
from wherry.staging.copied_staging import CopiedStaging, open_staging
from wherry.staging.object_staging import ObjectStaging
from wherry.staging.staging import Staging
from wherry.storage.copy import copy_files
from wherry.upload.file_copies import copy_to_store
from wherry.upload.sender import parts_share, reading_share

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from wherry.core.progress import OnProgress
    from wherry.storage.location import Location
    from wherry.upload.file_copies import CopiedFile

CopyStaging: TypeAlias = Staging | CopiedStaging | ObjectStaging


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
    meter = Meter("fetch", sum(entry.size for _source, _place, entry in files), progress)
    return copy_to_store(staging.run, files, reading_share(memory), meter.add)
