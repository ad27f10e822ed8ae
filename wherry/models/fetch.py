"""fetch: copy a checkpoint and verify the copy by the recorded digests.

The files are copied unchanged, with sidecar and signature, into a staging area next to the target. There every tensor
and companion is read and compared with the manifest, whose digest must be the registered or recorded one; then the copy
is committed in one step. A run resumes the copy of a killed one. Bytes pass through a few buffers of 8 MiB; memory does
not grow with the model. A store gets parts as they are read, and copies the objects of its own bucket itself.
"""

from __future__ import annotations

import os
import time
from dataclasses import asdict, replace
from typing import Any

from wherry.core.detection import Detection
from wherry.core.digest import sha256_of
from wherry.core.interrupts import committing
from wherry.core.lazy_dataclass import dataclass
from wherry.core.progress import OnProgress
from wherry.core.request import SourceRequest
from wherry.core.units import DEFAULT_MEMORY, parse_budget
from wherry.cures import Argument, Command, Cure
from wherry.errors import (
    MismatchError,
    TargetExistsError,
    wherry_error,
)
from wherry.formats.checkpoint import Checkpoint, fingerprint, present_fingerprint
from wherry.formats.recorded_files import file_differences
from wherry.formats.registry import find_format
from wherry.ledger.record import RECORDED, REFUSED, not_recorded
from wherry.ledger.resolve import proved_digest, proved_sidecar, resolve_named
from wherry.prove.evidence import ReadOptions, compare
from wherry.store.folders import put_file
from wherry.store.local_store import locate
from wherry.store.location import Location
from wherry.store.sidecar import (
    MOST_SIDECAR,
    Sidecar,
    read_sidecar,
    sidecar_location,
    signature_location,
)
from wherry.store.store import Entry
from wherry.target.clean import tidy
from wherry.target.janitor import in_use
from wherry.target.sinks import is_unfinished, open_staging


@dataclass(frozen=True, slots=True)
class FetchReport:
    """The result of a fetch.

    Attributes:
        source: URI of the original.
        uri: URI of the copy; opens like any checkpoint.
        checkpoint_digest: identity of both.
        files: number of files, including sidecar and signature.
        nbytes: their bytes.
        resumed_bytes: how many of them a killed run had copied.
        seconds: wall time.
        already: whether the copy existed already; then it was only verified.
        lineage: `recorded`, or why the copy is not in the ledger.
    """

    source: str
    uri: str
    checkpoint_digest: str
    files: int
    nbytes: int
    resumed_bytes: int
    seconds: float
    already: bool
    lineage: str = "not recorded"

    def to_json(self) -> dict[str, Any]:
        """The JSON form, which `fetch --json` prints."""
        return {"schema": 1, **asdict(self)}


@dataclass(frozen=True, slots=True)
class Original:
    """A checkpoint that can be copied: its location, detection and sidecar, and its files, relative to `base`."""

    location: Location
    detection: Detection
    sidecar: Sidecar
    base: Location
    files: tuple[Entry, ...]
    mark: str

    @property
    def name(self) -> str:
        """Path of the checkpoint in the copied folder; empty where the target itself is the checkpoint."""
        alone = self.location.path == self.base.path or self.is_file
        return "" if alone else self.location.name

    @property
    def is_file(self) -> bool:
        """Whether the checkpoint is one file; then the target is a file too, with sidecar and signature next to it."""
        return self.location.path != self.base.path and len(self.members) == 1

    @property
    def members(self) -> list[Entry]:
        """The files of the checkpoint itself."""
        own = {sidecar_location(self.location).name, signature_location(self.location).name}
        return [entry for entry in self.files if entry.name not in own]


def fetch(
    uri: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    memory: str | int = DEFAULT_MEMORY,
    progress: OnProgress | None = None,
) -> FetchReport:
    """Copy a checkpoint and verify the copy.

    Args:
        uri: a checkpoint that has a sidecar, or a model URI (`models:/name@alias`, `wherry://sha256/…`).
        target: URI of the copy: a folder, or a file where the checkpoint is one file.
        memory: budget for the verification.
        progress: called a few times a second.

    Raises:
        NotFoundError: the checkpoint does not exist, or no digests are recorded for it.
        MismatchError: the copy or the sidecar differs from the record; the copy is removed.
        IncompleteError: files are missing.
        TargetExistsError: the target is another checkpoint or file.
        StorageError: the storage failed; where a retry can help, the copied files are kept for it.
        NotRecordedError: the copy is committed and verified, but not in the ledger; `result` is the FetchReport.
    """
    subject = find_original(SourceRequest(os.fspath(uri)))
    return _record(subject, copy_proved(subject, locate(target), memory, progress))


def find_original(source: SourceRequest) -> Original:
    """The checkpoint that a request names, with its proved record.

    Raises:
        NotFoundError, MismatchError: as `fetch`.
    """
    from wherry.formats.detect import resolve_source

    location, detection = resolve_source(resolve_named(source))
    sidecar = proved_sidecar(location, "fetch")
    with Checkpoint(find_format(detection.format).open(location, detection)) as opened:
        members = list(opened.reader.members())
        mark = present_fingerprint(opened)
    entry = location.entry
    base = location if entry is not None and entry.is_dir else location.parent
    extra = [place.stat() for place in (sidecar_location(location), signature_location(location))]
    names = {member.name for member in members}
    files = (*members, *(one for one in extra if one is not None and one.name not in names))
    return Original(location, detection, sidecar, base, files, mark)


def copy_proved(
    subject: Original, place: Location, memory: str | int = DEFAULT_MEMORY, progress: OnProgress | None = None
) -> FetchReport:
    """As `fetch`, of a checkpoint that was found; the ledger gets no statement of the copy."""
    clock = time.monotonic()
    already = place.exists() and not is_unfinished(
        place, find_format(subject.detection.format).commit_members
    )
    home = place.join(subject.name) if subject.name else place
    with in_use(subject.location.uri):
        resumed = 0 if already else _copy(subject, place, memory, progress)
    digest = subject.sidecar.checkpoint.checkpoint_digest
    if already:
        sidecar = read_sidecar(home) if home.exists() else None
        if sidecar is None or proved_digest(sidecar) != digest:
            raise TargetExistsError(
                "target already exists and is another checkpoint",
                uri=home.uri,
                cure="choose another target, or remove this one",
                stage="fetch",
            )
        tidy(place)
        _prove(subject, home, memory, progress)
    if subject.is_file:
        # After the commit, unless the target has one; a rerun repeats this after a kill.
        signature, copied = signature_location(subject.location), signature_location(locate(place.uri))
        if signature.exists() and not copied.exists():
            put_file(copied, signature.read_whole(MOST_SIDECAR))
    nbytes = sum(entry.size for entry in subject.files)
    seconds = round(time.monotonic() - clock, 3)
    count = len(subject.files)
    return FetchReport(subject.location.uri, home.uri, digest, count, nbytes, resumed, seconds, already)


def _copy(subject: Original, place: Location, memory: str | int, progress: OnProgress | None) -> int:
    """Stage, copy, verify, commit; return the bytes that an earlier run had copied."""
    header = {"digest": subject.sidecar.checkpoint.checkpoint_digest, "files": subject.mark}
    members, budget = find_format(subject.detection.format).commit_members, parse_budget(memory)
    nbytes = sum(entry.size for entry in subject.files)
    staging = open_staging(
        place,
        sha256_of("fetch", header)[:8],
        header,
        members,
        nbytes,
        is_file=subject.is_file,
        memory=budget,
    )
    with staging:
        area = staging.location
        pairs = (
            [(subject.base.member(entry.name), area, entry) for entry in subject.members]
            if subject.is_file
            else [
                (subject.base.member(entry.name), area.member(entry.name), entry) for entry in subject.files
            ]
        )
        resumed = staging.copy_files(pairs, budget, progress)
        _prove(subject, area.join(subject.name) if subject.name else area, memory, progress)
        sidecar = sidecar_location(subject.location).read_whole(MOST_SIDECAR) if subject.is_file else None
        staging.prove_small()
        with committing(place.uri):
            staging.commit(sidecar)
    return resumed


def _prove(subject: Original, home: Location, memory: str | int, progress: OnProgress | None) -> None:
    """Read every byte of a copy and compare its digests with the record."""
    sidecar, options = subject.sidecar, ReadOptions(parse_budget(memory), progress)
    with _open_copy(subject, home) as copy:
        failed = compare(copy, sidecar, sidecar.algorithm, options).failed
        if failed:
            raise MismatchError(
                f"the copy differs from the record: {failed[0].reason}",
                uri=subject.location.uri,
                path=failed[0].path,
                cure=Cure(
                    "run {} to check the original",
                    Command("verify", subject.location.uri, Argument("level", "digest")),
                ),
                stage="fetch",
            )
        extra = file_differences(copy, home, sidecar).strange
        if extra:
            raise MismatchError(
                f"the file {extra[0]} has no recorded digest",
                uri=subject.location.uri,
                path=extra[0],
                cure=Cure(
                    "remove it from the original, or run {}",
                    Command("inspect", subject.location.uri, Argument("digest"), Argument("write")),
                ),
                stage="fetch",
            )


def _open_copy(subject: Original, home: Location) -> Checkpoint:
    """A copy, opened with the detection of the original, because the name of a staging area has no meaning."""
    detection = replace(subject.detection, uri=home.uri)
    return Checkpoint(find_format(detection.format).open(home, detection))


def _record(subject: Original, done: FetchReport) -> FetchReport:
    """Record the place of the copy in the ledger."""
    from wherry.ledger.record import open_ledger, record_sighting

    location = locate(done.uri)
    try:
        with _open_copy(subject, location) as copy:
            mark = fingerprint(copy.reader.members(), location)
        with open_ledger() as ledger:
            record_sighting(ledger, replace(subject.sidecar.checkpoint, uri=location.uri, fingerprint=mark))
    except Exception as caught:
        cause = wherry_error(caught)
        error = not_recorded(cause, [done.uri])
        error.result = replace(done, lineage=REFUSED + cause.what)
        raise error from caught
    return replace(done, lineage=RECORDED)
