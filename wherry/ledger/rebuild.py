"""rebuild: create a new ledger from the sidecars of checkpoints and from the model registry.

Sidecars restore checkpoints, conversions, edges and places; the tags of registered versions restore registrations, and
which of their checkpoints `prune` deleted. Everything else (verifications, promotions, other deletions, audits, the
numbers and times of the old statements) is lost. The first statement of the new chain states that, and lists everything
that could not be read. No tensor byte is read: the digests were recorded when the checkpoints were committed.

The rebuild is one transaction, and writes only to an empty ledger.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, field, replace
from typing import Any

from wherry.core.lazy_dataclass import dataclass
from wherry.core.numbers import decimal_number
from wherry.core.receipt import CheckpointRef
from wherry.core.services import service
from wherry.cures import Argument, Cure
from wherry.errors import TargetExistsError, WherryError
from wherry.formats.discover import SkippedPath, discover
from wherry.formats.registry import formats
from wherry.ledger import schema as tables
from wherry.ledger.database import LedgerConnection, open_ledger
from wherry.ledger.record import add_conversion, add_registration, add_sighting
from wherry.ledger.resolve import DELETED_TAG, DIGEST_TAG, URI_TAG, WEIGHTS_TAG, stores_of
from wherry.ledger.statements import append, last_statement
from wherry.store.folders import is_staging
from wherry.store.home import without_secrets
from wherry.store.local_store import locate
from wherry.store.sidecar import Sidecar, is_marked, read_sidecar
from wherry.version import __version__

SCHEMA = 1
_TAG = "wherry."
# What neither sidecars nor the registry contain.
LOST = (
    "verifications after the conversion", "promotions and rollbacks", "deletions of what was not registered",
    "audits and notes", "claims of registrations", "conversions whose targets were not found",
    "numbers, times and hashes of the old chain",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class RebuildReport:
    """What was restored.

    Attributes:
        ledger: the ledger that was written.
        checkpoints: nodes of the lineage.
        conversions: number of their statements.
        edges: conversions from one checkpoint to another.
        places: where checkpoints were found.
        registrations: versions of registered models.
        deletions: places of registered checkpoints that are known to be deleted.
        partial: digests of registered checkpoints that are known only from the registry's tags.
        unreadable: files that could not be read, with the reason.
        lost: kinds of records that are kept only in a ledger.
        head: hash of the last statement.
    """

    ledger: str
    checkpoints: int
    conversions: int
    edges: int
    places: int
    registrations: int
    deletions: int
    partial: tuple[str, ...]
    unreadable: tuple[Mapping[str, str], ...]
    lost: tuple[str, ...]
    head: str

    def to_json(self) -> dict[str, Any]:
        """The output of `ledger rebuild --json`."""
        return {"schema": SCHEMA, **asdict(self)}


@dataclass(slots=True)
class _RebuildSources:
    """Everything that was found, before anything is written."""

    sidecars: list[tuple[str, Sidecar]] = field(default_factory=list[tuple[str, Sidecar]])
    registered: list[tuple[CheckpointRef, str, str]] = field(
        default_factory=list[tuple[CheckpointRef, str, str]]
    )
    deleted: dict[str, str] = field(
        default_factory=dict[str, str]
    )  # digest → the deletion note of the registry
    partial: list[str] = field(default_factory=list[str])
    unreadable: list[dict[str, str]] = field(default_factory=list[dict[str, str]])


def rebuild(
    roots: Sequence[str | os.PathLike[str]],
    *,
    ledger: str | None = None,
    registry: bool = True,
    tracking_uri: str | None = None,
    registry_uri: str | None = None,
) -> RebuildReport:
    """Write a new ledger from sidecars and registry.

    Args:
        roots: folders with checkpoints.
        ledger: URL of the new ledger; `WHERRY_LEDGER` or the file in the home by default.
        registry: whether to query MLflow for registrations.
        tracking_uri, registry_uri: as in `register`.

    Raises:
        NotFoundError: a root does not exist.
        TargetExistsError: the ledger has statements already.
        StorageError: the ledger cannot be written.
    """
    with open_ledger(ledger) as opened:
        with opened.read() as connection:
            _require_empty(connection, opened.uri)
        found = _RebuildSources()
        for root in roots:
            _gather(root, found)
        stores = stores_of(tracking_uri, registry_uri)
        if registry:
            _ask_registry(stores, found)
        arguments = {
            "roots": [str(root) for root in roots],
            "registry": without_secrets(stores["registry_uri"]) if registry else None,
        }
        with opened.write() as connection:
            _require_empty(connection, opened.uri)  # no other process wrote meanwhile
            _write(connection, arguments, found)
            counts: dict[str, int] = {
                table.name: connection.value(f"SELECT count(*) FROM {table.name}")  # noqa: S608  our own name
                for table in tables.DERIVED
            }
            return RebuildReport(
                ledger=opened.uri,
                checkpoints=counts["checkpoint"],
                conversions=counts["conversion"],
                edges=counts["edge"],
                places=len(found.sidecars),
                registrations=counts["registration"],
                deletions=counts["tombstone"],
                partial=tuple(sorted(set(found.partial))),
                unreadable=tuple(found.unreadable),
                lost=LOST,
                head=last_statement(connection).hash,
            )


def _require_empty(connection: LedgerConnection, uri: str) -> None:
    if last_statement(connection).seq:
        raise TargetExistsError(
            "the ledger is not empty; rebuild writes only to an empty ledger",
            uri=uri,
            cure=Cure(
                "move the old ledger away, or name a new one in WHERRY_LEDGER or with {}", Argument("ledger")
            ),
        )


def _gather(root: str | os.PathLike[str], found: _RebuildSources) -> None:
    """Collect the sidecars of all checkpoints below a root, including damaged checkpoints."""
    skipped: list[SkippedPath] = []
    uris = [one.uri for one in discover(root, on_skip=skipped.append)]
    seen = {uri for uri, _sidecar in found.sidecars}
    for uri in (*uris, *(row.uri for row in skipped)):
        place = locate(uri)
        if uri in seen or is_staging(place.name):
            continue
        try:
            sidecar = read_sidecar(place)
        except WherryError as error:
            found.unreadable.append({"uri": uri, "reason": error.what})
            continue
        if sidecar is None:
            continue
        row = formats().get(sidecar.checkpoint.format)
        # A plug-in's format may not be installed here; others have a commit member, also in the step folder around it.
        if row is None or any(is_marked(one, row.commit_members) for one in (place, place.parent)):
            seen.add(uri)
            found.sidecars.append((uri, sidecar))
        else:
            found.unreadable.append({"uri": uri, "reason": "its commit member is missing"})


def _ask_registry(stores: Mapping[str, str], found: _RebuildSources) -> None:
    # Digest → checkpoint: from its own sidecar if that was found, otherwise from the sidecar of a conversion of it.
    receipts = (sidecar.receipt for _uri, sidecar in found.sidecars if sidecar.receipt is not None)
    sources = (one for receipt in receipts for one in receipt.sources)
    selves = (replace(sidecar.checkpoint, uri=uri) for uri, sidecar in found.sidecars)
    known = {one.checkpoint_digest: one for one in (*sources, *selves)}
    try:
        for row in service("mlflow").registered_versions(stores["tracking_uri"], stores["registry_uri"]):
            digest = row.tags[DIGEST_TAG]
            if digest not in known:
                found.partial.append(digest)
            found.registered.append((known.get(digest) or _from_tags(row.tags), row.name, str(row.version)))
            if DELETED_TAG in row.tags:
                found.deleted[digest] = row.tags[DELETED_TAG]
    except WherryError as error:
        found.unreadable.append({"uri": without_secrets(stores["registry_uri"]), "reason": error.what})


def _from_tags(tags: Mapping[str, str]) -> CheckpointRef:
    """A node with the fields that a registered version records."""
    step = tags.get(f"{_TAG}step", "")
    return CheckpointRef(
        uri=tags.get(URI_TAG, ""),
        format=tags.get(f"{_TAG}format", ""),
        format_version=tags.get(f"{_TAG}format_version") or None,
        checkpoint_digest=tags[DIGEST_TAG],
        weights_digest=tags.get(WEIGHTS_TAG, ""),
        fingerprint="",
        step=decimal_number(step),
    )


def _write(connection: LedgerConnection, arguments: Mapping[str, Any], found: _RebuildSources) -> None:
    """Write the statement of the rebuild, then the recovered statements, in their original order."""
    receipts = [sidecar.receipt for _uri, sidecar in found.sidecars if sidecar.receipt is not None]
    digests = {sidecar.checkpoint.checkpoint_digest for _uri, sidecar in found.sidecars}
    digests |= {one.checkpoint_digest for receipt in receipts for one in (*receipt.sources, receipt.target)}
    digests |= {subject.checkpoint_digest for subject, _name, _version in found.registered}
    # A copy of a converted checkpoint has the receipt of the same conversion.
    conversions = {(receipt.target.uri, receipt.plan_digest, receipt.finished) for receipt in receipts}
    body = {
        **arguments,
        "recovered": {
            "checkpoints": len(digests),
            "conversions": len(conversions),
            "places": len(found.sidecars),
            "registrations": len(found.registered),
        },
        "partial": sorted(set(found.partial)),
        "unreadable": found.unreadable,
        "lost": list(LOST),
        "tool": __version__,
    }
    append(connection, "rebuild", body)
    for _uri, sidecar in sorted(found.sidecars, key=_when):
        if sidecar.receipt is not None:
            add_conversion(connection, sidecar.receipt)
    for uri, sidecar in sorted(
        found.sidecars, key=_when
    ):  # where it was found, in addition to where it was made
        add_sighting(connection, replace(sidecar.checkpoint, uri=uri))
    for subject, name, version in sorted(
        found.registered, key=lambda row: (row[1], decimal_number(row[2]) or 0)
    ):
        add_registration(connection, subject, str(arguments["registry"]), name, version)
    _bury(connection, found)


def _bury(connection: LedgerConnection, found: _RebuildSources) -> None:
    """Record the deletions that the registry notes, except for checkpoints that were found."""
    query = "SELECT uri FROM location WHERE checkpoint_digest = :digest ORDER BY uri"
    there = {one.checkpoint.checkpoint_digest for _uri, one in found.sidecars}
    for digest, text in sorted(found.deleted.items()):
        time, _by, rest = text.partition(" by ")
        who, _colon, reason = rest.partition(": ")
        rows = [] if digest in there else list(connection.rows(query, digest=digest))
        for (uri,) in rows:
            said = {"reason": reason or text, "by": who, "deleted": time}
            append(connection, "deletion", {"checkpoint_digest": digest, "uri": uri, **said})


def _when(row: tuple[str, Sidecar]) -> tuple[str, str]:
    uri, sidecar = row
    return (sidecar.receipt.finished if sidecar.receipt else "", uri)
