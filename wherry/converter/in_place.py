"""Replaces small files of a checkpoint in its own folder, each atomically, and keeps the old ones.

`<file>.before` is the previous file. If the following check, or anything else, fails, the old files are restored and
new ones removed. After a killed run each file is either the old or the new one, never incomplete.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from wherry.errors import TargetExistsError, storage_errors
from wherry.store.copy import add_name
from wherry.store.folders import is_there, remove, replace_file, sync_folder
from wherry.store.location import Location
from wherry.store.sidecar import FOLDER_NAME, MOST_SIDECAR
from wherry.target.lease import Lease, lease_of

if TYPE_CHECKING:
    from wherry.formats.format import Change

BEFORE = ".before"


@contextmanager
def change_in_place(
    folder: Location, change: Change, require_unchanged: Callable[[], object]
) -> Generator[Lease]:
    """Carry out a change in a folder; if the block fails, all files are restored.

    Args:
        folder: a local folder; no other run may hold it as a target.
        change: the change; its `files` and `finish` are used.
        require_unchanged: called before anything is changed, while no other run can change the folder; raises if the
            folder has changed since the change was planned.

    Yields:
        The lease. The last step of the block must run within its `exclusive`, which raises if another run has taken the
        folder over meanwhile.

    Raises:
        TargetInUseError: another run holds the folder.
        TargetExistsError: a backup file of an earlier change exists.
        StorageError: the storage failed.
    """
    home = Path(folder.path)
    kept: list[str] = []
    with storage_errors(folder.uri), lease_of(folder) as held:
        require_unchanged()
        new = [name for name in (*change.files, *change.made) if not is_there(home / name)]
        try:
            with held.exclusive():
                for name, data in change.files.items():
                    if keep(home / name):
                        kept.append(name)
                    replace_file(home / name, data)
                change.finish(folder)
                sync_folder(home)
            yield held
        except BaseException:
            with held.exclusive():  # a folder that another run has taken over is not changed
                _undo(home, kept, new)
            raise


def replace_sidecar(folder: Location, data: bytes) -> None:
    """Write a sidecar, and keep the previous one under a hidden name, which no system mistakes for its own file.

    Raises:
        StorageError: the storage failed.
    """
    place = Path(folder.join(FOLDER_NAME).path)
    with storage_errors(folder.uri):
        if place.exists():
            replace_file(
                place.with_name(f".{FOLDER_NAME}{BEFORE}"), folder.join(FOLDER_NAME).read_whole(MOST_SIDECAR)
            )
        replace_file(place, data)


def keep(place: Path) -> bool:
    """Keep a backup of a file in the same folder; False if the file does not exist.

    Raises:
        TargetExistsError: an older backup exists.
        OSError: the storage failed.
    """
    if not place.exists():
        return False
    before = place.with_name(f"{place.name}{BEFORE}")
    try:
        add_name(place, before)
    except FileExistsError as error:
        if before.samefile(place):
            return True  # a run was killed between keeping and replacing
        raise TargetExistsError(
            "backup file already exists, from an earlier change",
            uri=str(before),
            cure="move the backup away; it holds the file from before that change",
        ) from error
    return True


def _undo(home: Path, kept: list[str], new: list[str]) -> None:
    for name in kept:
        before = home / f"{name}{BEFORE}"
        before.replace(home / name)
        before.unlink(missing_ok=True)  # a rename between two names of one file does nothing
    for name in new:
        remove(home / name)
    sync_folder(home)
