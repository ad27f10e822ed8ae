"""Checks a ledger: whether every row of every table is unchanged since it was written.

The hash chain is recomputed from the first statement, and the rows are derived again from each statement; the other
tables must hold exactly these rows. The seals of the projections' rows are recomputed. The first fault is reported.

A chain cannot prove that it is complete: after cutting off the last statements, or writing the whole chain anew, it is
still valid. An anchor (number and hash of a statement, kept elsewhere) detects that. The triggers that refuse changes
are compared with those that wherry creates: without them, the next change needs no trace.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from datetime import datetime
from hashlib import blake2b
from operator import itemgetter
from typing import Any

from wherry.core.lazy_dataclass import dataclass
from wherry.core.receipt import utc_now
from wherry.core.units import short
from wherry.errors import CorruptError, StorageError, describe_exception
from wherry.ledger import schema as tables
from wherry.ledger.database import SQLITE, Ledger, LedgerConnection
from wherry.ledger.deliver import projection_rows, seal_of
from wherry.ledger.schema import LedgerTable
from wherry.ledger.statements import (
    CLOCK_CURE,
    SKEW,
    Row,
    StatementRow,
    content_of,
    hash_of,
    is_ahead,
    last_statement,
    plausible_clocks,
    rows_of,
    stored_table,
    stored_time,
)

_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d{1,6})?\+00:00")
_EXACT = 1 << 53  # integers below are floats without loss
_DIGEST = re.compile(r"(?:\w+:)?[0-9a-f]{64}")
# The key and the contents of a row that must exist, and the key of a row that exists, which is a tuple, by table.
_KEY = {table: itemgetter(*table.key) for table in tables.DERIVED}
_CONTENTS = {table: itemgetter(*table.columns) for table in tables.DERIVED}
_STORED_KEY = {table: itemgetter(*map([*table.columns].index, table.key)) for table in tables.DERIVED}
_STATEMENTS = f"SELECT {', '.join(tables.statement.columns)} FROM statement ORDER BY seq"  # noqa: S608  our own names
_SECRET = os.urandom(16)  # of the marks of this process, so that collisions cannot be prepared


@dataclass(frozen=True, slots=True)
class Anchor:
    """The number and hash of a statement, kept outside the ledger.

    Attributes:
        hash: its hash, or at least 16 hex digits of it.
        seq: its number; None if only the hash was kept.
    """

    hash: str
    seq: int | None = None


_BEFORE_ALL = Anchor(tables.GENESIS, 0)  # what `anchor` prints for an empty ledger


@dataclass(frozen=True, slots=True)
class Chain:
    """Outcome of `check_chain`.

    Attributes:
        statements: number of statements.
        head: hash of the last one.
        altered: the first altered row, and the reason; None if no row was altered.
        clock: the first statement whose times contradict each other or the present by more than a day: a clock was
            wrong. The order is that of the chain, so nothing is lost.
        anchored: number of the statement that the anchor names; None if it is not in this chain, or without an anchor.
    """

    statements: int
    head: str
    altered: str | None
    anchored: int | None = None
    clock: str | None = None


def check_chain(ledger: Ledger, anchor: Anchor | None = None) -> Chain:
    """Recompute every hash, and every row that follows from the statements.

    Args:
        ledger: the ledger to check.
        anchor: a statement that must be in it unchanged.
    """
    with ledger.read() as connection:
        head, count, time, expected = tables.GENESIS, 0, "", _ExpectedRows()
        clock: str | None = None
        anchored = 0 if anchor == _BEFORE_ALL else None
        for row in _statements(connection):
            fault = _fault(row, head, count + 1) or _time_fault(row) or expected.take(row)
            if fault:
                return Chain(count, head, f"statement {row.seq}: {fault}", anchored, clock)
            odd = clock is None and _clock_fault(row, time)
            clock = f"statement {row.seq}: {odd}" if odd else clock
            head, count, time = row.hash, row.seq, row.time
            if anchor and head.startswith(anchor.hash) and anchor.seq in (None, count):
                anchored = count
        fault = (
            _row_fault(connection, expected) or _seal_fault(connection, count) or _trigger_fault(connection)
        )
        return Chain(count, head, fault, anchored, clock)


def require_agreement(ledger: Ledger) -> None:
    """Require that the clock of this machine fits the ledger: its storage's clock, and its last statement.

    Args:
        ledger: the ledger.

    Raises:
        StorageError: the clocks differ, or the last statement is of the future.
    """
    with ledger.read() as connection:
        time, last = plausible_clocks(connection).machine, last_statement(connection)
    if last.seq and is_ahead(last.time, time):
        raise StorageError(
            f"the last statement of the ledger is of {last.time}, but it is {time} by the clock of this machine",
            uri=ledger.uri,
            cure=f"{CLOCK_CURE}; if it is right, the next statement corrects the ledger",
        )


def _statements(connection: LedgerConnection) -> Iterator[StatementRow]:
    return map(StatementRow._make, connection.stream(_STATEMENTS))


def _fault(row: StatementRow, prev: str, seq: int) -> str | None:
    if row.seq != seq:
        return f"statement {seq} is missing"
    if row.prev != prev:
        return "the hash chain is broken: previous hash mismatch"
    if row.hash != hash_of(row._asdict()):
        return "its contents were altered"
    if row.schema != tables.SCHEMA:
        return f"unsupported schema {row.schema}, expected {tables.SCHEMA}"
    return None if row.content == content_of(row.kind, row.body) else "content digest mismatch"


def _time_fault(row: StatementRow) -> str | None:
    for time in (row.time, row.storage_time):
        try:
            written = bool(time and _TIME.fullmatch(time) and stored_time(time))
        except CorruptError:
            written = False
        if not written:
            return f"its time is not one that wherry writes: {time and time[:40]!r}"
    return None


def _clock_fault(row: StatementRow, before: str) -> str | None:
    """The contradiction that shows that a clock was wrong by more than a day when a statement was written."""
    time, storage, now = row.time, row.storage_time, utc_now()
    if is_ahead(time, now) or is_ahead(storage, now):
        return f"its time is in the future: {time}"
    if abs(datetime.fromisoformat(time) - datetime.fromisoformat(storage)) > SKEW:
        return f"its time is {time}, but that of the ledger's storage was {storage}"
    return "its time is before that of the statement before it" if before and is_ahead(before, time) else None


def _rows(row: StatementRow) -> list[Row]:
    return list(rows_of(row.kind, stored_table(row.body), row.seq, row.time))


class _ExpectedRows:
    """The rows that must exist, as marks of their keys and contents, so that a long ledger needs little memory."""

    def __init__(self) -> None:
        self._rows: dict[str, dict[int, int]] = {table.name: {} for table in tables.DERIVED}

    def take(self, statement: StatementRow) -> str | None:
        """Add the rows of a statement; the reason if its body is invalid."""
        try:
            rows = _rows(statement)
        except CorruptError as error:
            return f"invalid body: {error.what}"
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            return f"invalid body: {describe_exception(error)}"
        for table, row in rows:
            held, key = self._rows[table.name], _mark(_KEY[table](row))
            if not table.first or key not in held:
                held[key] = _mark(_CONTENTS[table](row))
        return None

    def fault(self, table: LedgerTable, row: tuple[Any, ...]) -> str | None:
        """The fault of an existing row, or None; each row must be passed once."""
        contents = self._rows[table.name].pop(_mark(_STORED_KEY[table](row)), None)
        if contents is None:
            return "no statement records it"
        return None if contents == _mark(row) else "the row differs from its statement"

    def missing(self, table: LedgerTable) -> frozenset[int]:
        return frozenset(self._rows[table.name])


def _mark(values: Any) -> int:
    """A keyed digest of values; a number and the same number of another type, as a driver may return it, are equal.

    Python's own hash of a number has no key: two numbers whose difference is 2^61 - 1 have the same.
    """
    row = values if isinstance(values, tuple) else (values,)
    text = repr([float(one) if isinstance(one, int) and abs(one) < _EXACT else one for one in row])
    return int.from_bytes(blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8, key=_SECRET).digest())


def _row_fault(connection: LedgerConnection, expected: _ExpectedRows) -> str | None:
    for table in tables.DERIVED:
        query = f"SELECT {', '.join(table.columns)} FROM {table.name}"  # noqa: S608  our own names
        for row in connection.stream(query):
            fault = expected.fault(table, row)
            if fault:
                return f"{_row_text(table, dict(zip(table.columns, row, strict=True)))}: {fault}"
        missing = expected.missing(table)
        if missing:
            return f"{_first_missing(connection, table, missing)}: the row is missing"
    return None


def _first_missing(connection: LedgerConnection, table: LedgerTable, missing: frozenset[int]) -> str:
    for statement in _statements(connection):
        for row_table, row in _rows(statement):
            if row_table is table and _mark(_KEY[table](row)) in missing:
                return _row_text(table, row)
    raise AssertionError("every missing row belongs to a statement")


def _row_text(table: LedgerTable, row: Mapping[str, Any]) -> str:
    """A row as text: its table and its key."""
    if table is tables.edge:
        return f"edge {short(row['source'])} → {short(row['target'])}"
    words = [str(row[name]) for name in table.key]
    return f"{table.name} {' '.join(short(word) if _DIGEST.fullmatch(word) else word for word in words)}"


def _seal_fault(connection: LedgerConnection, head: int) -> str | None:
    for row in projection_rows(connection):
        if row.seal != seal_of(row):
            return f"projection {row.name}: its contents were altered"
        if not 0 <= row.delivered <= head:
            return (
                f"projection {row.name}: statement {row.delivered} was delivered, but the last one is {head}"
            )
    return None


_SQLITE_TRIGGERS = "SELECT name, sql FROM sqlite_master WHERE type = 'trigger'"
_POSTGRES_TRIGGERS = (  # that fire for everyone, always, with what their functions do
    "SELECT t.tgname, c.relname || ' ' || t.tgtype || ' ' || btrim(p.prosrc) "
    "FROM pg_trigger t JOIN pg_class c ON c.oid = t.tgrelid "
    "JOIN pg_namespace n ON n.oid = c.relnamespace JOIN pg_proc p ON p.oid = t.tgfoid "
    "WHERE n.nspname = 'wherry' AND NOT t.tgisinternal AND t.tgenabled IN ('O', 'A') "
    "AND t.tgqual IS NULL AND t.tgattr::text = ''"
)


def _trigger_fault(connection: LedgerConnection) -> str | None:
    """The triggers that are missing, disabled, or not those that wherry creates."""
    if connection.dialect == SQLITE:
        query, expected = _SQLITE_TRIGGERS, tables.stored_triggers()
    else:
        query, expected = _POSTGRES_TRIGGERS, tables.stored_postgres_triggers()
    found: dict[str, str] = dict(connection.rows(query))
    lost = sorted(name for name, text in expected.items() if found.get(name) != text)
    if lost:
        return f"all rows match, but triggers that refuse changes are missing or altered: {', '.join(lost)}"
    added = sorted(found.keys() - expected.keys())
    return f"all rows match, but wherry does not create these triggers: {', '.join(added)}" if added else None
