"""What the ledger stated up to a moment: checkpoints, where they lie, who points at them, what was made of what.

The ledger is read once, statement by statement, and every statement is replayed into the rows that it tells. So an
audit as of a date sees what the ledger said then, and its memory is that of the rows, not of the receipts.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from wherry.ledger.record import Ledger, Statement

_HISTORY = ("promotion", "rollback", "deletion")
_PROVING = ("digest", "roundtrip")  # levels whose passing proves that the bytes are the recorded ones
WRITTEN, READ, SEEN = "written", "read", "seen"


@dataclass(frozen=True, slots=True)
class Subject:
    """A checkpoint as the ledger knows it; the fields of a CheckpointRef without its place."""

    checkpoint_digest: str
    weights_digest: str
    format: str
    format_version: str | None
    kind: str
    step: int | None
    tensors: int
    parameters: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class KnownPlace:
    """Where a checkpoint was.

    Attributes:
        uri: where.
        checkpoint_digest: which checkpoint lies there, by the last statement about that place.
        fingerprint: of its files when it was seen last.
        statement: number of the statement that told so.
        role: `written` by wherry, `read` as the source of a conversion, or only `seen`.
    """

    uri: str
    checkpoint_digest: str
    fingerprint: str
    statement: int
    role: str = SEEN


@dataclass(frozen=True, slots=True)
class KnownVersion:
    """A registration: in which registry, under which name, its version and state."""

    registry: str
    name: str
    version: str | None
    state: str

    def __str__(self) -> str:
        return f"{self.name} version {self.version}" if self.version else f"{self.name} ({self.state})"


@dataclass(frozen=True, slots=True)
class Damage:
    """What a verification found: when, the verdict, and the first tensor with the reason and the damaged leaf."""

    time: str
    verdict: str
    reason: str
    path: str | None = None
    leaf: int | None = None


@dataclass(frozen=True, slots=True)
class Made:
    """How a checkpoint was made of another one.

    Attributes:
        source: where that one lay.
        target: what was made.
        asked: what was asked for, as receipts keep it; empty in old ones.
        options: what that came to.
    """

    source: str
    target: str
    asked: Mapping[str, Any]
    options: Mapping[str, Any]


@dataclass(slots=True)
class Known:
    """The ledger as of a moment; made by `known`.

    Attributes:
        subjects: checkpoint digest → checkpoint.
        places: URI → what lies there.
        deleted: (checkpoint digest, URI) → number of the statement that buried it.
        registrations: checkpoint digest → registrations.
        children: checkpoint digest → those that were made from it.
        parents: checkpoint digest → those that it was made from.
        made: (checkpoint digest of a source, of what was made of it) → how; the last time that it was.
        sources: URI of a converted source → fingerprints under which it was converted.
        proved: checkpoint digest → when its bytes were last found equal to the record; UTC.
        damaged: (checkpoint digest, URI) → the verification that found damage, where none passed since.
        history: promotions, rollbacks and deletions, in order.
        at: checkpoint digest → its places.
        statements: how many there are.
        head: hash of the last one.
        time: when that was written; UTC.
    """

    subjects: dict[str, Subject] = field(default_factory=dict[str, Subject])
    places: dict[str, KnownPlace] = field(default_factory=dict[str, KnownPlace])
    deleted: dict[tuple[str, str], int] = field(default_factory=dict[tuple[str, str], int])
    registrations: dict[str, list[KnownVersion]] = field(
        default_factory=lambda: defaultdict[str, list[KnownVersion]](list)
    )
    children: dict[str, list[str]] = field(default_factory=lambda: defaultdict[str, list[str]](list))
    parents: dict[str, list[str]] = field(default_factory=lambda: defaultdict[str, list[str]](list))
    made: dict[tuple[str, str], Made] = field(default_factory=dict[tuple[str, str], "Made"])
    sources: dict[str, set[str]] = field(default_factory=lambda: defaultdict[str, set[str]](set))
    proved: dict[str, str] = field(default_factory=dict[str, str])
    damaged: dict[tuple[str, str], Damage] = field(default_factory=dict[tuple[str, str], "Damage"])
    history: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    at: dict[str, list[KnownPlace]] = field(default_factory=lambda: defaultdict[str, list[KnownPlace]](list))
    statements: int = 0
    head: str = "0" * 64
    time: str = ""

    def models(self, digest: str) -> tuple[str, ...]:
        """The model versions that point at a checkpoint."""
        rows = self.registrations.get(digest, [])
        return tuple(str(row) for row in rows if row.state == "registered")

    def living(self, digest: str) -> list[KnownPlace]:
        """Where a checkpoint should be."""
        return self.at.get(digest, [])


def known(ledger: Ledger, until: str | None = None) -> Known:
    """Replay the ledger.

    Args:
        ledger: opened.
        until: the moment up to which statements count; ISO 8601, a date alone means its end in UTC.

    Raises:
        UsageError: `until` is no moment.
    """
    from wherry.ledger.record import statements

    found, roles = Known(), dict[str, tuple[str, str]]()
    registrations = dict[tuple[str, str, str], KnownVersion]()
    for statement in statements(ledger, until=until):
        found.statements, found.head, found.time = statement.seq, statement.hash, statement.time
        if statement.kind in _HISTORY:
            found.history.append(_told(statement))
        _replay(found, statement, registrations)
        _prove(found, statement)
        roles |= _roles(statement)
        found.made |= _made(statement)
    for (digest, _registry, _name), version in registrations.items():
        found.registrations[digest].append(version)
    found.places = {
        uri: _with_role(place, roles)
        for uri, place in found.places.items()
        if found.deleted.get((place.checkpoint_digest, uri), 0) < place.statement
    }
    for place in found.places.values():
        found.at[place.checkpoint_digest].append(place)
    return found


def descendants(found: Known, digest: str) -> Iterator[str]:
    """Everything that was made from a checkpoint, near before far; a round trip ends where it began."""
    seen, front = {digest}, [digest]
    while front:
        fresh = [child for parent in front for child in found.children.get(parent, ())]
        front = [child for child in dict.fromkeys(fresh) if child not in seen]
        seen.update(front)
        yield from front


def _replay(
    found: Known, statement: Statement, registrations: dict[tuple[str, str, str], KnownVersion]
) -> None:
    from wherry.ledger.append import Told, rows_of

    told = Told(statement.kind, statement.body, statement.seq, statement.time)
    for table, row in rows_of(told):
        if table.name == "checkpoint":
            found.subjects.setdefault(row["checkpoint_digest"], Subject(**row))
        elif table.name == "location":
            _place(found, row)
        elif table.name == "tombstone":
            found.deleted[row["checkpoint_digest"], row["uri"]] = statement.seq
        elif table.name == "registration":
            key = row["checkpoint_digest"], row["registry"], row["name"]
            registrations[key] = KnownVersion(*key[1:], row["version"], row["state"])
        elif table.name == "edge":
            found.children[row["source"]].append(row["target"])
            found.parents[row["target"]].append(row["source"])
        elif table.name == "conversion":
            found.sources[row["source_uri"]].add(row["source_fingerprint"])


def _prove(found: Known, statement: Statement) -> None:
    """What a verification, or the reading back of a conversion, proved or disproved of the bytes."""
    if statement.kind == "conversion":
        subject, outcome = statement.body["target"], statement.body["verification"] or {}
    elif statement.kind == "verification":
        subject, outcome = statement.body, statement.body["verification"]
    else:
        return
    place = subject["checkpoint_digest"], str(outcome.get("uri") or subject.get("uri") or "")
    ok = outcome.get("ok", outcome.get("verdict") == "ok")
    if ok and outcome.get("level") in _PROVING:
        found.proved[place[0]] = statement.time
        found.damaged.pop(place, None)
    elif outcome and not ok:
        found.damaged[place] = _damage(statement.time, outcome)


def _damage(time: str, outcome: Mapping[str, Any]) -> Damage:
    tensors: Any = outcome.get("tensors")
    failed = tensors.get("failed", []) if isinstance(tensors, dict) else []
    first: dict[str, Any] = failed[0] if failed else {}
    reason = str(first.get("reason") or "it did not pass")
    return Damage(
        time, str(outcome.get("verdict", "failed")), reason, first.get("path") or None, first.get("leaf")
    )


def _place(found: Known, row: Mapping[str, Any]) -> None:
    names = ("uri", "checkpoint_digest", "fingerprint", "statement")
    found.places[row["uri"]] = KnownPlace(*(row[name] for name in names))


def _roles(statement: Statement) -> dict[str, tuple[str, str]]:
    """URI → (checkpoint digest, what wherry did there); what it wrote stays so when it is read later."""
    if statement.kind != "conversion":
        return {}
    ends = ((statement.body[side], role) for side, role in (("source", READ), ("target", WRITTEN)))
    return {f"{role} {end['uri']}": (end["checkpoint_digest"], role) for end, role in ends}


def _made(statement: Statement) -> dict[tuple[str, str], Made]:
    if statement.kind != "conversion":
        return {}
    body = statement.body
    source, target = body["source"], body["target"]
    how = Made(source["uri"], target["uri"], body.get("asked") or {}, body.get("options") or {})
    return {(source["checkpoint_digest"], target["checkpoint_digest"]): how}


def _with_role(place: KnownPlace, roles: Mapping[str, tuple[str, str]]) -> KnownPlace:
    for role in (WRITTEN, READ):
        if roles.get(f"{role} {place.uri}", ("", ""))[0] == place.checkpoint_digest:
            return KnownPlace(place.uri, place.checkpoint_digest, place.fingerprint, place.statement, role)
    return place


def _told(statement: Statement) -> dict[str, Any]:
    return {"seq": statement.seq, "time": statement.time, "kind": statement.kind, **statement.body}


def below(places: Iterable[KnownPlace], roots: Iterable[str]) -> list[KnownPlace]:
    """The places at or below one of the roots, which are printed locations."""
    heads = [root.rstrip("/") for root in roots]
    return [
        place
        for place in places
        if any(place.uri == head or place.uri.startswith(f"{head}/") for head in heads)
    ]
