"""clean: remove the staging areas that killed conversions left behind.

Files of a target are removed while holding its lease, as a conversion would: a run that resumes or starts meanwhile
finds that it does not hold the target. All leases below the root are watched at the same time. On a full disk, where no
lease can be created, an area is first renamed so that no run resumes it.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import time
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from wherry.errors import NotFoundError, StorageError, TargetInUseError, UsageError, storage_errors
from wherry.objects.stores import object_store
from wherry.staging.area import set_aside
from wherry.staging.hub_repository import clean_repository
from wherry.staging.janitor import end_runs, left_behind, left_runs, tidy
from wherry.staging.lease import Lease
from wherry.staging.lease_watch import Verdict, judge, see
from wherry.staging.object_clean import clean_one, leftovers
from wherry.storage.folders import PREFIX, is_staging, remove, short_name
from wherry.storage.stores import locate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from wherry.staging.lease_watch import Judgement
    from wherry.storage.location import Location

_JOB = "job.json"  # the record of a job; `wherry.records`
_OWN_LEASES = (".lease", ".reading")
_HEX = r"[0-9a-f]{8}(?:-[0-9a-f]{8})?"
_OF_TARGET = re.compile(rf"(.+)\.{_HEX}(?:\.[a-z]+)?")
# The names that wherry gives, with the name of the target: leases, areas and drafts; and its temporary folders.
_OWN = re.compile(
    rf"\{PREFIX}(?:(.+)\.(?:lease|reading|draft|job|{_HEX}(?:\.[a-z]+)?)|(?:spill-|audit-|dask-|ray-|logits\.)\w{{8,16}})"
)
# The files of a spool folder of a live state; `wherry.live`.
_SPOOLED = re.compile(r"(?:part|share|seen|here)-\d+(?:\.json)?")
_QUIET_SECONDS = 3600  # a staging area that was touched within the hour may belong to a running conversion
_HELD = "a running job holds its lease"
_YOUNG = "changed within the hour; may be in use"
_FULL = (errno.ENOSPC, errno.EDQUOT)


class CleanReport(NamedTuple):
    """A staging area: where it is, its bytes, and whether it was removed (or why not); or the store of an open run."""

    uri: str
    nbytes: int
    removed: bool
    reason: str


def clean(
    root: str | os.PathLike[str], *, dry_run: bool = False, min_age: float = _QUIET_SECONDS
) -> list[CleanReport]:
    """Remove stale staging areas below a root, and what processes of this machine left elsewhere that have ended.

    The runs that their registrations left open in MLflow are ended.

    Args:
        root: a local folder, one in a store of objects, or a repository of the Hub.
        dry_run: only list them.
        min_age: seconds since anything in the area changed; younger ones are left, as they may be in use.

    Raises:
        NotFoundError: the root does not exist.
        UsageError: the root is in a store that only reads.
        StorageError: an area could not be removed.
    """
    return _clean_below(locate(root), dry_run=dry_run, min_age=min_age) + _clean_left_behind(dry_run=dry_run)


def _clean_left_behind(*, dry_run: bool) -> list[CleanReport]:
    reason = "dry run" if dry_run else "its process has ended"
    rows = [(left, _nbytes(left.path)) for left in left_behind()]
    removed = set() if dry_run else set(tidy())
    files = [CleanReport(str(left.path), nbytes, left in removed, reason) for left, nbytes in rows]
    runs = left_runs()
    ended = set() if dry_run else set(end_runs())
    return files + [
        CleanReport(
            left.store, 0, left in ended, reason if dry_run or left in ended else "it does not answer"
        )
        for left in runs
    ]


def _nbytes(path: Path) -> int:
    found = (one for one in _statuses(path) if one is not None and not stat.S_ISDIR(one.st_mode))
    return sum(one.st_size for one in found)


def _clean_below(location: Location, *, dry_run: bool, min_age: float) -> list[CleanReport]:
    if object_store(location.store) is not None:
        return _clean_objects(location, dry_run=dry_run, min_age=min_age)
    if location.store.capabilities.one_commit:
        with storage_errors(location.uri):
            return [CleanReport(*row) for row in clean_repository(location, dry_run=dry_run, min_age=min_age)]
    if not location.store.capabilities.local:
        raise UsageError(
            f"{location.store.protocol}:// has no staging areas to clean",
            uri=location.uri,
            cure="pass a local folder, gs://, s3:// or az://",
        )
    if location.entry is None:
        raise NotFoundError("folder not found", uri=location.uri, cure="check the path")
    with storage_errors(location.uri):
        looked = [_look(area, min_age) for area in sorted(_areas(Path(location.path)))]
        areas = [area for area in looked if area]
        judged = judge({area.lease for area in areas if area.lease and area.is_quiet})
        cleaned = [_clean_one(area, judged, min_age, dry_run=dry_run) for area in areas]
        return [one for one in cleaned if one]


def _clean_objects(location: Location, *, dry_run: bool, min_age: float) -> list[CleanReport]:
    """The same in a store of objects, where one report stands for everything that is left of one target."""
    with storage_errors(location.uri):
        return [
            CleanReport(left.place.uri, *clean_one(left, dry_run=dry_run, min_age=min_age))
            for left in leftovers(location)
        ]


class _Area(NamedTuple):
    path: Path
    nbytes: int
    is_quiet: bool
    lease: Path | None


def _areas(folder: Path) -> Iterator[Path]:
    try:
        children = list(folder.iterdir())
    except FileNotFoundError:
        return  # removed by another process
    for child in children:
        if is_staging(child.name):
            if _is_own(child):
                yield child
        elif child.is_dir() and not child.is_symlink():
            yield from _areas(child)


def _is_own(area: Path) -> bool:
    """Whether wherry made what has the name of a staging area.

    Its whole name has a form that wherry gives, and a folder is empty or holds one of wherry's files: the target under
    its name, a file with wherry's prefix, the record of a job, or a part of a live state.
    """
    named = _OWN.fullmatch(area.name)
    if named is None:
        return False
    target = named[1]
    if target is None or area.is_symlink() or not area.is_dir():
        return True
    with suppress(FileNotFoundError):
        names = [child.name for child in area.iterdir()]
        return not names or any(map(partial(_is_of_target, target), names))
    return False  # removed by another process


def _is_of_target(target: str, name: str) -> bool:
    own = short_name(name) == target or name == _JOB or name.startswith(PREFIX)
    return own or _SPOOLED.fullmatch(name) is not None


def _look(path: Path, min_age: float) -> _Area | None:
    """The state of an area; None if it no longer exists. A running conversion may remove files meanwhile."""
    first, *others = _statuses(path)
    if first is None:
        return None
    status = [first, *(one for one in others if one)]
    nbytes = sum(one.st_size for one in status if not stat.S_ISDIR(one.st_mode))
    # A time far in the future is as quiet as one far in the past: it comes from a wrong clock.
    age = abs(time.time() - max(one.st_mtime for one in status))
    return _Area(path, nbytes, age >= min_age, _lease_of(path))


def _statuses(path: Path) -> Iterator[os.stat_result | None]:
    """The status of an area and of everything in it; None for each file that no longer exists."""
    yield _status(path)
    if path.is_dir() and not path.is_symlink():
        for folder, folders, files in os.walk(path):
            yield from (_status(Path(folder) / name) for name in (*folders, *files))


def _status(path: Path) -> os.stat_result | None:
    try:
        return path.lstat()
    except FileNotFoundError:
        return None


def _lease_of(area: Path) -> Path | None:
    """The lease of an area: a run that reads back for hours holds it, but does not change its area meanwhile."""
    if area.suffix in _OWN_LEASES:
        return area
    stem = _OF_TARGET.fullmatch(area.name)
    return area.with_name(f"{stem[1]}.lease") if stem else None


def _clean_one(
    area: _Area, judged: dict[Path, Judgement], min_age: float, *, dry_run: bool
) -> CleanReport | None:
    """Remove an area if that is safe; None if it no longer exists."""
    judgement = judged[area.lease] if area.lease and area.is_quiet else None
    if not area.is_quiet:
        return _kept_report(area, _YOUNG)
    if judgement and judgement.verdict is Verdict.ALIVE:
        return _kept_report(area, _HELD)
    if dry_run:
        return _kept_report(area, "dry run")
    try:
        with Lease(area.lease, str(area.path), judgement) if area.lease else nullcontext():
            return _remove(area, min_age)
    except TargetInUseError:
        return _kept_report(area, _HELD)
    except StorageError as error:
        if not isinstance(error.__cause__, OSError) or error.__cause__.errno not in _FULL:
            raise
        return _remove_on_full_disk(area, judgement, min_age)


def _remove(
    area: _Area, min_age: float, put_away: Callable[[Path], Path] = lambda path: path
) -> CleanReport | None:
    """Remove an area if it is still stale: another run may have used it since it was judged."""
    if area.path != area.lease:  # else releasing the lease removes it
        now = _look(area.path, min_age)
        if now is None:
            return None
        if not now.is_quiet:
            return _kept_report(area, _YOUNG)
        remove(put_away(area.path))
    return CleanReport(str(area.path), area.nbytes, removed=True, reason="stale")


def _remove_on_full_disk(area: _Area, judgement: Judgement | None, min_age: float) -> CleanReport | None:
    """Remove an area on a full disk: a rename excludes other runs and needs no space, unlike a lease."""
    if area.lease is None or judgement is None or see(area.lease) != judgement.sighting:
        return _kept_report(area, _HELD)
    if area.path == area.lease:
        return _kept_report(area, "no space to take its lease")
    try:
        return _remove(area, min_age, set_aside)
    except FileNotFoundError:
        return None  # another run has resumed it


def _kept_report(area: _Area, reason: str) -> CleanReport:
    return CleanReport(str(area.path), area.nbytes, removed=False, reason=reason)
