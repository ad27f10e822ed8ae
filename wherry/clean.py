"""clean: remove the staging areas that killed conversions left behind."""

from __future__ import annotations

import re
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from wherry.errors import NotFoundError, UsageError, storage_error
from wherry.lease import is_alive
from wherry.staging import is_staging
from wherry.store import locate

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator

_OF_TARGET = re.compile(r"(.+)\.[0-9a-f]{8}(?:\.[a-z]+)?")
_QUIET_SECONDS = 3600  # a staging area that was touched within the hour may belong to a running conversion


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
    return [
        _clean_one(area, dry_run=dry_run, min_age=min_age) for area in sorted(_areas(Path(location.path)))
    ]


def _areas(folder: Path) -> Iterator[Path]:
    for child in folder.iterdir():
        if is_staging(child.name):
            yield child
        elif child.is_dir() and not child.is_symlink():
            yield from _areas(child)


def _is_held(area: Path) -> bool:
    """Whether a living job works on it: one that reads back for hours changes nothing in its area meanwhile."""
    stem = _OF_TARGET.match(area.name)
    lease = area.with_name(f"{stem[1]}.lease") if stem else area
    return lease.is_file() and is_alive(lease)


def _clean_one(area: Path, *, dry_run: bool, min_age: float) -> Cleaned:
    files = [area, *area.rglob("*")] if area.is_dir() else [area]
    try:
        status = [file.lstat() for file in files]
        nbytes = sum(entry.st_size for file, entry in zip(files, status, strict=True) if not file.is_dir())
        if time.time() - max(entry.st_mtime for entry in status) < min_age:
            return Cleaned(str(area), nbytes, removed=False, reason="changed within the hour; may be in use")
        if _is_held(area):
            return Cleaned(str(area), nbytes, removed=False, reason="a running job holds its lease")
        if dry_run:
            return Cleaned(str(area), nbytes, removed=False, reason="dry run")
        shutil.rmtree(area) if area.is_dir() else area.unlink()
    except OSError as error:
        raise storage_error(error, str(area)) from error
    return Cleaned(str(area), nbytes, removed=True, reason="stale")
