"""Nodes of the lineage: checkpoints as the ledger knows them, with where they were seen and what is known of them.

Conversions as rows: which sources have been converted already, and into what.

Reconciliation asks this for a whole night, so it is one query over a table of its own that reads no statement.
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sqlalchemy import Row, Select, and_, or_, select

from wherry.errors import UsageError
from wherry.ledger import schema as tables
from wherry.ledger.append import RELEASED

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

    from sqlalchemy import Connection

    from wherry.core.receipt import CheckpointRef
    from wherry.ledger.database import Ledger


__all__ = [
    "ConvertedTarget", "Node", "Place", "Registered", "Verified", "conversions_of", "converted_sources", "digest_at",
    "digests_starting", "node_of", "nodes", "registered_nodes", "verifications",
]  # fmt: skip

_AT_ONCE = 500  # digests or statements asked for in one query; drivers bound the number of parameters
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


@dataclass(frozen=True, slots=True)
class ConvertedTarget:
    """One conversion that was carried out.

    Attributes:
        target_uri: where the result was committed.
        format: of the result.
        target_digest: checkpoint digest of the result.
        plan_digest: the plan that was carried out.
        options: the plan's options.
        time: when it was finished; UTC.
        source_uri: what was read.
        source_fingerprint: mark of the source's files then.
        source_digest: checkpoint digest of the source.
        statement: number of the ledger's statement.
        lossless: whether every move was exact.
        software: the version of wherry that did it; empty where that is not known.
        gone: when the result was deleted there (UTC); None where nothing says so.
    """

    target_uri: str
    format: str
    target_digest: str
    plan_digest: str
    options: Mapping[str, Any]
    time: str
    source_uri: str
    source_fingerprint: str
    source_digest: str
    statement: int
    lossless: bool
    software: str
    gone: str | None


def conversions_of(
    ledger: Ledger,
    fingerprint: str | None = None,
    checkpoint_digest: str | None = None,
    *,
    uri: str | None = None,
) -> list[ConvertedTarget]:
    """What was made of a source, in the order in which it was recorded.

    Args:
        ledger: where.
        fingerprint: the source's files as they are now; with `uri` only of those that lay there.
        checkpoint_digest: or the source's identity, wherever it lay.
        uri: where the source lies; alone, everything that was ever made of what lay there.

    Raises:
        UsageError: nothing is asked for.
    """
    table = tables.conversion.c
    here = [table.source_fingerprint == fingerprint] if fingerprint is not None else []
    here += [table.source_uri == uri] if uri is not None else []
    either = [and_(*here)] if here else []
    either += [table.source == checkpoint_digest] if checkpoint_digest is not None else []
    if not either:
        raise UsageError("conversions of what?", cure="give a fingerprint, a URI or a checkpoint digest")
    with ledger.read() as connection:
        return [_converted(row) for row in connection.execute(_query().where(or_(*either)))]


def converted_sources(ledger: Ledger) -> dict[tuple[str, str], list[ConvertedTarget]]:
    """(source URI, source fingerprint) → what was made of it, for everything that was ever converted."""
    found = defaultdict[tuple[str, str], list[ConvertedTarget]](list)
    with ledger.read() as connection:
        for row in connection.execute(_query()):
            one = _converted(row)
            found[one.source_uri, one.source_fingerprint].append(one)
    return dict(found)


def last_conversions(ledger: Ledger) -> dict[str, ConvertedTarget]:
    """Target URI → the conversion that was committed there last."""
    with ledger.read() as connection:
        rows = [_converted(row) for row in connection.execute(_query())]
    return {row.target_uri: row for row in rows}


def asked_in(ledger: Ledger, numbers: Iterable[int]) -> dict[int, dict[str, Any]]:
    """Number of a conversion's statement → what was stated; see `converter.command`. Empty where it is not kept."""
    table, every, found = tables.statement.c, list(numbers), dict[int, dict[str, Any]]()
    with ledger.read() as connection:
        for start in range(0, len(every), _AT_ONCE):
            query = select(table.seq, table.body).where(table.seq.in_(every[start : start + _AT_ONCE]))
            found |= {row.seq: json.loads(row.body).get("asked", {}) for row in connection.execute(query)}
    return found


def _query() -> Select[Any]:
    """Conversions with the tombstone of their target, where that is younger than the place it marks."""
    done, stone, place = tables.conversion.c, tables.tombstone.c, tables.location.c
    same = (stone.checkpoint_digest == done.target) & (stone.uri == done.target_uri)
    there = (place.checkpoint_digest == done.target) & (place.uri == done.target_uri)
    buried = and_(same, stone.statement >= place.statement)
    return (
        select(tables.conversion, stone.time.label("gone"))
        .join(tables.location, there)
        .outerjoin(tables.tombstone, buried)
        .order_by(done.statement)
    )


def _converted(row: Row[Any]) -> ConvertedTarget:
    return ConvertedTarget(
        target_uri=row.target_uri,
        format=row.format,
        target_digest=row.target,
        plan_digest=row.plan_digest,
        options=json.loads(row.options),
        time=row.time,
        source_uri=row.source_uri,
        source_fingerprint=row.source_fingerprint,
        source_digest=row.source,
        statement=row.statement,
        lossless=row.lossless,
        software=row.software,
        gone=row.gone,
    )
