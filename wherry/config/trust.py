"""trust: whether a configuration file in the working directory is trusted.

`cd` into a downloaded checkpoint must not let it choose the ledger, the registry or the webhook. A file there is
trusted only if the user (or root) owns it, not everybody can write it, its folder is neither a checkpoint nor a run,
and no parent folder is a checkpoint. A file that is not trusted is ignored with a warning. A file that the user names,
by `WHERRY_CONFIG` or `--config`, is always used.
"""

from __future__ import annotations

import os
import stat
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from wherry.core.progress import logger
from wherry.errors import HostileError, StorageError, WherryError, storage_error

if TYPE_CHECKING:
    from wherry.formats.format import Glimpse

_log = logger(__name__)
_PREFECT = ("prefect.toml", ".env", "pyproject.toml")  # files that Prefect reads in the working directory
_CURE = "change to another working directory, and name the source by its path"


def counts(file: Path) -> bool:
    """Whether a configuration in the working directory is trusted; if not, log a warning with the reason.

    Raises:
        StorageError: the storage failed.
    """
    try:
        rows = tuple((one.st_ino, one.st_mtime_ns, one.st_uid, one.st_mode) for one in _statuses(file))
        return _counts(file, rows)
    except FileNotFoundError:
        return False  # a dangling link, or removed meanwhile
    except OSError as error:
        if not os.path.exists(file):  # noqa: PTH110  Path.exists raises where a link cannot be followed
            _log.warning("%s is ignored: the link cannot be followed: %s", file, error.strerror)
            return False
        raise storage_error(error, str(file)) from error


def counts_in_home(file: Path) -> bool:
    """Whether the configuration of `WHERRY_HOME` is trusted: nobody but its user can write it or its folder."""
    reason = _foreign(file)
    if reason:
        _warn(file, reason)
    return not reason


def require_own_prefect_settings() -> None:
    """Refuse to import Prefect where it would read untrusted settings.

    Raises:
        HostileError: `prefect.toml`, `.env` or `pyproject.toml` in the working directory is inside a checkpoint.
    """
    for name in _PREFECT:
        file = Path(name).absolute()
        around = _checkpoint_around(file.parent) if os.path.lexists(file) else None
        if around is not None:
            raise HostileError(
                f"untrusted Prefect settings: {name} in the working directory is inside a checkpoint",
                uri=str(around),
                cure=_CURE,
            )


@lru_cache(maxsize=32)
def _counts(file: Path, _rows: tuple[tuple[int, ...], ...]) -> bool:
    reason = _distrust(file)
    if reason:
        _warn(file, reason)
    return not reason


def _warn(file: Path, reason: str) -> None:
    _log.warning("%s is ignored: %s; move it, or set WHERRY_CONFIG to its path if you trust it", file, reason)


def _distrust(file: Path) -> str:
    """Why a file is not trusted; empty where it is."""
    if foreign := _foreign(file):
        return foreign
    if not file.is_file():
        return "it is not a regular file"
    around = _checkpoint_around(file.parent)
    return f"it is inside the checkpoint {around}" if around else ""


def _foreign(file: Path) -> str:
    """Who else can write a file or its folder; empty if nobody can."""
    for path in (file, file.parent):
        if any(one.st_uid not in (0, os.geteuid()) for one in _statuses(path)):
            return f"another user owns {path}"
        if any(_is_open(one) for one in _statuses(path)):
            return f"{path} is writable by everybody"
    return ""


def _checkpoint_around(folder: Path) -> Path | None:
    """The folder itself if it is a checkpoint or run, else the parent folder that is a checkpoint."""
    around = next((one for one in (folder, *folder.parents) if _is_checkpoint(one)), None)
    return folder if around is None and _is_run(folder) else around


def _statuses(file: Path) -> tuple[os.stat_result, ...]:
    """Status of a file and, if it is a link, of the link's target."""
    return file.lstat(), file.stat()


def _is_open(status: os.stat_result) -> bool:
    """Whether everybody can write it; in a folder with the sticky bit only the owner of a file can replace it."""
    return (
        bool(status.st_mode & stat.S_IWOTH)
        and not stat.S_ISLNK(status.st_mode)
        and not (stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX)
    )


def _is_checkpoint(place: Path) -> bool:
    """Whether a folder or file is a checkpoint, or may be one that cannot be read.

    A folder of another user that cannot be listed does not count; one of the user's own that cannot be read does.
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
        return False  # `_is_checkpoint` has examined it
    steps = steps_among([name for name, entry in entries.items() if may_be_step(entry)])
    return any(_is_checkpoint(folder / step.name) for step in steps)


def _glimpse(place: Path) -> Glimpse:
    """A view of a place; the configuration under examination cannot allow links."""
    from wherry.formats.format import Glimpse
    from wherry.store.local_store import local_location

    return Glimpse(local_location(str(place), configurable=False))


def _is_own(uri: str) -> bool:
    """Whether the user owns a file; where its status cannot be read, whether the user owns the folder around it."""
    from wherry.store.local_store import locate

    place = Path(locate(uri).path)
    for one in (place, *place.parents):
        try:
            return one.lstat().st_uid == os.geteuid()
        except OSError:
            continue
    return False
