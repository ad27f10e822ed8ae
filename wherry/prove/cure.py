"""The cure of a finding, and the checkpoints and model versions that it affects.

The cure is the first of these that exists: fetch an intact copy of the same checkpoint; convert an intact source again,
or a checkpoint that has the same weights in another container; restore a backup. Checkpoints that were derived from a
damaged one are listed with their places and model versions: they were verified when they were made, but they cannot be
made again from the damaged one.
"""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from wherry.converter.command import command_line, in_place_of, restore_request
from wherry.cures import Argument, Blank, Command, Cure
from wherry.errors import WherryError
from wherry.layout.mapping import TREE_OPTIONS
from wherry.prove.report import AffectedCheckpoint, Finding
from wherry.store.local_store import locate
from wherry.store.sidecar import sidecar_location

if TYPE_CHECKING:
    from wherry.ledger.replay import ConversionRecord, LedgerState
    from wherry.prove.places import PlaceAudit

# Kinds after which the bytes at a place must be restored from elsewhere.
LOST = frozenset(
    (
        "malicious",
        "altered",
        "replaced",
        "structure",
        "gone",
        "incomplete",
        "corrupt",
        "unreadable",
        "known-damage",
        "not-native",
    )
)
_NO_COPY = "restore it from a backup; the ledger has no other intact copy"
_CURES = {
    "sidecar-altered": "restore the sidecar from a backup or the evidence of an earlier audit, then audit again",
    "added": Cure(
        "remove the file, or record it: remove the sidecar, then {}",
        Command("inspect", Argument("digest"), Argument("write"), Blank("URI")),
    ),
    "sidecar-gone": "restore the sidecar from a backup or the evidence of an earlier audit",
    "touched": Cure("run {} to read its bytes", Command("audit", Argument("level", "digest"))),
    "unreachable": "check that the storage is reachable from here, then audit again",
    "chain-altered": Cure(
        "restore the ledger from a backup, or run {} into a new one", Command("ledger rebuild", Blank("ROOT"))
    ),
    "anchor-lost": "restore the ledger from a backup that has the anchor: it was truncated or replaced",
    "unrecorded": Cure(
        "run {} to see whether the ledger was truncated, or {} to record it",
        Command("ledger check", Argument("anchor", Blank("HASH"))),
        Command("ledger record", Blank("URI")),
    ),
    "registration-gone": Cure(
        "register it again: {}", Command("register", Blank("URI"), Argument("model", Blank("NAME")))
    ),
    "registration-unknown": Cure(
        "find out who registered it; {} records it in a new ledger", Command("ledger rebuild", Blank("ROOT"))
    ),
    "registration-pending": Cure("run {} again; it resumes where it was interrupted", Command("register")),
    "registration-altered": "register it again under the recorded digest, and find out who changed the tags",
    "alias-unregistered": Cure(
        "find out who moved the alias, and promote a registered version: {}; to permit this "
        "version, promote it with a policy that has `unregistered = true`",
        Command("promote", Blank("URI"), Argument("model", Blank("NAME"))),
    ),
    "registration-without-bytes": "restore the checkpoint, or delete the model version",
}


def add_cures(
    findings: Iterable[Finding], known: LedgerState, looked: Mapping[str, PlaceAudit]
) -> list[Finding]:
    """The findings with cure, model versions and derived checkpoints."""
    return [_add_cure(finding, known, looked) for finding in findings]


def _add_cure(finding: Finding, known: LedgerState, looked: Mapping[str, PlaceAudit]) -> Finding:
    digest = finding.checkpoint_digest
    if finding.kind == "source-changed" and digest is not None and finding.uri is not None:
        return replace(finding, cure=_of_the_change(digest, finding.uri, known) or finding.cure)
    if finding.kind not in LOST or digest is None or finding.uri is None:
        return replace(finding, cure=finding.cure or _CURES.get(finding.kind))
    return replace(
        finding,
        cure=_source_of_bytes(digest, finding.uri, known, looked),
        models=known.models(digest),
        affected=tuple(
            AffectedCheckpoint(
                child,
                known.checkpoints[child].format,
                tuple(place.uri for place in known.living(child)),
                known.models(child),
            )
            for child in _descendants(digest, known)
        ),
    )


def _descendants(digest: str, known: LedgerState) -> Iterator[str]:
    """Everything that was derived from a checkpoint, breadth first; cycles end where they began."""
    seen, front = {digest}, [digest]
    while front:
        fresh = [child for parent in front for child in known.children.get(parent, ())]
        front = [child for child in dict.fromkeys(fresh) if child not in seen]
        seen.update(front)
        yield from front


def _source_of_bytes(digest: str, uri: str, known: LedgerState, looked: Mapping[str, PlaceAudit]) -> str:
    copies = _intact([digest], uri, known, looked)
    for copy in copies:
        if _is_recorded(copy):
            return in_place_of(uri, shlex.join(["wherry", "fetch", copy, uri]), "fetch the intact copy")
    for copy in copies:  # without a sidecar it cannot be fetched, as nothing next to it states its digest
        return _again(_request(known.between.get((digest, digest)), digest, known, copy, uri), copy, uri)
    for parent in known.parents.get(digest, ()):
        for source in _intact([parent], uri, known, looked):
            return _again(
                _request(known.between.get((parent, digest)), digest, known, source, uri), source, uri
            )
    weights = known.checkpoints[digest].weights_digest
    alike = [one.checkpoint_digest for one in known.checkpoints.values() if one.weights_digest == weights]
    for source in _intact(alike, uri, known, looked):
        return _again(_container(digest, known), source, uri)
    return _NO_COPY


def _of_the_change(digest: str, uri: str, known: LedgerState) -> str | None:
    """The cure of a source that has changed: convert its first target again; None where the ledger has no target."""
    for child in known.children.get(digest, ()):
        how = known.between.get((digest, child))
        if how is not None and how.source_uri == uri:
            request = _request(how, child, known, uri, how.target_uri)
            return _again(request, uri, how.target_uri)
    return None


def _again(request: Mapping[str, Any], source: str, target: str) -> str:
    return in_place_of(target, command_line(request, source, target))


def _is_recorded(uri: str) -> bool:
    try:
        return sidecar_location(locate(uri)).exists()
    except WherryError:
        return False


def _request(
    made: ConversionRecord | None, digest: str, known: LedgerState, source: str, target: str
) -> dict[str, Any]:
    """The recorded request; for another source or target without the options that apply to the recorded one only."""
    name = known.checkpoints[digest].format
    if made is None:
        return {"to": name}
    request = dict(made.request or _resolve_options(name, made.options))
    if source != made.source_uri:
        request.pop("format", None)
        request.pop("in_place", None)  # the copy stays as it is
    if target != made.target_uri:
        request.pop("into", None)
    return request


def _container(digest: str, known: LedgerState) -> dict[str, Any]:
    """The request for a source with the same tensors in another container: only the container's options."""
    name = known.checkpoints[digest].format
    made = next((how for (_source, target), how in known.between.items() if target == digest), None)
    if made is None:
        return {"to": name}
    request = _resolve_options(name, made.options)
    options = {key: value for key, value in request.get("options", {}).items() if key not in TREE_OPTIONS}
    return {**request, "options": options}


def _resolve_options(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return restore_request(name, options)
    except WherryError:
        return {"to": name}  # the format is not installed here, so its defaults are unknown


def _intact(
    digests: Collection[str], not_this: str, known: LedgerState, looked: Mapping[str, PlaceAudit]
) -> list[str]:
    """Places of intact copies of these checkpoints; those whose bytes were read come first."""
    places = [place.uri for digest in digests for place in known.living(digest) if place.uri != not_this]
    fine = [
        uri
        for uri in places
        if (looked[uri].row.verdict in ("ok", "touched") if uri in looked else _is_there(uri))
    ]
    return sorted(fine, key=lambda uri: (uri not in looked or looked[uri].row.level == "present", uri))


def _is_there(uri: str) -> bool:
    try:
        return locate(uri).exists()
    except WherryError:
        return False  # a store that cannot be reached is not a source for a copy
