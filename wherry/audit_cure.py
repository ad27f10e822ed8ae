"""What to do about a finding, and what else it concerns.

The cure is looked for in this order: an intact copy of the same checkpoint; an intact checkpoint from which it was
made, or that has the same weights in another container, to be converted; a backup. What was made from a damaged
checkpoint is named with the places and the model versions of each: their bytes were proved when they were made, so
they hold their own proof, but they cannot be made again from what is damaged.
"""

from __future__ import annotations

import shlex
from dataclasses import replace
from typing import TYPE_CHECKING

from wherry.audit_known import descendants
from wherry.audit_report import Affected
from wherry.errors import WherryError
from wherry.store import locate

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from wherry.audit_known import Known
    from wherry.audit_places import Looked
    from wherry.audit_report import Finding

# Kinds after which the bytes at a place must come from somewhere else.
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
_NO_COPY = "restore it from a backup; the ledger knows no other intact copy"
_CURES = {
    "sidecar-altered": "restore the sidecar from a backup or the evidence of an earlier audit, then audit again",
    "sidecar-gone": "restore the sidecar from a backup or the evidence of an earlier audit",
    "touched": "read its bytes: wherry audit --level digest",
    "unreachable": "check that the storage is reachable from here, then audit again",
    "chain-altered": "restore the ledger from a backup, or `wherry ledger rebuild ROOT` into a new one",
    "anchor-lost": "somebody cut or replaced the ledger: restore it from a backup that has the anchor",
    "registration-gone": "register it again: wherry register URI --name NAME",
    "registration-unknown": "find out who registered it; `wherry ledger rebuild` takes it over",
    "registration-pending": "run the registration again; it goes on where it stopped",
    "registration-altered": "register it again under the recorded digest, and find out who changed the tags",
    "registration-without-bytes": "restore the checkpoint, or delete the model version",
}


def completed(findings: Iterable[Finding], known: Known, looked: Mapping[str, Looked]) -> list[Finding]:
    """The findings with cure, model versions and what was made from the damaged ones."""
    return [_completed(finding, known, looked) for finding in findings]


def _completed(finding: Finding, known: Known, looked: Mapping[str, Looked]) -> Finding:
    digest = finding.checkpoint_digest
    if finding.kind not in LOST or digest is None or finding.uri is None:
        return replace(finding, cure=finding.cure or _CURES.get(finding.kind))
    return replace(
        finding,
        cure=_source_of_bytes(digest, finding.uri, known, looked),
        models=known.models(digest),
        affected=tuple(_affected(child, known) for child in descendants(known, digest)),
    )


def _affected(digest: str, known: Known) -> Affected:
    uris = tuple(place.uri for place in known.living(digest))
    return Affected(digest, known.subjects[digest].format, uris, known.models(digest))


def _source_of_bytes(digest: str, uri: str, known: Known, looked: Mapping[str, Looked]) -> str:
    target = shlex.quote(uri)
    for copy in _intact([digest], uri, known, looked):
        return f"fetch the intact copy: wherry fetch {shlex.quote(copy)} {target}"
    weights = known.subjects[digest].weights_digest
    alike = [one.checkpoint_digest for one in known.subjects.values() if one.weights_digest == weights]
    parents = _intact(known.parents.get(digest, ()), uri, known, looked)
    for source in [*parents, *_intact(alike, uri, known, looked)]:
        name = known.subjects[digest].format
        return (
            f"move it away and convert again: wherry convert {shlex.quote(source)} {target} --to {name}, "
            "with the options of its receipt"
        )
    return _NO_COPY


def _intact(digests: Collection[str], not_this: str, known: Known, looked: Mapping[str, Looked]) -> list[str]:
    """Where one of some checkpoints lies, nothing bad being known of it; those whose bytes were read come first."""
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
        return False  # a store that cannot be asked is no place to fetch from
