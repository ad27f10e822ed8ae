"""Nodes of the lineage: checkpoints as the ledger knows them, with where they were seen and what is known of them."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sqlalchemy import and_, or_, select

from wherry.ledger import schema as tables
from wherry.ledger.conversions import ConvertedTarget, conversions_of, converted_sources
from wherry.ledger.rows import RELEASED

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from sqlalchemy import Connection

    from wherry.core.receipt import CheckpointRef
    from wherry.ledger.database import Ledger

__all__ = [
    "ConvertedTarget", "Node", "Place", "Registered", "Verified", "conversions_of", "converted_sources", "digest_at",
    "digests_starting", "node_of", "nodes", "registered_nodes", "verifications",
]  # fmt: skip

_AT_ONCE = 500  # digests asked for in one query; drivers bound the number of parameters
_PAST_HEX = "g"  # sorts after every hex digit


@dataclass(frozen=True, slots=True)
class Place:
    """Where a checkpoint was: URI, fingerprint of the files, when it was seen and when it was deleted (UTC)."""

    uri: str
    fingerprint: str
    seen: str
    gone: str | None = None


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
    table, found = tables.checkpoint, dict[str, Node]()
    with ledger.read() as connection:
        for some in _batches(digests):
            places = _places(connection, some)
            registrations = _registrations(connection, some)
            verified = _verified(connection, some)
            for row in connection.execute(
                select(table).where(table.c.checkpoint_digest.in_(some))
            ).mappings():
                digest = row["checkpoint_digest"]
                levels = verified[digest]
                found[digest] = Node(
                    **row,
                    places=tuple(places[digest]),
                    registrations=tuple(registrations[digest]),
                    verified=levels[-1] if levels else None,
                )
    return found


def registered_nodes(ledger: Ledger) -> dict[str, Node]:
    """Checkpoint digest → node, for everything that was ever registered."""
    table = tables.registration.c
    query = select(table.checkpoint_digest).where(table.state != RELEASED).distinct()
    with ledger.read() as connection:
        digests = list(connection.scalars(query))
    return nodes(ledger, digests)


def verifications(ledger: Ledger, digest: str) -> list[Verified]:
    """The last verification of a checkpoint at each level, in the order in which they were recorded."""
    with ledger.read() as connection:
        return _verified(connection, [digest])[digest]


def digest_at(ledger: Ledger, uri: str) -> str | None:
    """The checkpoint that was seen last at a URI."""
    table = tables.location.c
    query = select(table.checkpoint_digest).where(table.uri == uri)
    with ledger.read() as connection:
        return connection.scalar(query.order_by(table.statement.desc(), table.seen.desc()).limit(1))


def digests_starting(ledger: Ledger, prefix: str) -> list[str]:
    """Checkpoints whose checkpoint digest or weights digest begins so."""
    table = tables.checkpoint.c
    begins = (
        and_(column >= prefix, column < prefix + _PAST_HEX)
        for column in (table.checkpoint_digest, table.weights_digest)
    )
    query = select(table.checkpoint_digest).where(or_(*begins)).order_by(table.checkpoint_digest)
    with ledger.read() as connection:
        return list(connection.scalars(query))


def _batches(digests: Collection[str]) -> Iterator[list[str]]:
    every = list(digests)
    for start in range(0, len(every), _AT_ONCE):
        yield every[start : start + _AT_ONCE]


def _places(connection: Connection, digests: Collection[str]) -> dict[str, list[Place]]:
    place, stone = tables.location.c, tables.tombstone.c
    buried = and_(
        stone.checkpoint_digest == place.checkpoint_digest,
        stone.uri == place.uri,
        stone.statement >= place.statement,
    )
    query = (
        select(tables.location, stone.time.label("gone"))
        .outerjoin(tables.tombstone, buried)
        .where(place.checkpoint_digest.in_(digests))
        .order_by(place.statement.desc(), place.seen.desc(), place.uri)
    )
    found = defaultdict[str, list[Place]](list)
    for row in connection.execute(query):
        found[row.checkpoint_digest].append(Place(row.uri, row.fingerprint, row.seen, row.gone))
    return found


def _registrations(connection: Connection, digests: Collection[str]) -> dict[str, list[Registered]]:
    table = tables.registration.c
    query = (
        select(tables.registration)
        .where(table.checkpoint_digest.in_(digests), table.state != RELEASED)
        .order_by(table.registry, table.name)
    )
    found = defaultdict[str, list[Registered]](list)
    for row in connection.execute(query):
        found[row.checkpoint_digest].append(Registered(row.registry, row.name, row.version, row.state))
    return found


def _verified(connection: Connection, digests: Collection[str]) -> dict[str, list[Verified]]:
    table = tables.verification.c
    query = select(tables.verification).where(table.checkpoint_digest.in_(digests)).order_by(table.statement)
    found = defaultdict[str, list[Verified]](list)
    for row in connection.execute(query):
        found[row.checkpoint_digest].append(Verified(row.level, row.verdict, row.time))
    return found
