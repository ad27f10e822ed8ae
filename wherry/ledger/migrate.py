"""Migrates an older ledger to the tables of the present schema; its statements are not changed.

The rows of the old tables are moved to the new ones as they are, except that the digests of checkpoints get their
algorithm, so that a row that was altered before is still found by the check. From schema 1 only checkpoints and edges
are moved; its other tables are filled from the statements. Old rows without a statement (in schema 1: claims,
sightings, and checkpoints that were only verified) are added as one statement of kind `migration`, so that from then on
every row follows from the chain. From schema 3 only the column of the storage's times is added: old statements have
none. The migration is one transaction.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from sqlalchemy import select, text

from wherry.core.algorithms import SHA256, with_algorithm
from wherry.errors import CorruptError, describe_exception
from wherry.ledger import schema as tables
from wherry.ledger.append import BareStatement, append, body_of, rows_of, write

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from sqlalchemy import Connection, RowMapping, Table

_BATCH = 1000  # rows written in one execution
# In schema 1 a place and its statement had separate timestamps, milliseconds apart.
_SAME_MOMENT = timedelta(seconds=1)
_WITHOUT_STATEMENTS = 1  # the schema in which rows of these tables could be without a statement
_UNSTATED = ("checkpoint", "location", "registration")
# Schema version → the tables whose rows are moved.
_MOVED: dict[int, tuple[Table, ...]] = {1: (tables.checkpoint, tables.edge), 2: tuple(tables.KEYS)}
_BARE = 64  # length of a digest without its algorithm


def migrate(connection: Connection, version: int, create: Callable[[Connection], None]) -> None:
    """Migrate a ledger to the present schema, in a transaction that is open for writing.

    Args:
        connection: of the ledger.
        version: the schema version of the ledger.
        create: creates missing tables, indexes and triggers, and stores the present schema version.

    Raises:
        CorruptError: the schema version or a statement is invalid.
    """
    if not 0 < version < tables.SCHEMA:
        raise CorruptError(f"invalid ledger schema {version}", cure="restore the ledger from a backup")
    old = _old_rows(connection) if version == _WITHOUT_STATEMENTS else {}
    _add_storage_time(connection)
    if version in _MOVED:
        _remake(connection, _MOVED[version], create)
    else:
        create(connection)
    try:
        if old:
            _fill(connection)
        body = {"from": version, "to": tables.SCHEMA, **_beyond(connection, old)}
        append(connection, "migration", body)
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptError(
            f"invalid statement: {describe_exception(error)}", cure="restore the ledger from a backup"
        ) from error


def _add_storage_time(connection: Connection) -> None:
    column = tables.statement.c.storage_time
    stored = f"{column.name} {column.type.compile(connection.dialect)}"
    connection.execute(text(f"ALTER TABLE {_schema_prefix(connection)}statement ADD COLUMN {stored}"))


def _remake(connection: Connection, moved: Iterable[Table], create: Callable[[Connection], None]) -> None:
    """Make all tables but that of the statements anew, and move rows into them."""
    prefix = _schema_prefix(connection)
    for table in moved:
        rows = f"SELECT * FROM {prefix}{table.name}"  # noqa: S608  our names
        connection.execute(text(f"CREATE TEMPORARY TABLE old_{table.name} AS {rows}"))
    for table in reversed(tables.KEYS):  # a table comes after those that it refers to
        table.drop(connection, checkfirst=True)
    create(connection)
    for table in moved:
        names = ", ".join(table.c.keys())
        values = ", ".join(_move_column(name) for name in table.c.keys())  # noqa: SIM118  columns
        connection.execute(
            text(f"INSERT INTO {prefix}{table.name} ({names}) SELECT {values} FROM old_{table.name}")  # noqa: S608  our names
        )
        connection.execute(text(f"DROP TABLE old_{table.name}"))


def _schema_prefix(connection: Connection) -> str:
    """The database schema of the tables with a point, for SQL as text."""
    name = connection.get_execution_options().get("schema_translate_map", {}).get(None)
    return f"{name}." if name else ""


def _move_column(column: str) -> str:
    """The SQL expression for a column of a moved row: digests of checkpoints get their algorithm."""
    if column not in tables.CHECKPOINT_DIGESTS:
        return column
    return f"CASE WHEN length({column}) = {_BARE} THEN '{SHA256}:' || {column} ELSE {column} END"


def _old_rows(connection: Connection) -> dict[str, list[dict[str, Any]]]:
    return {name: [_label_row(row) for row in _all(connection, name)] for name in _UNSTATED}


def _all(connection: Connection, name: str) -> Iterable[RowMapping]:
    return connection.execute(text(f"SELECT * FROM {name}")).mappings()  # noqa: S608  our names


def _label_row(row: RowMapping) -> dict[str, Any]:
    """A row with the algorithm in its digests."""
    named = {name: with_algorithm(row[name]) for name in tables.CHECKPOINT_DIGESTS if name in row}
    return {**row, **named}


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
            f"invalid statement {told.seq}: {describe_exception(error)}",
            cure="restore the ledger from a backup, or run `wherry ledger rebuild ROOT`",
        ) from error


def _statements(connection: Connection) -> Iterator[BareStatement]:
    """The statements, page by page, as rows are written meanwhile."""
    table, last = tables.statement, 0
    while True:
        query = select(table).where(table.c.seq > last).order_by(table.c.seq).limit(_BATCH)
        page = connection.execute(query).all()
        yield from (BareStatement(row.kind, body_of(row.schema, row.body), row.seq, row.time) for row in page)
        if len(page) < _BATCH:
            return
        last = page[-1].seq


def _beyond(connection: Connection, old: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """The contents of old rows that no statement contains."""
    if not old:
        return {"checkpoints": [], "places": [], "claims": []}
    stated = {digest for told in _statements(connection) for digest in _checkpoint_digests(told)}
    places = {(row.checkpoint_digest, row.uri): row for row in connection.execute(select(tables.location))}
    names = ("checkpoint_digest", "registry", "name", "seen")
    return {
        "checkpoints": [row for row in old["checkpoint"] if row["checkpoint_digest"] not in stated],
        "places": [row for row in old["location"] if _is_news(row, places)],
        "claims": [
            {name: row[name] for name in names} for row in old["registration"] if row["state"] == "pending"
        ],
    }


def _checkpoint_digests(told: BareStatement) -> Iterator[str]:
    for table, row in rows_of(told):
        if table is tables.checkpoint:
            yield row["checkpoint_digest"]


def _is_news(row: dict[str, Any], places: dict[tuple[str, str], Any]) -> bool:
    told = places.get((row["checkpoint_digest"], row["uri"]))
    if told is None or told.fingerprint != row["fingerprint"]:
        return True
    return datetime.fromisoformat(row["seen"]) - datetime.fromisoformat(told.seen) > _SAME_MOMENT
