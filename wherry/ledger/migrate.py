"""Migrates an older ledger to the tables of the present schema; its statements are not changed.

The new tables are filled from the statements. Old rows without a statement (in schema 1: claims, sightings, and
checkpoints that were only verified) are added as one statement of kind `migration`, so that from then on every row
follows from the chain. The migration is one transaction.
"""

from __future__ import annotations

import json
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from sqlalchemy import select, text

from wherry.errors import CorruptError
from wherry.ledger import schema as tables
from wherry.ledger.append import BareStatement, append, rows_of, write

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from sqlalchemy import Connection, Table

_BATCH = 1000  # rows written in one execution
# In schema 1 a place and its statement had separate timestamps, milliseconds apart.
_SAME_MOMENT = timedelta(seconds=1)


def migrate(connection: Connection, version: int, create: Callable[[Connection], None]) -> None:
    """Migrate a ledger to the present schema, in a transaction that is open for writing.

    Args:
        connection: of the ledger.
        version: the schema version of the ledger.
        create: creates missing tables, indexes and triggers, and stores the present schema version.

    Raises:
        CorruptError: the schema version or a statement is invalid.
    """
    if version != 1:
        raise CorruptError(f"invalid ledger schema {version}", cure="restore the ledger from a backup")
    old = _old_rows(connection)
    for table in ("location", "registration"):
        connection.execute(text(f"DROP TABLE {table}"))
    create(connection)
    try:
        _fill(connection)
        append(connection, "migration", {"from": version, "to": tables.SCHEMA, **_beyond(connection, old)})
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptError(
            f"invalid statement: {error!r}", cure="restore the ledger from a backup"
        ) from error


def _old_rows(connection: Connection) -> dict[str, list[dict[str, Any]]]:
    names = ("checkpoint", "location", "registration")
    return {
        name: [dict(row) for row in connection.execute(text(f"SELECT * FROM {name}")).mappings()]  # noqa: S608  our names
        for name in names
    }


def _fill(connection: Connection) -> None:
    """Write the rows of the statements; existing rows (checkpoints, edges) are kept."""
    batch: list[tuple[Table, dict[str, Any]]] = []
    for told in _statements(connection):
        batch += _rows(told)
        if len(batch) >= _BATCH:
            write(connection, batch)
            batch.clear()
    write(connection, batch)


def _rows(told: BareStatement) -> list[tuple[Table, dict[str, Any]]]:
    try:
        return list(rows_of(told))
    except (KeyError, TypeError, AttributeError) as error:
        raise CorruptError(
            f"invalid statement {told.seq}: {error!r}",
            cure="restore the ledger from a backup, or run `wherry ledger rebuild ROOT`",
        ) from error


def _statements(connection: Connection) -> Iterator[BareStatement]:
    """The statements, page by page, as rows are written meanwhile."""
    table, last = tables.statement, 0
    while True:
        query = select(table).where(table.c.seq > last).order_by(table.c.seq).limit(_BATCH)
        page = connection.execute(query).all()
        yield from (BareStatement(row.kind, json.loads(row.body), row.seq, row.time) for row in page)
        if len(page) < _BATCH:
            return
        last = page[-1].seq


def _beyond(connection: Connection, old: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """The contents of old rows that no statement contains."""
    stated = {digest for told in _statements(connection) for digest in _named(told)}
    places = {(row.checkpoint_digest, row.uri): row for row in connection.execute(select(tables.location))}
    names = ("checkpoint_digest", "registry", "name", "seen")
    return {
        "checkpoints": [row for row in old["checkpoint"] if row["checkpoint_digest"] not in stated],
        "places": [row for row in old["location"] if _is_news(row, places)],
        "claims": [
            {name: row[name] for name in names} for row in old["registration"] if row["state"] == "pending"
        ],
    }


def _named(told: BareStatement) -> Iterator[str]:
    for table, row in rows_of(told):
        if table is tables.checkpoint:
            yield row["checkpoint_digest"]


def _is_news(row: dict[str, Any], places: dict[tuple[str, str], Any]) -> bool:
    told = places.get((row["checkpoint_digest"], row["uri"]))
    if told is None or told.fingerprint != row["fingerprint"]:
        return True
    return datetime.fromisoformat(row["seen"]) - datetime.fromisoformat(told.seen) > _SAME_MOMENT
