"""clean, in a store of objects: what runs that have ended left below a folder.

That are leases, folders of staging objects with their journals, folders of jobs with their records, uploads that were
never assembled, and objects of targets that were never committed. A run that is at work holds the lease of its target;
everything of a target is removed while holding it. A journal or a job names the runs that wrote it, and the commit
members of the target: only objects of these runs are removed, and only where no commit member exists.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import chain
from typing import TYPE_CHECKING, Any

from wherry.errors import NotFoundError, TargetInUseError, UnsupportedError
from wherry.objects.listing_view import objects_below
from wherry.objects.stores import object_store
from wherry.objects.uploads import AnonymousUpload
from wherry.staging.lease_watch import MOST_BYTES, Verdict, owner_in, verdict_of_process
from wherry.staging.object_journal import NAME, without_parts
from wherry.staging.object_lease import ObjectLease
from wherry.staging.object_staging import areas_of, is_committed
from wherry.storage.ages import modified_time
from wherry.storage.folders import PREFIX, is_staging
from wherry.storage.location import MOST_CONFIG
from wherry.storage.sidecar import sidecar_name
from wherry.text.json_values import json_value

if TYPE_CHECKING:
    from collections.abc import Iterator

    from wherry.objects.uploads import ObjectStore, StoredObject, Upload
    from wherry.storage.location import Entry, Location

_LEASE = re.compile(rf"{re.escape(PREFIX)}(.+)\.lease")
_AREA = re.compile(rf"{re.escape(PREFIX)}(.+)\.(?:[0-9a-f]{{8}}|job)")
# Objects whose lines name runs, and those that name a run themselves; the folder of a job has them too.
_TELLING = (NAME, "job.json", "claim-")
_NAMED_BY_RUN = re.compile(r"(?:receipt|proof)-\d+-([0-9a-f]{8})")
_OF_OTHERS = 7 * 24  # times as long: programs keep uploads open for days and complete them when a job ends


@dataclass(slots=True)
class Leftover:
    """What is left of the runs that wrote one target.

    Attributes:
        target: the target.
        areas: folders of staging objects, and the folder of a job.
        lease: whether a lease is there.
        uploads: uploads of its objects that are not assembled.
    """

    target: Location
    areas: list[Location] = field(default_factory=list["Location"])
    lease: bool = False
    uploads: list[Upload] = field(default_factory=list["Upload"])

    @property
    def place(self) -> Location:
        """What it is called in a report: a folder of staging objects if there is one, else the lease or the target."""
        if self.areas:
            return self.areas[0]
        return self.lease_place if self.lease else self.target

    @property
    def lease_place(self) -> Location:
        """The lease."""
        return self.target.parent.join(f"{PREFIX}{self.target.name}.lease")


def leftovers(root: Location) -> list[Leftover]:
    """What is left below a folder, by target.

    Raises:
        StorageError: the storage failed.
    """
    found: dict[str, Leftover] = {}

    def of(target: Location) -> Leftover:
        return found.setdefault(target.path, Leftover(target))

    for folder, entry in _staging_entries(root):
        if area := _AREA.fullmatch(entry.name) if entry.is_dir else None:
            of(folder.join(area[1])).areas.append(folder.join(entry.name))
        elif lease := None if entry.is_dir else _LEASE.fullmatch(entry.name):
            of(folder.join(lease[1])).lease = True
    store = object_store(root.store)
    assert store is not None, "the caller has asked"
    for upload in store.uploads(f"{root.path.rstrip('/')}/"):
        owner = _owner(root, upload.path, found)
        of(owner).uploads.append(upload)
    return [found[path] for path in sorted(found)]


def clean_one(left: Leftover, *, dry_run: bool, min_age: float) -> tuple[int, bool, str]:
    """Remove what is left of the runs that wrote one target, if no run can be using it.

    Args:
        left: what is left.
        dry_run: remove nothing.
        min_age: seconds since anything of it was written; a week for an hour where another program may write.

    Returns:
        Its bytes, whether it was removed, and why or why not.

    Raises:
        StorageError: the storage failed.
    """
    store = object_store(left.target.store)
    assert store is not None, "the caller has asked"
    nbytes = sum(entry.size for area in left.areas for entry in objects_below(area))
    if _age(left) < min_age:
        return nbytes, False, "changed within the hour; may be in use"
    if _may_be_of_others(left, min_age):
        return nbytes, False, "an upload begun within the week, perhaps by another program"
    if dry_run:
        return nbytes, False, "dry run"
    try:
        with ObjectLease(store, left.lease_place, left.target.uri):
            nbytes += _remove(left, store)
    except TargetInUseError:
        return nbytes, False, "a running job holds its lease"
    return nbytes, True, "stale"


def tidy_objects(target: Location) -> None:
    """Remove what is left of a run that was killed just after its commit, unless another run holds the target.

    Raises:
        StorageError: the storage failed.
    """
    if object_store(target.store) is None:
        return
    left = Leftover(target, list(areas_of(target)))
    if left.areas or _is_abandoned(left.lease_place):
        clean_one(left, dry_run=False, min_age=0)


def _is_abandoned(lease: Location) -> bool:
    """Whether the owner of a lease was a process of this machine that has ended; others expire by themselves."""
    try:
        text = lease.read(0, MOST_BYTES)
    except NotFoundError:
        return False
    return verdict_of_process(owner_in(text)) is Verdict.DEAD


def _staging_entries(folder: Location) -> Iterator[tuple[Location, Entry]]:
    """Each lease and folder of staging objects below a folder, with its parent."""
    for entry in folder.entries():
        if is_staging(entry.name):
            yield folder, entry
        elif entry.is_dir:
            yield from _staging_entries(folder.join(entry.name))


def _owner(root: Location, path: str, found: dict[str, Leftover]) -> Location:
    """The target to which an upload belongs: one of which something else is left too, or the object itself."""
    for known in found.values():
        stem = known.target.parent.join(f"{PREFIX}{known.target.name}.").path
        if path == known.target.path or path.startswith((f"{known.target.path}/", stem)):
            return known.target
    place = root.join(path[len(root.path.rstrip("/")) + 1 :])
    area = _AREA.fullmatch(place.parent.name)
    return place.parent.parent.join(area[1]) if area else place


def _age(left: Leftover) -> float:
    """Seconds since anything of it was written; without limit if the store tells no times."""
    names = [(area, entry) for area in left.areas for entry in objects_below(area)]
    if left.lease and (lease := left.lease_place.stat()):
        names.append((left.lease_place.parent, lease))
    try:
        times = [modified_time(folder, [entry]) for folder, entry in names]
    except (UnsupportedError, NotFoundError):
        return time.time()
    return (datetime.now(UTC) - max(times)).total_seconds() if times else time.time()


def _may_be_of_others(left: Leftover, min_age: float) -> bool:
    """Whether only uploads are left that others may have begun, of which one is too young to be forgotten."""
    begun = [upload.begun for upload in left.uploads if isinstance(upload, AnonymousUpload)]
    alone = bool(begun) and not left.areas and not left.lease
    return alone and time.time() - max(begun) < _OF_OTHERS * min_age


def _remove(left: Leftover, store: ObjectStore) -> int:
    """Remove everything; returns the bytes of the target's own objects among it."""
    nbytes = 0
    for path, found in list(_orphans(left, store)):
        nbytes += found.nbytes * store.remove_object(path, found.mark)
    for upload in left.uploads:
        store.abort(upload)
    for area in left.areas:
        for entry in sorted(
            objects_below(area), key=lambda entry: entry.name, reverse=True
        ):  # the journal's head last
            place = area.join(entry.name).path
            if found := store.head(place):
                store.remove_object(place, found.mark)
    return nbytes


def _orphans(left: Leftover, store: ObjectStore) -> Iterator[tuple[str, StoredObject]]:
    """The objects of an uncommitted target, with the sidecar of a file, that runs of the journals have made."""
    for area in left.areas:
        runs, members = _journal_facts(area)
        if members is None or is_committed(left.target, members):
            continue
        below = (left.target.join(entry.name) for entry in without_parts(objects_below(left.target)))
        beside = left.target.parent.join(sidecar_name(left.target.name))
        for path in (place.path for place in chain(below, [beside])):
            found = store.head(path)
            if found is not None and found.run in runs:
                yield path, found


def _journal_facts(area: Location) -> tuple[set[str], tuple[str, ...] | None]:
    """The runs that a journal names, and the commit members of its target; None if it cannot be read."""
    runs, members = set[str](), None
    for entry in area.entries():
        if named := _NAMED_BY_RUN.fullmatch(entry.name):
            runs.add(named[1])
        if entry.name.startswith(_TELLING):
            for line in area.join(entry.name).read_whole(MOST_CONFIG).splitlines():
                try:
                    row: Any = json_value(line.partition(b"\t")[0])
                    runs |= {row["run"]} if "run" in row else set()
                    members = tuple(row["members"]) if "members" in row else members
                except (ValueError, TypeError, KeyError):
                    continue
    return runs, members
