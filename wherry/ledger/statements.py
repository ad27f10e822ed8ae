"""The chain: statements with hashes, how they are appended and read, and the rows that follow from them.

A statement is appended in the caller's write transaction, which holds the ledger's lock from its start: no other writer
comes between reading the head and adding the statement, and a statement never exists without its rows.

The rows of the ledger's other tables are a pure function (`rows_of`) of a statement's kind and body. It has three uses:
a new statement's rows are written with it, the check compares the tables with it, and `wherry.ledger.replay` makes the
state of an earlier moment.

The order of the statements is that of the hash chain; a time is what a clock claimed. A statement has two of them, in
fields of their own: that of the machine which wrote it, and that of the ledger's storage. A clock that is off by more
than a day is refused before it enters the ledger, where nothing could be taken back.
"""

from __future__ import annotations

import os
import tempfile
from bisect import bisect_right
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from wherry.core.digest import canonical_json, sha256_of, sha256_text
from wherry.core.json_document import json_value
from wherry.core.lazy_dataclass import dataclass
from wherry.core.receipt import utc_now
from wherry.errors import StorageError, UsageError, WherryError, describe_exception, storage_error
from wherry.ledger import schema as tables
from wherry.ledger.database import SQLITE, Ledger, LedgerConnection
from wherry.ledger.schema import LedgerTable

EVENTS = ("promotion", "rollback", "deletion", "audit", "note")
KINDS = ("conversion", "verification", "registration", "claim", "release", "sighting", "rebuild", *EVENTS)
PENDING, REGISTERED, RELEASED = "pending", "registered", "released"
SKEW = timedelta(days=1)  # by which clocks may differ
CLOCK_CURE = "set the clock of this machine (`timedatectl` shows it), and run the command again"
_STATES = {"claim": PENDING, "release": RELEASED, "registration": REGISTERED}
_LARGEST_NUMBER = 1 << 63
_LONGEST_TIME = 40  # characters
_PAGE = 500  # statements read in one transaction, at most
_PAGE_TEXT = 16 << 20  # characters of their bodies after which no further one is read
_HASHED = ("seq", "prev", "kind", "schema", "content", "body", "time", "storage_time")
_ORDER = {table: position for position, table in enumerate(tables.DERIVED)}
_COLUMNS = ", ".join(tables.statement.columns)
_HEAD = "SELECT seq, hash, time FROM statement ORDER BY seq DESC LIMIT 1"
_SAME = "SELECT seq FROM statement WHERE content = :content AND seq > :after LIMIT 1"
_NUMBERED = f"SELECT {_COLUMNS} FROM statement WHERE seq IN (:*numbers) ORDER BY seq"  # noqa: S608  our own names

Row = tuple["LedgerTable", dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Statement:
    """One statement of the ledger.

    Attributes:
        seq: its number, from 1 without gaps.
        kind: one of `KINDS`.
        schema: schema version of its body.
        time: when it was appended, by the clock of the machine that wrote it; UTC.
        storage_time: the same by the clock of the ledger's storage.
        hash: over all fields, including `prev`.
        prev: hash of the statement before it.
        body: its contents.
        content: digest of kind and body.
        text: the body as hashed text, so that the hash can be recomputed elsewhere.
    """

    seq: int
    kind: str
    schema: int
    time: str
    storage_time: str
    hash: str
    prev: str
    body: dict[str, Any]
    content: str
    text: str


@dataclass(frozen=True, slots=True)
class ChainHead:
    """The end of the chain, to be kept elsewhere; number 0 and the genesis hash if the chain is empty."""

    seq: int
    hash: str
    time: str


class StatementRow(NamedTuple):
    """A row of `statement`, in the order of its columns."""

    seq: int
    prev: str
    hash: str
    kind: str
    schema: int
    content: str
    body: str
    time: str
    storage_time: str


def append(connection: LedgerConnection, kind: str, body: Mapping[str, Any]) -> int:
    """Add a statement and its rows.

    Its place is after the last statement, whatever the clocks say: their times are stored as they were read.

    Returns:
        Its number.

    Raises:
        StorageError: the clock of this machine differs from that of the ledger's storage, which must be readable.
    """
    clocks = plausible_clocks(connection)
    last = last_statement(connection)
    text = canonical_json(body).decode()
    row: dict[str, Any] = {
        "seq": last.seq + 1,
        "prev": last.hash,
        "kind": kind,
        "schema": tables.SCHEMA,
        "content": content_of(kind, text),
        "body": text,
        "time": clocks.machine,
        "storage_time": clocks.storage,
    }
    connection.change(tables.statement.insertion(), {**row, "hash": hash_of(row)})
    write(connection, rows_of(kind, body, row["seq"], row["time"]))
    return row["seq"]


def last_statement(connection: LedgerConnection) -> ChainHead:
    """The end of the chain, in a transaction that is open."""
    row = connection.first(_HEAD)
    return ChainHead(*row) if row else ChainHead(0, tables.GENESIS, "")


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


def statements(
    ledger: Ledger, *, after: int = 0, kinds: Collection[str] | None = None, until: str | None = None
) -> Iterator[Statement]:
    """The statements in order.

    They are read page by page, and no transaction stays open while the caller works on one: statements never
    change, and those that are appended meanwhile come at the end.

    Args:
        ledger: the ledger.
        after: number after which to begin.
        kinds: only these.
        until: only those up to this moment by the clock of the ledger's storage, which all writers share (ISO 8601;
            UTC where it has no offset; a date means its end).

    Raises:
        UsageError: `until` is not a valid date or time.
    """
    last = None if until is None else moment(until)
    chosen = {} if kinds is None else {"kinds": sorted(kinds)}
    bounds = {} if last is None else {"last": last}
    query = (
        f"SELECT {_COLUMNS} FROM statement WHERE seq > :after"  # noqa: S608  our own names
        f"{' AND kind IN (:*kinds)' if chosen else ''}{' AND storage_time <= :last' if bounds else ''}"
        f" ORDER BY seq LIMIT {_PAGE}"
    )
    while True:
        with ledger.read() as connection:
            page, more = _page(connection.rows(query, after=after, **chosen, **bounds))
        yield from (_statement(row) for row in page)
        if not more:
            return
        after = page[-1].seq


def _page(rows: Iterable[tuple[Any, ...]]) -> tuple[list[StatementRow], bool]:
    """The first rows, as many as are read at once but at least one, and whether others can follow."""
    page, size = list[StatementRow](), 0
    for row in map(StatementRow._make, rows):
        page.append(row)
        size += sum(len(text or "") for text in (row.body, row.kind, row.time, row.storage_time))
        if size > _PAGE_TEXT:
            return page, True
    return page, len(page) == _PAGE


def head(ledger: Ledger) -> ChainHead:
    """The last statement's number, hash and time."""
    with ledger.read() as connection:
        return last_statement(connection)


def moment(text: str) -> str:
    """A moment in the format of statements.

    Raises:
        UsageError: the text is not a valid date or time.
    """
    try:
        read = datetime.fromisoformat(text)
    except ValueError as error:
        raise UsageError(
            f"invalid date or time: {text!r}", cure="use 2026-11-21 or 2026-11-21T08:00+00:00"
        ) from error
    if len(text) <= len("2026-11-21"):
        read = datetime.combine(read.date(), datetime.max.time())
    return _in_utc(read if read.tzinfo else read.replace(tzinfo=UTC))


def statements_of(ledger: Ledger, numbers: Collection[int]) -> Iterator[Statement]:
    """The statements that have these numbers, in order, read page by page; a number that none has is left out."""
    every, start = sorted(numbers), 0
    while start < len(every):
        with ledger.read() as connection:
            page, more = _page(connection.rows(_NUMBERED, numbers=every[start : start + _PAGE]))
        yield from (_statement(row) for row in page)
        start = bisect_right(every, page[-1].seq) if more else start + _PAGE


def _statement(row: StatementRow) -> Statement:
    if None in row:  # the tables of a forged file may take it
        raise tables.damage_error(f"values: statement {row.seq} lacks one")
    if row.schema != tables.SCHEMA:
        raise tables.damage_error(f"statement {row.seq}: schema {row.schema}, expected {tables.SCHEMA}")
    for stated in (row.time, row.storage_time):
        if len(stated) > _LONGEST_TIME:  # the state of a ledger keeps the times of its statements
            raise tables.damage_error(f"times: {stated[:_LONGEST_TIME]!r} goes on")
    fields: dict[str, Any] = {**row._asdict(), "body": stored_table(row.body), "text": row.body}
    return Statement(**fields)


def rows_of(kind: str, body: Mapping[str, Any], seq: int, time: str) -> Iterator[Row]:
    """The rows of a statement; checkpoints before rows that refer to them."""
    subjects = [*_sources(body), body["target"]] if kind == "conversion" else [body.get("subject")]
    for subject in subjects:
        if subject is not None:
            yield tables.checkpoint, {name: subject[name] for name in tables.checkpoint.columns}
            place = {name: subject[name] for name in ("checkpoint_digest", "uri", "fingerprint")}
            yield tables.location, {**place, "seen": time, "statement": seq}
    if kind == "conversion":
        yield from _conversion_rows(body, seq, time)
    elif kind == "verification":
        outcome = body["verification"]
        yield (
            tables.verification,
            {
                "checkpoint_digest": body["checkpoint_digest"],
                "level": str(outcome.get("level", "")),
                "verdict": str(outcome.get("verdict") or ("ok" if outcome.get("ok") else "failed")),
                "time": time,
                "statement": seq,
            },
        )
    elif kind in _STATES:
        yield (
            tables.registration,
            {
                **{name: body[name] for name in ("checkpoint_digest", "registry", "name")},
                "state": _STATES[kind],
                "version": body.get("version"),
                "seen": time,
                "statement": seq,
            },
        )
    elif kind == "deletion" and body.get("checkpoint_digest") and body.get("uri"):
        gone = {"checkpoint_digest": body["checkpoint_digest"], "uri": body["uri"]}
        yield tables.tombstone, {**gone, "time": time, "statement": seq}


def _conversion_rows(body: Mapping[str, Any], seq: int, time: str) -> Iterator[Row]:
    source, target = body["source"], body["target"]
    ends = {"source": source["checkpoint_digest"], "target": target["checkpoint_digest"]}
    yield (
        tables.conversion,
        {
            "statement": seq,
            **ends,
            "source_uri": source["uri"],
            "source_fingerprint": source["fingerprint"],
            "target_uri": target["uri"],
            "format": target["format"],
            "plan_digest": body["plan_digest"],
            "options": canonical_json(body["options"]).decode(),
            "software": str(body["software"].get("wherry", "")),
            "lossless": body["lossless"],
            "time": body["finished"] or time,
        },
    )
    for parent in dict.fromkeys(one["checkpoint_digest"] for one in _sources(body)):
        if parent != ends["target"]:  # a copy that keeps the digest is a second place of one node
            way = {"source": parent, "target": ends["target"], "plan_digest": body["plan_digest"]}
            yield tables.edge, {**way, "statement": seq}


def _sources(body: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Every checkpoint that was read: one, or the parents of a merge."""
    return [row["checkpoint"] for row in body.get("parents", ())] or [body["source"]]


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


@dataclass(frozen=True, slots=True)
class ClockReadings:
    """The times of two clocks at one moment; UTC.

    Attributes:
        machine: the clock of this machine.
        storage: the clock of what stores the ledger.
    """

    machine: str
    storage: str


def plausible_clocks(connection: LedgerConnection) -> ClockReadings:
    """The clocks of this machine and of the ledger's storage, which agree, give or take a day.

    Args:
        connection: a connection to the ledger.

    Raises:
        StorageError: the clocks differ, or that of the storage cannot be read.
    """
    read = ClockReadings(utc_now(), _storage_time(connection))
    ahead = datetime.fromisoformat(read.machine) - datetime.fromisoformat(read.storage)
    if abs(ahead) > SKEW:
        days, side = abs(ahead) / timedelta(days=1), "ahead of" if ahead > timedelta(0) else "behind"
        raise StorageError(
            f"the clock of this machine is {days:.0f} d {side} that of the ledger's storage",
            uri=connection.uri,
            cure=CLOCK_CURE,
        )
    return read


def is_ahead(time: str, now: str) -> bool:
    """Whether a stored time is more than a day after another."""
    return datetime.fromisoformat(time) - datetime.fromisoformat(now) > SKEW


def _storage_time(connection: LedgerConnection) -> str:
    """The present time by the database server, or by the file system of a SQLite file."""
    if connection.dialect != SQLITE:
        # Not now(), which is the start of the transaction: it may have waited for the ledger's lock since.
        return _in_utc(connection.value("SELECT clock_timestamp()"))
    folder = Path(connection.uri).parent  # in which SQLite makes its own files, too
    try:
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(b"\0")
            probe.flush()
            return _in_utc(datetime.fromtimestamp(os.fstat(probe.fileno()).st_mtime, UTC))
    except OSError as error:
        raise storage_error(error, str(folder)) from error


def _in_utc(read: datetime) -> str:
    return read.astimezone(UTC).isoformat(timespec="milliseconds")
