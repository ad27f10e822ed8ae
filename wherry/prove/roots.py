"""A walk below the roots of an audit: checkpoints that were never converted, and files that belong to no checkpoint.

`discover` finds the checkpoints, which are compared with the ledger. A file is unknown if it is neither inside a
checkpoint, nor its sidecar, nor a part that its reader lists. Lists are truncated at a limit, with a count of the rest,
so that a folder of a million files takes one line.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field
from typing import NamedTuple

from wherry.core.detection import Detection
from wherry.core.lazy_dataclass import dataclass
from wherry.core.request import SourceRequest
from wherry.errors import CrowdedFolderError, NotFoundError, WherryError
from wherry.formats.checkpoint import open_source, present_fingerprint
from wherry.formats.discover import DEEPEST, SkippedPath, discover, is_folder_link
from wherry.ledger.replay import LedgerState
from wherry.ledger.resolve import checkpoint_uri
from wherry.prove.report import Finding
from wherry.store.folders import is_staging
from wherry.store.local_store import locate
from wherry.store.location import Location, age_of
from wherry.store.sidecar import read_sidecar, sidecar_name, signature_name

LISTED = 1000  # maximum findings of one kind; the rest is counted
_NANOSECONDS = 1_000_000_000


class UnconvertedCheckpoint(NamedTuple):
    """A checkpoint that was not converted, or changed since.

    Attributes:
        uri: its URI.
        format: its format.
        step: training step, where known.
        age: seconds since its last file was written; None where the store does not state times.
        reason: `never converted`, or what changed.
    """

    uri: str
    format: str
    step: int | None
    age: float | None
    reason: str


@dataclass(slots=True)
class RootSurvey:
    """The contents of the roots.

    Attributes:
        waiting: checkpoints that were not converted.
        unrecorded: checkpoints whose sidecar records a conversion that is not in the ledger.
        skipped: paths that do not count as checkpoints, and why.
        unknown: files that belong to no checkpoint.
        unlisted: number of further unknown files.
    """

    waiting: list[UnconvertedCheckpoint] = field(default_factory=list[UnconvertedCheckpoint])
    unrecorded: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    skipped: list[SkippedPath] = field(default_factory=list[SkippedPath])
    unknown: list[str] = field(default_factory=list[str])
    unlisted: int = 0


def survey_roots(roots: Sequence[str], known: LedgerState) -> RootSurvey:
    """Walk below the roots.

    Args:
        roots: URIs.
        known: the ledger state.

    Raises:
        NotFoundError: a root does not exist.
    """
    result = RootSurvey()
    for root in roots:
        found = list(discover(root, on_skip=result.skipped.append))
        result.waiting += (waiting for one in found if (waiting := _waiting(one, known)) is not None)
        result.unrecorded += [row for one in found if (row := _unrecorded_checkpoint(one, known)) is not None]
        _unknown_files(locate(root), {locate(one.uri).uri: one for one in found}, result)
    return result


def findings_of(result: RootSurvey, *, as_of: str | None = None) -> Iterator[Finding]:
    """The survey as findings; with `as_of`, checkpoints that the ledger state does not have are not findings."""
    for uri, digest in result.unrecorded[:LISTED] if as_of is None else ():
        yield Finding("unrecorded", "its sidecar records a conversion that is not in the ledger", uri, digest)
    for one in result.waiting[:LISTED]:
        age = "" if one.age is None else f", {one.age / 3600:.1f} hours old"
        yield Finding("unconverted", f"{one.format}{age}: {one.reason}", one.uri)
    yield from _rest("unconverted", len(result.waiting) - LISTED)
    for uri in result.unknown:
        yield Finding("unknown-file", "it belongs to no checkpoint", uri)
    yield from _rest("unknown-file", result.unlisted)
    for skipped in result.skipped[:LISTED]:
        yield Finding("passed-over", skipped.reason, skipped.uri)
    yield from _rest("passed-over", len(result.skipped) - LISTED)


def _rest(kind: str, count: int) -> Iterator[Finding]:
    if count > 0:
        yield Finding(kind, f"and {count} more")


def _waiting(found: Detection, known: LedgerState) -> UnconvertedCheckpoint | None:
    """Why a checkpoint counts as not converted; None where wherry wrote it, or has converted its current files."""
    location = locate(found.uri)
    place = known.places.get(location.uri)
    if place is not None and place.role == "written":
        return None
    try:
        reason = _reason(location, found, known)
    except WherryError as error:
        reason = f"{error.verdict}: {error.what}"
    return (
        UnconvertedCheckpoint(location.uri, found.format, found.step, age_of(location), reason)
        if reason
        else None
    )


def _unrecorded_checkpoint(found: Detection, known: LedgerState) -> tuple[str, str] | None:
    """URI and checkpoint digest of a checkpoint that wherry wrote, if it is not in the ledger."""
    location = locate(found.uri)
    if location.uri in known.places:
        return None
    try:
        sidecar = read_sidecar(location)
    except WherryError:
        return None  # the check of the checkpoint reports it
    if (
        sidecar is None
        or sidecar.receipt is None
        or sidecar.checkpoint.checkpoint_digest in known.checkpoints
    ):
        return None
    return location.uri, sidecar.checkpoint.checkpoint_digest


def _reason(location: Location, found: Detection, known: LedgerState) -> str | None:
    fingerprints = known.by_source.get(location.uri)
    if fingerprints is None:
        sidecar = read_sidecar(location)
        return None if sidecar is not None and sidecar.receipt is not None else "never converted"
    with open_source(SourceRequest(location.uri, found.format)) as checkpoint:
        now = present_fingerprint(checkpoint)
    return None if now in fingerprints else "changed since it was converted"


def _unknown_files(
    root: Location, claimed: Mapping[str, Detection], result: RootSurvey, depth: int = 0
) -> None:
    """Find the files below a root that belong to no checkpoint."""
    if root.uri in claimed or root.entry is None:
        return
    try:
        names = {entry.name: entry for entry in root.entries()}
    except CrowdedFolderError:  # it is passed over by the walk, too
        _add_unknown(root, result)
        return
    parts = {
        part for name in names if (one := claimed.get(root.join(name).uri)) for part in _parts_of(one, name)
    }
    for name, entry in names.items():
        place = root.join(name)
        if place.uri in claimed or name in parts or is_staging(name) or is_folder_link(place, entry):
            continue
        if entry.is_dir and depth < DEEPEST:  # what is deeper is listed as one unknown folder
            _unknown_files(place, claimed, result, depth + 1)
        else:
            _add_unknown(place, result)


def _add_unknown(place: Location, result: RootSurvey) -> None:
    if len(result.unknown) < LISTED:
        result.unknown.append(place.uri)
    else:
        result.unlisted += 1


def _parts_of(found: Detection, name: str) -> set[str]:
    """Names of the files that belong to a single-file checkpoint: sidecar, signature, parts that its reader lists."""
    own = {sidecar_name(name), signature_name(name)}
    if (entry := locate(found.uri).entry) is None or entry.is_dir:
        return own
    try:
        with open_source(SourceRequest(found.uri, found.format)) as checkpoint:
            return own | {member.name.split("/")[0] for member in checkpoint.reader.members()}
    except WherryError:
        return own  # the check of the checkpoint reports it; here only names count


def normalise_roots(roots: Sequence[str]) -> list[str]:
    """The roots as normalised URIs; the beginning of a digest stands for the place of its checkpoint.

    Raises:
        NotFoundError: a root does not exist.
        AmbiguousError: several checkpoints have a digest with this beginning.
    """
    places = [locate(checkpoint_uri(root)) for root in roots]
    for place in places:
        if place.entry is None:
            raise NotFoundError(
                "file or folder not found", uri=place.uri, cure="check the path", stage="audit"
            )
    return [place.uri for place in places]
