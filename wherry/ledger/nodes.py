"""Nodes of the lineage: checkpoints of the ledger, with their places, registrations and verifications.

These queries about single checkpoints use the indexes of the tables; `wherry.ledger.replay` answers questions about the
whole ledger, or about an earlier moment.
"""

from __future__ import annotations

import sqlite3
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path
from sys import intern
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from wherry.config.settings import ledger_url
from wherry.core.digest import ALGORITHMS
from wherry.core.lazy_dataclass import dataclass
from wherry.core.receipt import CheckpointRef
from wherry.ledger import schema as tables
from wherry.ledger.database import Ledger, LedgerConnection, open_ledger
from wherry.ledger.replay import (
    RATE_STATEMENTS,
    SOUND,
    CheckpointRecord,
    ConversionRecord,
    LedgerState,
    PlaceRecord,
    RegistrationRecord,
    VerificationRecord,
    replay,
)
from wherry.ledger.statements import (
    RELEASED,
    damage_of,
    head,
    statements_of,
    stored_table,
    stored_word,
)
from wherry.store.home import ledger_to_read, sqlite_file

if TYPE_CHECKING:
    _Key = TypeVar("_Key", str, int)

_AT_ONCE = 5000  # digests or statements in one query
_PAST_HEX = "g"  # sorts after every hex digit


# Queries about many checkpoints. Their columns are in the order of the fields of the records, as building a record from
# a tuple takes a fraction of the time that it takes from a mapping.
_CHECKPOINTS = (
    f"SELECT {', '.join(tables.checkpoint.columns)} FROM checkpoint "  # noqa: S608  our own names
    "WHERE checkpoint_digest IN (:*digests)"
)
_PLACES = """
SELECT place.uri, place.checkpoint_digest, place.fingerprint, place.statement, place.seen, stone.time
FROM location AS place
LEFT JOIN tombstone AS stone ON stone.checkpoint_digest = place.checkpoint_digest AND stone.uri = place.uri
  AND stone.statement >= place.statement
WHERE place.checkpoint_digest IN (:*digests)
ORDER BY place.statement DESC, place.seen DESC, place.uri
"""
_REGISTRATIONS = """
SELECT checkpoint_digest, registry, name, version, state FROM registration
WHERE checkpoint_digest IN (:*digests) AND state <> :released
ORDER BY registry, name, checkpoint_digest
"""
_VERIFICATIONS = """
SELECT checkpoint_digest, level, verdict, time FROM verification
WHERE checkpoint_digest IN (:*digests) ORDER BY statement
"""
# Conversions with the time of the tombstone of their target, if that is newer than the place that it marks.
_CONVERSIONS = """
SELECT done.target_uri, done.format, done.target, done.plan_digest, done.options, done.time, done.source_uri,
  done.source_fingerprint, done.source, done.statement, done.lossless, done.software, stone.time
FROM conversion AS done
JOIN location AS place ON place.checkpoint_digest = done.target AND place.uri = done.target_uri
LEFT JOIN tombstone AS stone ON stone.checkpoint_digest = done.target AND stone.uri = done.target_uri
  AND stone.statement >= place.statement
{chosen}
ORDER BY done.statement
"""
_EVERY_CONVERSION = _CONVERSIONS.format(chosen="")
_CONVERSIONS_AT = _CONVERSIONS.format(
    chosen="WHERE done.target_uri IN (SELECT target_uri FROM conversion WHERE target IN (:*digests))"
)


class _ConversionRow(NamedTuple):
    """A row of these queries, whose columns are fields of `ConversionRecord`."""

    target_uri: str
    format: str
    target_digest: str
    plan_digest: str
    options: str
    time: str
    source_uri: str
    source_fingerprint: str
    source_digest: str
    statement: int
    lossless: bool
    software: str
    gone: str | None


@dataclass(frozen=True, slots=True)
class LineageNode(CheckpointRecord):
    """A checkpoint in the lineage: its record, and its places, registrations and last verification."""

    places: tuple[PlaceRecord, ...] = ()
    registrations: tuple[RegistrationRecord, ...] = ()
    verified: VerificationRecord | None = None

    def to_json(self) -> dict[str, Any]:
        """The output of `lineage show --json`."""
        return {
            **{name: getattr(self, name) for name in CheckpointRecord.__slots__},
            "places": [place.to_json() for place in self.places],
            "registrations": [asdict(row) for row in self.registrations],
            "verified": self.verified and asdict(self.verified),
        }


def node_of(subject: CheckpointRef, seen: str) -> LineageNode:
    """The node that a sidecar describes, without a ledger."""
    return LineageNode(
        checkpoint_digest=subject.checkpoint_digest,
        weights_digest=subject.weights_digest,
        format=subject.format,
        format_version=subject.format_version,
        kind=subject.kind,
        step=subject.step,
        tensors=subject.tensors,
        parameters=subject.parameters,
        nbytes=subject.nbytes,
        places=(PlaceRecord(subject.uri, subject.checkpoint_digest, subject.fingerprint, 0, seen),),
    )


def nodes(ledger: Ledger, digests: Collection[str]) -> dict[str, LineageNode]:
    """Checkpoint digest → node, for the checkpoints in the ledger."""
    found = dict[str, LineageNode]()
    with ledger.read() as connection:
        for some in _batches(digests):
            places = _places(connection, some)
            registrations = _registrations(connection, some)
            verified = _last_verifications(connection, some)
            for row in connection.rows(_CHECKPOINTS, digests=some):
                digest = row[0]
                found[digest] = LineageNode(
                    *row,
                    places=tuple(places.get(digest, ())),
                    registrations=tuple(registrations.get(digest, ())),
                    verified=verified.get(digest),
                )
    return found


def referenced_nodes(ledger: Ledger, digests: Collection[str]) -> dict[str, LineageNode]:
    """Checkpoint digest → node, for checkpoints that rows of the ledger refer to.

    Raises:
        CorruptError: one of them is not in the ledger.
    """
    found = nodes(ledger, digests)
    if missing := sorted(set(digests) - found.keys()):
        raise tables.damage_error(f"references: to {missing[0][:80]!r}, which is not in it")
    return found


def standing(ledger: Ledger, digests: Collection[str]) -> tuple[list[PlaceRecord], list[RegistrationRecord]]:
    """The places and the registrations of checkpoints, without the checkpoints themselves."""
    places, registrations = list[PlaceRecord](), list[RegistrationRecord]()
    with ledger.read() as connection:
        for some in _batches(digests):
            places += chain.from_iterable(_places(connection, some).values())
            registrations += chain.from_iterable(_registrations(connection, some).values())
    return places, registrations


def notable(ledger: Ledger, digests: Collection[str]) -> set[str]:
    """The checkpoints among `digests` that have a registered version, or whose last verification failed."""
    found = set[str]()
    with ledger.read() as connection:
        for some in _batches(digests):
            registrations, verified = _registrations(connection, some), _last_verifications(connection, some)
            found |= {digest for digest, rows in registrations.items() if any(row.version for row in rows)}
            found |= {digest for digest, row in verified.items() if row.verdict not in SOUND}
    return found


def verifications(ledger: Ledger, digest: str) -> dict[str, dict[str, Any]]:
    """Level → the last verification of a checkpoint at it, in JSON form, in the order in which they were recorded."""
    query = (
        "SELECT level, body FROM verification JOIN statement ON seq = statement "
        "WHERE checkpoint_digest = :digest ORDER BY seq"
    )
    with ledger.read() as connection:
        return {level: _outcome(body) for level, body in connection.rows(query, digest=digest)}


def _outcome(body: str) -> dict[str, Any]:
    """The verification in the body of a statement."""
    found = stored_table(body).get("verification")
    if not isinstance(found, dict):
        raise tables.damage_error("statements: a verification without its outcome")
    return found


def present(ledger: Ledger) -> LedgerState:
    """The present conversions, their rate, and the notes of routes: the part of the state that a night needs.

    The rest of the state is empty. Only the last statements of conversions are read, for the rate.
    """
    last = replay(ledger, after=max(head(ledger).seq - RATE_STATEMENTS, 0), kinds={"conversion"})
    return replace(replay(ledger, kinds={"note"}), conversions=conversions(ledger), rate=last.rate)


def conversions(ledger: Ledger) -> tuple[ConversionRecord, ...]:
    """All conversions, in the order in which they were recorded, without fields that are only in their statements."""
    with ledger.read() as connection:
        shared = dict[str, "Mapping[str, Any]"]()
        return tuple(_conversion(row, {}, shared) for row in _conversion_rows(connection, None))


def current_conversions(
    ledger: Ledger, digests: Collection[str] | None = None
) -> tuple[ConversionRecord, ...]:
    """The last conversion at each place, with its stated request, unless its result was deleted.

    Args:
        ledger: the ledger.
        digests: only conversions to these checkpoints; only their places are read. All by default.

    Returns:
        The conversions in the order in which they were recorded.
    """
    with ledger.read() as connection:
        last = {row.target_uri: row for row in _conversion_rows(connection, digests)}
    chosen = (
        row for row in last.values() if row.gone is None and (digests is None or row.target_digest in digests)
    )
    rows = sorted(chosen, key=lambda row: row.statement)
    requests = {
        one.seq: one.body.get("requested", {})
        for one in statements_of(ledger, [row.statement for row in rows])
    }
    shared = dict[str, "Mapping[str, Any]"]()
    return tuple(_conversion(row, requests[row.statement], shared) for row in rows)


def every_digest(ledger: Ledger) -> list[str]:
    """The digests of all checkpoints in the ledger."""
    with ledger.read() as connection:
        return [digest for (digest,) in connection.rows("SELECT checkpoint_digest FROM checkpoint")]


def families_and_read_backs(
    ledger: Ledger,
) -> tuple[dict[str, str], dict[tuple[str, str], VerificationRecord]]:
    """The facts that only the statements of conversions have: families and read-backs.

    Returns:
        Checkpoint digest → model family, for the sources and targets of conversions between layouts;
        (checkpoint digest, URI) → how the last conversion there compared what it had written with its source, unless it
        compared nothing or a verification of its result was recorded later.

    Raises:
        CorruptError: a statement is invalid.
    """
    query = (
        "SELECT source, target, target_uri, seq, conversion.time, body "
        "FROM conversion JOIN statement ON seq = statement ORDER BY seq"
    )
    later = "SELECT checkpoint_digest, max(statement) FROM verification GROUP BY checkpoint_digest"
    families, compared = dict[str, str](), dict[tuple[str, str], VerificationRecord | None]()
    with ledger.read() as connection:
        verified: dict[str, int] = dict(connection.rows(later))
        for source, target, uri, seq, time, text in connection.stream(query):
            with damage_of(seq):
                body = stored_table(text)
                if body.get("family"):
                    families |= dict.fromkeys((source, target), stored_word(body["family"]))
                level = (body.get("verification") or {}).get("level")
                stands = level and seq > verified.get(target, 0)
                compared[target, uri] = VerificationRecord(stored_word(level), "ok", time) if stands else None
    return families, {place: record for place, record in compared.items() if record is not None}


def digest_at(ledger: Ledger, uri: str) -> str | None:
    """The digest of the checkpoint that was last seen at a URI."""
    query = (
        "SELECT checkpoint_digest FROM location WHERE uri = :uri ORDER BY statement DESC, seen DESC LIMIT 1"
    )
    with ledger.read() as connection:
        return connection.value(query, uri=uri)


def look_up(query: str, tables: Collection[str], **values: str) -> list[tuple[Any, ...]]:
    """The rows of a query in the configured ledger, which is not created for it; nor is an empty file made one.

    Args:
        query: SQL that every database of the ledger understands.
        tables: those that it reads.
        values: its parameters.

    Raises:
        WherryError: as `open_ledger`.
    """
    file = sqlite_file(ledger_url())
    if file is not None:
        # One of another schema, in use, or that is no ledger is an error: opening it says which.
        with suppress(sqlite3.Error):
            return _rows_in_file(file, query, tables, values)
    with open_ledger() as ledger, ledger.read() as connection:
        return list(connection.rows(query, **values))


def _rows_in_file(
    file: Path, query: str, tables: Collection[str], values: Mapping[str, str]
) -> list[tuple[Any, ...]]:
    """The rows of a query in a file, which is only read; none if it does not exist or is empty.

    Raises:
        sqlite3.Error: as `ledger_to_read`.
    """
    if not file.exists() or (file.is_file() and not file.stat().st_size):
        return []
    with ledger_to_read(file, tables) as connection:
        return connection.execute(query, values).fetchall()


def last_target() -> str | None:
    """The digest of the last conversion's target in the configured ledger; None if there is none.

    A file is only read: one that cannot be read as a ledger has none, whatever the reason.

    Raises:
        WherryError: as `open_ledger`, of a ledger in PostgreSQL.
    """
    query, names = "SELECT target FROM conversion ORDER BY statement DESC LIMIT 1", ("conversion",)
    file, found = sqlite_file(ledger_url()), list[tuple[Any, ...]]()
    with suppress(sqlite3.Error):
        found = look_up(query, names) if file is None else _rows_in_file(file, query, names, {})
    return found[0][0] if found else None


def digests_starting(ledger: Ledger, prefix: str) -> list[str]:
    """Checkpoints whose checkpoint digest or weights digest starts with a prefix.

    Args:
        ledger: the opened ledger.
        prefix: of a digest, with or without its algorithm.
    """
    starts = [prefix] if ":" in prefix else [f"{name}:{prefix}" for name in ALGORITHMS]
    values = {f"first{at}": start for at, start in enumerate(starts)}
    values |= {f"past{at}": start + _PAST_HEX for at, start in enumerate(starts)}
    begins = " OR ".join(
        f"{column} >= :first{at} AND {column} < :past{at}"
        for column in ("checkpoint_digest", "weights_digest")
        for at in range(len(starts))
    )
    query = f"SELECT checkpoint_digest FROM checkpoint WHERE {begins} ORDER BY checkpoint_digest"  # noqa: S608  our own
    with ledger.read() as connection:
        return [digest for (digest,) in connection.rows(query, **values)]


def _batches(keys: Collection[_Key]) -> Iterator[list[_Key]]:
    every = list(keys)
    for start in range(0, len(every), _AT_ONCE):
        yield every[start : start + _AT_ONCE]


def _places(connection: LedgerConnection, digests: list[str]) -> dict[str, list[PlaceRecord]]:
    found = defaultdict[str, list[PlaceRecord]](list)
    for row in connection.rows(_PLACES, digests=digests):
        place = PlaceRecord(*row)
        found[place.checkpoint_digest].append(place)
    return found


def _registrations(connection: LedgerConnection, digests: list[str]) -> dict[str, list[RegistrationRecord]]:
    found = defaultdict[str, list[RegistrationRecord]](list)
    for digest, *fields in connection.rows(_REGISTRATIONS, digests=digests, released=RELEASED):
        found[digest].append(RegistrationRecord(*fields))
    return found


def _last_verifications(connection: LedgerConnection, digests: list[str]) -> dict[str, VerificationRecord]:
    """The last verification of each checkpoint."""
    rows = connection.rows(_VERIFICATIONS, digests=digests)
    return {digest: VerificationRecord(*fields) for digest, *fields in rows}


def _conversion_rows(
    connection: LedgerConnection, digests: Collection[str] | None
) -> Iterator[_ConversionRow]:
    """Conversions in the order in which they were recorded; with digests, those at each place that has one of them."""
    if digests is None:
        yield from map(_ConversionRow._make, connection.rows(_EVERY_CONVERSION))
        return
    found = {
        row.statement: row
        for some in _batches(digests)
        for row in map(_ConversionRow._make, connection.rows(_CONVERSIONS_AT, digests=some))
    }
    yield from (found[statement] for statement in sorted(found))


def _conversion(
    row: _ConversionRow, request: Mapping[str, Any], shared: dict[str, Mapping[str, Any]]
) -> ConversionRecord:
    """A record; strings and options that occur again are one object."""
    if row.options not in shared:
        shared[row.options] = stored_table(row.options)
    values: dict[str, Any] = {
        name: intern(value) if type(value) is str else value for name, value in row._asdict().items()
    }
    values["options"] = shared[row.options]
    return ConversionRecord(**values, request=request)
