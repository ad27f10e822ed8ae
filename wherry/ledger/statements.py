"""Reads the statements of the chain in order; all of them, by kind, or up to a moment."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, time
from typing import TYPE_CHECKING, Any

from sqlalchemy import Row, select

from wherry.errors import UsageError
from wherry.ledger import schema as tables
from wherry.ledger.append import stored_table

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

    from wherry.ledger.database import Ledger

_PAGE = 500  # statements read in one transaction, at most
_LONGEST_TIME = 40  # characters
_PAGE_TEXT = 16 << 20  # characters of their bodies after which no further one is read


@dataclass(frozen=True, slots=True)
class Statement:
    """One statement of the ledger.

    Attributes:
        seq: its number, from 1 without gaps.
        kind: one of `wherry.ledger.append.KINDS`.
        schema: schema version of its body.
        time: when it was appended, by the clock of the machine that wrote it; UTC.
        storage_time: the same by the clock of the ledger's storage.
        hash: over all fields, including `prev`.
        prev: hash of the statement before it.
        body: its contents.
        content: digest of kind and body.
        text: the body as hashed text, so that the hash can be recomputed elsewhere.
    """

    seq: int
    kind: str
    schema: int
    time: str
    storage_time: str
    hash: str
    prev: str
    body: dict[str, Any]
    content: str
    text: str


@dataclass(frozen=True, slots=True)
class ChainHead:
    """The end of the chain, to be kept elsewhere; number 0 and the genesis hash if the chain is empty."""

    seq: int
    hash: str
    time: str


def statements(
    ledger: Ledger, *, after: int = 0, kinds: Collection[str] | None = None, until: str | None = None
) -> Iterator[Statement]:
    """The statements in order.

    They are read page by page, and no transaction stays open while the caller works on one: statements never
    change, and those that are appended meanwhile come at the end.

    Args:
        ledger: the ledger.
        after: number after which to begin.
        kinds: only these.
        until: only those up to this moment by the clock of the ledger's storage, which all writers share (ISO 8601;
            UTC where it has no offset; a date means its end).

    Raises:
        UsageError: `until` is not a valid date or time.
    """
    last = None if until is None else moment(until)
    table = tables.statement
    while True:
        query = select(table).where(table.c.seq > after).order_by(table.c.seq).limit(_PAGE)
        query = query if kinds is None else query.where(table.c.kind.in_(kinds))
        query = query if last is None else query.where(table.c.storage_time <= last)
        with ledger.read() as connection:
            page, more = _page(connection.execute(query))
        yield from (_statement(row) for row in page)
        if not more:
            return
        after = page[-1].seq


def _page(rows: Iterable[Row[Any]]) -> tuple[list[Row[Any]], bool]:
    """The first rows, so many as are read at once but one at least, and whether others can follow."""
    page, size = list[Row[Any]](), 0
    for row in rows:
        page.append(row)
        size += sum(len(text or "") for text in (row.body, row.kind, row.time, row.storage_time))
        if size > _PAGE_TEXT:
            return page, True
    return page, len(page) == _PAGE


def head(ledger: Ledger) -> ChainHead:
    """The last statement's number, hash and time."""
    table = tables.statement.c
    query = select(table.seq, table.hash, table.time).order_by(table.seq.desc()).limit(1)
    with ledger.read() as connection:
        row = connection.execute(query).first()
    return ChainHead(*row) if row else ChainHead(0, tables.GENESIS, "")


def moment(text: str) -> str:
    """A moment in the format of statements.

    Raises:
        UsageError: the text is not a valid date or time.
    """
    try:
        read = datetime.fromisoformat(text)
    except ValueError as error:
        raise UsageError(
            f"invalid date or time: {text!r}", cure="use 2026-11-21 or 2026-11-21T08:00+00:00"
        ) from error
    if len(text) <= len("2026-11-21"):
        read = datetime.combine(read.date(), time.max)
    aware = read if read.tzinfo else read.replace(tzinfo=UTC)
    return aware.astimezone(UTC).isoformat(timespec="milliseconds")


def by_number(ledger: Ledger, numbers: Collection[int]) -> dict[int, Statement]:
    """Number → statement, for the numbers that exist."""
    table, found, every = tables.statement, dict[int, Statement](), sorted(numbers)
    with ledger.read() as connection:
        for start in range(0, len(every), _PAGE):
            query = select(table).where(table.c.seq.in_(every[start : start + _PAGE]))
            found |= {row.seq: _statement(row) for row in connection.execute(query)}
    return found


def times_written(ledger: Ledger, numbers: Collection[int]) -> dict[int, str]:
    """Number → when a statement was appended, by the clock of the ledger's storage; UTC."""
    table, found, every = tables.statement.c, dict[int, str](), sorted(numbers)
    with ledger.read() as connection:
        for start in range(0, len(every), _PAGE):
            query = select(table.seq, table.storage_time).where(table.seq.in_(every[start : start + _PAGE]))
            found |= dict(connection.execute(query).tuples().all())
    if None in found.values():  # as in `_statement`
        raise tables.damage_error("values: a statement lacks its time")
    return found


def _statement(row: Row[Any]) -> Statement:
    if None in row:  # the tables of a forged file may take it
        raise tables.damage_error(f"values: statement {row.seq} lacks one")
    if row.schema != tables.SCHEMA:
        raise tables.damage_error(f"statement {row.seq}: schema {row.schema}, expected {tables.SCHEMA}")
    for stated in (row.time, row.storage_time):
        if len(stated) > _LONGEST_TIME:  # the state of a ledger keeps the times of its statements
            raise tables.damage_error(f"times: {stated[:_LONGEST_TIME]!r} goes on")
    return Statement(
        row.seq,
        row.kind,
        row.schema,
        row.time,
        row.storage_time,
        row.hash,
        row.prev,
        stored_table(row.body),
        row.content,
        row.body,
    )
