"""Staging areas on disk: their names, whom they belong to, and how a run takes up what an earlier one left.

An area is a folder `.wherry-<name>.<id>-<token>` beside the target, made exclusively and open to its user alone. In it
lie the staged target under its own name, the journal, and whatever else the run needs. The token is that of the
owner's lease: everything of one run goes with one name, a takeover is one rename, and from then on no path that a
former owner knows leads anywhere. A run that ends in order, and can be resumed, takes the token off the name.

A former owner that is not known to have ended may still hold files open, and write to them at any later time. Of its
area a copy is made, so that nothing it does reaches the new run's files. Logs are copied before the data that they
speak of.

What is taken up must be this user's own: a folder with mode 0700, without links or special files in it.
"""

from __future__ import annotations

import os
import re
import secrets
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from wherry.storage.copy import copy_written
from wherry.storage.folders import DRAFT, PREFIX, is_staging, sync_folder, sync_tree

if TYPE_CHECKING:
    from collections.abc import Iterator

JOURNAL, SPILL, SIDECAR, REPLACED = (
    f"{PREFIX}{name}" for name in ("journal", "spill", "sidecar", "replaced")
)
LOG_SUFFIX = ".wherry-log"  # of files in a target that say which of its other bytes are there
_FORMER = ".former"  # an area that is being copied
_HEX = "[0-9a-f]{8}"
_OTHERS = (DRAFT, _FORMER, ".journal", ".spill", ".sidecar")


@dataclass(frozen=True, slots=True)
class FormerArea:
    """What an earlier run left for a target.

    Attributes:
        path: where it is.
        identity: eight hex digits of the conversion; None where it is no area.
        token: of its owner; None where that has given it up.
        copied: whether a run was copying it when it ended.
    """

    path: Path
    identity: str | None = None
    token: str | None = None
    copied: bool = False

    @property
    def is_draft(self) -> bool:
        """Whether it is a lease before its time, or something that is being removed."""
        return self.path.suffix == DRAFT

    def is_abandoned(self, dead: str | None) -> bool:
        """Whether no process can write to it any more.

        Args:
            dead: the token of an owner that is known to have ended.
        """
        return not self.copied and (self.token is None or self.token == dead)


def left_for(parent: Path, name: str) -> Iterator[FormerArea]:
    """What earlier runs left for a target, drafts of leases included; not the lease itself.

    Args:
        parent: the target's folder.
        name: the target's name.
    """
    # The last part of a name has no dot before its suffix, so no other target's names are matched.
    pattern = re.compile(rf"{re.escape(PREFIX + name)}\.({_HEX})(?:-({_HEX}))?(\.[a-z]+)?")
    for path in parent.iterdir():
        found = pattern.fullmatch(path.name)
        if found is None:
            continue
        identity, token, suffix = found.groups()
        if suffix in (None, _FORMER):
            yield FormerArea(path, identity, token, copied=suffix is not None)
        elif suffix in _OTHERS:
            yield FormerArea(path)


def distrusted(area: Path) -> str | None:
    """Why an area cannot be believed to be this user's own; None where it can.

    Raises:
        FileNotFoundError: it is gone.
        OSError: the storage failed.
    """
    status, user = area.lstat(), os.geteuid()
    if not stat.S_ISDIR(status.st_mode):
        return "it is not a folder"
    if status.st_uid != user:
        return "it belongs to another user"
    if status.st_mode & 0o077:
        return "other users had access to it"
    for folder, folders, files in os.walk(area):
        for name in (*folders, *files):
            try:
                one = os.lstat(os.path.join(folder, name))  # noqa: PTH118  twice as fast as Path, of thousands
            except FileNotFoundError:
                continue  # a former owner that woke up has removed it
            if one.st_uid != user:
                return f"{name} in it belongs to another user"
            if not (stat.S_ISDIR(one.st_mode) or (stat.S_ISREG(one.st_mode) and one.st_nlink == 1)):
                return f"{name} in it is a link or a special file"
    return None


def take_up(left: FormerArea, area: Path, dead: str | None) -> Path | None:
    """Give the area of an earlier run a name of this run; from then on its owner cannot reach it by any path.

    Args:
        left: what the earlier run left; it can be believed.
        area: the name of this run's area.
        dead: see Left.is_abandoned.

    Returns:
        Where it lies if its former owner may still write to it, so that it must be copied; None where it is the
        new area.

    Raises:
        FileNotFoundError: it is gone.
        OSError: the storage failed.
    """
    if left.is_abandoned(dead):
        left.path.rename(area)
        return None
    former = area.with_name(f"{area.name}{_FORMER}")
    left.path.rename(former)
    return former


def set_aside(path: Path) -> Path:
    """Give an area or file, which is to be removed, a name that no run takes up.

    Raises:
        FileNotFoundError: it is gone.
        OSError: the storage failed.
    """
    stem = re.sub(rf"\.{_HEX}(-{_HEX})?(\.[a-z]+)?$", "", path.name)
    return path.rename(path.with_name(f"{stem}.{secrets.token_hex(4)}{DRAFT}"))


def copy_area(former: Path, area: Path) -> None:
    """Copy an area into new files, durably, names included; the journal last, so that a partial copy has none.

    Args:
        former: the area; its files may be written to meanwhile.
        area: a new folder.

    Raises:
        OSError: the storage failed.
    """
    journal = former / JOURNAL
    signed = journal.read_bytes() if journal.exists() else None  # before the data that it speaks of
    files: list[Path] = []
    for folder, folders, names in os.walk(former):
        here = Path(folder)
        if here == former:
            folders[:] = [name for name in folders if not is_staging(name)]
            names = [name for name in names if not is_staging(name)]  # noqa: PLW2901
        for name in folders:
            (area / here.relative_to(former) / name).mkdir()
        files += [here / name for name in names]
    for file in sorted(files, key=lambda file: not file.name.endswith(LOG_SUFFIX)):
        copy_written(file, area / file.relative_to(former))
    sync_tree(area)  # a journal must not outlive the names of the data that it speaks of
    if signed is not None:
        _write_journal(area / JOURNAL, signed)
        sync_folder(area)


def _write_journal(path: Path, signed: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(signed)
        file.flush()
        os.fsync(descriptor)
