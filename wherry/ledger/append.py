"""Appends statements to the chain, and derives the rows of the other tables from them.

Both happen in the caller's write transaction, which holds the ledger's lock from its start: no other writer comes
between reading the head and adding the new statement, and a statement never exists without its rows.

The rows of the ledger's other tables are a pure function (`rows_of`) of a statement's kind and body. It has two uses:
a new statement's rows are written with it, and the check replays the chain through it and compares.
"""

from __future__ import annotations

from contextlib import contextmanager
from datetime import datetime
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

from wherry.core.digest import canonical_json, sha256_of, sha256_text
from wherry.errors import WherryError, describe_exception
from wherry.ledger import schema as tables
from wherry.ledger.clocks import plausible_clocks
from wherry.text.json_values import json_value

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Iterator, Mapping

    from wherry.ledger.connection import LedgerConnection
    from wherry.ledger.schema import LedgerTable

_LARGEST_NUMBER = 1 << 63
_HASHED = ("seq", "prev", "kind", "schema", "content", "body", "time", "storage_time")
_LAST = "SELECT seq, hash FROM statement ORDER BY seq DESC LIMIT 1"
_SAME = "SELECT seq FROM statement WHERE content = :content AND seq > :after LIMIT 1"


def append(connection: LedgerConnection, kind: str, body: Mapping[str, Any]) -> int:
    """Add a statement and its rows.

    Its place is after the last statement, whatever the clocks say: their times are stored as they were read.

    Returns:
        Its number.

    Raises:
        StorageError: the clock of this machine differs from that of the ledger's storage, which must be readable.
    """
    clocks = plausible_clocks(connection)
    number, head = connection.first(_LAST) or (0, tables.GENESIS)
    text = canonical_json(body).decode()
    row: dict[str, Any] = {
        "seq": number + 1,
        "prev": head,
        "kind": kind,
        "schema": tables.SCHEMA,
        "content": content_of(kind, text),
        "body": text,
        "time": clocks.machine,
        "storage_time": clocks.storage,
    }
    connection.change(tables.statement.insertion(), {**row, "hash": hash_of(row)})
    write(connection, rows_of(BareStatement(kind, body, row["seq"], row["time"])))
    return row["seq"]


def last_number(connection: LedgerConnection) -> int:
    """The number of the last statement; 0 if there is none."""
    number, _hash = connection.first(_LAST) or (0, "")
    return number


def same_statement(
    connection: LedgerConnection, kind: str, body: Mapping[str, Any], after: int = 0
) -> int | None:
    """The number of an existing statement with the same kind and body; None if there is none.

    Args:
        connection: a transaction.
        kind: its kind.
        body: its body.
        after: the number of a statement that it comes after.
    """
    content = content_of(kind, canonical_json(body).decode())
    return connection.value(_SAME, content=content, after=after)


def stored_table(text: str) -> dict[str, Any]:
    """A table that the ledger stores as JSON.

    Raises:
        CorruptError: the text is something else, which wherry never stores.
    """
    try:
        found = json_value(text)
    except ValueError as error:
        raise tables.damage_error(f"JSON: {error}") from error
    if not isinstance(found, dict):
        raise tables.damage_error(f"JSON: expected a table, got {type(found).__name__}")
    return found


def stored_time(text: str) -> datetime:
    """A time that the ledger stores.

    Raises:
        CorruptError: the text is not a time with an offset, which wherry never stores.
    """
    try:
        found = datetime.fromisoformat(text[:80])  # an error repeats the text
    except ValueError as error:
        raise tables.damage_error(f"times: {text[:40]!r}") from error
    if found.tzinfo is None:
        raise tables.damage_error(f"times: {text[:40]!r} has no offset")
    return found


@contextmanager
def damage_of(seq: int) -> Generator[None]:
    """Turn what the contents of an invalid statement lead to into the error that names it.

    Raises:
        CorruptError: the statement lacks something that those of its kind have, or it has another type.
    """
    try:
        yield
    except WherryError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise tables.damage_error(f"statement {seq}: {describe_exception(error)}") from error


def stored_number(value: Any) -> Any:
    """A number from a statement.

    Raises:
        TypeError: it is something else.
        OverflowError: it is beyond 64 bits, so that sums of it could exceed a float.
    """
    if type(value) not in (int, float):
        raise TypeError(f"expected a number, got {type(value).__name__}")
    if abs(value) > _LARGEST_NUMBER:
        raise OverflowError("a number beyond 64 bits")
    return value


def stored_word(value: Any) -> str:
    """A string from a statement.

    Raises:
        TypeError: it is something else.
    """
    if type(value) is not str:
        raise TypeError(f"expected a string, got {type(value).__name__}")
    return value


def content_of(kind: str, text: str) -> str:
    """Digest of the kind and body of a statement, without its time and position.

    Args:
        kind: of the statement.
        text: its body as it is stored, in canonical JSON.
    """
    return sha256_text(kind, text.encode())


def hash_of(row: Mapping[str, Any]) -> str:
    """The hash of a statement: over all columns of its row, including the previous hash."""
    return sha256_of("statement", {name: row[name] for name in _HASHED})


def write(connection: LedgerConnection, rows: Iterable[Row]) -> None:
    """Write rows by the rule of their table: the first value is kept, or the last one wins.

    A row that refers to another comes after it.
    """
    ordered = sorted(rows, key=lambda row: _ORDER[row[0]])
    for table, group in groupby(ordered, key=lambda row: row[0]):
        connection.change(table.upsert(), *(row for _table, row in group))


_ORDER = {table: position for position, table in enumerate(tables.DERIVED)}


EVENTS = ("promotion", "rollback", "deletion", "audit", "note")
KINDS = ("conversion", "verification", "registration", "claim", "release", "sighting", "rebuild", *EVENTS)
PENDING, REGISTERED, RELEASED = "pending", "registered", "released"
_STATES = {"claim": PENDING, "release": RELEASED, "registration": REGISTERED}

Row = tuple["LedgerTable", dict[str, Any]]


class BareStatement(NamedTuple):
    """The parts of a statement on which its rows depend."""

    kind: str
    body: Mapping[str, Any]
    seq: int
    time: str


def rows_of(statement: BareStatement) -> Iterator[Row]:
    """The rows of a statement; checkpoints before rows that refer to them."""
    body = statement.body
    if statement.kind == "conversion":
        for source in _sources(body):
            yield from _seen_rows(source, statement)
        yield from _seen_rows(body["target"], statement)
        yield from _conversion_rows(statement)
        return
    if body.get("subject") is not None:
        yield from _seen_rows(body["subject"], statement)
    if statement.kind == "verification":
        outcome = body["verification"]
        yield (
            tables.verification,
            {
                "checkpoint_digest": body["checkpoint_digest"],
                "level": str(outcome.get("level", "")),
                "verdict": str(outcome.get("verdict") or ("ok" if outcome.get("ok") else "failed")),
                "time": statement.time,
                "statement": statement.seq,
            },
        )
    elif statement.kind in _STATES:
        yield (
            tables.registration,
            {
                **{name: body[name] for name in ("checkpoint_digest", "registry", "name")},
                "state": _STATES[statement.kind],
                "version": body.get("version"),
                "seen": statement.time,
                "statement": statement.seq,
            },
        )
    elif statement.kind == "deletion" and body.get("checkpoint_digest") and body.get("uri"):
        gone = {"checkpoint_digest": body["checkpoint_digest"], "uri": body["uri"]}
        yield tables.tombstone, {**gone, "time": statement.time, "statement": statement.seq}


def _seen_rows(subject: Mapping[str, Any], statement: BareStatement) -> Iterator[Row]:
    """The rows of a checkpoint and of its place."""
    yield tables.checkpoint, {name: subject[name] for name in tables.checkpoint.columns}
    place = {name: subject[name] for name in ("checkpoint_digest", "uri", "fingerprint")}
    yield tables.location, {**place, "seen": statement.time, "statement": statement.seq}


def _conversion_rows(statement: BareStatement) -> Iterator[Row]:
    body = statement.body
    source, target = body["source"], body["target"]
    ends = {"source": source["checkpoint_digest"], "target": target["checkpoint_digest"]}
    yield (
        tables.conversion,
        {
            "statement": statement.seq,
            **ends,
            "source_uri": source["uri"],
            "source_fingerprint": source["fingerprint"],
            "target_uri": target["uri"],
            "format": target["format"],
            "plan_digest": body["plan_digest"],
            "options": canonical_json(body["options"]).decode(),
            "software": str(body["software"].get("wherry", "")),
            "lossless": body["lossless"],
            "time": body["finished"] or statement.time,
        },
    )
    parents = dict.fromkeys(one["checkpoint_digest"] for one in _sources(body))
    for parent in parents:
        if parent != ends["target"]:  # a copy that keeps the digest is a second place of one node
            way = {"source": parent, "target": ends["target"], "plan_digest": body["plan_digest"]}
            yield tables.edge, {**way, "statement": statement.seq}


def _sources(body: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Every checkpoint that was read: one, or the parents of a merge."""
    return [row["checkpoint"] for row in body.get("parents", ())] or [body["source"]]
