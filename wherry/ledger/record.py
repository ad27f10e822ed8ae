"""The ledger: what was converted, verified, registered, promoted and deleted; append-only and chained by hashes.

Each statement carries the hash of the one before it, so that `check_chain` finds and names an altered, removed or
inserted row. (It does not find a cut-off tail: keep `head` elsewhere, as an anchor.) Writers take the ledger's lock
before they read the head, so the chain stays valid with any number of processes; a statement and its rows are on disk
when its function returns.

Work counts as done only when it is recorded: if recording fails, the target stays, and the call raises a
`NotRecordedError` that carries the result of the call and names the command that records it later. That command runs
`record_sidecar`, which needs only the checkpoint with its sidecar.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any, NamedTuple

from wherry.core import interrupts
from wherry.core.lazy_dataclass import dataclass
from wherry.core.receipt import CheckpointRef, Receipt
from wherry.core.request import SourceRequest
from wherry.cures import Argument, Command, Cure
from wherry.errors import (
    MissingExtraError,
    NotFoundError,
    NotRecordedError,
    StorageError,
    TargetInUseError,
    UnsupportedError,
    UsageError,
    WherryError,
    wherry_error,
)
from wherry.ledger.check import Anchor, Chain, check_chain
from wherry.ledger.database import Ledger, LedgerConnection, open_ledger
from wherry.ledger.deliver import after_record
from wherry.ledger.schema import GENESIS
from wherry.ledger.statements import (
    EVENTS,
    PENDING,
    REGISTERED,
    ChainHead,
    Statement,
    append,
    head,
    last_statement,
    same_statement,
    statements,
    statements_of,
)

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
    "conversions_to",
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
    "versions_in",
]  # fmt: skip

_CONVERSIONS_TO = "SELECT statement FROM conversion WHERE target = :digest"
_LAST_PLACE = """
SELECT checkpoint_digest, fingerprint, location.statement,
  (SELECT tombstone.statement FROM tombstone
   WHERE tombstone.checkpoint_digest = location.checkpoint_digest AND tombstone.uri = location.uri) AS statement
FROM location WHERE uri = :uri ORDER BY location.statement DESC, seen DESC LIMIT 1
"""
_REACHABLE = """
WITH RECURSIVE walk (digest) AS (
  SELECT checkpoint_digest FROM checkpoint WHERE checkpoint_digest = :digest
  UNION SELECT edge.{there} FROM edge JOIN walk ON edge.{here} = walk.digest
)
SELECT edge.source, edge.target, edge.plan_digest, edge.statement, conversion.time, conversion.lossless
FROM edge JOIN conversion ON conversion.statement = edge.statement
WHERE edge.{here} IN (SELECT digest FROM walk) ORDER BY edge.statement
"""
# Errors of the ledger and the registry themselves; other errors concern the checkpoint.
_REFUSALS = (StorageError, MissingExtraError, UnsupportedError, UsageError)
# Errors that after the commit mean only that work remains to be done.
_GONE = (NotFoundError, TargetInUseError)
RECORDED = "recorded"
REFUSED = "not recorded: "  # prefix of the reason
LEFT_OUT = "left out by request"
_LATE = "recorded now; the ledger did not have it"
_HAD = "already recorded"
_PASSING = ("already", "lineage")  # fields of a receipt that describe how it was obtained, not what was done


@dataclass(frozen=True, slots=True)
class Edge:
    """One conversion: from one checkpoint digest to another, by a plan.

    Attributes:
        source: digest of the checkpoint that was read.
        target: digest of the checkpoint that was written.
        plan_digest: the plan that was carried out.
        statement: number of the ledger's statement; None if it is known only from a sidecar.
        time: when it was finished; UTC.
        lossless: whether every move was exact.
    """

    source: str
    target: str
    plan_digest: str
    statement: int | None
    time: str
    lossless: bool

    def to_json(self) -> dict[str, Any]:
        """One of the `edges` of `lineage show --json`."""
        return {name: getattr(self, name) for name in self.__slots__}


def record_conversion(ledger: Ledger, receipt: Receipt) -> int:
    """Append a conversion.

    Recording a receipt again adds at most new sightings of the places. A copy with the same checkpoint digest is a
    second place of one node and has no edge.

    Returns:
        The number of its statement.
    """
    return ledger.change(lambda connection: add_conversion(connection, receipt))


def add_conversion(connection: LedgerConnection, receipt: Receipt) -> int:
    """Like `record_conversion`, in a transaction that is open for writing."""
    body = _body(receipt)
    seq = same_statement(connection, "conversion", body)
    if seq is None:
        return append(connection, "conversion", body)
    for one in receipt.sources:
        add_sighting(connection, one)
    add_sighting(connection, receipt.target)
    return seq


def has_conversion(ledger: Ledger, receipt: Receipt) -> bool:
    """Whether the ledger has exactly this conversion."""
    with ledger.read() as connection:
        return same_statement(connection, "conversion", _body(receipt)) is not None


def _body(receipt: Receipt) -> dict[str, Any]:
    return {name: value for name, value in receipt.to_json().items() if name not in _PASSING}


def conversions_to(ledger: Ledger, digest: str) -> list[Statement]:
    """The statements of the conversions that made a checkpoint, in the order in which they were recorded."""
    with ledger.read() as connection:
        numbers = [number for (number,) in connection.rows(_CONVERSIONS_TO, digest=digest)]
    return list(statements_of(ledger, numbers))


def record_verification(ledger: Ledger, subject: CheckpointRef, verification: Mapping[str, Any]) -> int:
    """Append the outcome of a verification (its JSON form); returns the number of the statement."""
    return _append_once(ledger, "verification", {**_about(subject), "verification": dict(verification)})


def record_sighting(ledger: Ledger, subject: CheckpointRef) -> int | None:
    """Record that a checkpoint is at its place, unless the ledger already says so.

    Returns:
        The number of the statement; None if nothing was new.
    """
    return ledger.change(lambda connection: add_sighting(connection, subject))


def add_sighting(connection: LedgerConnection, subject: CheckpointRef) -> int | None:
    """Like `record_sighting`, in a transaction that is open for writing."""
    last = connection.first(_LAST_PLACE, uri=subject.uri)
    if last is not None and last[:2] == (subject.checkpoint_digest, subject.fingerprint):
        seen, gone = last[2:]
        if gone is None or gone < seen:
            return None
    return append(connection, "sighting", _about(subject))


def record_event(ledger: Ledger, kind: str, subject: CheckpointRef | None, body: Mapping[str, Any]) -> int:
    """Append an event: a promotion, a rollback, a deletion, an audit, or a note. Each call adds a new event.

    A deletion names the deleted checkpoint by `checkpoint_digest` and `uri`, which default to the subject's; from
    then on the lineage shows that place as deleted, until the checkpoint is seen there again.

    Args:
        ledger: the ledger.
        kind: one of `EVENTS`.
        subject: the checkpoint that the event concerns; None if it concerns none.
        body: further fields; JSON, without secrets. wherry's own fields (`subject`, `checkpoint_digest`) take
            precedence.

    Returns:
        The number of its statement.

    Raises:
        UsageError: the kind is unknown, or a deletion does not name a checkpoint.
    """
    if kind not in EVENTS:
        raise UsageError(f"unknown event kind {kind!r}", cure=f"choose {', '.join(EVENTS)}")
    place = {"uri": subject.uri} if subject is not None and kind == "deletion" else {}
    full = {**place, **body, **(_about(subject) if subject is not None else {})}
    if kind == "deletion" and not (full.get("checkpoint_digest") and full.get("uri")):
        raise UsageError(
            "a deletion must name the deleted checkpoint", cure="pass a subject, or checkpoint_digest and uri"
        )
    return _append_once(ledger, kind, full)


def _append_once(ledger: Ledger, kind: str, body: Mapping[str, Any]) -> int:
    """Append a statement, also one that the ledger has already, and only once if its transaction is made again."""
    before: list[int] = []

    def add(connection: LedgerConnection) -> int:
        made = same_statement(connection, kind, body, after=before[0]) if before else None
        before[:] = before or [last_statement(connection).seq]
        return append(connection, kind, body) if made is None else made

    return ledger.change(add)


def claim_registration(ledger: Ledger, subject: CheckpointRef, registry: str, name: str) -> None:
    """Record, before the registry is called, that this checkpoint is about to be registered under a name.

    Nothing is added if it is already claimed or registered there.
    """

    def claim(connection: LedgerConnection) -> None:
        held = _registration(connection, subject, registry, name)
        if held is None or held.state not in (PENDING, REGISTERED):
            append(connection, "claim", {**_about(subject), "registry": registry, "name": name})

    ledger.change(claim)


def drop_claim(ledger: Ledger, subject: CheckpointRef, registry: str, name: str) -> None:
    """Release a claim after a failure that left nothing in the registry; a registration is kept."""

    def drop(connection: LedgerConnection) -> None:
        held = _registration(connection, subject, registry, name)
        if held is not None and held.state == PENDING:
            append(connection, "release", {**_about(subject), "registry": registry, "name": name})

    ledger.change(drop)


def record_registration(
    ledger: Ledger, subject: CheckpointRef, registry: str, name: str, version: str
) -> int:
    """Turn a claim into a registration and append the statement; do nothing if that version is already recorded.

    Returns:
        The number of its statement.
    """
    return ledger.change(lambda connection: add_registration(connection, subject, registry, name, version))


def add_registration(
    connection: LedgerConnection, subject: CheckpointRef, registry: str, name: str, version: str
) -> int:
    """Like `record_registration`, in a transaction that is open for writing."""
    held = _registration(connection, subject, registry, name)
    if held is not None and (held.state, held.version) == (REGISTERED, version):
        return held.statement
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
    with ledger.read() as connection:
        return [
            Edge(*row) for row in connection.rows(_REACHABLE.format(here=here, there=there), digest=digest)
        ]


def _about(subject: CheckpointRef) -> dict[str, Any]:
    return {"checkpoint_digest": subject.checkpoint_digest, "subject": asdict(subject)}


class _Registration(NamedTuple):
    state: str
    version: str | None
    statement: int


def _registration(
    connection: LedgerConnection, subject: CheckpointRef, registry: str, name: str
) -> _Registration | None:
    row = connection.first(
        "SELECT state, version, statement FROM registration "
        "WHERE checkpoint_digest = :digest AND registry = :registry AND name = :name",
        digest=subject.checkpoint_digest,
        registry=registry,
        name=name,
    )
    return None if row is None else _Registration(*row)


def versions_in(ledger: Ledger, name: str, registry: str) -> int:
    """The number of versions of a model that the ledger knows in a registry.

    Args:
        ledger: the opened ledger.
        name: the registered model.
        registry: its URI, without secrets.
    """
    query = (
        "SELECT count(*) FROM registration "
        "WHERE name = :name AND registry = :registry AND state = :state AND version IS NOT NULL"
    )
    with ledger.read() as connection:
        return connection.value(query, name=name, registry=registry, state=REGISTERED)


def record(receipt: Receipt) -> Receipt:
    """Record a conversion; see `record_all`.

    Raises:
        NotRecordedError: the ledger cannot be used; `result` is the receipt.
    """
    try:
        return record_all([receipt])[0]
    except NotRecordedError as error:
        error.result = error.result[0]
        raise


def record_all(receipts: Sequence[Receipt]) -> tuple[Receipt, ...]:
    """Record committed conversions: new ones, and existing ones that were found.

    Returns:
        The receipts, each with the outcome of the recording as `lineage`.

    Raises:
        NotRecordedError: the ledger cannot be used. The targets stay; `result` is the result of the call, with the
            reason as `lineage` of each receipt that was not recorded.
    """
    done: list[Receipt] = []
    try:
        with open_ledger() as ledger:
            for one in receipts:
                late = one.already and not has_conversion(ledger, one)
                record_conversion(ledger, one)
                done.append(replace(one, lineage=_LATE if late else RECORDED))
    except Exception as caught:  # noqa: BLE001  whatever the error is, the targets are committed
        cause, rest = wherry_error(caught), receipts[len(done) :]
        error = not_recorded(cause, [one.target.uri for one in rest])
        error.result = (*done, *(replace(one, lineage=REFUSED + cause.what) for one in rest))
        raise error from cause
    interrupts.settle([one.target.uri for one in receipts])
    after_record()
    return tuple(done)


def require_recorded(receipt: Receipt) -> Receipt:
    """Return the receipt of another process, unless that process could not record the conversion.

    Raises:
        NotRecordedError: the conversion was not recorded; `result` is the receipt.
    """
    if receipt.lineage.startswith(REFUSED):
        error = not_recorded(StorageError(receipt.lineage.removeprefix(REFUSED)), [receipt.target.uri])
        error.result = receipt
        raise error
    return receipt


def record_outcome(subject: CheckpointRef, verification: Mapping[str, Any]) -> None:
    """Record the outcome of a verification (its JSON form).

    Raises:
        NotRecordedError: the ledger cannot be used.
    """
    try:
        with open_ledger() as ledger:
            record_verification(ledger, subject, verification)
    except Exception as caught:
        raise not_recorded(wherry_error(caught), [subject.uri], cure="verify it again") from caught
    after_record()


def record_sidecar(uri: str | os.PathLike[str], *, ledger: str | None = None) -> tuple[str, str]:
    """Record a committed checkpoint from its sidecar: its place, and the conversion that made it.

    Use it after a conversion, a rewrite, an export or a fetch that could not be recorded. No tensor byte is read.

    Args:
        uri: the checkpoint.
        ledger: its URL; `WHERRY_LEDGER` or the file in the home by default.

    Returns:
        The URI of the checkpoint, and what was recorded, as text.

    Raises:
        NotFoundError: the checkpoint does not exist, or has no sidecar.
        MismatchError: the sidecar was altered.
        StorageError: the ledger cannot be used.
    """
    from wherry.formats.checkpoint import open_source, present_fingerprint
    from wherry.formats.detect import resolve_source
    from wherry.ledger.resolve import proved_sidecar, resolve_named

    location, _found = resolve_source(resolve_named(SourceRequest(os.fspath(uri))))
    sidecar = proved_sidecar(location, "ledger record")
    receipt, subject = sidecar.receipt, sidecar.checkpoint
    if subject.uri != location.uri:  # a copy has its own fingerprint
        with open_source(SourceRequest(location.uri, subject.format)) as copy:
            subject = replace(subject, uri=location.uri, fingerprint=present_fingerprint(copy))
    with open_ledger(ledger) as opened:
        missing = receipt is not None and not has_conversion(opened, receipt)
        if receipt is not None and missing:
            record_conversion(opened, receipt)
        seen = record_sighting(opened, subject)
    after_record()
    return location.uri, RECORDED if missing or seen is not None else _HAD


def not_recorded(error: WherryError, uris: Sequence[str], *, cure: str | None = None) -> NotRecordedError:
    """The error for work that is done, but could not be recorded or registered.

    Args:
        error: the error of the ledger or the registry.
        uris: the committed checkpoints.
        cure: how to record the work once the error is fixed; by default the command that records the sidecars.
    """
    again = cure or Cure("run {}", Command("ledger record", *uris))
    return NotRecordedError(
        f"done, but not recorded: {error.what}",
        uri=", ".join(uris),
        cure=Cure("{}; then {}", error.cure, again) if error.cure else again,
        retryable=error.retryable,
    )


@contextmanager
def verification_of(uri: str) -> Generator[None]:
    """Around the verification of a committed target: an error, such as a missing source, does not undo the commit.

    Raises:
        NotRecordedError: the target could not be verified; `result` is None.
    """
    try:
        yield
    except _GONE as error:
        refused = not_recorded(
            error, [uri], cure=Cure("run {}", Command("verify", uri, Argument("level", "digest")))
        )
        refused.what = f"done, but not verified: {error.what}"
        raise refused from error


@contextmanager
def registration_of(
    uri: str, name: str, *, alias: str | None = None, tags: Mapping[str, str] | None = None
) -> Generator[None]:
    """Around the registration of a committed target: an error of the registry or ledger does not undo the commit.

    Args:
        uri: the checkpoint.
        name: the registered model.
        alias, tags: as for `register`.

    Raises:
        NotRecordedError: the target could not be registered.
    """
    try:
        yield
    except (*_REFUSALS, *_GONE) as error:
        more = [Argument("alias", alias)] if alias else []
        more += [Argument("tag", f"{key}={value}") for key, value in (tags or {}).items()]
        refused = not_recorded(
            error, [uri], cure=Cure("run {}", Command("register", uri, Argument("model", name), *more))
        )
        refused.what = f"done, but not registered: {error.what}"
        raise refused from error
