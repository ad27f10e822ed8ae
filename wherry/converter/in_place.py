"""In place: small files of a checkpoint are replaced in its own folder, each in one step, and the old ones kept.

`<file>.before` is the file that was there. Where the check that follows fails, or anything else does, the old files
are put back and what was made is removed. A run that is killed leaves either file under its name, never half of one.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from wherry.errors import TargetExistsError, storage_errors
from wherry.staging.lease import NO_LINKS
from wherry.staging.staging import lease_of
from wherry.storage.copy import carry_file
from wherry.storage.durable import replace
from wherry.storage.folders import remove, sync_folder
from wherry.storage.sidecar import FOLDER_NAME, MOST_SIDECAR
from wherry.storage.stores import locate

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from wherry.formats.format import Change
    from wherry.staging.lease import Lease
    from wherry.storage.location import Location

BEFORE = ".before"


@contextmanager
def changed(folder: Location, change: Change, require_unchanged: Callable[[], object]) -> Generator[Lease]:
    """Carry out a change in a folder; where the block fails, everything is as it was.

    Args:
        folder: a local folder; nobody else may hold it as a target.
        change: what to do; its `files` and `finish`.
        require_unchanged: called before anything is touched, when no other run can change the folder any more; raises
            where the folder is not what the change was made for.

    Yields:
        The lease. The last step of the block belongs within its `exclusive`, which raises where another run has taken
        the folder over meanwhile.

    Raises:
        TargetInUseError: another run holds the folder.
        TargetExistsError: a kept file of an earlier change is in the way.
        StorageError: the storage failed.
    """
    home = Path(folder.path)
    kept: list[str] = []
    with storage_errors(folder.uri), lease_of(home.parent, folder) as held:
        require_unchanged()
        new = [name for name in (*change.files, *change.made) if not os.path.lexists(home / name)]
        try:
            with held.exclusive():
                for name, data in change.files.items():
                    if keep(home / name):
                        kept.append(name)
                    replace(home / name, data)
                change.finish(folder)
                sync_folder(home)
            yield held
        except BaseException:
            with held.exclusive():  # a folder that another run has taken over is left as it is
                _undo(home, kept, new)
            raise


def replace_sidecar(folder: Location, data: bytes) -> None:
    """Put a sidecar, and keep the newest older one under a hidden name: no system takes it for a file of its own.

    Raises:
        StorageError: the storage failed.
    """
    place = Path(folder.join(FOLDER_NAME).path)
    with storage_errors(folder.uri):
        if place.exists():
            replace(
                place.with_name(f".{FOLDER_NAME}{BEFORE}"), folder.join(FOLDER_NAME).read_whole(MOST_SIDECAR)
            )
        replace(place, data)


def keep(place: Path) -> bool:
    """Keep a file beside itself; False where there is none.

    Raises:
        TargetExistsError: an older one was kept there.
        OSError: the storage failed.
    """
    if not place.exists():
        return False
    before = place.with_name(f"{place.name}{BEFORE}")
    try:
        _link(place, before)
    except FileExistsError as error:
        if before.samefile(place):
            return True  # a run was killed between keeping and replacing
        raise TargetExistsError(
            "backup file already exists, from an earlier change",
            uri=str(before),
            cure="move the backup away; it holds the file from before that change",
        ) from error
    return True


def _link(place: Path, before: Path) -> None:
    """A second name for a file, in one step; a copy where the file system has no links."""
    try:
        before.hardlink_to(place)
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        carry_file(locate(place), before)


def _undo(home: Path, kept: list[str], new: list[str]) -> None:
    for name in kept:
        before = home / f"{name}{BEFORE}"
        before.replace(home / name)
        before.unlink(missing_ok=True)  # two names of one file: renaming one to the other does nothing
    for name in new:
        remove(home / name)
    sync_folder(home)
