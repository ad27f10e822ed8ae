"""leftovers: what runs have left, who may still use it, and the rule by which it is removed.

The files of a target are used by the process that holds the lease of the target. A job has no lease while its workers
make units: each renews a claim (`wherry.workers.records`). The folder of an export is shared by processes that are
named in it (`wherry.live.shares`). A lease that is not renewed has no owner any more. A claim or a name that is not
renewed proves nothing, unless its process was on this machine and has ended: the worker may be one of many, and the
next one not named yet. Only where no owner can be checked, the age of what is left decides.

All owners are judged at the same time. Leftovers without an owner at work are removed, whatever their age, while
holding the lease of their target, as a conversion would: a run that resumes or starts meanwhile finds that it does not
hold the target. On a full disk, where no lease can be created, what is left is removed without it if the lease is as
it was. `wherry.target.clean` finds what is left.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from wherry.core.json_document import json_value
from wherry.core.lazy_dataclass import dataclass
from wherry.errors import NotFoundError, StorageError, TargetInUseError
from wherry.store.location import MOST_CONFIG, Location
from wherry.target.lease import Judgement, Lease, Register, Sighting, Verdict, Watch, judge_all

YOUNG = "changed within the hour; may be in use"
_HELD = "a running job holds its lease"
_FULL = (errno.ENOSPC, errno.EDQUOT)
JOB, JOB_SUFFIX = (
    "job.json",
    ".job",
)  # the record that names the conversion of a job; suffix of the job's folder
CLAIM_SECONDS = 60.0  # after which a claim that is not renewed expires
CLAIM = re.compile(r"claim-((?:receipt|proof)-\d+)-(\d+)")  # with the task and the attempt
# With the task, its kind, the number of its unit, and the attempt.
TASK_RECORD = re.compile(r"((receipt|proof)-(\d+))-([0-9a-f]{8})")
_WRITER, _RANKS = "writer.lease", "here-*.json"  # in the folder of an export


class CleanReport(NamedTuple):
    """What was left: where it is, its bytes, and whether it was removed (or why not); or the store of an open run."""

    uri: str
    nbytes: int
    removed: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Owners:
    """Who may use something.

    Attributes:
        leases: of which the holder uses it.
        processes: that are named, and may use it without a lease.
        unnamed: whether others may use it that are not named: a job waits for workers.
    """

    leases: tuple[Watch, ...] = ()
    processes: tuple[Watch, ...] = ()
    unnamed: bool = False

    def joined(self, other: Owners) -> Owners:
        """The owners of something that these and others may use."""
        return Owners(
            self.leases + other.leases, self.processes + other.processes, self.unnamed or other.unnamed
        )

    @property
    def watches(self) -> tuple[Watch, ...]:
        """The leases and owners to judge; see `judge_all`."""
        return self.leases + self.processes

    def live(self, judged: Mapping[Path | str, Judgement]) -> bool:
        """Whether an owner is known to be still at work."""
        return any(judged[watch.path].verdict is Verdict.ALIVE for watch in self.watches)

    def ended(self, judged: Mapping[Path | str, Judgement]) -> bool:
        """Whether all of them are known to have ended."""
        verdicts = [judged[watch.path].verdict for watch in self.processes]
        named = bool(verdicts) or not self.unnamed
        return named and not self.live(judged) and all(verdict is Verdict.DEAD for verdict in verdicts)


@dataclass(frozen=True, slots=True)
class Leftover:
    """The files or objects that runs have left in one place.

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
    """Remove the leftovers that no process uses; yields a report of each that still exists.

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
    """Remove a leftover that no process uses; see `Leftover.remove`."""
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


def owners_by_lease(register: Register) -> Owners:
    """Who holds a lease."""
    return Owners((Watch(register.uri, register.look, register.expiry),))


def owners_of_job(folder: Location) -> Owners:
    """The workers of a job, by their claims on tasks that are not done yet.

    Raises:
        StorageError: the storage failed.
    """
    names = [entry.name for entry in folder.entries()]
    done = {found[1] for found in map(TASK_RECORD.fullmatch, names) if found}  # whose claims are over
    claims = [name for name in names if (found := CLAIM.fullmatch(name)) and found[1] not in done]
    places = (folder.join(name) for name in claims)
    open_claims = (place for place in places if _claim(place) is not None)
    return Owners(processes=tuple(map(_watch, open_claims)), unnamed=True)


def owners_of_export(folder: Path) -> Owners:
    """The processes that share the folder of an export."""
    ranks: Iterable[Path] = sorted(folder.glob(_RANKS))
    # A name is not renewed: if the process table does not tell, nothing does.
    processes = tuple(Watch(path, expiry=0.0) for path in ranks)
    return Owners((Watch(folder / _WRITER),), processes, unnamed=True)


def _watch(claim: Location) -> Watch:
    def look() -> Sighting | None:
        row = _claim(claim)
        return None if row is None else Sighting(row["beat"], row["owner"].encode())

    return Watch(claim.path, look, CLAIM_SECONDS)


def _claim(place: Location) -> dict[str, str] | None:
    """A claim as it is written; None if it is gone, or is none. Whether it is signed does not matter to keep it."""
    with suppress(NotFoundError, ValueError, TypeError, KeyError):
        row = unverified_row(place.read_whole(MOST_CONFIG))
        return {"owner": str(row["owner"]), "beat": str(int(row["beat"]))}
    return None


def unverified_row(line: bytes) -> Mapping[str, Any]:
    """The row in a line of a signed log, without a check of its signature; empty if the line has no row."""
    try:
        row = json_value(line.partition(b"\t")[0])
    except ValueError:
        return {}
    return row if isinstance(row, dict) else {}
