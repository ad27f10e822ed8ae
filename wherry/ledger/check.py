"""Checking a ledger: is every row of every table what it was when it was written?

The chain is recomputed from the first statement on, and each statement is asked which rows it tells; what the
other tables hold must be exactly that. The seals of the projections' rows are recomputed. The first fault is named.

A chain proves nothing about its own end: whoever cuts off the last statements, or writes the whole chain anew,
leaves one that is in itself whole. An anchor (number and hash of a statement, kept elsewhere) finds that.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from sqlalchemy import Connection, RowMapping, select

from wherry.core.units import short
from wherry.ledger import schema as tables
from wherry.ledger.append import BareStatement, Row, content_of, hash_of, rows_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from sqlalchemy import Table

    from wherry.ledger.database import Ledger

    _Row = Mapping[str, Any] | RowMapping

_PAGE = 1000  # rows that the driver holds at a time
_DIGEST = re.compile(r"[0-9a-f]{64}")
# What names a row of a table, and all that it holds. Their hash() is keyed anew in every process, so that nobody can
# prepare two rows that look alike.
_KEY = {table: itemgetter(*names) for table, names in tables.KEYS.items()}
_CONTENTS = {table: itemgetter(*table.c.keys()) for table in tables.KEYS}


@dataclass(frozen=True, slots=True)
class Anchor:
    """A statement that was kept elsewhere.

    Attributes:
        hash: its hash, or at least 16 hex digits of it.
        seq: its number; None where only the hash was kept.
    """

    hash: str
    seq: int | None = None


_BEFORE_ALL = Anchor(tables.GENESIS, 0)  # what `anchor` prints of an empty ledger


@dataclass(frozen=True, slots=True)
class Chain:
    """Outcome of `check_chain`.

    Attributes:
        statements: how many there are.
        head: hash of the last one.
        altered: the first row that is not what it was when written, and why; None where all are.
        anchored: number of the statement that the anchor names; None where it is not in this chain, or none was given.
    """

    statements: int
    head: str
    altered: str | None
    anchored: int | None = None


def check_chain(ledger: Ledger, anchor: Anchor | None = None) -> Chain:
    """Recompute every hash, and every row that the statements tell.

    Args:
        ledger: what to check.
        anchor: a statement that must be in it as it was.
    """
    with ledger.read() as connection:
        head, count, expected = tables.GENESIS, 0, _ExpectedRows()
        anchored = 0 if anchor == _BEFORE_ALL else None
        for row in _statements(connection):
            fault = _fault(row, head, count + 1) or expected.take(row)
            if fault:
                return Chain(count, head, f"statement {row['seq']}: {fault}", anchored)
            head, count = row["hash"], row["seq"]
            if anchor and head.startswith(anchor.hash) and anchor.seq in (None, count):
                anchored = count
        return Chain(
            count, head, _row_fault(connection, expected) or _seal_fault(connection, count), anchored
        )


def _statements(connection: Connection) -> Iterator[RowMapping]:
    query = select(tables.statement).order_by(tables.statement.c.seq)
    return iter(connection.execution_options(yield_per=_PAGE).execute(query).mappings())


def _fault(row: RowMapping, prev: str, seq: int) -> str | None:
    if row["seq"] != seq:
        return f"statement {seq} is missing"
    if row["prev"] != prev:
        return "the hash chain is broken: previous hash mismatch"
    if row["hash"] != hash_of(row):
        return "its contents were altered"
    if row["schema"] > tables.SCHEMA:
        return f"unsupported schema {row['schema']}; upgrade wherry"
    told = content_of(row["kind"], row["body"])
    return None if row["content"] == told else "content digest mismatch"


def _rows(row: RowMapping) -> list[Row]:
    return list(rows_of(BareStatement(row["kind"], json.loads(row["body"]), row["seq"], row["time"])))


class _ExpectedRows:
    """The rows that must be there, as digests of their keys and contents: the memory of a long ledger is small."""

    def __init__(self) -> None:
        self._rows: dict[str, dict[int, int]] = {table.name: {} for table in tables.KEYS}

    def take(self, statement: RowMapping) -> str | None:
        """Take what a statement tells; why it cannot be read, where it cannot."""
        try:
            told = _rows(statement)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            return f"invalid body: {error!r}"
        for table, row in told:
            held, key = self._rows[table.name], hash(_KEY[table](row))
            if table not in tables.FIRST or key not in held:
                held[key] = hash(_CONTENTS[table](row))
        return None

    def fault(self, table: Table, row: _Row) -> str | None:
        """What is wrong with a row that is there; each row must come once."""
        contents = self._rows[table.name].pop(hash(_KEY[table](row)), None)
        if contents is None:
            return "no statement records it"
        return None if contents == hash(_CONTENTS[table](row)) else "the row differs from its statement"

    def missing(self, table: Table) -> frozenset[int]:
        return frozenset(self._rows[table.name])


def _row_fault(connection: Connection, expected: _ExpectedRows) -> str | None:
    for table in tables.KEYS:
        for row in connection.execution_options(yield_per=_PAGE).execute(select(table)).mappings():
            fault = expected.fault(table, row)
            if fault:
                return f"{_named(table, row)}: {fault}"
        missing = expected.missing(table)
        if missing:
            return f"{_first_missing(connection, table, missing)}: the row is missing"
    return None


def _first_missing(connection: Connection, table: Table, missing: frozenset[int]) -> str:
    for row in _statements(connection):
        for other, told in _rows(row):
            if other is table and hash(_KEY[table](told)) in missing:
                return _named(table, told)
    raise AssertionError("every missing row belongs to a statement")


def _named(table: Table, row: _Row) -> str:
    """A row in words: its table and what names it."""
    if table is tables.edge:
        return f"edge {short(row['source'])} → {short(row['target'])}"
    values = (row[name] for name in tables.KEYS[table])
    words = [str(value) for value in values]
    return f"{table.name} {' '.join(short(word) if _DIGEST.fullmatch(word) else word for word in words)}"


def _seal_fault(connection: Connection, head: int) -> str | None:
    from wherry.ledger.cursors import seal_of

    for row in connection.execute(select(tables.projection).order_by(tables.projection.c.name)).mappings():
        if row["seal"] != seal_of(row):
            return f"projection {row['name']}: its contents were altered"
        if not 0 <= row["delivered"] <= head:
            return f"projection {row['name']}: statement {row['delivered']} was delivered, but the last one is {head}"
    return None
