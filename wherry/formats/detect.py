"""detect: identify the checkpoint at a URI from metadata alone, with the evidence.

Every format of the registry looks at names and first bytes; the most specific one wins. Then the checkpoint's
metadata is opened, every expected chunk is looked up, and matrices are checked for parts that were never gathered
(`wherry.formats.shortage`), so that the verdict says whether it is complete. A run
folder stands for its newest complete step; the evidence lists the steps that were skipped.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, cast

from wherry.core.detection import Detection, Evidence, Verdict
from wherry.core.keypath import KeyPath, render
from wherry.core.steps import StepFolder, step_number, steps_among, unfinished_reason
from wherry.core.units import plural
from wherry.cures import Argument, Blank, Command, Cure
from wherry.errors import (
    AmbiguousError,
    DamagedError,
    IncompleteError,
    MissingExtraError,
    NotACheckpointError,
    NotFoundError,
    UnsupportedError,
    UsageError,
    WherryError,
    storage_errors,
)
from wherry.formats.file_names import COMMIT_SUCCESS, is_part, unsupported_form
from wherry.formats.format import Absent, Contents, Format, Glimpse
from wherry.formats.nearby import MOST_LOOKED_AT, checkpoints_among, cure_of_absence, cure_of_nothing
from wherry.formats.registry import FormatFacts, Formats, find_format, formats
from wherry.formats.shortage import shortage
from wherry.store.folders import is_staging
from wherry.store.local_store import LocalStore, locate, locate_below, with_open_root
from wherry.store.location import Location
from wherry.store.object_view import ObjectView, view_of_store
from wherry.store.open_file import root_within
from wherry.store.sidecar import FOLDER_NAME, readable_sidecar
from wherry.store.store import Entry

if TYPE_CHECKING:
    from wherry.core.request import SourceRequest

# Folders that training systems put between a run and its steps.
_STEP_ROOTS = ("checkpoints", "checkpoint")
_DIGITS = re.compile(r"(\d{1,18})")


def detect_source(source: SourceRequest) -> Detection:
    """Identify the checkpoint that a request names; a damaged, hostile or unknown one is a verdict, not an error.

    Raises:
        UsageError: the URI or the format is invalid.
        NotFoundError: the file, folder or step was not found.
        MissingExtraError: the package for the protocol is not installed.
        StorageError: the storage failed.
    """
    try:
        location, found = resolve_source(source)
    except (NotFoundError, MissingExtraError, UsageError, OSError):
        raise
    except WherryError as error:
        return Detection(
            uri=error.uri or source.uri,
            format="none",
            verdict=_verdict(error),
            reason=error.what,
            cure=error.cure,
        )
    return examine(location, found)


def resolve_source(source: SourceRequest) -> tuple[Location, Detection]:
    """Find the one checkpoint that a request names, by names and first bytes only.

    Raises:
        NotFoundError: the file, folder, step or item was not found.
        NotACheckpointError: no format recognises it.
        AmbiguousError: several formats or items match equally well.
        IncompleteError: it is a staging folder, or an empty step folder.
        HostileError: the step or item is a link that must not be followed.
    """
    opaque = frozenset(source.allow_opaque)
    named = with_open_root(
        locate(source.uri, opaque) if source.below is None else locate_below(source.below, source.uri, opaque)
    )
    location = _existing(source.uri, view_of_store(named))
    step = source.step
    if is_staging(location.name) or is_staging(location.parent.name):
        around = location.parent if is_staging(location.name) else location.parent.parent
        raise IncompleteError(
            "staging area of an unfinished conversion",
            uri=location.uri,
            cure=Cure(
                "run the conversion again, or remove the staging area: {}", Command("clean", around.uri)
            ),
        )
    rows = formats() if source.format is None else {source.format: find_format(source.format)}
    if step is not None and step_number(location.name, any_prefix=True) != step:
        location = _step_folder(location, step)
    chosen: tuple[Evidence, ...] = ()
    if source.item is not None:
        location, chosen = _item(location, source.item, rows)
    glimpse = Glimpse(location)
    found = look(glimpse, rows) or _in_run(glimpse, rows)
    if found is None:
        raise _record_without_checkpoint(glimpse, source.format) or _nothing(glimpse, source.format)
    store = location.store
    is_root = isinstance(store, LocalStore) and store.root is not None and store.root.path == location.path
    if not is_root or found.uri != location.uri:
        location = locate_near(location, found.uri)  # the root of everything that is read of the checkpoint
    return location, replace(found, evidence=(*chosen, *found.evidence))


def look(glimpse: Glimpse, rows: Mapping[str, Format]) -> Detection | None:
    """The most specific detection of a location itself, or None.

    Raises:
        AmbiguousError: two formats recognise it and neither refines the other.
    """
    if len(rows) > 1 and is_part(glimpse):
        return None  # unless its format was chosen
    facts = rows.facts if isinstance(rows, Formats) else rows
    names = [name for name, row in facts.items() if row.signs is None or row.signs.are_at(glimpse)]
    claims = {name: claim for name in names if (claim := rows[name].detect(glimpse)) is not None}
    if not claims:
        return None
    refined = {base for name in claims for base in _bases(name, facts)}
    winners = [name for name in claims if name not in refined]
    if len(winners) > 1:
        raise AmbiguousError(
            f"ambiguous format: this could be {' or '.join(winners)}",
            uri=glimpse.location.uri,
            cure=Cure(
                "choose one with {}, for example {}", Argument("format"), Argument("format", winners[0])
            ),
        )
    rest = tuple(name for name in claims if name != winners[0])
    return replace(claims[winners[0]], also=rest)


def examine(location: Location, found: Detection) -> Detection:
    """Open the metadata of a detected checkpoint and look up every chunk; the verdict states the result."""
    if found.verdict != "ok":
        return found
    try:
        opened = find_format(found.format).open(location, found)
    except OSError:
        raise
    except WherryError as error:
        return replace(found, verdict=_verdict(error), reason=error.what)
    try:
        reason = absence(opened.reader)
    except OSError:
        raise
    except WherryError as error:  # chunks that overlap, for example
        return replace(found, verdict=_verdict(error), reason=error.what)
    finally:
        opened.reader.close()
    detection = replace(opened.detection, also=found.also)
    if reason:
        return replace(detection, verdict="incomplete", reason=reason)
    parts = shortage(opened.manifest)
    return (
        replace(detection, verdict="incomplete", reason=parts.reason, cure=parts.cure) if parts else detection
    )


def absence(reader: Contents, shown: int = 3, *, left: Callable[[KeyPath], bool] | None = None) -> str | None:
    """A sentence about the missing chunks; None if no requested chunk is missing.

    Args:
        reader: of the checkpoint.
        shown: how many chunks are named.
        left: whether a leaf is not requested.
    """
    absent = [piece for piece in reader.absent() if left is None or not left(piece.path)]
    if not absent:
        return None
    first = ", ".join(describe_absent(piece) for piece in islice(absent, shown))
    more = f" and {len(absent) - shown} more" if len(absent) > shown else ""
    sentence = f"{plural(len(absent), 'expected chunk', 'is/are')} missing: {first}{more}"
    whole = reader.shortfall()
    return f"{whole}; {sentence}" if whole else sentence


def describe_absent(piece: Absent) -> str:
    """A missing chunk as text."""
    return f"chunk {piece.chunk} of {render(piece.path)} ({piece.reason})"


def may_be_step(entry: Entry) -> bool:
    """Whether a child of a run can be a step: a folder, or a file with a step's full name (flax's are files).

    An entry that must not be opened counts too, so that it is refused by name and no older step replaces it.
    """
    return (
        entry.is_dir
        or bool(entry.barred)
        or (step_number(entry.name) is not None and not entry.name.isdecimal())
    )


def _bases(name: str, facts: Mapping[str, Format] | Mapping[str, FormatFacts]) -> set[str]:
    direct = facts[name].refines
    return {*direct, *(base for parent in direct if parent in facts for base in _bases(parent, facts))}


def _in_run(run: Glimpse, rows: Mapping[str, Format]) -> Detection | None:
    """The newest complete step below a run folder."""
    for root in (run, *(Glimpse(run.location.join(name)) for name in _STEP_ROOTS)):
        steps = steps_among([name for name, entry in root.entries.items() if may_be_step(entry)])
        found = _newest_complete(root.location, steps, rows)
        if found is not None:
            return found
        found = _newest_unfinished(root, rows)
        if found is not None:
            return found
    return _empty_step(run, rows)


def _newest_unfinished(root: Glimpse, rows: Mapping[str, Format]) -> Detection | None:
    """The newest save of a run that has only saves that were not finished, by their names; None for other folders.

    Raises:
        IncompleteError: the save has only the name of one that was not finished.
    """
    folders = [name for name, entry in root.entries.items() if entry.is_dir and not entry.barred]
    reasons = {name: reason for name in folders if (reason := unfinished_reason(name)) is not None}
    others = [root.location.join(name) for name in folders if name not in reasons]
    if not reasons or checkpoints_among(others[:MOST_LOOKED_AT], _is_checkpoint):
        return None
    for name in sorted(reasons, key=_natural, reverse=True):
        claim = look(Glimpse(root.location.join(name)), rows)
        if claim is not None and claim.verdict == "ok":
            raise IncompleteError(
                f"the run has no finished save: {reasons[name]}: {name}",
                uri=root.location.uri,
                cure="use another run; to read the save as it is, pass its folder",
            )
        if claim is not None:
            return replace(
                claim,
                reason=f"the run has no finished save: {claim.reason}",
                evidence=(Evidence(name, f"newest of {plural(len(reasons), 'save')}"), *claim.evidence),
            )
    return None


def _natural(name: str) -> list[tuple[int, str]]:
    """A sort key by which the numbers in a name count as numbers."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in _DIGITS.split(name)]


def _newest_complete(root: Location, steps: list[StepFolder], rows: Mapping[str, Format]) -> Detection | None:
    passed: list[Evidence] = []
    newest: Detection | None = None
    damage: DamagedError | None = None
    for step in steps:
        try:
            claim = look(Glimpse(root.join(step.name)), rows)
        except DamagedError as error:
            damage = damage or error
            passed.append(Evidence(step.name, f"skipped: {error.verdict}: {error.what}"))
            continue
        if claim is None:
            passed.append(Evidence(step.name, "skipped: not a checkpoint"))
            continue
        found = examine(locate_near(root, claim.uri), claim)
        if found.verdict == "ok":
            chosen = Evidence(step.name, f"newest complete of {plural(len(steps), 'step')}")
            return replace(claim, evidence=(chosen, *passed, *claim.evidence))
        newest = newest or found
        passed.append(Evidence(step.name, f"skipped: {found.verdict}: {found.reason}"))
    if newest is None and damage is not None:
        raise damage
    return newest and newest.seen(*passed)


def _empty_step(glimpse: Glimpse, rows: Mapping[str, Format]) -> Detection | None:
    """An empty step folder next to other steps: Orbax itself lists it as a step."""
    location = glimpse.location
    number = step_number(location.name, any_prefix=True)
    if number is None or glimpse.entries or not glimpse.is_dir:
        return None
    siblings = steps_among([entry.name for entry in location.parent.entries() if entry.is_dir])
    for sibling in siblings:
        claim = look(Glimpse(location.parent.join(sibling.name)), rows)
        if claim is not None:
            evidence = (
                Evidence(".", "empty"),
                Evidence(f"../{sibling.name}", f"a step in format {claim.format}"),
            )
            return Detection(
                uri=location.uri,
                format=claim.format,
                step=number,
                verdict="incomplete",
                reason=f"the step folder {location.name} is empty",
                evidence=evidence,
            )
    return None


def _step_folder(location: Location, step: int) -> Location:
    for root in (location, *(location.join(name) for name in _STEP_ROOTS)):
        steps = steps_among([entry.name for entry in root.entries() if may_be_step(entry)])
        for found in steps:
            if found.number == step:
                return root.join(found.name)
    raise NotFoundError(
        f"step {step} not found", uri=location.uri, cure=Cure("run {} to list the steps", Command("discover"))
    )


def _item(location: Location, item: str, rows: Mapping[str, Format]) -> tuple[Location, tuple[Evidence, ...]]:
    """An item of a step, or that of the newest step of a run whose item of this name is complete."""
    if location.join(item).entry is not None:
        return location.join(item), ()
    for root in (location, *(location.join(name) for name in _STEP_ROOTS)):
        steps = steps_among([entry.name for entry in root.entries() if entry.is_dir])
        for step in steps:
            place = root.join(step.name).join(item)
            claim = look(Glimpse(place), rows) if place.entry is not None else None
            if claim is not None and examine(locate_near(place, claim.uri), claim).verdict == "ok":
                seen = f"newest step with a complete {item}, of {plural(len(steps), 'step')}"
                return place, (Evidence(step.name, seen),)
    raise NotFoundError(
        f"item {item} not found",
        uri=location.uri,
        cure=Cure("run {} to list the steps and their items", Command("discover")),
    )


def locate_near(near: Location, uri: str) -> Location:
    """The location of a checkpoint that was found near another location, through the same view of its store.

    On this machine it becomes a separate root, below the root of the other location.

    Raises:
        HostileError: a link on the way must not be followed.
    """
    found = locate(uri, near.opaque)
    if isinstance(near.store, ObjectView) and found.store.protocol == near.store.protocol:
        return replace(found, store=near.store)
    if isinstance(near.store, LocalStore) and near.store.root is not None and found.store.capabilities.local:
        with storage_errors(found.uri):
            return replace(found, store=LocalStore(root_within(near.store.root, found.path)))
    return found


def _existing(given: str, location: Location) -> Location:
    """The location itself; for the prefix with which TensorFlow names a checkpoint, its index file."""
    index = Location(location.store, f"{location.path}.index")
    if location.entry is None and index.entry is not None:
        return index
    if location.entry is None:
        raise NotFoundError(
            "file or folder not found",
            uri=location.uri,
            cure=cure_of_absence(given, location),
        )
    location.parent.require_open(location.entry)
    return location


def _record_without_checkpoint(glimpse: Glimpse, stated_format: str | None) -> IncompleteError | None:
    """The error for a folder that has the sidecar of a checkpoint, but not the checkpoint."""
    location = glimpse.location
    sidecar = readable_sidecar(location) if glimpse.is_dir else None
    if sidecar is None or stated_format not in (None, sidecar.checkpoint.format):
        return None
    recorded = sidecar.checkpoint
    row = formats().get(recorded.format)  # None for a plug-in's format that is not installed here
    members = [name for name in row.commit_members if name != COMMIT_SUCCESS] if row else []
    lacking = next((name for name in reversed(members) if not location.join(name).exists()), None)
    return IncompleteError(
        f"{lacking or 'the file of its tensors'} is missing: {FOLDER_NAME} records a checkpoint of "
        f"{plural(recorded.tensors, 'tensor')} in format {recorded.format} here",
        uri=location.uri,
        cure=Cure("restore its files; {} lists where other copies are", Command("audit", Blank("FOLDER"))),
    )


def _nothing(glimpse: Glimpse, stated_format: str | None) -> WherryError:
    uri = glimpse.location.uri
    if stated_format is not None:
        what = f"not a checkpoint of format {stated_format}"
        return UnsupportedError(
            what, uri=uri, cure=Cure("remove {} to detect the format", Argument("format"))
        )
    form = unsupported_form(glimpse)
    if form is not None:
        return UnsupportedError(f"{form.name}, which wherry does not read", uri=uri, cure=form.cure)
    cure = cure_of_nothing(glimpse, _is_checkpoint)
    return NotACheckpointError("not a checkpoint of any known format", uri=uri, cure=cure)


def _is_checkpoint(location: Location) -> bool:
    return look(Glimpse(location), formats()) is not None


def _verdict(error: WherryError) -> Verdict:
    return cast("Verdict", error.verdict)
