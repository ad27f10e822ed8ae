"""The outbox: how far each projection of the ledger (OpenLineage events, a registry, ...) has been delivered.

The statements themselves are the outbox: a projection is a cursor over them. Appends happen strictly one after the
other, so a statement never becomes visible after one with a higher number, and a cursor that moves forward skips
none. Delivery is in order and at least once: a projection processes a statement, then `record_delivery` moves the
cursor, and a crash in between delivers the statement again. A failed delivery never fails the call that records a
statement: it is logged, noted in the ledger, and repeated with the next statement, or by `wherry ledger deliver`; a
destination that lost its data is rebuilt from the first statement (`again`).

The model registry is also a projection, only on request: `wherry ledger deliver mlflow --again` restores lost entries.

A projection is active if it is configured; `WHERRY_OPENLINEAGE`, or `target` in the section
`[openlineage]` of `wherry.toml`, names a file or a server for OpenLineage events.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict
from typing import Any, NamedTuple

from wherry.config.settings import configured_value as setting
from wherry.config.settings import mlflow_registry_uri
from wherry.core.digest import sha256_of
from wherry.core.lazy_dataclass import dataclass
from wherry.core.progress import logger
from wherry.core.receipt import utc_now
from wherry.core.services import service
from wherry.credentials import redact
from wherry.errors import UsageError, WherryError
from wherry.ledger import schema as tables
from wherry.ledger.database import Ledger, LedgerConnection, open_ledger
from wherry.ledger.statements import Statement, last_statement, statements
from wherry.store.home import without_secrets

# projection → the variable with its destination. Its service has a function `projection(destination)`.
DESTINATIONS = {"openlineage": "WHERRY_OPENLINEAGE"}
_SETTINGS = {"openlineage": "openlineage.target"}  # the same in `wherry.toml`
# Projections that are delivered to only on request, because their contents are created before they are recorded.
ON_REQUEST = {"mlflow": mlflow_registry_uri}
_EVERY = 50  # statements after which the cursor is stored: storing it costs as much as a statement
_log = logger(__name__)
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


def rewind(ledger: Ledger, name: str) -> None:
    """Move a cursor back to the beginning, so that all statements are delivered again."""
    with ledger.write() as connection:
        _put(connection, name, 0, None)


def cursors(ledger: Ledger) -> list[Cursor]:
    """The cursors of all projections that were ever tried, by name."""
    with ledger.read() as connection:
        last = last_statement(connection).seq
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


@dataclass(frozen=True, slots=True)
class Delivery:
    """The result of one delivery.

    Attributes:
        projection: its name.
        destination: its destination, without secrets.
        statements: number of delivered statements.
        events: number of statements for which it produced an event.
        cursor: number of the last delivered statement.
        failed: why the next one was not delivered; None if all were.
    """

    projection: str
    destination: str
    statements: int
    events: int
    cursor: int
    failed: str | None = None


def configured_projections() -> dict[str, str]:
    """Projection → destination, for the configured projections.

    Raises:
        UsageError: `wherry.toml` is invalid.
    """
    rows = {
        name: os.environ.get(variable) or setting(_SETTINGS[name]) for name, variable in DESTINATIONS.items()
    }
    return {name: str(value) for name, value in rows.items() if value}


def deliver(projection: str | None = None, *, again: bool = False) -> list[Delivery]:
    """Deliver pending statements.

    Args:
        projection: only this one; every configured one by default.
        again: start from the first statement, for a destination that lost its data.

    Returns:
        The result of each projection; a failure of one does not stop the others.

    Raises:
        UsageError: the projection is unknown or not configured.
        StorageError: the ledger cannot be read or written.
    """
    wanted = configured_projections()
    if projection is not None:
        wanted = {projection: _destination(projection)}
    with open_ledger() as ledger:
        return [_deliver(ledger, name, destination, again=again) for name, destination in wanted.items()]


def after_record() -> None:
    """Deliver new statements if any projection is configured; never fails the caller."""
    try:
        outcomes = deliver() if configured_projections() else []
    except Exception as error:  # noqa: BLE001  the record stands, whatever happens to a destination
        _log.warning("ledger statements were not delivered: %s", _describe_error(error))
        return
    for one in outcomes:
        if one.failed:
            _log.warning(
                "delivery to %s failed; it is tried again with the next statement: %s",
                one.projection,
                one.failed,
            )


def report_failure(error: WherryError, source: str, target: str, to: str, started: str) -> None:
    """Report a failed conversion to the projections; never fails the caller.

    The ledger records only completed work, so this is sent immediately or not at all.

    Args:
        error: why it failed.
        source: URI of the source.
        target: URI of the target.
        to: its format.
        started: when it began; UTC, ISO 8601.
    """
    try:
        for name, destination in configured_projections().items():
            service(name).report_failure(destination, error, source, target, to, started)
    except Exception as failure:  # noqa: BLE001  the conversion's own error is the one to raise
        _log.warning("the failed conversion was not reported: %s", _describe_error(failure))


def _destination(name: str) -> str:
    if name in ON_REQUEST:
        return ON_REQUEST[name]()
    if name not in DESTINATIONS:
        known = " or ".join((*DESTINATIONS, *ON_REQUEST))
        raise UsageError(f"unknown projection {name!r}", cure=f"choose {known}")
    destination = configured_projections().get(name)
    if destination is None:
        raise UsageError(
            f"no destination is configured for {name}",
            cure=f"set {DESTINATIONS[name]} to a file or an http(s) URL",
        )
    return destination


def _deliver(ledger: Ledger, name: str, destination: str, *, again: bool) -> Delivery:
    if again:
        rewind(ledger, name)
    take: Callable[[Statement], bool] = service(name).projection(destination)
    seq = next((row.delivered for row in cursors(ledger) if row.name == name), 0)
    kept, count, events = 0, 0, 0
    failure: str | None = None
    for statement in pending(ledger, name):
        try:
            events += take(statement)
        except Exception as error:  # noqa: BLE001  the record stands, whatever a projection raises
            failure = _describe_error(error)
            record_delivery(ledger, name, seq)
            record_failure(ledger, name, statement.seq, failure)
            break
        seq, count = statement.seq, count + 1
        if count - kept >= _EVERY:
            record_delivery(ledger, name, seq)
            kept = count
    if failure is None and (count > kept or not count):
        record_delivery(ledger, name, seq)
    return Delivery(name, without_secrets(destination), count, events, seq, failure)


def _describe_error(error: Exception) -> str:
    return error.what if isinstance(error, WherryError) else f"{type(error).__name__}: {redact(str(error))}"


def to_json(outcomes: list[Delivery]) -> dict[str, Any]:
    """The output of `ledger deliver --json`."""
    return {"schema": 1, "delivered": [asdict(one) for one in outcomes]}
