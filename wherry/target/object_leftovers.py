"""object_leftovers: what runs that have ended have left below a folder in a store of objects.

That are leases, folders of staging objects with their journals, folders of jobs with their records, uploads that were
never assembled, and objects of targets that were never committed; all of one target is removed together. A journal or
a job names the runs that wrote it, and the commit members of the target: only objects of these runs are removed, and
only where no commit member exists.
"""

from __future__ import annotations

import re
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial, reduce
from itertools import chain
from typing import TYPE_CHECKING

from wherry.errors import NotFoundError, UnsupportedError
from wherry.storage.ages import modified_time
from wherry.storage.folders import PREFIX, is_staging
from wherry.storage.listing_view import objects_below
from wherry.storage.location import MOST_CONFIG
from wherry.storage.sidecar import sidecar_name
from wherry.store.store import AnonymousUpload
from wherry.target.lease import register_of
from wherry.target.lease_watch import Verdict, Watch
from wherry.target.leftovers import YOUNG, Leftover
from wherry.target.object_staging import areas_of, is_committed, uploads_of
from wherry.target.owners import JOB, JOB_SUFFIX, Owners, owners_by_lease, owners_of_job, unverified_row
from wherry.target.signed_log import NAME
from wherry.target.upload_run import is_inner

if TYPE_CHECKING:
    from collections.abc import Iterator

    from wherry.storage.location import Location
    from wherry.store.store import Entry, Store, StoredObject, Upload
    from wherry.target.lease import Lease

_LEASE = re.compile(rf"{re.escape(PREFIX)}(.+)\.lease")
_AREA = re.compile(rf"{re.escape(PREFIX)}(.+)\.(?:[0-9a-f]{{8}}|job)")
# Objects whose lines name runs, and those that name a run themselves; the folder of a job has them too.
_TELLING = (NAME, JOB, "claim-")
_NAMED_BY_RUN = re.compile(r"(?:receipt|proof)-\d+-([0-9a-f]{8})")
_OF_OTHERS = 7 * 24  # times as long: programs keep uploads open for days and complete them when a job ends


@dataclass(slots=True)
class _OfTarget:
    """What is left of the runs that wrote one target.

    Attributes:
        target: the target.
        areas: folders of staging objects, and the folder of a job.
        has_lease: whether a lease is there.
        uploads: uploads of its objects that are not assembled.
    """

    target: Location
    areas: list[Location] = field(default_factory=list["Location"])
    has_lease: bool = False
    uploads: list[Upload] = field(default_factory=list["Upload"])


def object_leftovers(root: Location, min_age: float) -> Iterator[Leftover]:
    """What is left below a folder, by target.

    Args:
        root: the folder.
        min_age: seconds since anything changed in what is old; a week for an hour where another program may write.

    Raises:
        StorageError: the storage failed.
    """
    found: dict[str, _OfTarget] = {}
    store = root.store
    # The uploads first: the lease of a run is there before its uploads.
    uploads = list(store.uploads(f"{root.path.rstrip('/')}/"))

    def of(target: Location) -> _OfTarget:
        return found.setdefault(target.path, _OfTarget(target))

    for folder, entry in _staging_entries(root):
        if area := _AREA.fullmatch(entry.name) if entry.is_dir else None:
            of(folder.join(area[1])).areas.append(folder.join(entry.name))
        elif lease := None if entry.is_dir else _LEASE.fullmatch(entry.name):
            of(folder.join(lease[1])).has_lease = True
    for upload in uploads:
        of(_owner(root, upload.path, found)).uploads.append(upload)
    for path in sorted(found):
        yield _leftover(found[path], min_age)


def leftover_objects(target: Location, *folders: Location) -> Leftover | None:
    """What is left of the runs of one target, if there are staging objects, or the lease of a process that has ended.

    Args:
        target: in a store of objects.
        folders: of a job, which is left too.

    Raises:
        StorageError: the storage failed.
    """
    left, register = _OfTarget(target, [*areas_of(target), *folders]), register_of(target)
    # An owner on another machine has ended when its lease expires.
    if left.areas or Watch(register.uri, register.look).look() is Verdict.DEAD:
        return _leftover(left, 0)
    return None


def _leftover(left: _OfTarget, min_age: float) -> Leftover:
    register, target = register_of(left.target), left.target
    owners, refusal = owners_by_lease(register), ""
    jobs = [area for area in left.areas if area.name.endswith(JOB_SUFFIX)]
    if jobs:
        owners = reduce(Owners.joined, map(owners_of_job, jobs), owners)
        refusal = YOUNG if _age(jobs) < min_age else ""
    if not (left.areas or left.has_lease):  # if the run has left anything else, all uploads are its own
        begun, left.uploads = left.uploads, [one for one in left.uploads if _is_own(one, min_age)]
        if begun and not left.uploads:
            owners = replace(owners, unnamed=True)
            refusal = "an upload begun within the week, perhaps by another program"
    place = left.areas[0].uri if left.areas else register.uri if left.has_lease else target.uri
    nbytes = sum(entry.size for area in left.areas for entry in objects_below(area))
    return Leftover(place, nbytes, owners, register, refusal, partial(_remove, left, nbytes))


def _staging_entries(folder: Location) -> Iterator[tuple[Location, Entry]]:
    """Each lease and folder of staging objects below a folder, with its parent."""
    for entry in folder.entries():
        if is_staging(entry.name):
            yield folder, entry
        elif entry.is_dir:
            yield from _staging_entries(folder.join(entry.name))


def _owner(root: Location, path: str, found: dict[str, _OfTarget]) -> Location:
    """The target to which an upload belongs: one of which something else is left too, or the object itself."""
    for known in found.values():
        stem = known.target.parent.join(f"{PREFIX}{known.target.name}.").path
        if path == known.target.path or path.startswith((f"{known.target.path}/", stem)):
            return known.target
    place = root.join(path[len(root.path.rstrip("/")) + 1 :])
    area = _AREA.fullmatch(place.parent.name)
    return place.parent.parent.join(area[1]) if area else place


def _age(folders: list[Location]) -> float:
    """Seconds since anything in some folders was written; without limit if the store tells no times."""
    names = [(folder, entry) for folder in folders for entry in objects_below(folder)]
    try:
        times = [modified_time(folder, [entry]) for folder, entry in names]
    except (UnsupportedError, NotFoundError):
        return time.time()
    return (datetime.now(UTC) - max(times)).total_seconds() if times else time.time()


def _is_own(upload: Upload, min_age: float) -> bool:
    """Whether wherry began an upload, or it is so old that its program has forgotten it.

    One to a staging object is of wherry, whoever began it: its beginning can be late, after the run has ended.
    """
    if not isinstance(upload, AnonymousUpload) or any(map(is_staging, upload.path.split("/"))):
        return True
    return upload.begun <= time.time() - _OF_OTHERS * min_age


def _remove(left: _OfTarget, nbytes: int, lease: Lease | None) -> int:
    """Remove everything; returns its bytes, with those of the target's own objects among it."""
    store = left.target.store
    assert lease is not None, "no store is full"
    guard = lease.require_fresh  # another run may have taken the target over meanwhile
    for path, found in list(_orphans(left, store)):
        nbytes += found.nbytes * store.remove_object(path, found.mark, guard)
    uploads = {(upload.path, upload.key): upload for upload in left.uploads}
    if left.areas or left.has_lease:  # a run that was stopped may have begun more, before it lost its lease
        uploads |= {(upload.path, upload.key): upload for upload in uploads_of(left.target, store)}
    for upload in uploads.values():
        guard()
        store.abort(upload)
    for area in left.areas:
        for entry in sorted(
            objects_below(area), key=lambda entry: entry.name, reverse=True
        ):  # the journal's head last
            place = area.join(entry.name).path
            if found := store.head(place):
                store.remove_object(place, found.mark, guard)
    return nbytes


def _orphans(left: _OfTarget, store: Store) -> Iterator[tuple[str, StoredObject]]:
    """The objects of an uncommitted target, with the sidecar of a file, that runs of the journals have made."""
    for area in left.areas:
        runs, members = _journal_facts(area)
        if members is None or is_committed(left.target, members):
            continue
        below = (left.target.join(one.name) for one in objects_below(left.target) if not is_inner(one.name))
        sidecar = left.target.parent.join(sidecar_name(left.target.name))
        for path in (place.path for place in chain(below, [sidecar])):
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
            lines: list[bytes] = []
            with suppress(NotFoundError):  # its run removes it at this moment, after its commit
                lines = area.join(entry.name).read_whole(MOST_CONFIG).splitlines()
            for line in lines:
                row = unverified_row(line)
                with suppress(TypeError):
                    runs |= {row["run"]} if "run" in row else set()
                    members = tuple(row["members"]) if "members" in row else members
    return runs, members
