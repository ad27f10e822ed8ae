"""The ledger: what was converted, verified, registered, promoted and deleted; append-only and chained by hashes.

Each statement carries the hash of the one before it, so that an altered, removed or inserted row is found and
named by `check_chain`. (A cut-off tail is not: keep `head` elsewhere, as an anchor.) Writers take the ledger's lock
before they read the head, so the chain stays whole under any number of processes; a statement, with the rows that
it tells, is on the disk when its function returns.

SQLAlchemy is imported by the `ledger` modules and nowhere else in the engine: import them only where the ledger
is used.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from sqlalchemy import Connection, RowMapping, select

from wherry.errors import UsageError
from wherry.ledger import schema as tables
from wherry.ledger.append import EVENTS, PENDING, REGISTERED, append, same_statement
from wherry.ledger.check import Anchor, Chain, check_chain
from wherry.ledger.database import Ledger, open_ledger
from wherry.ledger.schema import GENESIS
from wherry.ledger.statements import ChainHead, Statement, head, statements

if TYPE_CHECKING:
    from collections.abc import Mapping

    from wherry.core.receipt import CheckpointRef, Receipt

__all__ = [
    "EVENTS",
    "GENESIS",
    "Anchor",
    "Chain",
    "ChainHead",
    "Edge",
    "Ledger",
    "Statement",
    "ancestors",
    "check_chain",
    "claim_registration",
    "descendants",
    "drop_claim",
    "has_conversion",
    "head",
    "open_ledger",
    "record_conversion",
    "record_event",
    "record_registration",
    "record_sighting",
    "record_verification",
    "statements",
]  # fmt: skip

_PASSING = ("already", "lineage")  # fields of a receipt that say how it was obtained, not what was done


@dataclass(frozen=True, slots=True)
class Edge:
    """One conversion: from a checkpoint digest to another, by a plan.

    Attributes:
        source: digest of the checkpoint that was read.
        target: digest of the checkpoint that was written.
        plan_digest: the plan that was carried out.
        statement: number of the ledger's statement; None where only a sidecar tells of it.
        time: when it was finished; UTC.
        lossless: whether every move was exact.
    """

    source: str
    target: str
    plan_digest: str
    statement: int | None
    time: str
    lossless: bool


def record_conversion(ledger: Ledger, receipt: Receipt) -> int:
    """Append what a conversion did.

    Recording a receipt again adds at most that the places were seen again. A copy that keeps the checkpoint digest
    is a second location of one node and has no edge.

    Returns:
        The number of its statement.
    """
    with ledger.write() as connection:
        return add_conversion(connection, receipt)


def add_conversion(connection: Connection, receipt: Receipt) -> int:
    """As `record_conversion`, in a transaction that is open for writing."""
    body = _body(receipt)
    seq = same_statement(connection, "conversion", body)
    if seq is None:
        return append(connection, "conversion", body)
    add_sighting(connection, receipt.source)
    add_sighting(connection, receipt.target)
    return seq


def has_conversion(ledger: Ledger, receipt: Receipt) -> bool:
    """Whether the ledger has this very conversion."""
    with ledger.read() as connection:
        return same_statement(connection, "conversion", _body(receipt)) is not None


def _body(receipt: Receipt) -> dict[str, Any]:
    return {name: value for name, value in receipt.to_json().items() if name not in _PASSING}


def record_verification(ledger: Ledger, subject: CheckpointRef, verification: Mapping[str, Any]) -> int:
    """Append the outcome of a verification (its JSON form); returns the number of the statement."""
    with ledger.write() as connection:
        return append(connection, "verification", {**_about(subject), "verification": dict(verification)})


def record_sighting(ledger: Ledger, subject: CheckpointRef) -> int | None:
    """Note that a checkpoint is at its place, where the ledger would not say so of that place now.

    Returns:
        The number of the statement; None where nothing was new.
    """
    with ledger.write() as connection:
        return add_sighting(connection, subject)


def add_sighting(connection: Connection, subject: CheckpointRef) -> int | None:
    """As `record_sighting`, in a transaction that is open for writing."""
    place, stone = tables.location.c, tables.tombstone.c
    gone = (
        select(stone.statement)
        .where(stone.checkpoint_digest == place.checkpoint_digest, stone.uri == place.uri)
        .scalar_subquery()
    )
    query = select(place.checkpoint_digest, place.fingerprint, place.statement, gone.label("gone"))
    last = connection.execute(
        query.where(place.uri == subject.uri).order_by(place.statement.desc(), place.seen.desc()).limit(1)
    ).first()
    known = last is not None and last[:2] == (subject.checkpoint_digest, subject.fingerprint)
    if last is not None and known and (last.gone is None or last.gone < last.statement):
        return None
    return append(connection, "sighting", _about(subject))


def record_event(ledger: Ledger, kind: str, subject: CheckpointRef | None, body: Mapping[str, Any]) -> int:
    """Append an event: a promotion, a rollback, a deletion, an audit, or a note. Each call is an event of its own.

    A deletion names what is gone by `checkpoint_digest` and `uri`, which are the subject's where it has one; from
    then on the lineage shows that place as gone, until the checkpoint is seen there again.

    Args:
        ledger: where.
        kind: one of `EVENTS`.
        subject: the checkpoint that it is about, where it is about one.
        body: what else is to be said; JSON, nothing secret. Our own fields (`subject`, `checkpoint_digest`) win.

    Returns:
        The number of its statement.

    Raises:
        UsageError: no such kind, or a deletion that does not say of what.
    """
    if kind not in EVENTS:
        raise UsageError(f"unknown event kind {kind!r}", cure=f"choose {', '.join(EVENTS)}")
    place = {"uri": subject.uri} if subject is not None and kind == "deletion" else {}
    full = {**place, **body, **(_about(subject) if subject is not None else {})}
    if kind == "deletion" and not (full.get("checkpoint_digest") and full.get("uri")):
        raise UsageError(
            "a deletion must name the deleted checkpoint", cure="pass a subject, or checkpoint_digest and uri"
        )
    with ledger.write() as connection:
        return append(connection, kind, full)


def claim_registration(ledger: Ledger, subject: CheckpointRef, registry: str, name: str) -> None:
    """Say, before a registry is asked, that this checkpoint is about to be registered under a name.

    Nothing is added where it has been claimed or registered there already.
    """
    with ledger.write() as connection:
        held = _registration(connection, subject, registry, name)
        if held is None or held["state"] not in (PENDING, REGISTERED):
            append(connection, "claim", {**_about(subject), "registry": registry, "name": name})


def drop_claim(ledger: Ledger, subject: CheckpointRef, registry: str, name: str) -> None:
    """Take a claim back after a failure that left nothing in the registry; a registration stays."""
    with ledger.write() as connection:
        held = _registration(connection, subject, registry, name)
        if held is not None and held["state"] == PENDING:
            append(connection, "release", {**_about(subject), "registry": registry, "name": name})


def record_registration(
    ledger: Ledger, subject: CheckpointRef, registry: str, name: str, version: str
) -> int:
    """Turn a claim into a registration and append the statement; nothing where that version is recorded.

    Returns:
        The number of its statement.
    """
    with ledger.write() as connection:
        return add_registration(connection, subject, registry, name, version)


def add_registration(
    connection: Connection, subject: CheckpointRef, registry: str, name: str, version: str
) -> int:
    """As `record_registration`, in a transaction that is open for writing."""
    held = _registration(connection, subject, registry, name)
    if held is not None and (held["state"], held["version"]) == (REGISTERED, version):
        return held["statement"]
    body = {**_about(subject), "registry": registry, "name": name, "version": version}
    return append(connection, "registration", body)


def ancestors(ledger: Ledger, digest: str) -> list[Edge]:
    """Every edge above a checkpoint, in the order in which it was recorded."""
    return _reachable(ledger, digest, here="target", there="source")


def descendants(ledger: Ledger, digest: str) -> list[Edge]:
    """Every edge below a checkpoint, in the order in which it was recorded."""
    return _reachable(ledger, digest, here="source", there="target")


def _reachable(ledger: Ledger, digest: str, *, here: str, there: str) -> list[Edge]:
    """Edges reached from a node. UNION drops what was seen, so a round trip (A → B → A) ends the recursion."""
    edge, done = tables.edge, tables.conversion
    start = select(tables.checkpoint.c.checkpoint_digest.label("digest"))
    walk = start.where(tables.checkpoint.c.checkpoint_digest == digest).cte("walk", recursive=True)
    walk = walk.union(select(edge.c[there]).join(walk, edge.c[here] == walk.c.digest))
    query = (
        select(
            edge.c.source, edge.c.target, edge.c.plan_digest, edge.c.statement, done.c.time, done.c.lossless
        )
        .join(done, done.c.statement == edge.c.statement)
        .where(edge.c[here].in_(select(walk.c.digest)))
        .order_by(edge.c.statement)
    )
    with ledger.read() as connection:
        return [Edge(*row) for row in connection.execute(query)]


def _about(subject: CheckpointRef) -> dict[str, Any]:
    return {"checkpoint_digest": subject.checkpoint_digest, "subject": asdict(subject)}


def _registration(
    connection: Connection, subject: CheckpointRef, registry: str, name: str
) -> RowMapping | None:
    table = tables.registration
    query = select(table).where(
        table.c.checkpoint_digest == subject.checkpoint_digest,
        table.c.registry == registry,
        table.c.name == name,
    )
    return connection.execute(query).mappings().first()
