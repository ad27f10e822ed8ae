"""Staging areas on disk: their names, their owners, and the takeover: how a run resumes the area of an earlier run.

An area is a folder `.wherry-<name>.<id>-<token>` next to the target, created exclusively and accessible to its user
alone. It holds the staged target under its own name, the journal, and other files of the run. The token is that of the
owner's lease: all files of one run are under one name, a takeover is one rename, and after it the paths that the former
owner knows no longer exist. A run that ends normally, and can be resumed, removes the token from the name.

A former owner that is not known to have ended may still hold files open, and write to them at any later time. So its
area is copied, and its later writes never reach the files of the new run. Logs are copied before the data that they
describe.

Only an area of the same user is resumed: a folder with mode 0700, without links or special files in it.

`open_area` performs the steps that must exclude other runs, and takes no longer than a few renames and a listing;
`complete` does the rest: it removes discarded areas, and copies an area that a former owner may still write to.
"""

from __future__ import annotations

import os
import re
import secrets
import stat
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from wherry.storage.copy import copy_written
from wherry.storage.folders import (
    DRAFT,
    PREFIX,
    is_staging,
    is_there,
    raise_walk_error,
    remove_leftover,
    staging_stem,
    sync_folder,
    sync_tree,
)
from wherry.target.key import journal_key
from wherry.target.lease import Lease, LeaseFile
from wherry.target.signed_log import read_log

JOURNAL, SPILL, SIDECAR, REPLACED = (
    f"{PREFIX}{name}" for name in ("journal", "spill", "sidecar", "replaced")
)
LOG_SUFFIX = ".wherry-log"  # suffix of files in a target that log which of its other bytes are written
_FORMER = ".former"  # an area that is being copied
_HEX = "[0-9a-f]{8}"
_OTHERS = (DRAFT, _FORMER, ".journal", ".spill", ".sidecar")


@dataclass(frozen=True, slots=True)
class FormerArea:
    """A file or folder that an earlier run left for a target.

    Attributes:
        path: its path.
        identity: eight hex digits of the conversion; None if it is not an area.
        token: of its owner; None if the owner released the area.
        copied: whether a run was copying it when it ended.
    """

    path: Path
    identity: str | None = None
    token: str | None = None
    copied: bool = False

    @property
    def is_draft(self) -> bool:
        """Whether it is an unfinished lease, or a file or folder that is being removed."""
        return self.path.suffix == DRAFT

    def is_abandoned(self, dead: str | None) -> bool:
        """Whether no process can write to it any more.

        Args:
            dead: the token of an owner that is known to have ended.
        """
        return not self.copied and (self.token is None or self.token == dead)


def left_for(parent: Path, name: str) -> Iterator[FormerArea]:
    """Files and folders that earlier runs left for a target, including drafts of leases but not the lease itself.

    Args:
        parent: the target's folder.
        name: the target's name.
    """
    # The last part of a name has no dot before its suffix, so no other target's names are matched.
    pattern = re.compile(rf"{re.escape(staging_stem(name))}\.({_HEX})(?:-({_HEX}))?(\.[a-z]+)?")
    for path in parent.iterdir():
        found = pattern.fullmatch(path.name)
        if found is None:
            continue
        identity, token, suffix = found.groups()
        if suffix in (None, _FORMER):
            yield FormerArea(path, identity, token, copied=suffix is not None)
        elif suffix in _OTHERS:
            yield FormerArea(path)


def distrust_reason(area: Path) -> str | None:
    """Why an area is not trusted to belong to this user; None if it is trusted.

    Raises:
        FileNotFoundError: it no longer exists.
        OSError: the storage failed.
    """
    status, user = area.lstat(), os.geteuid()
    if not stat.S_ISDIR(status.st_mode):
        return "it is not a folder"
    if status.st_uid != user:
        return "it belongs to another user"
    if status.st_mode & 0o077:
        return "other users had access to it"
    for folder, folders, files in os.walk(area, onerror=_unless_removed):
        for name in (*folders, *files):
            try:
                one = os.lstat(os.path.join(folder, name))  # noqa: PTH118  twice as fast as Path, of thousands
            except FileNotFoundError:
                continue  # the former owner resumed and removed it
            if one.st_uid != user:
                return f"{name} in it belongs to another user"
            if not (stat.S_ISDIR(one.st_mode) or (stat.S_ISREG(one.st_mode) and one.st_nlink == 1)):
                return f"{name} in it is a link or a special file"
    return None


def _unless_removed(error: OSError) -> None:
    """Raise the error of a folder that cannot be listed: what is in it was not examined."""
    if not isinstance(error, FileNotFoundError):
        raise error


def take_up(left: FormerArea, area: Path, dead: str | None) -> Path | None:
    """Rename the area of an earlier run to a name of this run, after which its former owner cannot reach it by path.

    Args:
        left: the area of the earlier run; it must be trusted.
        area: the name of this run's area.
        dead: see FormerArea.is_abandoned.

    Returns:
        The path of the former area if its owner may still write to it, so that it must be copied; None if it
        became the new area.

    Raises:
        FileNotFoundError: it no longer exists.
        OSError: the storage failed.
    """
    if left.is_abandoned(dead):
        left.path.rename(area)
        return None
    former = area.with_name(f"{area.name}{_FORMER}")
    left.path.rename(former)
    return former


def set_aside(path: Path) -> Path:
    """Rename an area or file that is to be removed, durably, so that no run resumes what is left of it.

    Raises:
        FileNotFoundError: it no longer exists.
        OSError: the storage failed.
    """
    aside = hide(path)
    # Else a loss of power can undo the rename, but not the removal of what the journal names.
    sync_folder(path.parent)
    return aside


def hide(path: Path) -> Path:
    """Rename an area or file, so that no run resumes it; see `set_aside`, which makes that durable."""
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
    signed = journal.read_bytes() if journal.exists() else None  # before the data that it describes
    files: list[Path] = []
    for folder, folders, names in os.walk(former, onerror=raise_walk_error):
        here = Path(folder)
        if here == former:
            folders[:] = [name for name in folders if not is_staging(name)]
            names = [name for name in names if not is_staging(name)]  # noqa: PLW2901
        for name in folders:
            (area / here.relative_to(former) / name).mkdir()
        files += [here / name for name in names]
    for file in sorted(files, key=lambda file: not file.name.endswith(LOG_SUFFIX)):
        copy_written(file, area / file.relative_to(former))
    sync_tree(area)  # the names of the data must be durable before the journal is
    if signed is not None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        descriptor = os.open(area / JOURNAL, flags, 0o600)
        with os.fdopen(descriptor, "wb") as written:
            written.write(signed)
            written.flush()
            os.fsync(descriptor)
        sync_folder(area)


@dataclass(slots=True)
class AreaHistory:
    """What happened to the areas of earlier runs when an area was opened.

    Attributes:
        is_new: whether the area was created, not resumed.
        former: an area that must be copied into the new one; None if there is none.
        aside: files and folders that are to be removed.
        discarded: why an earlier area was not resumed; None if there was none.
    """

    is_new: bool = True
    former: Path | None = None
    aside: list[Path] = field(default_factory=list["Path"])
    discarded: str | None = None


def open_area(area: Path, name: str, identity: str | None, lease: Lease) -> AreaHistory:
    """Resume an earlier area under a new name, or create the area; the caller excludes other runs.

    Args:
        area: the path of this run's area, which must not exist.
        name: the target's name.
        identity: the conversion; None if no area may be resumed.
        lease: of the target, held.

    Raises:
        UsageError: the key of the journals is too short.
        OSError: the storage failed.
    """
    opening = AreaHistory()
    same = [left for left in left_for(area.parent, name) if left.identity and left.identity == identity]
    for left in sorted(same, key=lambda left: _progress(left, name, lease), reverse=True):
        with suppress(FileNotFoundError):  # the former owner resumed and removed it
            reason = distrust_reason(left.path)
            if reason is None:
                opening.former = take_up(left, area, lease.dead)
                opening.is_new = opening.former is not None
                break
            opening.discarded = f"the staging area of an interrupted run was not reused: {reason}"
    for left in list(left_for(area.parent, name)):
        if left.path not in (area, opening.former):
            with suppress(FileNotFoundError):  # a run that did not get the lease has removed its draft
                _discard(left, lease, opening)
    if opening.is_new:
        area.mkdir(mode=0o700)  # last: if an earlier step fails, no area needs to be removed
    return opening


def complete(opening: AreaHistory, area: Path) -> None:
    """Remove discarded areas, copy a former area if required, and remove files that are never kept for a later run.

    Raises:
        OSError: the storage failed.
    """
    for path in opening.aside:  # before the copy, which may need the space
        remove_leftover(path)
    if opening.former is not None:
        copy_area(opening.former, area)
        sync_folder(area.parent)  # the name of the copy must be durable before the original is removed
        remove_leftover(set_aside(opening.former))
    for name in (SPILL, SIDECAR, REPLACED):
        remove_leftover(area / name)


def _progress(left: FormerArea, name: str, lease: Lease) -> tuple[int, bool]:
    """The order in which areas are resumed: most recorded moves first, then those that need no copy.

    A journal counts only together with the staged target: a power failure while an area was removed can leave it alone.
    """
    try:
        usable = is_there(left.path / name) and not distrust_reason(left.path)
        lines = read_log(left.path / JOURNAL, journal_key())[0] if usable else []
    except FileNotFoundError:
        return 0, False
    return len(lines), left.is_abandoned(lease.dead)


def _discard(left: FormerArea, lease: Lease, opening: AreaHistory) -> None:
    """Set aside the area of another conversion to this target; holding the lease proves that it is unused."""
    assert isinstance(lease.register, LeaseFile), "areas are on a file system"
    if left.path.lstat().st_uid not in (os.geteuid(), lease.register.uid):
        opening.discarded = f"{left.path.name} belongs to another user and was not removed"
    elif left.is_draft:
        opening.aside.append(left.path)
    else:
        opening.aside.append(set_aside(left.path))
        opening.discarded = (
            opening.discarded
            or "the interrupted run had a different source, plan, option or digest algorithm"
        )
