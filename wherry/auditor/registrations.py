"""The model registry against the ledger: versions without bytes, bytes without versions, tags that were changed.

The registry is asked once, in pages, and only told of by its rows here: `(name, version, tags, aliases)`. Versions that
do not carry our digest are other people's, and no business of this audit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from wherry.auditor.report import Finding
from wherry.config.settings import mlflow_registry_uri, mlflow_tracking_uri
from wherry.core.services import service
from wherry.core.units import short
from wherry.errors import MissingExtraError, StorageError, WherryError
from wherry.ledger.replay import WRITTEN
from wherry.ledger.resolve import DELETED_TAG, DIGEST_TAG, URI_TAG, WEIGHTS_TAG
from wherry.storage.home import sqlite_file, without_secrets

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from wherry.auditor.places import PlaceAudit
    from wherry.ledger.replay import LedgerState, PlaceRecord

_ABSENT = ("gone", "unreachable", "replaced")


class ModelVersion(NamedTuple):
    """A model version as the registry tells it."""

    name: str
    version: str
    tags: Mapping[str, str]
    aliases: tuple[str, ...]

    @property
    def digest(self) -> str:
        """The checkpoint that it points at."""
        return self.tags.get(DIGEST_TAG, "")

    @property
    def shown(self) -> str:
        """Name, version and aliases in words."""
        known_as = f" ({', '.join(f'@{alias}' for alias in self.aliases)})" if self.aliases else ""
        return f"{self.name} version {self.version}{known_as}"


class RegistryContents(NamedTuple):
    """What the registry said: its URI without secrets, its versions, and why it said nothing."""

    uri: str | None
    versions: tuple[ModelVersion, ...] = ()
    findings: tuple[Finding, ...] = ()


def ask(known: LedgerState, tracking_uri: str | None, registry_uri: str | None) -> RegistryContents:
    """All versions of the registry; nothing where no registry was ever used or named.

    Args:
        known: the ledger.
        tracking_uri: MLflow tracking store; where `register` would go by default.
        registry_uri: MLflow registry; likewise.
    """
    tracking = tracking_uri or mlflow_tracking_uri()
    chosen = registry_uri or (tracking if tracking_uri else mlflow_registry_uri())
    shown = without_secrets(chosen)
    file = sqlite_file(chosen)
    if file is not None and not file.exists():
        return RegistryContents(None, (), _unasked(known, shown, "its database does not exist"))
    if file is not None and not (tracking_uri or registry_uri) and not known.registrations:
        return RegistryContents(None)
    try:
        rows = service("mlflow").registered(tracking, chosen)
        versions = tuple(
            ModelVersion(name, str(number), tags, tuple(aliases)) for name, number, tags, aliases in rows
        )
    except (MissingExtraError, StorageError) as error:
        return RegistryContents(None, (), _unasked(known, shown, error.what, error))
    return RegistryContents(shown, versions)


def _unasked(known: LedgerState, uri: str, why: str, error: WherryError | None = None) -> tuple[Finding, ...]:
    """Silence about a registry matters where the ledger says that something is in it."""
    used = any(row.registry == uri for rows in known.registrations.values() for row in rows)
    if not used and error is None:
        return ()
    return (Finding("registry-not-asked", why, uri=uri, cure=error.cure if error else None),)


def compared(
    asked: RegistryContents, known: LedgerState, looked: Mapping[str, PlaceAudit], *, as_of: bool
) -> Iterator[Finding]:
    """What registry and ledger say of each other.

    Args:
        asked: the registry now.
        known: the ledger.
        looked: URI → what came of the look at that place.
        as_of: whether the ledger is that of an earlier moment; then the registry's newer versions mean nothing.
    """
    yield from asked.findings
    yield from _unfinished(known)
    yield from _elsewhere(asked, known, looked)
    if asked.uri is None:
        return
    for version in asked.versions:
        if version.digest in known.checkpoints:
            yield from _of_version(version, asked.uri, known, looked)
        elif version.digest and not as_of:
            what = f"{version.shown} points at checkpoint {short(version.digest)}, of which the ledger knows nothing"
            yield Finding("registration-unknown", what, asked.uri, version.digest, models=(version.shown,))
    yield from _lost(asked, known)
    if not as_of:
        yield from _unregistered(asked, known)


def _of_version(
    version: ModelVersion, registry: str, known: LedgerState, looked: Mapping[str, PlaceAudit]
) -> Iterator[Finding]:
    about: dict[str, Any] = {"checkpoint_digest": version.digest, "models": (version.shown,)}
    if DELETED_TAG not in version.tags and _nowhere(version.digest, known, looked):
        what = f"{version.shown} points at a checkpoint that is in none of the places that the ledger knows"
        yield Finding("registration-without-bytes", what, version.tags.get(URI_TAG), **about)
    stated = version.tags.get(WEIGHTS_TAG)
    if stated is not None and stated != known.checkpoints[version.digest].weights_digest:
        what = f"{version.shown}: its weights digest {short(stated)} is not that of its checkpoint"
        yield Finding("registration-altered", what, registry, **about)
    rows = known.registrations.get(version.digest, [])  # of any registry: one store has several addresses
    if not any((row.name, row.version) == (version.name, version.version) for row in rows):
        what = f"{version.shown}: the ledger has no such registration of checkpoint {short(version.digest)}"
        yield Finding("registration-unknown", what, registry, **about)


def _nowhere(digest: str, known: LedgerState, looked: Mapping[str, PlaceAudit]) -> bool:
    """Whether every place of a checkpoint was looked at, and it is in none."""
    return all(
        place.uri in looked and looked[place.uri].row.verdict in _ABSENT for place in known.living(digest)
    )


def _elsewhere(
    asked: RegistryContents, known: LedgerState, looked: Mapping[str, PlaceAudit]
) -> Iterator[Finding]:
    """Registrations in registries that were not asked: the ledger alone tells of them."""
    for digest, rows in known.registrations.items():
        for row in rows:
            if row.registry != asked.uri and row.state == "registered" and _nowhere(digest, known, looked):
                what = f"{row} points at a checkpoint that is in none of the places that the ledger knows"
                yield Finding("registration-without-bytes", what, row.registry, digest, models=(str(row),))


def _lost(asked: RegistryContents, known: LedgerState) -> Iterator[Finding]:
    there = {(one.name, one.version): one.digest for one in asked.versions}
    for digest, rows in known.registrations.items():
        for row in rows:
            if row.registry != asked.uri or row.state != "registered":
                continue
            found = there.get((row.name, row.version or ""))
            if found is None:
                yield Finding(
                    "registration-gone",
                    f"{row} is not in the registry",
                    asked.uri,
                    digest,
                    models=(str(row),),
                )
            elif found != digest:
                what = f"{row} points at checkpoint {short(found) or 'none'}, the ledger has {short(digest)}"
                yield Finding("registration-altered", what, asked.uri, digest, models=(str(row),))


def _unfinished(known: LedgerState) -> Iterator[Finding]:
    for digest, rows in known.registrations.items():
        for row in rows:
            if row.state == "pending":
                what = f"the registration as {row.name} was begun and not finished"
                yield Finding("registration-pending", what, row.registry, digest)


def _unregistered(asked: RegistryContents, known: LedgerState) -> Iterator[Finding]:
    pointed_at = {version.digest for version in asked.versions}
    for place in _written(known.places.values()):
        if place.checkpoint_digest not in pointed_at:
            what = "no model version points at it"
            yield Finding("bytes-without-registration", what, place.uri, place.checkpoint_digest)


def _written(places: Iterable[PlaceRecord]) -> Iterator[PlaceRecord]:
    return (place for place in places if place.role == WRITTEN)
