"""What a statement tells: the rows of the ledger's other tables, as a pure function of kind and body.

One function serves three ends: a new statement's rows are written with it, the check replays the chain through it
and compares, and a migration fills new tables by it. So it reads the bodies of every schema there ever was:

- Schema 1 knew `conversion`, `verification` and `registration`; the latter two named their checkpoint by its digest
  alone, and claims and sightings were rows without a statement.
- Since schema 2 every body has the whole `subject`, and there are `claim`, `release`, `sighting`, `migration` (what
  the rows of schema 1 said beyond the statements), `rebuild` and the events.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from wherry.core.digest import canonical_json
from wherry.ledger import schema as tables

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from sqlalchemy import Table

EVENTS = ("promotion", "rollback", "deletion", "audit", "note")
KINDS = (
    "conversion", "verification", "registration", "claim", "release", "sighting", "migration", "rebuild", *EVENTS
)  # fmt: skip
PENDING, REGISTERED, RELEASED = "pending", "registered", "released"
_STATES = {"claim": PENDING, "release": RELEASED, "registration": REGISTERED}

Row = tuple["Table", dict[str, Any]]


class Told(NamedTuple):
    """A statement, as far as its rows depend on it."""

    kind: str
    body: Mapping[str, Any]
    seq: int
    time: str


def rows_of(told: Told) -> Iterator[Row]:
    """The rows that a statement tells, checkpoints before what refers to them."""
    body = told.body
    if told.kind == "conversion":
        yield from _seen(body["source"], told)
        yield from _seen(body["target"], told)
        yield from _converted(told)
        return
    if told.kind == "migration":
        yield from _carried(told)
        return
    if body.get("subject") is not None:
        yield from _seen(body["subject"], told)
    if told.kind == "verification":
        yield tables.verification, _verified(told)
    elif told.kind in _STATES:
        yield tables.registration, _registered(body, _STATES[told.kind], told)
    elif told.kind == "deletion" and body.get("checkpoint_digest") and body.get("uri"):
        gone = {"checkpoint_digest": body["checkpoint_digest"], "uri": body["uri"]}
        yield tables.tombstone, {**gone, "time": told.time, "statement": told.seq}


def _seen(subject: Mapping[str, Any], told: Told) -> Iterator[Row]:
    """A checkpoint and where it was."""
    yield tables.checkpoint, {name: subject[name] for name in tables.checkpoint.c.keys()}  # noqa: SIM118  columns
    yield tables.location, _place(subject, told)


def _place(subject: Mapping[str, Any], told: Told) -> dict[str, Any]:
    names = ("checkpoint_digest", "uri", "fingerprint")
    return {**{name: subject[name] for name in names}, "seen": told.time, "statement": told.seq}


def _converted(told: Told) -> Iterator[Row]:
    body = told.body
    source, target = body["source"], body["target"]
    ends = {"source": source["checkpoint_digest"], "target": target["checkpoint_digest"]}
    yield (
        tables.conversion,
        {
            "statement": told.seq,
            **ends,
            "source_uri": source["uri"],
            "source_fingerprint": source["fingerprint"],
            "target_uri": target["uri"],
            "format": target["format"],
            "plan_digest": body["plan_digest"],
            "options": canonical_json(body["options"]).decode(),
            "software": str(body["software"].get("wherry", "")),
            "lossless": body["lossless"],
            "time": body["finished"] or told.time,
        },
    )
    if ends["source"] != ends["target"]:  # a copy that keeps the digest is a second place of one node
        yield tables.edge, {**ends, "plan_digest": body["plan_digest"], "statement": told.seq}


def _verified(told: Told) -> dict[str, Any]:
    outcome = told.body["verification"]
    return {
        "checkpoint_digest": told.body["checkpoint_digest"],
        "level": str(outcome.get("level", "")),
        "verdict": str(outcome.get("verdict") or ("ok" if outcome.get("ok") else "failed")),
        "time": told.time,
        "statement": told.seq,
    }


def _registered(body: Mapping[str, Any], state: str, told: Told) -> dict[str, Any]:
    return {
        **{name: body[name] for name in ("checkpoint_digest", "registry", "name")},
        "state": state,
        "version": body.get("version"),
        "seen": told.time,
        "statement": told.seq,
    }


def _carried(told: Told) -> Iterator[Row]:
    """What the rows of an older schema said beyond its statements."""
    for row in told.body["checkpoints"]:
        yield tables.checkpoint, dict(row)
    for row in told.body["places"]:
        yield tables.location, {**row, "statement": told.seq}
    for row in told.body["claims"]:
        yield tables.registration, {**row, "state": PENDING, "version": None, "statement": told.seq}
