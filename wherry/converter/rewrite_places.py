"""rewrite_places: where a rewrite reads and writes: folders of this machine, or one bucket that copies objects itself.

In a bucket the unchanged files are copied by the store, in the state that was seen and only where nothing is, so their
bytes pass this machine only to be proved. Between a bucket and any other place a rewrite would be a transfer of the
whole checkpoint, which `fetch` and `convert` are for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from wherry.core.progress import Meter
from wherry.cures import Blank, Command, Cure
from wherry.errors import UnsupportedError
from wherry.store.copy import list_files
from wherry.store.location import Location
from wherry.target.object_staging import bucket_of
from wherry.target.upload_run import UploadRun

if TYPE_CHECKING:
    from wherry.formats.format import Change

COPIED_BY_STORE = "store"


def require_places(source: Location, target: Location, *, in_place: bool) -> None:
    """Refuse places between which files would have to be transferred.

    Raises:
        UnsupportedError: one of them is not local, and they are not in one bucket whose store copies objects.
    """
    if source.store.capabilities.local and target.store.capabilities.local:
        return
    if in_place:
        raise UnsupportedError(
            "objects of a store are not replaced in place",
            uri=source.uri,
            cure="name a new target in the bucket",
        )
    if bucket_of(source) != bucket_of(target):
        raise UnsupportedError(
            "a rewrite copies within one file system or one bucket",
            uri=target.uri,
            cure=Cure(
                "choose a target next to the source, then copy it: {}",
                Command("fetch", Blank("SOURCE"), Blank("TARGET")),
            ),
        )
    if not target.store.capabilities.object_copy or not target.store.capabilities.parts:
        raise UnsupportedError(
            f"{source.store.protocol}:// does not copy objects",
            uri=source.uri,
            cure=Cure(
                "fetch the checkpoint to a local folder first: {}",
                Command("fetch", Blank("SOURCE"), Blank("DIR")),
            ),
        )


def require_kind(change: Change, source: Location) -> None:
    """Refuse a rewrite that needs files of this machine.

    Raises:
        UnsupportedError: it does, and the source is in a bucket.
    """
    if change.local_only and not source.store.capabilities.local:
        raise UnsupportedError(
            change.local_only,
            uri=source.uri,
            cure=Cure(
                "fetch it to a local folder first: {}", Command("fetch", Blank("SOURCE"), Blank("DIR"))
            ),
        )


def copied_by_store(
    source: Location, target: Location, run: UploadRun, names: Mapping[str, str], meter: Meter
) -> dict[str, int]:
    """Let the store copy files.

    Args:
        source, target: the folders.
        run: the objects of the target.
        names: file of the source → its name in the target.
        meter: counts the bytes.

    Returns:
        `store`, with the number of bytes that it copied.

    Raises:
        MismatchError: an object of the source was replaced meanwhile.
        TargetExistsError: an object of the target was created meanwhile.
        StorageError: the storage failed.
    """
    files = list_files(source)
    for old, new in sorted(names.items()):
        entry = files[old]
        run.copy(target.member(new).path, source.member(old).path, entry.mark)
        meter.add(entry.size, old)
    return {COPIED_BY_STORE: sum(files[old].size for old in names)}
