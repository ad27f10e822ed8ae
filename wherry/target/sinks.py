"""sinks: which kind of staging a target has, by what its store can do, and whether a run has left it unfinished."""

from __future__ import annotations

from wherry.store.location import Location
from wherry.target.journal import Header
from wherry.target.staging import FileStaging, Staging


def open_staging(
    target: Location,
    identity: str,
    header: Header,
    members: tuple[str, ...],
    nbytes: int,
    *,
    resume: bool = True,
    is_file: bool = False,
    memory: int | None = None,
    by_checksum: bool = False,
) -> Staging:
    """The staging of a target; use it in a `with` statement.

    Args:
        target: what will be committed.
        identity: eight hex digits of the conversion; the same conversion finds what it has staged.
        header: what identifies the conversion in its journal.
        members: names of commit members, relative to the target, which a store of objects gets last.
        nbytes: size of the checkpoint.
        resume: whether to resume what an earlier run has staged.
        is_file: whether the target is a single file; see FileStaging and ObjectStaging.
        memory: budget in bytes; see ObjectStaging.
        by_checksum: whether the checksums of the store are the proof; see ObjectStaging.

    Raises:
        UsageError: the target's storage is read-only, or the target names no repository of the Hub.
    """
    if target.store.capabilities.parts:
        from wherry.target.object_staging import ObjectStaging

        return ObjectStaging(
            target, identity, header, members, nbytes,
            resume=resume, is_file=is_file, memory=memory, by_checksum=by_checksum,
        )  # fmt: skip
    capabilities = target.store.capabilities
    if capabilities.local or not (capabilities.create_only_put or capabilities.one_commit):
        return FileStaging(target, identity, header, resume=resume, is_file=is_file)
    from wherry.target.copied_staging import CopiedStaging, HubStaging

    if capabilities.one_commit:
        return HubStaging(target, identity, header)
    return CopiedStaging(target, header, members)


def is_unfinished(target: Location, members: tuple[str, ...]) -> bool:
    """Whether the objects of a target were left by a run that has not committed it.

    Args:
        target: a file or folder.
        members: names of commit members of its format.

    Raises:
        StorageError: the storage failed.
    """
    if not target.store.capabilities.parts:
        return False
    from wherry.target.object_staging import areas_of, is_committed

    return not is_committed(target, members) and next(areas_of(target), None) is not None
