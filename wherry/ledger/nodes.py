"""Nodes of the lineage: checkpoints of the ledger, with their places, registrations and verifications.

These queries about single checkpoints use the indexes of the tables; `wherry.ledger.replay` answers questions about the
whole ledger, or about an earlier moment.
"""

from __future__ import annotations

from collections import defaultdict
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import chain
from sys import intern
from typing import TYPE_CHECKING, Any, TypeVar

from sqlalchemy import (
    JSON,
    BigInteger,
    Select,
    and_,
    bindparam,
    cast,
    func,
    literal_column,
    or_,
    select,
    text,
)
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import FunctionElement

from wherry.core.algorithms import ALGORITHMS
from wherry.ledger import schema as tables
from wherry.ledger.append import RELEASED, stored_table
from wherry.ledger.database import open_ledger
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
from wherry.ledger.statements import head
from wherry.text.json_values import json_value_at

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

    from sqlalchemy import ColumnElement, Connection, Row
    from sqlalchemy.sql.compiler import SQLCompiler

    from wherry.core.receipt import CheckpointRef
    from wherry.ledger.database import Ledger

    _Key = TypeVar("_Key", str, int)

_AT_ONCE = 5000  # digests or statements in one query
_FIRST = '{"asked":'
_PAST_HEX = "g"  # sorts after every hex digit


class _JsonElements(FunctionElement[str]):
    """The texts of a JSON array, as rows with the column `value`."""

    name = "json_elements"
    inherit_cache = True


@compiles(_JsonElements, "sqlite")
def _on_sqlite(elements: _JsonElements, compiler: SQLCompiler, **how: Any) -> str:
    return f"json_each({compiler.process(elements.clauses, **how)})"


@compiles(_JsonElements, "postgresql")
def _on_postgres(elements: _JsonElements, compiler: SQLCompiler, **how: Any) -> str:
    return f"json_array_elements_text({compiler.process(elements.clauses, **how)})"


class _BodyField(FunctionElement[str]):
    """The text of a field in the body of a statement; its path is given as names with dots, such as `target.uri`."""

    name = "body_field"
    inherit_cache = True

    def __init__(self, body: ColumnElement[str], path: str) -> None:
        super().__init__(body, literal_column(f"'{path}'"))


@compiles(_BodyField, "sqlite")
def _field_on_sqlite(element: _BodyField, compiler: SQLCompiler, **how: Any) -> str:
    body, path = (compiler.process(clause, **how) for clause in element.clauses)
    return f"json_extract({body}, '$.' || {path})"


@compiles(_BodyField, "postgresql")
def _field_on_postgres(element: _BodyField, compiler: SQLCompiler, **how: Any) -> str:
    body, path = (compiler.process(clause, **how) for clause in element.clauses)
    return f"CAST({body} AS json) #>> string_to_array({path}, '.')"


# Queries about many checkpoints. Their columns are in the order of the fields of the records, as building a record from
# a tuple takes a fraction of the time that it takes from a mapping. All digests are one parameter: drivers limit the
# number of parameters, and writing each into the query takes longer than the search for it.
_DIGESTS = select(_JsonElements(bindparam("digests", type_=JSON)).table_valued("value").c.value)
_NUMBERS = select(
    cast(_JsonElements(bindparam("numbers", type_=JSON)).table_valued("value").c.value, BigInteger)
)


def _places_query() -> Select[Any]:
    place, stone = tables.location.c, tables.tombstone.c
    buried = and_(
        stone.checkpoint_digest == place.checkpoint_digest,
        stone.uri == place.uri,
        stone.statement >= place.statement,
    )
    columns = (place.uri, place.checkpoint_digest, place.fingerprint, place.statement, place.seen, stone.time)
    query = select(*columns).select_from(tables.location).outerjoin(tables.tombstone, buried)
    chosen = query.where(place.checkpoint_digest.in_(_DIGESTS))
    return chosen.order_by(place.statement.desc(), place.seen.desc(), place.uri)


def _registrations_query() -> Select[Any]:
    row = tables.registration.c
    query = select(row.checkpoint_digest, row.registry, row.name, row.version, row.state)
    chosen = query.where(row.checkpoint_digest.in_(_DIGESTS), row.state != RELEASED)
    return chosen.order_by(row.registry, row.name)


def _verifications_query() -> Select[Any]:
    row = tables.verification.c
    query = select(row.checkpoint_digest, row.level, row.verdict, row.time)
    return query.where(row.checkpoint_digest.in_(_DIGESTS)).order_by(row.statement)


def _conversions_query() -> Select[Any]:
    """Conversions with the tombstone of their target, if that is newer than the place that it marks."""
    done, stone, place = tables.conversion.c, tables.tombstone.c, tables.location.c
    same = (stone.checkpoint_digest == done.target) & (stone.uri == done.target_uri)
    there = (place.checkpoint_digest == done.target) & (place.uri == done.target_uri)
    buried = and_(same, stone.statement >= place.statement)
    columns = (
        done.target_uri, done.format, done.target, done.plan_digest, done.options, done.time, done.source_uri,
        done.source_fingerprint, done.source, done.statement, done.lossless, done.software, stone.time.label("gone"),
    )  # fmt: skip
    query = select(*columns).join(tables.location, there).outerjoin(tables.tombstone, buried)
    return query.order_by(done.statement)


_CHECKPOINTS = select(tables.checkpoint).where(tables.checkpoint.c.checkpoint_digest.in_(_DIGESTS))
_CONVERSIONS, _OPTIONS = _conversions_query(), 4  # the options are the fifth column
_PLACES, _REGISTRATIONS, _VERIFICATIONS = _places_query(), _registrations_query(), _verifications_query()


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
            for row in connection.execute(_CHECKPOINTS, {"digests": some}).all():
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
    """Those of some checkpoints that have a registered version, or whose last verification failed."""
    found = set[str]()
    with ledger.read() as connection:
        for some in _batches(digests):
            registrations, verified = _registrations(connection, some), _last_verifications(connection, some)
            found |= {digest for digest, rows in registrations.items() if any(row.version for row in rows)}
            found |= {digest for digest, row in verified.items() if row.verdict not in SOUND}
    return found


def verifications(ledger: Ledger, digest: str) -> dict[str, dict[str, Any]]:
    """Level → the last verification of a checkpoint at it, in JSON form, in the order in which they were recorded."""
    last, told = tables.verification.c, tables.statement.c
    query = select(last.level, told.body).join(tables.statement, told.seq == last.statement)
    with ledger.read() as connection:
        rows = connection.execute(query.where(last.checkpoint_digest == digest).order_by(told.seq)).all()
    return {row.level: _outcome(row.body) for row in rows}


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
        return tuple(_conversion(row, {}, shared) for row in connection.execute(_CONVERSIONS))


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
    chosen = (row for row in last.values() if row.gone is None and (digests is None or row.target in digests))
    rows = sorted(chosen, key=lambda row: row.statement)
    asked, shared = asked_in(ledger, [row.statement for row in rows]), dict[str, "Mapping[str, Any]"]()
    return tuple(_conversion(row, asked[row.statement], shared) for row in rows)


def asked_in(ledger: Ledger, numbers: Iterable[int]) -> dict[int, dict[str, Any]]:
    """Statement number of a conversion → the stated request; see `converter.command`. Empty if it was not recorded."""
    table, found = tables.statement.c, dict[int, dict[str, Any]]()
    query = select(table.seq, table.body).where(table.seq.in_(_NUMBERS))
    with ledger.read() as connection:
        for some in _batches(list(numbers)):
            found |= {
                seq: _recorded_request(body) for seq, body in connection.execute(query, {"numbers": some})
            }
    return found


def _recorded_request(body: str) -> dict[str, Any]:
    """The request in the body of a conversion; where it comes first, as in canonical JSON, the rest is not parsed."""
    if body.startswith(_FIRST):
        with suppress(ValueError):
            return json_value_at(body, len(_FIRST))
    return stored_table(body).get("asked", {})


def every_digest(ledger: Ledger) -> list[str]:
    """The digests of all checkpoints in the ledger."""
    with ledger.read() as connection:
        return list(connection.scalars(select(tables.checkpoint.c.checkpoint_digest)))


def families_of(ledger: Ledger) -> dict[str, str]:
    """Checkpoint digest → model family, for the sources and targets of conversions between layouts."""
    done, told = tables.conversion.c, tables.statement.c
    family = _BodyField(told.body, "family")
    query = select(done.source, done.target, family).join(tables.statement, told.seq == done.statement)
    with ledger.read() as connection:
        rows = connection.execute(query.order_by(done.statement)).all()
    return {digest: name for *ends, name in rows if name for digest in ends}


def read_backs(ledger: Ledger) -> dict[tuple[str, str], VerificationRecord]:
    """(Checkpoint digest, URI) → how the last conversion there compared what it had written with its source.

    A conversion is left out if it compared nothing, or if a verification of its result was recorded later.
    """
    done, told, checked = tables.conversion.c, tables.statement.c, tables.verification.c
    level = _BodyField(told.body, "verification.level")
    query = select(done.target, done.target_uri, done.statement, done.time, level)
    later = select(checked.checkpoint_digest, func.max(checked.statement)).group_by(checked.checkpoint_digest)
    with ledger.read() as connection:
        rows = connection.execute(
            query.join(tables.statement, told.seq == done.statement).order_by(done.statement)
        ).all()
        last = {row[0]: row[1] for row in connection.execute(later)}
    made = {(digest, uri): rest for digest, uri, *rest in rows}  # in their order: the last one stays
    return {
        place: VerificationRecord(level, "ok", time)
        for place, (statement, time, level) in made.items()
        if level and statement > last.get(place[0], 0)
    }


def digest_at(ledger: Ledger, uri: str) -> str | None:
    """The digest of the checkpoint that was last seen at a URI."""
    table = tables.location.c
    query = select(table.checkpoint_digest).where(table.uri == uri)
    with ledger.read() as connection:
        return connection.scalar(query.order_by(table.statement.desc(), table.seen.desc()).limit(1))


def first_row(ledger: Ledger, query: str, **values: str) -> tuple[Any, ...] | None:
    """The first row of a query in SQL that every database of the ledger understands; None if there is none.

    Args:
        ledger: the ledger.
        query: the query, with `{schema}` before each table.
        values: its parameters.
    """
    with ledger.read() as connection:
        row = connection.execute(text(query.format(schema=ledger.backend.prefix)), values).first()
    return None if row is None else tuple(row)


def all_rows(ledger: Ledger, query: str, **values: str) -> list[tuple[Any, ...]]:
    """The rows of a query in SQL that every database of the ledger understands, with `{schema}` before each table."""
    with ledger.read() as connection:
        query = query.format(schema=ledger.backend.prefix)
        return [tuple(row) for row in connection.execute(text(query), values)]


def last_target() -> str | None:
    """The digest of the last conversion's target; None if there is none. It opens the ledger itself.

    Raises:
        StorageError: the ledger cannot be read.
    """
    done = tables.conversion.c
    with open_ledger() as ledger, ledger.read() as connection:
        return connection.scalar(select(done.target).order_by(done.statement.desc()).limit(1))


def digests_starting(ledger: Ledger, prefix: str) -> list[str]:
    """Checkpoints whose checkpoint digest or weights digest starts with a prefix.

    Args:
        ledger: the opened ledger.
        prefix: of a digest, with or without its algorithm.
    """
    table = tables.checkpoint.c
    starts = [prefix] if ":" in prefix else [f"{one}:{prefix}" for one in ALGORITHMS]
    begins = (
        and_(column >= start, column < start + _PAST_HEX)
        for column in (table.checkpoint_digest, table.weights_digest)
        for start in starts
    )
    query = select(table.checkpoint_digest).where(or_(*begins)).order_by(table.checkpoint_digest)
    with ledger.read() as connection:
        return list(connection.scalars(query))


def _batches(keys: Collection[_Key]) -> Iterator[list[_Key]]:
    every = list(keys)
    for start in range(0, len(every), _AT_ONCE):
        yield every[start : start + _AT_ONCE]


def _places(connection: Connection, digests: list[str]) -> dict[str, list[PlaceRecord]]:
    found = defaultdict[str, list[PlaceRecord]](list)
    for row in connection.execute(_PLACES, {"digests": digests}).all():
        place = PlaceRecord(*row)
        found[place.checkpoint_digest].append(place)
    return found


def _registrations(connection: Connection, digests: list[str]) -> dict[str, list[RegistrationRecord]]:
    found = defaultdict[str, list[RegistrationRecord]](list)
    for digest, *fields in connection.execute(_REGISTRATIONS, {"digests": digests}).all():
        found[digest].append(RegistrationRecord(*fields))
    return found


def _last_verifications(connection: Connection, digests: list[str]) -> dict[str, VerificationRecord]:
    """The last verification of each checkpoint."""
    rows = connection.execute(_VERIFICATIONS, {"digests": digests}).all()
    return {digest: VerificationRecord(*fields) for digest, *fields in rows}


def _conversion_rows(connection: Connection, digests: Collection[str] | None) -> Iterator[Row[Any]]:
    """Conversions in the order in which they were recorded; with digests, those at each place that has one of them."""
    if digests is None:
        yield from connection.execute(_CONVERSIONS)
        return
    done = tables.conversion.c
    there = select(done.target_uri).where(done.target.in_(_DIGESTS))
    found = {
        row.statement: row
        for some in _batches(digests)
        for row in connection.execute(_CONVERSIONS.where(done.target_uri.in_(there)), {"digests": some})
    }
    yield from (found[statement] for statement in sorted(found))


def _conversion(
    row: Row[Any], asked: Mapping[str, Any], shared: dict[str, Mapping[str, Any]]
) -> ConversionRecord:
    """A record; strings and options that occur again are one object."""
    if row.options not in shared:
        shared[row.options] = stored_table(row.options)
    values: list[Any] = [intern(value) if type(value) is str else value for value in row]
    values[_OPTIONS] = shared[row.options]
    return ConversionRecord(*values, asked=asked)
