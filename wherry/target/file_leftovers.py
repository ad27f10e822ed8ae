"""file_leftovers: areas, leases, drafts and temporary folders that killed processes have left below a local folder."""

from __future__ import annotations

import os
import re
import stat
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from wherry.storage.folders import PREFIX, is_staging, remove, short_name
from wherry.storage.stores import local_location
from wherry.target.area import set_aside
from wherry.target.lease import LeaseFile
from wherry.target.leftovers import YOUNG, Leftover
from wherry.target.owners import JOB, JOB_SUFFIX, Owners, owners_by_lease, owners_of_export, owners_of_job

if TYPE_CHECKING:
    from collections.abc import Iterator

    from wherry.target.lease import Lease

_SPOOL = ".spool"  # suffix of the folder of an export
_OWN_LEASES = (".lease", ".reading")
_HEX = r"[0-9a-f]{8}(?:-[0-9a-f]{8})?"
_OF_TARGET = re.compile(rf"(.+)\.{_HEX}(?:\.[a-z]+)?")
# The names that wherry gives, with the name of the target: leases, areas and drafts; and its temporary folders.
_OWN = re.compile(
    rf"\{PREFIX}(?:(.+?)\.(?:{_HEX}(?:\.[a-z]+)?|lease|reading|draft|job)|(?:spill-|audit-|dask-|ray-|logits\.)\w{{8,16}})"
)
# The files of a spool folder of a live state; `wherry.live`.
_SPOOLED = re.compile(r"(?:part|share|seen|here)-\d+(?:\.json)?")


class _SeenState(NamedTuple):
    """What is seen of a file or folder: it changes when it is used."""

    files: int  # and folders
    nbytes: int
    changed: int  # nanoseconds, by the clock of the file system


def file_leftovers(folder: Path, min_age: float) -> Iterator[Leftover]:
    """What is left below a folder; a running conversion may remove files meanwhile.

    Args:
        folder: the folder.
        min_age: seconds since anything changed in what is old.

    Raises:
        OSError: the storage failed.
    """
    for path in sorted(_areas(folder)):
        state, lease = _state(path), _lease_of(path)
        if state is not None:
            # A time far in the future comes from a wrong clock.
            young = abs(time.time() - state.changed / 1e9) < min_age
            register = None if lease is None else LeaseFile(lease)
            yield Leftover(
                str(path),
                state.nbytes,
                _owners_of(path, register),
                register,
                YOUNG if young else "",
                partial(_remove, path, state, is_lease=path == lease),
            )


def _owners_of(path: Path, register: LeaseFile | None) -> Owners:
    """Who may use an area: of a temporary folder, nobody says."""
    owners = Owners(unnamed=True) if register is None else owners_by_lease(register)
    if path.suffix == _SPOOL:
        return owners.joined(owners_of_export(path))
    job = None if register is None or register.path == path else register.path.with_suffix(JOB_SUFFIX)
    if job is not None and job.is_dir():
        return owners.joined(owners_of_job(local_location(str(job))))
    return owners


def _remove(path: Path, state: _SeenState, lease: Lease | None, *, is_lease: bool) -> int | str | None:
    """Remove an area if it is as it was: another run may have used it since its owners were checked.

    It is renamed first, so that no run resumes what is left of it if the removal ends halfway.
    """
    if is_lease:  # releasing the lease removes it
        return "no space to take its lease" if lease is None else state.nbytes
    now = _state(path)
    if now is None:
        return None
    if now != state:
        return "a run has just used it"
    try:
        remove(set_aside(path) if _OF_TARGET.fullmatch(path.name) else path)
    except FileNotFoundError:
        return None  # another run has resumed it
    return state.nbytes


def nbytes_of(path: Path) -> int:
    """Bytes of a file, or of all files in a folder."""
    state = _state(path)
    return state.nbytes if state else 0


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
    own = short_name(name) == target or name == JOB or name.startswith(PREFIX)
    return own or _SPOOLED.fullmatch(name) is not None


def _lease_of(area: Path) -> Path | None:
    """The lease of an area: a run that reads back for hours holds it, but does not change its area meanwhile."""
    if area.suffix in _OWN_LEASES:
        return area
    if area.suffix == JOB_SUFFIX:
        return area.with_suffix(".lease")
    stem = _OF_TARGET.fullmatch(area.name)
    return area.with_name(f"{stem[1]}.lease") if stem else None


def _state(path: Path) -> _SeenState | None:
    found = [_status(path)]
    if path.is_dir() and not path.is_symlink():
        for folder, folders, files in os.walk(path):
            found += [_status(Path(folder) / name) for name in (*folders, *files)]
    if found[0] is None:
        return None
    status = [one for one in found if one]  # others no longer exist
    nbytes = sum(one.st_size for one in status if not stat.S_ISDIR(one.st_mode))
    return _SeenState(len(status), nbytes, max(one.st_mtime_ns for one in status))


def _status(path: Path) -> os.stat_result | None:
    try:
        return path.lstat()
    except FileNotFoundError:
        return None
