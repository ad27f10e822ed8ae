"""Appending: how a statement joins the chain, and how the rows that it tells are written.

Both happen in the caller's write transaction, which holds the ledger's lock from its first moment: nothing comes
between the reading of the head and the new statement, and a statement is never there without its rows.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from itertools import groupby
from typing import TYPE_CHECKING, Any

from sqlalchemy import select

from wherry.core.digest import canonical_json, sha256_of, sha256_text
from wherry.core.receipt import utc_now
from wherry.ledger import schema as tables
from wherry.ledger.rows import Row, Told, rows_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from sqlalchemy import Connection, RowMapping, Table

_HASHED = ("seq", "prev", "kind", "schema", "content", "body", "time")


def append(connection: Connection, kind: str, body: Mapping[str, Any]) -> int:
    """Add a statement and the rows that it tells.

    Its time is never before that of its predecessor, whatever the clocks of the writers say, so that the ledger up
    to a moment is a beginning of the chain.

    Returns:
        Its number.
    """
    table = tables.statement.c
    query = select(table.seq, table.hash, table.time).order_by(table.seq.desc()).limit(1)
    last = connection.execute(query).first()
    text = canonical_json(body).decode()
    row: dict[str, Any] = {
        "seq": last.seq + 1 if last else 1,
        "prev": last.hash if last else tables.GENESIS,
        "kind": kind,
        "schema": tables.SCHEMA,
        "content": content_of(kind, text),
        "body": text,
        "time": max(utc_now(), last.time) if last else utc_now(),
    }
    connection.execute(tables.statement.insert(), {**row, "hash": hash_of(row)})
    write(connection, rows_of(Told(kind, body, row["seq"], row["time"])))
    return row["seq"]


def same_statement(connection: Connection, kind: str, body: Mapping[str, Any]) -> int | None:
    """The statement that says exactly this already; the digest covers the kind."""
    table, text = tables.statement.c, canonical_json(body).decode()
    return connection.scalar(select(table.seq).where(table.content == content_of(kind, text)).limit(1))


def content_of(kind: str, text: str) -> str:
    """Digest of what a statement says, without when and after which other.

    Args:
        kind: of the statement.
        text: its body as it is stored, in canonical JSON.
    """
    return sha256_text(kind, text.encode())


def hash_of(row: Mapping[str, Any] | RowMapping) -> str:
    """The link of the chain: over everything that a statement's row has, the hash before it included."""
    return sha256_of("statement", {name: row[name] for name in _HASHED})


def write(connection: Connection, rows: Iterable[Row]) -> None:
    """Write rows by the rule of their table: the first telling stays, or the last one wins.

    Rows of one table that follow each other go in one execution; a row that refers to another comes after it.
    """
    ordered = sorted(rows, key=lambda row: _ORDER[row[0]])
    for table, group in groupby(ordered, key=lambda row: row[0]):
        connection.execute(_upsert(connection.dialect.name, table), [row for _table, row in group])


_ORDER = {table: position for position, table in enumerate(tables.KEYS)}


@cache
def _upsert(dialect: str, table: Table) -> Any:
    insert = import_module(f"sqlalchemy.dialects.{dialect}").insert(table)
    keys = tables.KEYS[table]
    if table in tables.FIRST:
        return insert.on_conflict_do_nothing(index_elements=keys)
    rest = {name: insert.excluded[name] for name in table.c.keys() if name not in keys}  # noqa: SIM118  columns
    return insert.on_conflict_do_update(index_elements=keys, set_=rest)
