"""The outbox: how far each projection of the ledger (OpenLineage events, a registry, ...) has been delivered.

The statements themselves are the outbox: a projection is a cursor over them. Appends happen strictly one after the
other, so a statement never becomes visible after one with a higher number, and a cursor that moves forward skips
none. Delivery is in order and at least once: a projection processes a statement, then `record_delivery` moves the
cursor, and a crash in between delivers the statement again. `rewind` rebuilds a projection.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sqlalchemy import select

from wherry.core.digest import sha256_of
from wherry.core.receipt import utc_now
from wherry.ledger import schema as tables
from wherry.ledger.statements import Statement, statements

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from sqlalchemy import Connection, RowMapping

    from wherry.ledger.database import Ledger

_LONGEST = 2000  # characters of an error that are kept


@dataclass(frozen=True, slots=True)
class Cursor:
    """The progress of a projection.

    Attributes:
        name: of the projection.
        delivered: number of the last delivered statement; 0 before the first.
        failed: the error of the last attempt; None if that succeeded.
        tried: time of the last attempt; UTC.
        behind: number of statements that are not delivered yet, of any kind.
    """

    name: str
    delivered: int
    failed: str | None
    tried: str
    behind: int


def pending(ledger: Ledger, name: str, *, kinds: Collection[str] | None = None) -> Iterator[Statement]:
    """The statements that were not delivered to a projection yet, in order."""
    with ledger.read() as connection:
        row = _row(connection, name)
    return statements(ledger, after=row["delivered"] if row else 0, kinds=kinds)


def record_delivery(ledger: Ledger, name: str, seq: int) -> None:
    """Record that all statements up to a number were delivered; this never moves a cursor back."""
    with ledger.write() as connection:
        row = _row(connection, name)
        _put(connection, name, max(seq, row["delivered"] if row else 0), None)


def record_failure(ledger: Ledger, name: str, seq: int, error: str) -> None:
    """Record why a statement could not be delivered; the cursor stays before it."""
    with ledger.write() as connection:
        row = _row(connection, name)
        _put(connection, name, row["delivered"] if row else 0, f"statement {seq}: {error}"[:_LONGEST])


def rewind(ledger: Ledger, name: str, seq: int = 0) -> None:
    """Move a cursor back, so that all statements after a number are delivered again; from the first by default."""
    with ledger.write() as connection:
        _put(connection, name, seq, None)


def cursors(ledger: Ledger) -> list[Cursor]:
    """The cursors of all projections that were ever tried, by name."""
    head = select(tables.statement.c.seq).order_by(tables.statement.c.seq.desc()).limit(1)
    with ledger.read() as connection:
        last = connection.scalar(head) or 0
        rows = connection.execute(select(tables.projection).order_by(tables.projection.c.name))
        return [Cursor(r.name, r.delivered, r.failed, r.tried, last - r.delivered) for r in rows]


def seal_of(row: Mapping[str, Any] | RowMapping) -> str:
    """Digest of a projection's row, which reveals an altered row."""
    return sha256_of("projection", [row[name] for name in ("name", "delivered", "failed", "tried")])


def _row(connection: Connection, name: str) -> RowMapping | None:
    query = select(tables.projection).where(tables.projection.c.name == name)
    return connection.execute(query).mappings().first()


def _put(connection: Connection, name: str, seq: int, error: str | None) -> None:
    """Insert or update the row; the ledger's lock is held, so no other writer interferes."""
    table = tables.projection
    row = {"name": name, "delivered": seq, "failed": error, "tried": utc_now()}
    row["seal"] = seal_of(row)
    changed = connection.execute(table.update().where(table.c.name == name), row)
    if not changed.rowcount:
        connection.execute(table.insert(), row)
