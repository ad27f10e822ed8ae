"""leftovers: what runs have left, on a disk and in stores of objects, and the rule by which it is removed.

`wherry.target.owners` checks which owners are still at work, all of them at the same time; what belongs to none of
these is removed, whatever its age. It is removed while holding the lease of its target, as a conversion would: a run
that resumes or starts meanwhile finds that it does not hold the target. On a full disk, where no lease can be created,
what is left is removed without it if the lease is as it was.
"""

from __future__ import annotations

import errno
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from wherry.errors import StorageError, TargetInUseError
from wherry.target.lease import Lease
from wherry.target.lease_watch import judge_all

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

    from wherry.target.lease import Register
    from wherry.target.lease_watch import Judgement
    from wherry.target.owners import Owners

YOUNG = "changed within the hour; may be in use"
_HELD = "a running job holds its lease"
_FULL = (errno.ENOSPC, errno.EDQUOT)


class CleanReport(NamedTuple):
    """What was left: where it is, its bytes, and whether it was removed (or why not); or the store of an open run."""

    uri: str
    nbytes: int
    removed: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Leftover:
    """What runs have left in one place.

    Attributes:
        uri: names it in a report.
        nbytes: that are seen of it.
        owners: who may use it.
        register: the lease of its target; None if it is of no target.
        refusal: why it is left if it is not known that its owners have ended: it is too young; empty if it is old.
        remove: removes it if it is as it was; returns the bytes, the reason why it is left, or None if it is gone. It
            gets the lease, held; None if it is of no target, or if the disk is full.
    """

    uri: str
    nbytes: int
    owners: Owners
    register: Register | None
    refusal: str
    remove: Callable[[Lease | None], int | str | None]


def clean_leftovers(leftovers: Iterable[Leftover], *, dry_run: bool) -> list[CleanReport]:
    """Remove what nobody uses; a report of each that still exists.

    Args:
        leftovers: what is left.
        dry_run: remove nothing.

    Raises:
        StorageError: the storage failed.
    """
    leftovers = list(leftovers)
    watches = {watch.path: watch for left in leftovers for watch in left.owners.watches}
    judged = judge_all(list(watches.values()))
    reports: list[CleanReport] = []
    for left in leftovers:
        found = _remove(left, judged, dry_run=dry_run)
        if isinstance(found, str):
            reports.append(CleanReport(left.uri, left.nbytes, removed=False, reason=found))
        elif found is not None:
            reports.append(CleanReport(left.uri, found, removed=True, reason="stale"))
    return reports


def _remove(left: Leftover, judged: Mapping[Path | str, Judgement], *, dry_run: bool) -> int | str | None:
    """Remove what nobody uses; see `Leftover.remove`."""
    owners, register = left.owners, left.register
    if owners.live(judged):
        return _HELD
    reason = "" if owners.ended(judged) else left.refusal
    if reason or dry_run:
        return reason or "dry run"
    if register is None:
        return left.remove(None)
    judgement = judged[register.uri]
    try:
        with Lease(register, register.uri, judgement) as lease:
            return left.remove(lease)
    except TargetInUseError:
        return _HELD
    except StorageError as error:
        if not isinstance(error.__cause__, OSError) or error.__cause__.errno not in _FULL:
            raise
        return left.remove(None) if register.look() == judgement.sighting else _HELD
