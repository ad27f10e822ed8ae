"""deliver: deliver the ledger's statements to projections, such as OpenLineage.

A projection processes the statements in order; the ledger stores its cursor. Delivery is at least once: if it fails,
the cursor stays and delivery is tried again with the next statement, or by `wherry ledger deliver`; a destination that
lost its data is rebuilt from the first statement (`again`). A failed delivery never fails the call that records a
statement: it is logged, noted in the ledger, and repeated later.

The model registry is also a projection, only on request: `wherry ledger deliver mlflow --again` restores lost entries.

A projection is active if it is configured; `WHERRY_OPENLINEAGE`, or `target` in the section
`[openlineage]` of `wherry.toml`, names a file or a server for OpenLineage events.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from wherry.config.settings import configured_value as setting
from wherry.config.settings import mlflow_registry_uri
from wherry.core.progress import logger
from wherry.core.services import service
from wherry.credentials import redact
from wherry.errors import UsageError, WherryError
from wherry.storage.home import without_secrets

if TYPE_CHECKING:
    from collections.abc import Callable

    from wherry.ledger.database import Ledger
    from wherry.ledger.statements import Statement

# projection → the variable with its destination. Its service has a function `projection(destination)`.
DESTINATIONS = {"openlineage": "WHERRY_OPENLINEAGE"}
_SETTINGS = {"openlineage": "openlineage.target"}  # the same in `wherry.toml`
# Projections that are delivered to only on request, because their contents are created before they are recorded.
ON_REQUEST = {"mlflow": mlflow_registry_uri}
_EVERY = 50  # statements after which the cursor is stored: storing it costs as much as a statement
_log = logger(__name__)


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
    from wherry.ledger.record import open_ledger

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
    from wherry.ledger import cursors as ledger_outbox

    if again:
        ledger_outbox.rewind(ledger, name)
    take: Callable[[Statement], bool] = service(name).projection(destination)
    seq = next((row.delivered for row in ledger_outbox.cursors(ledger) if row.name == name), 0)
    kept, count, events = 0, 0, 0
    failure: str | None = None
    for statement in ledger_outbox.pending(ledger, name):
        try:
            events += take(statement)
        except Exception as error:  # noqa: BLE001  the record stands, whatever a projection raises
            failure = _describe_error(error)
            ledger_outbox.record_delivery(ledger, name, seq)
            ledger_outbox.record_failure(ledger, name, statement.seq, failure)
            break
        seq, count = statement.seq, count + 1
        if count - kept >= _EVERY:
            ledger_outbox.record_delivery(ledger, name, seq)
            kept = count
    if failure is None and (count > kept or not count):
        ledger_outbox.record_delivery(ledger, name, seq)
    return Delivery(name, without_secrets(destination), count, events, seq, failure)


def _describe_error(error: Exception) -> str:
    return error.what if isinstance(error, WherryError) else f"{type(error).__name__}: {redact(str(error))}"


def to_json(outcomes: list[Delivery]) -> dict[str, Any]:
    """The output of `ledger deliver --json`."""
    from dataclasses import asdict

    return {"schema": 1, "delivered": [asdict(one) for one in outcomes]}
