"""Nodes of the lineage: checkpoints as the ledger knows them, with where they were seen and what is known of them."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sqlalchemy import or_, select

from wherry import ledger_schema as tables

if TYPE_CHECKING:
    from collections.abc import Collection

    from sqlalchemy import Connection

    from wherry.ledger_file import Ledger
    from wherry.receipt import CheckpointRef


@dataclass(frozen=True, slots=True)
class Place:
    """Where a checkpoint was: URI, fingerprint of the files and when (UTC)."""

    uri: str
    fingerprint: str
    seen: str


@dataclass(frozen=True, slots=True)
class Registered:
    """A claim or a version in a model registry; `version` is None while the state is `pending`."""

    registry: str
    name: str
    version: str | None
    state: str


@dataclass(frozen=True, slots=True)
class Verified:
    """The last verification: its level, its verdict and when it was recorded (UTC)."""

    level: str
    verdict: str
    time: str


@dataclass(frozen=True, slots=True)
class Node:
    """A checkpoint in the lineage; the fields of a CheckpointRef but for places, which may be many."""

    checkpoint_digest: str
    weights_digest: str
    format: str
    format_version: str | None
    kind: str
    step: int | None
    tensors: int
    parameters: int
    nbytes: int
    places: tuple[Place, ...] = ()
    registrations: tuple[Registered, ...] = ()
    verified: Verified | None = None


def node_of(subject: CheckpointRef, seen: str) -> Node:
    """The node that a sidecar tells of, without any ledger."""
    return Node(
        checkpoint_digest=subject.checkpoint_digest,
        weights_digest=subject.weights_digest,
        format=subject.format,
        format_version=subject.format_version,
        kind=subject.kind,
        step=subject.step,
        tensors=subject.tensors,
        parameters=subject.parameters,
        nbytes=subject.nbytes,
        places=(Place(subject.uri, subject.fingerprint, seen),),
    )


def nodes(ledger: Ledger, digests: Collection[str]) -> dict[str, Node]:
    """Checkpoint digest → node, for those that the ledger knows."""
    with ledger.read() as connection:
        places = _places(connection, digests)
        registrations = _registrations(connection, digests)
        verified = _verified(connection, digests)
        table = tables.checkpoint
        rows = connection.execute(select(table).where(table.c.checkpoint_digest.in_(digests))).mappings()
        return {
            row["checkpoint_digest"]: Node(
                **row,
                places=tuple(places[row["checkpoint_digest"]]),
                registrations=tuple(registrations[row["checkpoint_digest"]]),
                verified=verified.get(row["checkpoint_digest"]),
            )
            for row in rows
        }


def digest_at(ledger: Ledger, uri: str) -> str | None:
    """The checkpoint that was seen last at a URI."""
    table = tables.location.c
    query = select(table.checkpoint_digest).where(table.uri == uri).order_by(table.seen.desc()).limit(1)
    with ledger.read() as connection:
        return connection.scalar(query)


def digests_starting(ledger: Ledger, prefix: str) -> list[str]:
    """Checkpoints whose checkpoint digest or weights digest begins so."""
    table = tables.checkpoint.c
    begins = or_(table.checkpoint_digest.startswith(prefix), table.weights_digest.startswith(prefix))
    with ledger.read() as connection:
        return list(
            connection.scalars(
                select(table.checkpoint_digest).where(begins).order_by(table.checkpoint_digest)
            )
        )


def _places(connection: Connection, digests: Collection[str]) -> dict[str, list[Place]]:
    table = tables.location.c
    query = (
        select(tables.location)
        .where(table.checkpoint_digest.in_(digests))
        .order_by(table.seen.desc(), table.uri)
    )
    found = defaultdict[str, list[Place]](list)
    for row in connection.execute(query):
        found[row.checkpoint_digest].append(Place(row.uri, row.fingerprint, row.seen))
    return found


def _registrations(connection: Connection, digests: Collection[str]) -> dict[str, list[Registered]]:
    table = tables.registration.c
    query = (
        select(tables.registration)
        .where(table.checkpoint_digest.in_(digests))
        .order_by(table.registry, table.name)
    )
    found = defaultdict[str, list[Registered]](list)
    for row in connection.execute(query):
        found[row.checkpoint_digest].append(Registered(row.registry, row.name, row.version, row.state))
    return found


def _verified(connection: Connection, digests: Collection[str]) -> dict[str, Verified]:
    table = tables.statement.c
    query = select(table.body, table.time).where(table.kind == "verification").order_by(table.seq)
    found: dict[str, Verified] = {}
    for row in connection.execute(query):
        body: dict[str, Any] = json.loads(row.body)
        if body["checkpoint_digest"] in digests:
            outcome = body["verification"]
            found[body["checkpoint_digest"]] = Verified(outcome["level"], outcome["verdict"], row.time)
    return found
