"""Replays the ledger: the state that results from its statements up to a moment.

The chain is streamed once, and every statement is replayed into its rows. So the state as of a date is the state that
the ledger had then, and it needs memory for its records, not for the receipts. For questions that need no statements,
about single checkpoints and the present conversions, `nodes` reads the same records from the tables.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import field, replace
from functools import cached_property
from sys import intern
from typing import Any, NamedTuple

from wherry.core.lazy_dataclass import dataclass
from wherry.ledger.database import Ledger
from wherry.ledger.schema import GENESIS
from wherry.ledger.statements import Statement, damage_of, rows_of, statements, stored_number, stored_word

WRITTEN, READ, SEEN = "written", "read", "seen"
# Subjects of notes: a target that a route made, a conversion that failed permanently, a run of a flow.
PRODUCT, FAILURE, RUN = "route", "failure", "run"
RATE_STATEMENTS = 200  # number of last statements from which the rate of conversions is estimated
_HISTORY = ("promotion", "rollback", "deletion")
_PRODUCT_FIELDS = ("route", "target", "request", "committed", "run", "step", "score")
_NEEDED = {"route", "target", "request"}
_FAILURE_FIELDS = {"source", "fingerprint", "wherry", "requests", "error", "kind"}
READ_ONLY = "read"  # the verdict on what was read, but never recorded: it proves nothing
ADDED = "added"  # the verdict on intact data next to files that its record does not list
SOUND = ("ok", READ_ONLY, ADDED)  # verdicts of verifications that found the data intact
_PROVING = ("digest", "roundtrip")  # levels that prove that the bytes match the recorded digests


@dataclass(frozen=True, slots=True)
class CheckpointRecord:
    """A checkpoint in the ledger; the fields of a CheckpointRef without its place."""

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
class PlaceRecord:
    """A URI at which a checkpoint was seen.

    Attributes:
        uri: the URI.
        checkpoint_digest: the checkpoint that was seen.
        fingerprint: of its files when it was last seen.
        statement: number of the last statement about it; 0 if it is known only from a sidecar.
        seen: when it was last seen; UTC.
        gone: when it was deleted there (UTC); None if no deletion is recorded.
        role: `written` by wherry, `read` as the source of a conversion, or only `seen`.
    """

    uri: str
    checkpoint_digest: str
    fingerprint: str
    statement: int
    seen: str = ""
    gone: str | None = None
    role: str = SEEN

    def to_json(self) -> dict[str, Any]:
        """The JSON form in a node of the lineage."""
        return {name: getattr(self, name) for name in ("uri", "fingerprint", "seen", "gone")}


@dataclass(frozen=True, slots=True)
class RegistrationRecord:
    """A claim or a version in a model registry; `version` is None while the state is `pending`."""

    registry: str
    name: str
    version: str | None
    state: str

    def __str__(self) -> str:
        return f"{self.name} version {self.version}" if self.version else f"{self.name} ({self.state})"


@dataclass(frozen=True, slots=True)
class VerificationRecord:
    """The last verification at a level: the level, its verdict and when it was recorded (UTC)."""

    level: str
    verdict: str
    time: str


@dataclass(frozen=True, slots=True)
class DamageRecord:
    """The damage that a verification found: time, verdict, and the first tensor with its reason and damaged leaf."""

    time: str
    verdict: str
    reason: str
    path: str | None = None
    leaf: int | None = None


class FailureRecord(NamedTuple):
    """A conversion that failed permanently, as a nightly run recorded it.

    Attributes:
        what: its error.
        kind: class of the error.
    """

    what: str
    kind: str


@dataclass(frozen=True, slots=True)
class ConversionRecord:
    """One conversion that was carried out.

    Attributes:
        target_uri: where the result was committed.
        format: of the result.
        target_digest: checkpoint digest of the result.
        plan_digest: the plan that was carried out.
        options: the plan's options.
        time: when it was finished; UTC.
        source_uri: URI of the source.
        source_fingerprint: fingerprint of the source's files then.
        source_digest: checkpoint digest of the source.
        statement: number of the ledger's statement.
        lossless: whether every move was exact.
        software: the version of wherry that did it; empty if unknown.
        gone: when the result was deleted there (UTC); None if no deletion is recorded.
        request: the stated request, `requested` in receipts; empty if no statement was read.
        seconds: wall time; 0 in the same case.
        bytes_read: tensor bytes that were read; 0 in the same case.
    """

    target_uri: str
    format: str
    target_digest: str
    plan_digest: str
    options: Mapping[str, Any]
    time: str
    source_uri: str
    source_fingerprint: str
    source_digest: str
    statement: int
    lossless: bool
    software: str
    gone: str | None = None
    request: Mapping[str, Any] = field(default_factory=dict[str, Any])
    seconds: float = 0.0
    bytes_read: int = 0


@dataclass(frozen=True, slots=True)
class ProductNote:
    """A note about a target that a route made; it is recorded last, when all work for the target is done.

    Attributes:
        statement: number of the note.
        route: name of the route.
        target: URI of the checkpoint.
        request: digest of the route's request.
        committed: what was committed in one step: the checkpoint, or the step folder that holds it.
        run, step: run and step of its source.
        score: the metric of its source by which the route selects or keeps; None if it is unknown.
    """

    statement: int
    route: str
    target: str
    request: str
    committed: str
    run: str
    step: int | None
    score: float | None


@dataclass(frozen=True)
class LedgerState:
    """The state of the ledger up to a moment; made by `replay`, or in part by `nodes.present`.

    Attributes:
        checkpoints: checkpoint digest → checkpoint.
        places: URI → the checkpoint at that place by its last statement, unless that is a deletion.
        registrations: checkpoint digest → registrations.
        conversions: in the order in which they were recorded.
        proved: checkpoint digest → when its bytes were last verified against the recorded digests; UTC.
        damaged: (checkpoint digest, URI) → the verification that found damage, if none has passed since.
        states: (checkpoint digest, URI) → the state of its objects whose bytes were last verified, if their store
            gives states.
        products: (route, target URI) → the last note that the route made it.
        failures: (source URI, fingerprint, version of wherry) → request that failed permanently → its error.
        history: promotions, rollbacks and deletions, in order.
        rate: bytes per second of the last conversions, one after the other; None if there are none.
        statements: number of statements.
        head: hash of the last statement.
        time: when that was written; UTC.
    """

    checkpoints: Mapping[str, CheckpointRecord] = field(default_factory=dict[str, CheckpointRecord])
    places: Mapping[str, PlaceRecord] = field(default_factory=dict[str, PlaceRecord])
    registrations: Mapping[str, list[RegistrationRecord]] = field(
        default_factory=dict[str, list[RegistrationRecord]]
    )
    conversions: tuple[ConversionRecord, ...] = ()
    proved: Mapping[str, str] = field(default_factory=dict[str, str])
    damaged: Mapping[tuple[str, str], DamageRecord] = field(
        default_factory=dict[tuple[str, str], DamageRecord]
    )
    states: Mapping[tuple[str, str], str] = field(default_factory=dict[tuple[str, str], str])
    products: Mapping[tuple[str, str], ProductNote] = field(
        default_factory=dict[tuple[str, str], ProductNote]
    )
    failures: Mapping[tuple[str, str, str], Mapping[str, FailureRecord]] = field(
        default_factory=dict[tuple[str, str, str], "Mapping[str, FailureRecord]"]
    )
    history: tuple[dict[str, Any], ...] = ()
    rate: float | None = None
    statements: int = 0
    head: str = GENESIS
    time: str = ""

    def models(self, digest: str) -> tuple[str, ...]:
        """The model versions that point at a checkpoint."""
        return tuple(str(row) for row in self.registrations.get(digest, ()) if row.state == "registered")

    def living(self, digest: str) -> list[PlaceRecord]:
        """The places at which a checkpoint should be."""
        return self._by_checkpoint.get(digest, [])

    @cached_property
    def _by_checkpoint(self) -> Mapping[str, list[PlaceRecord]]:
        found = defaultdict[str, list[PlaceRecord]](list)
        for place in self.places.values():
            found[place.checkpoint_digest].append(place)
        return found

    @cached_property
    def between(self) -> Mapping[tuple[str, str], ConversionRecord]:
        """(checkpoint digest of a source, of its target) → the last such conversion."""
        return {(one.source_digest, one.target_digest): one for one in self.conversions}

    @cached_property
    def children(self) -> Mapping[str, list[str]]:
        """Checkpoint digest → checkpoints that were made from it; a copy is the same checkpoint."""
        return self._edges(up=False)

    @cached_property
    def parents(self) -> Mapping[str, list[str]]:
        """Checkpoint digest → checkpoints from which it was made."""
        return self._edges(up=True)

    def _edges(self, *, up: bool) -> Mapping[str, list[str]]:
        found = defaultdict[str, list[str]](list)
        for source, target in self.between:
            if source != target:
                found[target if up else source].append(source if up else target)
        return found

    @cached_property
    def by_source(self) -> Mapping[str, Mapping[str, list[ConversionRecord]]]:
        """URI of a converted source → fingerprint of its files → conversions of it."""
        found = defaultdict[str, defaultdict[str, list[ConversionRecord]]](lambda: defaultdict(list))
        for one in self.conversions:
            found[one.source_uri][one.source_fingerprint].append(one)
        return found

    @cached_property
    def by_target(self) -> Mapping[str, ConversionRecord]:
        """Target URI → the last conversion that was committed there."""
        return {one.target_uri: one for one in self.conversions}

    @cached_property
    def requests(self) -> Mapping[str, str]:
        """Target URI → the request with which a route last made it."""
        return {
            one.target: one.request for one in sorted(self.products.values(), key=lambda one: one.statement)
        }


def replay(
    ledger: Ledger, *, after: int = 0, kinds: Collection[str] | None = None, until: str | None = None
) -> LedgerState:
    """The state of the ledger, or the state that follows from some of its statements.

    Args:
        ledger: the opened ledger.
        after, kinds, until: which statements count, as for `wherry.ledger.statements.statements`; all by default.

    Raises:
        UsageError: `until` is not a valid date or time.
    """
    draft = _Draft()
    for statement in statements(ledger, after=after, kinds=kinds, until=until):
        draft.take(statement)
    return draft.state()


def has_passed(outcome: Mapping[str, Any]) -> bool:
    """Whether a verification passed, by its JSON form; `read` is no pass."""
    return bool(outcome.get("ok"))


def has_failed(outcome: Mapping[str, Any]) -> bool:
    """Whether a verification found damage or differences, by its JSON form."""
    return not has_passed(outcome) and outcome.get("verdict") not in SOUND


def _product(seq: int, body: Mapping[str, Any]) -> ProductNote:
    """A note about a target; what it does not state is None."""
    fields: dict[str, Any] = {name: body.get(name) for name in _PRODUCT_FIELDS}
    for name, value in fields.items():
        if value is not None or name in _NEEDED:
            (stored_number if name in ("step", "score") else stored_word)(value)
    return ProductNote(seq, **fields)


class _Draft:
    """A state that is built statement by statement; repeated strings and options are stored once."""

    def __init__(self) -> None:
        self._checkpoints: dict[str, CheckpointRecord] = {}
        self._places: dict[str, PlaceRecord] = {}
        self._tombstones: dict[tuple[str, str], str] = {}
        self._registrations: dict[tuple[str, str, str], RegistrationRecord] = {}
        self._conversions: list[ConversionRecord] = []
        self._proved: dict[str, str] = {}
        self._damaged: dict[tuple[str, str], DamageRecord] = {}
        self._states: dict[tuple[str, str], str] = {}
        self._products: dict[tuple[str, str], ProductNote] = {}
        self._failures = defaultdict[tuple[str, str, str], dict[str, FailureRecord]](dict)
        self._history: list[dict[str, Any]] = []
        self._end: dict[str, Any] = {}
        self._options: dict[str, Mapping[str, Any]] = {}

    def take(self, statement: Statement) -> None:
        """Replay one statement.

        Raises:
            CorruptError: it lacks something that statements of its kind have.
        """
        kind, body, seq, time = statement.kind, statement.body, statement.seq, statement.time
        with damage_of(seq):
            self._end = {"statements": seq, "head": statement.hash, "time": time}
            for table, row in rows_of(kind, body, seq, time):
                self._take_row(table.name, row, body)
            if kind in ("conversion", "verification"):
                self._take_outcome(statement)
            elif kind == "note":
                self._take_note(statement)
            elif kind in _HISTORY:
                self._history.append({"seq": seq, "time": time, "kind": kind, **body})

    def _take_row(self, table: str, row: Mapping[str, Any], body: Mapping[str, Any]) -> None:
        if table == "checkpoint":
            if row["checkpoint_digest"] not in self._checkpoints:
                self._checkpoints[intern(row["checkpoint_digest"])] = CheckpointRecord(**intern_row(row))
        elif table == "location":
            uri, digest, mark = (intern(row[name]) for name in ("uri", "checkpoint_digest", "fingerprint"))
            self._places[uri] = PlaceRecord(uri, digest, mark, row["statement"], row["seen"])
            self._tombstones.pop((digest, uri), None)  # seen again
        elif table == "tombstone":
            self._tombstones[row["checkpoint_digest"], row["uri"]] = row["time"]
        elif table == "registration":
            key = row["checkpoint_digest"], row["registry"], row["name"]
            self._registrations[key] = RegistrationRecord(*key[1:], row["version"], row["state"])
        elif table == "conversion":
            fields = intern_row(row)
            fields["options"] = self._options.setdefault(row["options"], body["options"])
            request: Mapping[str, Any] = body.get("requested") or {}
            done = ConversionRecord(
                source_digest=fields.pop("source"),
                target_digest=fields.pop("target"),
                **fields,
                request=self._options.setdefault(repr(request), request),
                seconds=stored_number(body["seconds"]),
                bytes_read=stored_number(body["bytes_read"]),
            )
            self._conversions.append(done)

    def _take_outcome(self, statement: Statement) -> None:
        """Apply the outcome of a verification, or of the read-back of a conversion."""
        body = statement.body
        subject = body["target"] if statement.kind == "conversion" else body
        outcome = body["verification"] or {}
        place = subject["checkpoint_digest"], str(outcome.get("uri") or subject.get("uri") or "")
        if has_passed(outcome) and outcome.get("level") in _PROVING:
            self._proved[intern(place[0])] = statement.time
            self._damaged.pop(place, None)
            if outcome.get("state"):
                self._states[place] = str(outcome["state"])
        elif outcome and has_failed(outcome):
            self._damaged[place] = _damage(statement.time, outcome)
            self._states.pop(place, None)

    def _take_note(self, statement: Statement) -> None:
        """Apply a note of wherry; other notes, and notes without a required field, are ignored."""
        body: dict[str, Any] = intern_row(statement.body)
        if body.get("about") == PRODUCT and body.keys() >= _NEEDED:
            note = _product(statement.seq, body)
            self._products[note.route, note.target] = note
        elif body.get("about") == FAILURE and body.keys() >= _FAILURE_FIELDS:
            key = body["source"], body["fingerprint"], body["wherry"]
            said = FailureRecord(stored_word(body["error"]), stored_word(body["kind"]))
            self._failures[key] |= dict.fromkeys(body["requests"], said)

    def state(self) -> LedgerState:
        """The state after the last statement."""
        registrations = defaultdict[str, list[RegistrationRecord]](list)
        for (digest, _registry, _name), row in self._registrations.items():
            registrations[digest].append(row)
        after = self._end.get("statements", 0) - RATE_STATEMENTS
        last = [one for one in self._conversions[-RATE_STATEMENTS:] if one.statement > after]
        seconds = sum(one.seconds for one in last)
        return LedgerState(
            checkpoints=self._checkpoints,
            places=self._living(),
            registrations=dict(registrations),
            conversions=tuple(self._with_tombstone(one) for one in self._conversions),
            proved=self._proved,
            damaged=self._damaged,
            states=self._states,
            products=self._products,
            failures=dict(self._failures),
            history=tuple(self._history),
            rate=sum(one.bytes_read for one in last) / seconds if seconds > 0 else None,
            **self._end,
        )

    def _living(self) -> dict[str, PlaceRecord]:
        """The places without a deletion, each with its role; a place that wherry wrote stays `written` when read."""
        read = {one.source_uri: one.source_digest for one in self._conversions}
        written = {one.target_uri: one.target_digest for one in self._conversions}
        places = self._places
        for digest, uri in self._tombstones:
            if uri in places and places[uri].checkpoint_digest == digest:
                del places[uri]
        for uri, place in places.items():
            for role, ends in ((WRITTEN, written), (READ, read)):
                if ends.get(uri) == place.checkpoint_digest:
                    places[uri] = replace(place, role=role)
                    break
        return places

    def _with_tombstone(self, one: ConversionRecord) -> ConversionRecord:
        gone = self._tombstones.get((one.target_digest, one.target_uri))
        return one if gone is None else replace(one, gone=gone)


def intern_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row with interned strings: digests and URIs occur in many statements."""
    return {name: intern(value) if type(value) is str else value for name, value in row.items()}


def _damage(time: str, outcome: Mapping[str, Any]) -> DamageRecord:
    tensors: Any = outcome.get("tensors")
    failed = tensors.get("failed", []) if isinstance(tensors, dict) else []
    first: dict[str, Any] = failed[0] if failed else {}
    reason = str(first.get("reason") or "verification failed")
    verdict = str(outcome.get("verdict", "failed"))
    return DamageRecord(time, verdict, reason, first.get("path") or None, first.get("leaf"))
