"""trust: whether settings that lie in the working directory count.

`cd` into a downloaded checkpoint must not hand it the ledger, the registry or the webhook. A file there counts only
where the user (or root) owns it, nobody else may change it, and no checkpoint lies around it: its folder is no
checkpoint and no run, and no folder above is a checkpoint. What does not count is named in a warning and passed over.
A file that the user names, by `WHERRY_CONFIG` or `--config`, is the user's choice and is not judged.
"""

from __future__ import annotations

import logging
import os
import stat
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from wherry.errors import HostileError, StorageError, WherryError, storage_error

if TYPE_CHECKING:
    from wherry.formats.format import Glimpse

_log = logging.getLogger(__name__)
_PREFECT = ("prefect.toml", ".env", "pyproject.toml")  # what Prefect reads in the working directory by itself
_CURE = "leave the folder of the checkpoint, and name the source by its path"


def counts(file: Path) -> bool:
    """Whether a configuration that was found in the working directory counts; a warning says why not.

    Raises:
        StorageError: the storage failed.
    """
    try:
        rows = tuple((one.st_ino, one.st_mtime_ns, one.st_uid, one.st_mode) for one in _statuses(file))
        return _counts(file, rows)
    except FileNotFoundError:
        return False  # a link to nothing, or it went away
    except OSError as error:
        if not os.path.exists(file):  # noqa: PTH110  Path.exists raises where a link cannot be followed
            _log.warning("%s is ignored: it cannot be followed: %s", file, error.strerror)
            return False
        raise storage_error(error, str(file)) from error


def require_own_prefect_settings() -> None:
    """Refuse to import Prefect where it would read settings that do not count.

    Raises:
        HostileError: `prefect.toml`, `.env` or `pyproject.toml` of the working directory lies in a checkpoint.
    """
    for name in _PREFECT:
        file = Path(name).absolute()
        around = _checkpoint_around(file.parent) if os.path.lexists(file) else None
        if around is not None:
            raise HostileError(
                f"Prefect would take its settings from {name} of a checkpoint", uri=str(around), cure=_CURE
            )


@lru_cache(maxsize=32)
def _counts(file: Path, _rows: tuple[tuple[int, ...], ...]) -> bool:
    reason = _distrust(file)
    if reason:
        _log.warning(
            "%s is ignored: %s; move it, or name it with WHERRY_CONFIG if its settings are yours",
            file,
            reason,
        )
    return not reason


def _distrust(file: Path) -> str:
    """Why a file does not count, in words; empty where it does."""
    for path in (file, file.parent):
        if any(one.st_uid not in (0, os.geteuid()) for one in _statuses(path)):
            return f"{path} belongs to another user"
        if any(_is_open(one) for one in _statuses(path)):
            return f"everybody may change {path}"
    if not file.is_file():
        return "it is no regular file"
    around = _checkpoint_around(file.parent)
    return f"the checkpoint {around} lies around it" if around else ""


def _checkpoint_around(folder: Path) -> Path | None:
    """The checkpoint or run that a folder is, or the checkpoint in which it lies."""
    around = next((one for one in (folder, *folder.parents) if _is_checkpoint(one)), None)
    return folder if around is None and _is_run(folder) else around


def _statuses(file: Path) -> tuple[os.stat_result, ...]:
    """Of the name and, where that is a link, of what it leads to."""
    return file.lstat(), file.stat()


def _is_open(status: os.stat_result) -> bool:
    """Whether everybody may replace what this is; in a folder with the sticky bit only the owner of a file may."""
    return (
        bool(status.st_mode & stat.S_IWOTH)
        and not stat.S_ISLNK(status.st_mode)
        and not (stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX)
    )


def _is_checkpoint(place: Path) -> bool:
    """Whether a folder or file is a checkpoint, or hides from the user what it is.

    Folders of other users often cannot be listed, and say nothing. What the user owns and cannot read was made so.
    """
    from wherry.formats.detect import look
    from wherry.formats.registry import formats

    try:
        return look(_glimpse(place), formats()) is not None
    except StorageError as error:
        return _is_own(error.uri or str(place))
    except WherryError:
        return True


def _is_run(folder: Path) -> bool:
    """Whether a folder holds steps, each a checkpoint."""
    from wherry.core.steps import steps_among
    from wherry.formats.detect import may_be_step

    try:
        entries = _glimpse(folder).entries
    except StorageError:
        return False  # `_is_checkpoint` has judged it
    steps = steps_among([name for name, entry in entries.items() if may_be_step(entry)])
    return any(_is_checkpoint(folder / step.name) for step in steps)


def _glimpse(place: Path) -> Glimpse:
    """A look at a place; the configuration cannot allow links while it is being judged."""
    from wherry.formats.format import Glimpse
    from wherry.storage.stores import local_location

    return Glimpse(local_location(str(place), configurable=False))


def _is_own(uri: str) -> bool:
    """Whether a file belongs to the user; where the system does not say so, whether the folder around it does."""
    from wherry.storage.stores import locate

    place = Path(locate(uri).path)
    for one in (place, *place.parents):
        try:
            return one.lstat().st_uid == os.geteuid()
        except OSError:
            continue
    return False
