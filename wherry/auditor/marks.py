"""marks: an audit tells the registry what it found, so that the page of a model version shows that it is altered."""

from __future__ import annotations

from typing import TYPE_CHECKING

from wherry.auditor.report import Finding
from wherry.core.services import service
from wherry.errors import WherryError
from wherry.ledger.resolve import ALTERED_TAG

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from wherry.auditor.places import PlaceAudit
    from wherry.auditor.registrations import ModelVersion, RegistryContents
    from wherry.ledger.replay import LedgerState

# Findings after which the bytes of a version are not those that were registered.
_ALTERED = {
    "malicious", "altered", "replaced", "structure", "signature", "sidecar-altered", "incomplete", "corrupt",
    "known-damage", "not-native",
}  # fmt: skip
_READ = ("digest", "native")


def mark_versions(
    registry: RegistryContents, findings: Sequence[Finding], known: LedgerState, looked: Mapping[str, PlaceAudit],
    time: str,
) -> Iterator[Finding]:  # fmt: skip
    """Write the outcome on the versions whose checkpoints were looked at.

    Args:
        registry: the versions, and the stores that have them.
        findings: all findings.
        known: the ledger state.
        looked: URI → result of the audit of that place.
        time: of the audit; UTC.

    Yields:
        A finding for each version that could not be marked.
    """
    wrong: dict[str, Finding] = {}
    for one in reversed(findings):  # the most severe one of each checkpoint stays
        if one.kind in _ALTERED and one.checkpoint_digest:
            wrong[one.checkpoint_digest] = one
    for version in registry.versions:
        outcome = _outcome(version, wrong.get(version.digest), known, looked, time)
        if outcome is None:
            continue
        try:
            service("mlflow").mark_version(version.name, version.version, **outcome, **registry.stores)
        except WherryError as error:
            what = f"{version.shown}: its tags could not be updated: {error.what}"
            yield Finding(
                "registration-unmarked", what, registry.uri, version.digest, models=(version.shown,)
            )


def _outcome(
    version: ModelVersion,
    wrong: Finding | None,
    known: LedgerState,
    looked: Mapping[str, PlaceAudit],
    time: str,
) -> dict[str, str | None] | None:
    """The arguments of `mark_version`; None if nothing is to be changed.

    A checkpoint that was altered is whole again only if the audit has looked at all its places.
    """
    before = version.tags.get(ALTERED_TAG)
    if wrong is not None:
        where = ", ".join(filter(None, [wrong.uri, wrong.path]))
        said = f"{wrong.kind}: {wrong.what}{f' at {where}' if where else ''}"
        again = before is not None and before.startswith(said)  # the first audit that found it has said so
        return None if again else {"altered": f"{said} (found {_show_time(time)})", "verified": ""}
    living = known.living(version.digest)
    places = [looked[place.uri] for place in living if place.uri in looked]
    mended = before is not None and bool(places) and len(places) == len(living)
    read = next((one.row.level for one in places if one.row.level in _READ and one.row.verdict == "ok"), None)
    if read is None and not mended:
        return None
    verified = f"{read}: ok, {_show_time(time)}" if read else ""
    return {"altered": "" if mended else None, "verified": verified}


def _show_time(time: str) -> str:
    return f"{time[:16].replace('T', ' ')} UTC"
