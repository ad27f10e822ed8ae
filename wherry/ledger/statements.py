"""Reads the statements of the chain in order; all of them, by kind, or up to a moment."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, time
from typing import TYPE_CHECKING, Any

from wherry.errors import UsageError
from wherry.ledger import schema as tables
from wherry.ledger.append import stored_table
from wherry.ledger.schema import StatementRow

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

    from wherry.ledger.database import Ledger

_PAGE = 500  # statements read in one transaction, at most
_LONGEST_TIME = 40  # characters
_PAGE_TEXT = 16 << 20  # characters of their bodies after which no further one is read
_COLUMNS = ", ".join(tables.statement.columns)
_HEAD = "SELECT seq, hash, time FROM statement ORDER BY seq DESC LIMIT 1"
_NUMBERED = f"SELECT {_COLUMNS} FROM statement WHERE seq IN (:*numbers)"  # noqa: S608  our own names
_TIMES = "SELECT seq, storage_time FROM statement WHERE seq IN (:*numbers)"


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
    chosen = {} if kinds is None else {"kinds": sorted(kinds)}
    bounds = {} if last is None else {"last": last}
    query = (
        f"SELECT {_COLUMNS} FROM statement WHERE seq > :after"  # noqa: S608  our own names
        f"{' AND kind IN (:*kinds)' if chosen else ''}{' AND storage_time <= :last' if bounds else ''}"
        f" ORDER BY seq LIMIT {_PAGE}"
    )
    while True:
        with ledger.read() as connection:
            page, more = _page(connection.rows(query, after=after, **chosen, **bounds))
        yield from (_statement(row) for row in page)
        if not more:
            return
        after = page[-1].seq


def _page(rows: Iterable[tuple[Any, ...]]) -> tuple[list[StatementRow], bool]:
    """The first rows, so many as are read at once but one at least, and whether others can follow."""
    page, size = list[StatementRow](), 0
    for row in map(StatementRow._make, rows):
        page.append(row)
        size += sum(len(text or "") for text in (row.body, row.kind, row.time, row.storage_time))
        if size > _PAGE_TEXT:
            return page, True
    return page, len(page) == _PAGE


def head(ledger: Ledger) -> ChainHead:
    """The last statement's number, hash and time."""
    with ledger.read() as connection:
        row = connection.first(_HEAD)
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
    found, every = dict[int, Statement](), sorted(numbers)
    with ledger.read() as connection:
        for start in range(0, len(every), _PAGE):
            rows = connection.rows(_NUMBERED, numbers=every[start : start + _PAGE])
            found |= {row.seq: _statement(row) for row in map(StatementRow._make, rows)}
    return found


def times_written(ledger: Ledger, numbers: Collection[int]) -> dict[int, str]:
    """Number → when a statement was appended, by the clock of the ledger's storage; UTC."""
    found, every = dict[int, str](), sorted(numbers)
    with ledger.read() as connection:
        for start in range(0, len(every), _PAGE):
            found |= dict(connection.rows(_TIMES, numbers=every[start : start + _PAGE]))
    if None in found.values():  # as in `_statement`
        raise tables.damage_error("values: a statement lacks its time")
    return found


def _statement(row: StatementRow) -> Statement:
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
