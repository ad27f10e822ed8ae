"""clean: remove what killed conversions left behind, in the places of their targets and elsewhere on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from wherry.errors import NotFoundError, TargetInUseError, UsageError, storage_errors
from wherry.storage.folders import staging_stem
from wherry.storage.stores import locate
from wherry.target.file_leftovers import file_leftovers, nbytes_of
from wherry.target.file_staging import FileStaging
from wherry.target.hub_repository import clean_repository
from wherry.target.janitor import end_runs, left_behind, left_runs
from wherry.target.janitor import tidy as tidy_left_behind
from wherry.target.leftovers import CleanReport, clean_leftovers
from wherry.target.object_leftovers import leftover_objects, object_leftovers

if TYPE_CHECKING:
    import os

    from wherry.storage.location import Location

_QUIET_SECONDS = 3600  # what names no owner, and was touched within the hour, may be in use


def clean(
    root: str | os.PathLike[str], *, dry_run: bool = False, min_age: float = _QUIET_SECONDS
) -> list[CleanReport]:
    """Remove stale staging areas below a root, and what processes of this machine left elsewhere that have ended.

    The runs that their registrations left open in MLflow are ended.

    Args:
        root: a local folder, one in a store of objects, or a repository of the Hub.
        dry_run: only list them.
        min_age: seconds since anything changed in what names no owner that can be checked: a job that waits for
            workers, a branch of the Hub, a temporary folder; younger ones are left, as they may be in use.

    Raises:
        NotFoundError: the root does not exist.
        UsageError: the root is in a store that only reads.
        StorageError: an area could not be removed.
    """
    below = _clean_below(locate(root), dry_run=dry_run, min_age=min_age)
    reason = "dry run" if dry_run else "its process has ended"
    rows = [(left, nbytes_of(left.path)) for left in left_behind()]
    removed = set() if dry_run else set(tidy_left_behind())
    files = [CleanReport(str(left.path), nbytes, left in removed, reason) for left, nbytes in rows]
    runs = left_runs()
    ended = set() if dry_run else set(end_runs())
    return [
        *below,
        *files,
        *(
            CleanReport(
                left.store, 0, left in ended, reason if dry_run or left in ended else "it does not answer"
            )
            for left in runs
        ),
    ]


def tidy(target: Location) -> None:
    """Remove what is left of a run that was killed just after its commit, unless another run holds the target.

    Raises:
        StorageError: the storage failed.
    """
    if target.store.capabilities.local:
        folder, stem = Path(target.path).parent, f"{staging_stem(target.name)}."
        with storage_errors(target.uri):
            if any(path.name.startswith(stem) for path in folder.iterdir()):
                discard_areas(target)
    elif target.store.capabilities.parts:
        left = leftover_objects(target)
        clean_leftovers([left] if left else [], dry_run=False)


def discard_areas(target: Location) -> None:
    """Remove all staging areas of a local target, unless another run holds it.

    Raises:
        StorageError: the storage failed.
    """
    try:
        with FileStaging(target, "0" * 8, resume=False):
            pass  # entering discards areas of other runs, leaving releases the lease
    except TargetInUseError:
        return


def _clean_below(location: Location, *, dry_run: bool, min_age: float) -> list[CleanReport]:
    local, parts = location.store.capabilities.local, location.store.capabilities.parts
    if not (local or parts or location.store.capabilities.one_commit):
        raise UsageError(
            f"{location.store.protocol}:// has no staging areas to clean",
            uri=location.uri,
            cure="pass a local folder, gs://, s3:// or az://",
        )
    if local and location.entry is None:
        raise NotFoundError("folder not found", uri=location.uri, cure="check the path")
    with storage_errors(location.uri):
        if not (local or parts):
            return [CleanReport(*row) for row in clean_repository(location, dry_run=dry_run, min_age=min_age)]
        if local:
            return clean_leftovers(file_leftovers(Path(location.path), min_age), dry_run=dry_run)
        return clean_leftovers(object_leftovers(location, min_age), dry_run=dry_run)
