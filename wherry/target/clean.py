"""clean: remove what killed conversions left behind, in the places of their targets and elsewhere on this machine.

- Below a local folder: areas, leases, drafts and temporary folders.
- Below a folder in a store of objects: leases, folders of staging objects with their journals, folders of jobs with
  their records, uploads that were never assembled, and objects of targets that were never committed; all of one target
  is removed together. A journal or a job names the runs that wrote it, and the commit members of the target: only
  objects of these runs are removed, and only where no commit member exists.
- In a repository of the Hub: branches (`hub_repository`). Elsewhere: what this machine has noted (`janitor`).

`wherry.target.leftovers` has the rule: what nobody uses is removed.
"""

from __future__ import annotations

import os
import re
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import field, replace
from datetime import UTC, datetime
from functools import partial, reduce
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from wherry.core.lazy_dataclass import dataclass
from wherry.errors import NotFoundError, TargetInUseError, UnsupportedError, UsageError, storage_errors
from wherry.store.folders import PREFIX, is_staging, remove, short_name, staging_stem
from wherry.store.local_store import local_location, locate
from wherry.store.location import Location, modified_time
from wherry.store.object_view import objects_below
from wherry.store.sidecar import sidecar_name
from wherry.store.store import AnonymousUpload, Entry, Store, StoredObject, Upload
from wherry.target.hub_repository import clean_repository
from wherry.target.janitor import end_runs, left_behind, left_runs
from wherry.target.janitor import tidy as tidy_left_behind
from wherry.target.lease import Lease, LeaseFile, Verdict, Watch, register_of
from wherry.target.leftovers import (
    JOB,
    JOB_SUFFIX,
    TASK_RECORD,
    YOUNG,
    CleanReport,
    Leftover,
    Owners,
    clean_leftovers,
    owners_by_lease,
    owners_of_export,
    owners_of_job,
    unverified_row,
)
from wherry.target.object_staging import areas_of, is_committed, uploads_of
from wherry.target.signed_log import MOST_BYTES, NAME
from wherry.target.staging import FileStaging, set_aside
from wherry.target.upload_run import is_inner

_QUIET_SECONDS = 3600  # what names no owner, and was touched within the hour, may be in use
_SPOOL = ".spool"  # suffix of the folder of an export
_OWN_LEASES = (".lease", ".reading")
_HEX = r"[0-9a-f]{8}(?:-[0-9a-f]{8})?"
_OF_TARGET = re.compile(rf"(.+)\.{_HEX}(?:\.[a-z]+)?")
# The names that wherry gives, with the name of the target: leases, areas and drafts; and its temporary folders.
_OWN = re.compile(
    rf"\{PREFIX}(?:(.+?)\.(?:{_HEX}(?:\.[a-z]+)?|lease|reading|draft|job)|(?:spill-|audit-|dask-|ray-|logits\.)\w{{8,16}})"
)
# The files of a spool folder of a live state; `wherry.live`.
_SPOOLED = re.compile(r"(?:part|share|seen|here)-\d+(?:\.json)?")
_LEASE_OBJECT = re.compile(rf"{re.escape(PREFIX)}(.+)\.lease")
_OBJECT_FOLDER = re.compile(rf"{re.escape(PREFIX)}(.+)\.(?:[0-9a-f]{{8}}|job)")
# Objects whose lines name runs; the folder of a job has them too, and records that name a run themselves.
_TELLING = (NAME, JOB, "claim-")
_OF_OTHERS = 7 * 24  # times as long: programs keep uploads open for days and complete them when a job ends


def clean(
    root: str | os.PathLike[str], *, dry_run: bool = False, min_age: float = _QUIET_SECONDS
) -> list[CleanReport]:
    """Remove stale staging areas below a root, and the files that ended processes of this machine left elsewhere.

    The runs that their registrations left open in MLflow are ended.

    Args:
        root: a local folder, one in a store of objects, or a repository of the Hub.
        dry_run: only list them.
        min_age: seconds since anything changed in what names no owner that can be checked: a job that waits for
            workers, a branch of the Hub, a temporary folder; younger ones are left, as they may be in use.

    Raises:
        NotFoundError: the root does not exist.
        UsageError: the root is in a store that only reads.
        StorageError: an area could not be removed.
    """
    below = _clean_below(locate(root), dry_run=dry_run, min_age=min_age)
    reason = "dry run" if dry_run else "its process has ended"
    rows = [(left, nbytes_of(left.path)) for left in left_behind()]
    removed = set() if dry_run else set(tidy_left_behind())
    files = [CleanReport(str(left.path), nbytes, left in removed, reason) for left, nbytes in rows]
    runs = left_runs()
    ended = set() if dry_run else set(end_runs())
    return [
        *below,
        *files,
        *(
            CleanReport(
                left.store, 0, left in ended, reason if dry_run or left in ended else "it does not answer"
            )
            for left in runs
        ),
    ]


def tidy(target: Location) -> None:
    """Remove the leftovers of a run that was killed just after its commit, unless another run holds the target.

    Raises:
        StorageError: the storage failed.
    """
    if target.store.capabilities.local:
        folder, stem = Path(target.path).parent, f"{staging_stem(target.name)}."
        with storage_errors(target.uri):
            if any(path.name.startswith(stem) for path in folder.iterdir()):
                discard_areas(target)
    elif target.store.capabilities.parts:
        left = leftover_objects(target)
        clean_leftovers([left] if left else [], dry_run=False)


def discard_areas(target: Location) -> None:
    """Remove all staging areas of a local target, unless another run holds it.

    Raises:
        StorageError: the storage failed.
    """
    try:
        with FileStaging(target, "0" * 8, resume=False):
            pass  # entering discards areas of other runs, leaving releases the lease
    except TargetInUseError:
        return


def _clean_below(location: Location, *, dry_run: bool, min_age: float) -> list[CleanReport]:
    local, parts = location.store.capabilities.local, location.store.capabilities.parts
    if not (local or parts or location.store.capabilities.one_commit):
        raise UsageError(
            f"{location.store.protocol}:// has no staging areas to clean",
            uri=location.uri,
            cure="pass a local folder, gs://, s3:// or az://",
        )
    if local and location.entry is None:
        raise NotFoundError("folder not found", uri=location.uri, cure="check the path")
    with storage_errors(location.uri):
        if not (local or parts):
            return list(clean_repository(location, dry_run=dry_run, min_age=min_age))
        if local:
            return clean_leftovers(file_leftovers(Path(location.path), min_age), dry_run=dry_run)
        return clean_leftovers(object_leftovers(location, min_age), dry_run=dry_run)


class _SeenState(NamedTuple):
    """The state of a file or folder, which changes when it is used."""

    files: int  # and folders
    nbytes: int
    changed: int  # nanoseconds, by the clock of the file system


def file_leftovers(folder: Path, min_age: float) -> Iterator[Leftover]:
    """The leftovers below a folder; a running conversion may remove files meanwhile.

    Args:
        folder: the folder.
        min_age: seconds since anything changed in what is old.

    Raises:
        OSError: the storage failed.
    """
    for path in sorted(_areas(folder)):
        state, lease = _state(path), _lease_of(path)
        if state is not None:
            # A time far in the future comes from a wrong clock.
            young = abs(time.time() - state.changed / 1e9) < min_age
            register = None if lease is None else LeaseFile(lease)
            yield Leftover(
                str(path),
                state.nbytes,
                _owners_of(path, register),
                register,
                YOUNG if young else "",
                partial(_remove_area, path, state, is_lease=path == lease),
            )


def _owners_of(path: Path, register: LeaseFile | None) -> Owners:
    """The processes that may use an area; those of a temporary folder are not known."""
    owners = Owners(unnamed=True) if register is None else owners_by_lease(register)
    if path.suffix == _SPOOL:
        return owners.joined(owners_of_export(path))
    job = None if register is None or register.path == path else register.path.with_suffix(JOB_SUFFIX)
    if job is not None and job.is_dir():
        return owners.joined(owners_of_job(local_location(str(job))))
    return owners


def _remove_area(path: Path, state: _SeenState, lease: Lease | None, *, is_lease: bool) -> int | str | None:
    """Remove an area if it is as it was: another run may have used it since its owners were checked.

    It is renamed first, so that no run resumes what is left of it if the removal ends halfway.
    """
    if is_lease:  # releasing the lease removes it
        return "no space to take its lease" if lease is None else state.nbytes
    now = _state(path)
    if now is None:
        return None
    if now != state:
        return "a run has just used it"
    try:
        remove(set_aside(path) if _OF_TARGET.fullmatch(path.name) else path)
    except FileNotFoundError:
        return None  # another run has resumed it
    return state.nbytes


def nbytes_of(path: Path) -> int:
    """Bytes of a file, or of all files in a folder."""
    state = _state(path)
    return state.nbytes if state else 0


def _areas(folder: Path) -> Iterator[Path]:
    try:
        children = list(folder.iterdir())
    except FileNotFoundError:
        return  # removed by another process
    for child in children:
        if is_staging(child.name):
            if _is_own_area(child):
                yield child
        elif child.is_dir() and not child.is_symlink():
            yield from _areas(child)


def _is_own_area(area: Path) -> bool:
    """Whether wherry made what has the name of a staging area.

    Its whole name has a form that wherry gives, and a folder is empty or holds one of wherry's files: the target under
    its name, a file with wherry's prefix, the record of a job, or a part of a live state.
    """
    named = _OWN.fullmatch(area.name)
    if named is None:
        return False
    target = named[1]
    if target is None or area.is_symlink() or not area.is_dir():
        return True
    with suppress(FileNotFoundError):
        names = [child.name for child in area.iterdir()]
        return not names or any(map(partial(_is_of_target, target), names))
    return False  # removed by another process


def _is_of_target(target: str, name: str) -> bool:
    own = short_name(name) == target or name == JOB or name.startswith(PREFIX)
    return own or _SPOOLED.fullmatch(name) is not None


def _lease_of(area: Path) -> Path | None:
    """The lease of an area: a run that reads back for hours holds it, but does not change its area meanwhile."""
    if area.suffix in _OWN_LEASES:
        return area
    if area.suffix == JOB_SUFFIX:
        return area.with_suffix(".lease")
    stem = _OF_TARGET.fullmatch(area.name)
    return area.with_name(f"{stem[1]}.lease") if stem else None


def _state(path: Path) -> _SeenState | None:
    found = [_status(path)]
    if path.is_dir() and not path.is_symlink():
        for folder, folders, files in os.walk(path):
            found += [_status(Path(folder) / name) for name in (*folders, *files)]
    if found[0] is None:
        return None
    status = [one for one in found if one]  # others no longer exist
    nbytes = sum(one.st_size for one in status if not stat.S_ISDIR(one.st_mode))
    return _SeenState(len(status), nbytes, max(one.st_mtime_ns for one in status))


def _status(path: Path) -> os.stat_result | None:
    try:
        return path.lstat()
    except FileNotFoundError:
        return None


@dataclass(slots=True)
class _OfTarget:
    """The leftovers of the runs that wrote one target.

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
    """The leftovers below a folder of a store, by target.

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
        if area := _OBJECT_FOLDER.fullmatch(entry.name) if entry.is_dir else None:
            of(folder.join(area[1])).areas.append(folder.join(entry.name))
        elif lease := None if entry.is_dir else _LEASE_OBJECT.fullmatch(entry.name):
            of(folder.join(lease[1])).has_lease = True
    for upload in uploads:
        of(_owner(root, upload.path, found)).uploads.append(upload)
    for path in sorted(found):
        yield _leftover(found[path], min_age)


def leftover_objects(target: Location, *folders: Location) -> Leftover | None:
    """The leftovers of one target's runs, if there are staging objects, or the lease of a process that has ended.

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
        begun, left.uploads = left.uploads, [one for one in left.uploads if _is_own_upload(one, min_age)]
        if begun and not left.uploads:
            owners = replace(owners, unnamed=True)
            refusal = "an upload begun within the week, perhaps by another program"
    place = left.areas[0].uri if left.areas else register.uri if left.has_lease else target.uri
    nbytes = sum(entry.size for area in left.areas for entry in objects_below(area))
    return Leftover(place, nbytes, owners, register, refusal, partial(_remove_objects, left, nbytes))


def _staging_entries(folder: Location) -> Iterator[tuple[Location, Entry]]:
    """Each lease and folder of staging objects below a folder, with its parent."""
    for entry in folder.entries():
        if is_staging(entry.name):
            yield folder, entry
        elif entry.is_dir:
            yield from _staging_entries(folder.join(entry.name))


def _owner(root: Location, path: str, found: dict[str, _OfTarget]) -> Location:
    """The target that an upload belongs to: a target with other leftovers, or else the object itself."""
    for known in found.values():
        stem = known.target.parent.join(f"{PREFIX}{known.target.name}.").path
        if path == known.target.path or path.startswith((f"{known.target.path}/", stem)):
            return known.target
    place = root.join(path[len(root.path.rstrip("/")) + 1 :])
    area = _OBJECT_FOLDER.fullmatch(place.parent.name)
    return place.parent.parent.join(area[1]) if area else place


def _age(folders: list[Location]) -> float:
    """Seconds since anything in some folders was written; without limit if the store tells no times."""
    names = [(folder, entry) for folder in folders for entry in objects_below(folder)]
    try:
        times = [modified_time(folder, [entry]) for folder, entry in names]
    except (UnsupportedError, NotFoundError):
        return time.time()
    return (datetime.now(UTC) - max(times)).total_seconds() if times else time.time()


def _is_own_upload(upload: Upload, min_age: float) -> bool:
    """Whether wherry began an upload, or it is so old that its program has forgotten it.

    One to a staging object is of wherry, whoever began it: its beginning can be late, after the run has ended.
    """
    if not isinstance(upload, AnonymousUpload) or any(map(is_staging, upload.path.split("/"))):
        return True
    return upload.begun <= time.time() - _OF_OTHERS * min_age


def _remove_objects(left: _OfTarget, nbytes: int, lease: Lease | None) -> int:
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
        if named := TASK_RECORD.fullmatch(entry.name):
            runs.add(named[4])
        if entry.name.startswith(_TELLING):
            lines: list[bytes] = []
            with suppress(NotFoundError):  # its run removes it at this moment, after its commit
                lines = area.join(entry.name).read_whole(MOST_BYTES).splitlines()
            for line in lines:
                row = unverified_row(line)
                with suppress(TypeError):
                    runs |= {row["run"]} if "run" in row else set()
                    members = tuple(row["members"]) if "members" in row else members
    return runs, members
