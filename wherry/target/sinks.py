"""sinks: which kind of staging a target has, by what its store can do."""

from __future__ import annotations

from wherry.storage.location import Location
from wherry.target.copied_staging import CopiedStaging, HubStaging
from wherry.target.file_staging import FileStaging
from wherry.target.journal import Header
from wherry.target.object_staging import ObjectStaging
from wherry.target.staging import Staging


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
        return ObjectStaging(
            target, identity, header, members, nbytes,
            resume=resume, is_file=is_file, memory=memory, by_checksum=by_checksum,
        )  # fmt: skip
    capabilities = target.store.capabilities
    if capabilities.one_commit:
        return HubStaging(target, identity, header)
    if capabilities.local or not capabilities.create_only_put:
        return FileStaging(target, identity, header, resume=resume, is_file=is_file)
    return CopiedStaging(target, header, members)
