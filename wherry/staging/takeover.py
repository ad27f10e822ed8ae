"""Opens the area of a run: resumes the area of an earlier run of the same conversion, and discards all others.

`open_area` performs the steps that must exclude other runs, and takes no longer than a few renames and a listing;
`complete` does the rest: it removes discarded areas, and copies an area that a former owner may still write to.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from wherry.staging.area import (
    JOURNAL,
    REPLACED,
    SIDECAR,
    SPILL,
    copy_area,
    distrust_reason,
    left_for,
    set_aside,
    take_up,
)
from wherry.staging.journal import signed_lines
from wherry.staging.key import journal_key
from wherry.storage.folders import remove_leftover, sync_folder

if TYPE_CHECKING:
    from pathlib import Path

    from wherry.staging.area import FormerArea
    from wherry.staging.lease import Lease


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
    for left in sorted(same, key=lambda left: _progress(left, lease), reverse=True):
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


def _progress(left: FormerArea, lease: Lease) -> tuple[int, bool]:
    """The order in which areas are resumed: most recorded moves first, then those that need no copy."""
    try:
        lines = [] if distrust_reason(left.path) else signed_lines(left.path / JOURNAL, journal_key())[0]
    except FileNotFoundError:
        return 0, False
    return len(lines), left.is_abandoned(lease.dead)


def _discard(left: FormerArea, lease: Lease, opening: AreaHistory) -> None:
    """Set aside the area of another conversion to this target; holding the lease proves that it is unused."""
    if left.path.lstat().st_uid not in (os.geteuid(), lease.uid):
        opening.discarded = f"{left.path.name} belongs to another user and was not removed"
    elif left.is_draft:
        opening.aside.append(left.path)
    else:
        opening.aside.append(set_aside(left.path))
        opening.discarded = (
            opening.discarded
            or "the interrupted run had a different source, plan, option or digest algorithm"
        )
