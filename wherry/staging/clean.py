"""clean: remove the staging areas that killed conversions left behind.

What belongs to a target is removed by who holds its lease, as a conversion would: a run that wakes up meanwhile, or
begins, finds that it does not hold the target. All leases below the root are watched at the same time.
"""

from __future__ import annotations

import re
import shutil
import time
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from wherry.errors import NotFoundError, TargetInUseError, UsageError, storage_error
from wherry.staging.lease import Lease
from wherry.staging.lease_watch import Verdict, judge
from wherry.storage.folders import is_staging
from wherry.storage.stores import locate

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator

    from wherry.staging.lease_watch import Judgement

_OF_TARGET = re.compile(r"(.+)\.[0-9a-f]{8}(?:-[0-9a-f]{8})?(?:\.[a-z]+)?")
_OWN_LEASES = (".lease", ".reading")
_QUIET_SECONDS = 3600  # a staging area that was touched within the hour may belong to a running conversion
_HELD = "a running job holds its lease"


class Cleaned(NamedTuple):
    """A staging area: where it is, its bytes, and whether it was removed (or why not)."""

    uri: str
    nbytes: int
    removed: bool
    reason: str


def clean(
    root: str | os.PathLike[str], *, dry_run: bool = False, min_age: float = _QUIET_SECONDS
) -> list[Cleaned]:
    """Remove stale staging areas below a root.

    Args:
        root: a local folder.
        dry_run: only list them.
        min_age: seconds since anything in the area changed; younger ones are left, as they may be in use.

    Raises:
        NotFoundError: the root does not exist.
        UsageError: the root is not local.
        StorageError: an area could not be removed.
    """
    location = locate(root)
    if not location.store.capabilities.local:
        raise UsageError("only local folders have staging areas to clean", uri=location.uri)
    if location.entry is None:
        raise NotFoundError("nothing is there", uri=location.uri)
    try:
        areas = [_look(area, min_age) for area in sorted(_areas(Path(location.path)))]
        judged = judge({area.lease for area in areas if area.lease and area.is_quiet})
        return [_clean_one(area, judged, dry_run=dry_run) for area in areas]
    except OSError as error:
        raise storage_error(error, location.uri) from error


class _Area(NamedTuple):
    path: Path
    nbytes: int
    is_quiet: bool
    lease: Path | None


def _areas(folder: Path) -> Iterator[Path]:
    for child in folder.iterdir():
        if is_staging(child.name):
            yield child
        elif child.is_dir() and not child.is_symlink():
            yield from _areas(child)


def _look(path: Path, min_age: float) -> _Area:
    files = [path, *path.rglob("*")] if path.is_dir() and not path.is_symlink() else [path]
    status = [file.lstat() for file in files]
    nbytes = sum(entry.st_size for file, entry in zip(files, status, strict=True) if not file.is_dir())
    # A time that lies as far ahead says nothing: of another clock, or of nobody's.
    age = abs(time.time() - max(entry.st_mtime for entry in status))
    return _Area(path, nbytes, age >= min_age, _lease_of(path))


def _lease_of(area: Path) -> Path | None:
    """The lease that whoever works on it holds: one that reads back for hours changes nothing in its area meanwhile."""
    if area.suffix in _OWN_LEASES:
        return area
    stem = _OF_TARGET.fullmatch(area.name)
    return area.with_name(f"{stem[1]}.lease") if stem else None


def _clean_one(area: _Area, judged: dict[Path, Judgement], *, dry_run: bool) -> Cleaned:
    uri = str(area.path)
    if not area.is_quiet:
        return Cleaned(uri, area.nbytes, removed=False, reason="changed within the hour; may be in use")
    judgement = judged[area.lease] if area.lease else None
    if judgement and judgement.verdict is Verdict.ALIVE:
        return Cleaned(uri, area.nbytes, removed=False, reason=_HELD)
    if dry_run:
        return Cleaned(uri, area.nbytes, removed=False, reason="dry run")
    try:
        with Lease(area.lease, uri, judgement) if area.lease else nullcontext():
            if area.path != area.lease:  # the end of the block frees the lease
                is_folder = area.path.is_dir() and not area.path.is_symlink()
                shutil.rmtree(area.path) if is_folder else area.path.unlink()
    except TargetInUseError:
        return Cleaned(uri, area.nbytes, removed=False, reason=_HELD)
    return Cleaned(uri, area.nbytes, removed=True, reason="stale")
