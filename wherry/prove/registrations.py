"""Compare the model registry with the ledger: versions without bytes, bytes without versions, changed tags.

The audit then tells the registry what it found, so that the page of a model version shows that it is altered.

The registry is queried once, in pages, for rows of `(name, version, tags, aliases)`. Versions without wherry's digest
tag do not belong to wherry and are ignored, unless an alias names one of a model that the ledger knows.

Whoever moves an alias decides what is deployed. So an alias on a version that the ledger has not registered is an
error, unless the ledger has a promotion of this version and digest under a policy that permits unregistered versions.

A night may register while an audit runs:

1. The audit replays the ledger.
2. The night claims a registration in the ledger, and creates the version.
3. The audit queries the registry, and gets a version whose registration its replay does not have.
4. The night records the registration in the ledger, or withdraws the version and releases its claim.

Every version is claimed before it is created. So a version is unknown only if neither the replay has its claim nor any
statement since then is about it: the statements that were appended meanwhile are read before anything is called
unknown or unfinished.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from wherry.core.services import service
from wherry.core.units import short
from wherry.errors import MissingExtraError, StorageError, WherryError
from wherry.ledger.replay import WRITTEN, LedgerState
from wherry.ledger.resolve import ALTERED_TAG, DELETED_TAG, DIGEST_TAG, URI_TAG, WEIGHTS_TAG, stores_of
from wherry.prove.report import Finding
from wherry.store.home import sqlite_file, without_secrets

if TYPE_CHECKING:
    from wherry.prove.places import PlaceAudit


_ABSENT = ("gone", "unreachable", "replaced")


class ModelVersion(NamedTuple):
    """A model version in the registry."""

    name: str
    version: str
    tags: Mapping[str, str]
    aliases: tuple[str, ...]

    @property
    def digest(self) -> str:
        """Digest of the checkpoint that it points to."""
        return self.tags.get(DIGEST_TAG, "")

    @property
    def shown(self) -> str:
        """Name, version and aliases for display."""
        known_as = f" ({', '.join(f'@{alias}' for alias in self.aliases)})" if self.aliases else ""
        return f"{self.name} version {self.version}{known_as}"


class RegistryContents(NamedTuple):
    """Contents of the registry: its URI without secrets, its versions, and the finding if it was not queried.

    `stores` has the MLflow URIs of tracking store and registry as keyword arguments.
    """

    uri: str | None
    versions: tuple[ModelVersion, ...] = ()
    findings: tuple[Finding, ...] = ()
    stores: Mapping[str, str] = MappingProxyType({})


def ask(known: LedgerState, tracking_uri: str | None, registry_uri: str | None) -> RegistryContents:
    """All versions of the registry; empty where no registry was used or configured.

    Args:
        known: the ledger state.
        tracking_uri: MLflow tracking store; as for `register` by default.
        registry_uri: MLflow registry; as for `register` by default.
    """
    stores = stores_of(tracking_uri, registry_uri)
    chosen = stores["registry_uri"]
    shown = without_secrets(chosen)
    file = sqlite_file(chosen)
    if file is not None and not file.exists():
        return RegistryContents(None, (), _unasked_findings(known, shown, "database file not found"))
    if file is not None and not (tracking_uri or registry_uri) and not known.registrations:
        return RegistryContents(None)
    try:
        rows = service("mlflow").registered_versions(**stores, with_aliased=True)
        named = {row.name for registered in known.registrations.values() for row in registered}
        versions = tuple(
            ModelVersion(name, str(number), tags, tuple(aliases))
            for name, number, tags, aliases in rows
            if DIGEST_TAG in tags or name in named
        )
    except (MissingExtraError, StorageError) as error:
        return RegistryContents(None, (), _unasked_findings(known, shown, error.what, error))
    return RegistryContents(shown, versions, stores=stores)


def _unasked_findings(
    known: LedgerState, uri: str, why: str, error: WherryError | None = None
) -> tuple[Finding, ...]:
    """The finding that a registry was not queried, if the ledger has registrations in it."""
    used = any(row.registry == uri for rows in known.registrations.values() for row in rows)
    if not used and error is None:
        return ()
    return (Finding("registry-not-compared", why, uri=uri, cure=error.cure if error else None),)


def compare_registry(
    registry: RegistryContents,
    known: LedgerState,
    later: LedgerState,
    looked: Mapping[str, PlaceAudit],
    *,
    as_of: bool,
) -> Iterator[Finding]:
    """Findings from the comparison of registry and ledger.

    Args:
        registry: the contents of the registry.
        known: the ledger state.
        later: what follows from the statements after it, read after the registry was queried.
        looked: URI → result of the audit of that place.
        as_of: whether the ledger state is of an earlier date; then newer versions of the registry are not findings.
    """
    yield from registry.findings
    yield from _unfinished_registrations(known, later)
    yield from _elsewhere(registry, known, looked)
    if registry.uri is None:
        return
    permitted = set(_permitted_versions(known))
    for version in registry.versions:
        rows = known.registrations.get(version.digest, [])
        # Its registration is claimed, or was recorded or withdrawn after the ledger state was read.
        claimed = (row for row in rows if row.state == "pending")
        in_flight = any(
            row.name == version.name for row in (*claimed, *later.registrations.get(version.digest, ()))
        )
        # In any registry, since a store can have several addresses.
        registered = in_flight or any(
            (row.name, row.version) == (version.name, version.version) for row in rows
        )
        named = (version.name, version.version, version.digest)
        if version.aliases and not as_of and not registered and named not in permitted:
            target = f"checkpoint {short(version.digest)}" if version.digest else "no checkpoint of wherry"
            what = f"{version.shown} points to {target}; the ledger has not registered this version"
            yield Finding(
                "alias-unregistered", what, registry.uri, version.digest or None, models=(version.shown,)
            )
        elif version.digest in known.checkpoints:
            yield from _of_version(version, registry.uri, known, looked, registered=registered)
        elif version.digest and not as_of and not in_flight:
            what = f"{version.shown} points to checkpoint {short(version.digest)}, which is not in the ledger"
            yield Finding("registration-unknown", what, registry.uri, version.digest, models=(version.shown,))
    yield from _lost_versions(registry, known)
    if not as_of:
        pointed_at = {version.digest for version in registry.versions}
        for place in known.places.values():
            if place.role == WRITTEN and place.checkpoint_digest not in pointed_at:
                what = "no model version points to it"
                yield Finding("bytes-without-registration", what, place.uri, place.checkpoint_digest)


def _of_version(
    version: ModelVersion,
    registry: str,
    known: LedgerState,
    looked: Mapping[str, PlaceAudit],
    *,
    registered: bool,
) -> Iterator[Finding]:
    about: dict[str, Any] = {"checkpoint_digest": version.digest, "models": (version.shown,)}
    if DELETED_TAG not in version.tags and _nowhere(version.digest, known, looked):
        what = f"the checkpoint of {version.shown} is missing at all places in the ledger"
        yield Finding("registration-without-bytes", what, version.tags.get(URI_TAG), **about)
    stated = version.tags.get(WEIGHTS_TAG)
    if stated is not None and stated != known.checkpoints[version.digest].weights_digest:
        what = f"{version.shown}: its weights digest {short(stated)} does not match its checkpoint"
        yield Finding("registration-altered", what, registry, **about)
    if not registered:
        what = (
            f"{version.shown}: this registration of checkpoint {short(version.digest)} is not in the ledger"
        )
        yield Finding("registration-unknown", what, registry, **about)


def _permitted_versions(known: LedgerState) -> Iterator[tuple[str, str, str]]:
    """Name, version and digest of what was promoted without the gate `registered`: its policy has left it out."""
    for row in known.history:
        gates = row.get("gates") if row["kind"] == "promotion" else None
        if isinstance(gates, list) and not any(gate.get("gate") == "registered" for gate in gates):
            yield row["name"], row["version"], row["checkpoint_digest"]


def _nowhere(digest: str, known: LedgerState, looked: Mapping[str, PlaceAudit]) -> bool:
    """Whether all places of a checkpoint were checked, and it is missing at all of them."""
    return all(
        place.uri in looked and looked[place.uri].row.verdict in _ABSENT for place in known.living(digest)
    )


def _elsewhere(
    registry: RegistryContents, known: LedgerState, looked: Mapping[str, PlaceAudit]
) -> Iterator[Finding]:
    """Findings for registrations in other registries, which only the ledger has."""
    for digest, rows in known.registrations.items():
        for row in rows:
            if row.registry != registry.uri and row.state == "registered" and _nowhere(digest, known, looked):
                what = f"the checkpoint of {row} is missing at all places in the ledger"
                yield Finding("registration-without-bytes", what, row.registry, digest, models=(str(row),))


def _lost_versions(registry: RegistryContents, known: LedgerState) -> Iterator[Finding]:
    there = {(one.name, one.version): one.digest for one in registry.versions}
    for digest, rows in known.registrations.items():
        for row in rows:
            if row.registry != registry.uri or row.state != "registered":
                continue
            found = there.get((row.name, row.version or ""))
            if found is None:
                yield Finding(
                    "registration-gone",
                    f"{row} is not in the registry",
                    registry.uri,
                    digest,
                    models=(str(row),),
                )
            elif found != digest:
                what = f"{row}: expected checkpoint {short(digest)}, got {short(found) or 'none'}"
                yield Finding("registration-altered", what, registry.uri, digest, models=(str(row),))


def _unfinished_registrations(known: LedgerState, later: LedgerState) -> Iterator[Finding]:
    for digest, rows in known.registrations.items():
        ended = {(row.registry, row.name) for row in later.registrations.get(digest, ())}
        for row in rows:
            if row.state == "pending" and (row.registry, row.name) not in ended:
                what = f"the registration as {row.name} did not finish"
                yield Finding("registration-pending", what, row.registry, digest)


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
