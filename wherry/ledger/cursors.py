"""The outbox: how far each projection of the ledger (OpenLineage events, a registry, ...) has been delivered.

The statements themselves are the outbox: a projection is a cursor over them. Appends happen strictly one after the
other, so a statement never becomes visible after one with a higher number, and a cursor that moves forward skips
none. Delivery is in order and at least once: a projection processes a statement, then `record_delivery` moves the
cursor, and a crash in between delivers the statement again. `rewind` rebuilds a projection.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from wherry.core.digest import sha256_of
from wherry.core.receipt import utc_now
from wherry.ledger import schema as tables
from wherry.ledger.append import last_number
from wherry.ledger.statements import Statement, statements

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from wherry.ledger.connection import LedgerConnection
    from wherry.ledger.database import Ledger

_LONGEST = 2000  # characters of an error that are kept
_ALL = "SELECT name, delivered, failed, tried, seal FROM projection"
_ORDERED = f"{_ALL} ORDER BY name"
_NAMED = f"{_ALL} WHERE name = :name"
_CHANGE = (
    "UPDATE projection SET delivered = :delivered, failed = :failed, tried = :tried, seal = :seal "
    "WHERE name = :name"
)


class ProjectionRow(NamedTuple):
    """A row of `projection`, in the order of its columns."""

    name: str
    delivered: int
    failed: str | None
    tried: str
    seal: str


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
        after = _last_delivery(connection, name)
    return statements(ledger, after=after, kinds=kinds)


def record_delivery(ledger: Ledger, name: str, seq: int) -> None:
    """Record that all statements up to a number were delivered; this never moves a cursor back."""
    with ledger.write() as connection:
        _put(connection, name, max(seq, _last_delivery(connection, name)), None)


def record_failure(ledger: Ledger, name: str, seq: int, error: str) -> None:
    """Record why a statement could not be delivered; the cursor stays before it."""
    with ledger.write() as connection:
        _put(connection, name, _last_delivery(connection, name), f"statement {seq}: {error}"[:_LONGEST])


def rewind(ledger: Ledger, name: str, seq: int = 0) -> None:
    """Move a cursor back, so that all statements after a number are delivered again; from the first by default."""
    with ledger.write() as connection:
        _put(connection, name, seq, None)


def cursors(ledger: Ledger) -> list[Cursor]:
    """The cursors of all projections that were ever tried, by name."""
    with ledger.read() as connection:
        last = last_number(connection)
        return [Cursor(*row[:-1], last - row.delivered) for row in projection_rows(connection)]


def projection_rows(connection: LedgerConnection) -> Iterator[ProjectionRow]:
    """The rows of all projections, by name."""
    return map(ProjectionRow._make, connection.rows(_ORDERED))


def seal_of(row: ProjectionRow) -> str:
    """Digest of a projection's row, which reveals an altered row."""
    return sha256_of("projection", list(row[:-1]))


def _last_delivery(connection: LedgerConnection, name: str) -> int:
    """The number of the last statement that was delivered to a projection; 0 if none was."""
    row = connection.first(_NAMED, name=name)
    return 0 if row is None else ProjectionRow(*row).delivered


def _put(connection: LedgerConnection, name: str, seq: int, error: str | None) -> None:
    """Insert or update the row; the ledger's lock is held, so no other writer interferes."""
    row = ProjectionRow(name, seq, error, utc_now(), "")
    sealed = row._replace(seal=seal_of(row))._asdict()
    if not connection.change(_CHANGE, sealed):
        connection.change(tables.projection.insertion(), sealed)
