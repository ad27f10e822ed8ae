"""The ledger: what was converted, verified and registered, append-only and chained by hashes.

Each statement carries the hash of the one before it, so that an altered, removed or inserted row is found and
named by `check_chain`. (A cut-off tail is not: compare `Chain.head` with a head kept elsewhere.) Writers take the
database's write lock before they read the head, so the chain stays whole under any number of processes; a
statement is on the disk when its function returns.

SQLAlchemy is imported by the `ledger` modules and nowhere else in the engine: import them only where the ledger
is used.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from sqlalchemy import Connection, RowMapping, delete, select
from sqlalchemy.dialects.sqlite import insert

from wherry import ledger_schema as tables
from wherry.digest import canonical_json, sha256_of
from wherry.ledger_file import Ledger, open_ledger
from wherry.receipt import utc_now

if TYPE_CHECKING:
    from collections.abc import Mapping

    from wherry.receipt import CheckpointRef, Receipt

__all__ = [
    "Chain", "Edge", "Ledger", "ancestors", "check_chain", "claim_registration", "descendants", "drop_claim",
    "open_ledger", "record_conversion", "record_registration", "record_verification",
]  # fmt: skip

GENESIS = "0" * 64
_PASSING = ("already", "lineage")  # fields of a receipt that say how it was obtained, not what was done


@dataclass(frozen=True, slots=True)
class Edge:
    """One conversion: from a checkpoint digest to another, by a plan.

    Attributes:
        source: digest of the checkpoint that was read.
        target: digest of the checkpoint that was written.
        plan_digest: the plan that was carried out.
        statement: number of the ledger's statement; None where only a sidecar tells of it.
        time: when it was recorded, or finished; UTC.
        lossless: whether every move was exact.
    """

    source: str
    target: str
    plan_digest: str
    statement: int | None
    time: str
    lossless: bool


@dataclass(frozen=True, slots=True)
class Chain:
    """Outcome of `check_chain`.

    Attributes:
        statements: how many there are.
        head: hash of the last one.
        altered: the first row that is not what it was when written, and why; None where all are.
    """

    statements: int
    head: str
    altered: str | None


def record_conversion(ledger: Ledger, receipt: Receipt) -> int:
    """Append what a conversion did.

    Recording a receipt again adds nothing but a fresh sighting of both places. A copy that keeps the checkpoint
    digest is a second location of one node and has no edge.

    Returns:
        The number of its statement.
    """
    body = {name: value for name, value in receipt.to_json().items() if name not in _PASSING}
    with ledger.write() as connection:
        _see(connection, receipt.source)
        _see(connection, receipt.target)
        seq = _same_statement(connection, "conversion", body) or _append(connection, "conversion", body)
        if receipt.source.checkpoint_digest != receipt.target.checkpoint_digest:
            row = {
                "source": receipt.source.checkpoint_digest,
                "target": receipt.target.checkpoint_digest,
                "plan_digest": receipt.plan_digest,
                "statement": seq,
            }
            connection.execute(insert(tables.edge).values(row).on_conflict_do_nothing())
    return seq


def record_verification(ledger: Ledger, subject: CheckpointRef, verification: Mapping[str, Any]) -> int:
    """Append the outcome of a verification (its JSON form); returns the number of the statement."""
    body = {"checkpoint_digest": subject.checkpoint_digest, "verification": dict(verification)}
    with ledger.write() as connection:
        _see(connection, subject)
        return _append(connection, "verification", body)


def claim_registration(ledger: Ledger, subject: CheckpointRef, registry: str, name: str) -> None:
    """Say, before a registry is asked, that this checkpoint is about to be registered under a name."""
    row = {
        "checkpoint_digest": subject.checkpoint_digest,
        "registry": registry,
        "name": name,
        "state": "pending",
        "seen": utc_now(),
    }
    with ledger.write() as connection:
        _see(connection, subject)
        connection.execute(insert(tables.registration).values(row).on_conflict_do_nothing())


def drop_claim(ledger: Ledger, subject: CheckpointRef, registry: str, name: str) -> None:
    """Take a claim back after a failure that left nothing in the registry; a registration stays."""
    table = tables.registration
    mine = (table.c.checkpoint_digest == subject.checkpoint_digest) & (table.c.registry == registry)
    with ledger.write() as connection:
        connection.execute(delete(table).where(mine, table.c.name == name, table.c.state == "pending"))


def record_registration(
    ledger: Ledger, subject: CheckpointRef, registry: str, name: str, version: str
) -> int:
    """Turn a claim into a registration and append the statement; nothing where that version is recorded.

    Returns:
        The number of its statement.
    """
    body = {
        "checkpoint_digest": subject.checkpoint_digest,
        "registry": registry,
        "name": name,
        "version": version,
    }
    row = {**body, "state": "registered", "seen": utc_now()}
    with ledger.write() as connection:
        _see(connection, subject)
        update = {key: row[key] for key in ("state", "version", "seen")}
        keys = ["checkpoint_digest", "registry", "name"]
        written = insert(tables.registration).values(row)
        connection.execute(written.on_conflict_do_update(index_elements=keys, set_=update))
        same = _same_statement(connection, "registration", body)
        return same or _append(connection, "registration", body)


def ancestors(ledger: Ledger, digest: str) -> list[Edge]:
    """Every edge above a checkpoint, in the order in which it was recorded."""
    return _reachable(ledger, digest, here="target", there="source")


def descendants(ledger: Ledger, digest: str) -> list[Edge]:
    """Every edge below a checkpoint, in the order in which it was recorded."""
    return _reachable(ledger, digest, here="source", there="target")


def check_chain(ledger: Ledger) -> Chain:
    """Recompute every hash and compare every edge with its statement."""
    with ledger.read() as connection:
        head, count, edges = GENESIS, 0, set[tuple[str, str, str]]()
        for row in connection.execute(select(tables.statement).order_by(tables.statement.c.seq)).mappings():
            fault = _fault(row, head, count + 1)
            if fault:
                return Chain(count, head, f"statement {row['seq']}: {fault}")
            head, count = row["hash"], row["seq"]
            edges |= _edges_of(row["kind"], row["body"])
        return Chain(count, head, _edge_fault(connection, edges))


def _fault(row: RowMapping, prev: str, seq: int) -> str | None:
    if row["seq"] != seq:
        return f"statement {seq} before it is gone"
    if row["prev"] != prev:
        return "does not continue the one before it"
    return None if row["hash"] == _hash(row) else "its contents were altered"


def _edges_of(kind: str, body: str) -> set[tuple[str, str, str]]:
    if kind != "conversion":
        return set()
    data = json.loads(body)
    ends = data["source"]["checkpoint_digest"], data["target"]["checkpoint_digest"]
    return {(*ends, data["plan_digest"])} if ends[0] != ends[1] else set()


def _edge_fault(connection: Connection, stated: set[tuple[str, str, str]]) -> str | None:
    table = tables.edge.c
    found = {tuple(row) for row in connection.execute(select(table.source, table.target, table.plan_digest))}
    for source, target, _plan in sorted(found - stated):
        return f"edge {source[:12]} → {target[:12]}: no statement says so"
    for source, target, _plan in sorted(stated - found):
        return f"edge {source[:12]} → {target[:12]}: it is gone"
    return None


def _reachable(ledger: Ledger, digest: str, *, here: str, there: str) -> list[Edge]:
    """Edges reached from a node. UNION drops what was seen, so a round trip (A → B → A) ends the recursion."""
    edge, statement = tables.edge, tables.statement
    start = select(tables.checkpoint.c.checkpoint_digest.label("digest"))
    walk = start.where(tables.checkpoint.c.checkpoint_digest == digest).cte("walk", recursive=True)
    walk = walk.union(select(edge.c[there]).join(walk, edge.c[here] == walk.c.digest))
    query = (
        select(
            edge.c.source,
            edge.c.target,
            edge.c.plan_digest,
            edge.c.statement,
            statement.c.time,
            statement.c.body,
        )
        .join(statement, statement.c.seq == edge.c.statement)
        .where(edge.c[here].in_(select(walk.c.digest)))
        .order_by(edge.c.statement)
    )
    with ledger.read() as connection:
        return [
            Edge(*row[:5], lossless=json.loads(row.body)["lossless"]) for row in connection.execute(query)
        ]


def _see(connection: Connection, subject: CheckpointRef) -> None:
    """Note a checkpoint and where it was."""
    row = asdict(subject)
    place = {"uri": row.pop("uri"), "fingerprint": row.pop("fingerprint"), "seen": utc_now()}
    connection.execute(insert(tables.checkpoint).values(row).on_conflict_do_nothing())
    sighting = insert(tables.location).values({**place, "checkpoint_digest": subject.checkpoint_digest})
    update = {"fingerprint": place["fingerprint"], "seen": place["seen"]}
    keys = ["checkpoint_digest", "uri"]
    connection.execute(sighting.on_conflict_do_update(index_elements=keys, set_=update))


def _same_statement(connection: Connection, kind: str, body: Mapping[str, Any]) -> int | None:
    table = tables.statement.c
    content = sha256_of(kind, body)
    return connection.scalar(select(table.seq).where(table.kind == kind, table.content == content).limit(1))


def _append(connection: Connection, kind: str, body: Mapping[str, Any]) -> int:
    table = tables.statement.c
    last = connection.execute(select(table.seq, table.hash).order_by(table.seq.desc()).limit(1)).first()
    row: dict[str, Any] = {
        "seq": last.seq + 1 if last else 1,
        "prev": last.hash if last else GENESIS,
        "kind": kind,
        "schema": tables.SCHEMA,
        "content": sha256_of(kind, body),
        "body": canonical_json(body).decode(),
        "time": utc_now(),
    }
    connection.execute(insert(tables.statement).values({**row, "hash": _hash(row)}))
    return row["seq"]


def _hash(row: Mapping[str, Any] | RowMapping) -> str:
    names = ("seq", "prev", "kind", "schema", "content", "body", "time")
    return sha256_of("statement", {name: row[name] for name in names})
