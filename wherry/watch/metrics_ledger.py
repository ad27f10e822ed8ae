"""What the ledger adds up to: the counters and last states of the metrics, from its statements in one pass."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from wherry.ledger.record import Ledger, Statement

RUN = "run"  # what a note says that tells of a run of a flow
_FAILED = "failure"  # and one that tells of a conversion that failed for good
_EVENTS = ("registration", "promotion", "rollback", "deletion", "audit")

# metric → (type, what it says).
HELP: dict[str, tuple[str, str]] = {
    "wherry_conversions_total": ("counter", "Conversions that the ledger has, by format of the result."),
    "wherry_conversion_bytes_total": ("counter", "Tensor bytes that conversions read and wrote."),
    "wherry_conversion_seconds_total": ("counter", "Wall time of conversions."),
    "wherry_failures_total": ("counter", "Failed conversions, verifications and runs that the ledger has."),
    "wherry_events_total": ("counter", "Further statements of the ledger, by kind."),
    "wherry_last_conversion_timestamp_seconds": ("gauge", "When the last conversion was finished."),
    "wherry_last_run_timestamp_seconds": ("gauge", "When a flow last ended."),
    "wherry_last_success_timestamp_seconds": ("gauge", "When a flow last ended without any failure."),
    "wherry_last_run_ok": ("gauge", "Whether the last run of a flow had no failure."),
    "wherry_last_run_count": ("gauge", "What the last run of a flow did, by outcome."),
    "wherry_audit_findings": ("gauge", "Findings of the last audit, by severity."),
    "wherry_unconverted": ("gauge", "Checkpoints that wait to be converted."),
    "wherry_unconverted_bytes": ("gauge", "Bytes of the checkpoints that wait."),
    "wherry_oldest_unconverted_age_seconds": (
        "gauge",
        "Time since the oldest waiting checkpoint was written.",
    ),
    "wherry_root_reachable": ("gauge", "Whether the checkpoints of a route or root could be looked for."),
    "wherry_ledger_statements": ("gauge", "Length of the ledger's chain."),
}


@dataclass(frozen=True, slots=True)
class Sample:
    """One number: its metric's name, labels and value."""

    name: str
    labels: tuple[tuple[str, str], ...]
    value: float


@dataclass(slots=True)
class _Tally:
    """What the statements add up to."""

    totals: Counter[tuple[str, tuple[tuple[str, str], ...]]] = field(
        default_factory=Counter[tuple[str, tuple[tuple[str, str], ...]]]
    )
    last: dict[tuple[str, tuple[tuple[str, str], ...]], float] = field(
        default_factory=dict[tuple[str, tuple[tuple[str, str], ...]], float]
    )
    sources: set[str] = field(default_factory=set[str])

    def add(self, name: str, value: float = 1, **labels: str) -> None:
        """Count on."""
        self.totals[name, tuple(labels.items())] += value  # pyright: ignore[reportArgumentType]  seconds are floats

    def set(self, name: str, value: float, **labels: str) -> None:
        """What was said last holds."""
        self.last[name, tuple(labels.items())] = value

    def forget(self, name: str, **labels: str) -> None:
        """Drop what an earlier statement said of the same thing."""
        wanted = set(labels.items())
        self.last = {
            key: value for key, value in self.last.items() if key[0] != name or not wanted <= {*key[1]}
        }


def done(ledger: Ledger) -> tuple[list[Sample], set[str]]:
    """Numbers of the ledger, and the URIs that were read or written by conversions."""
    from wherry.ledger.record import head, statements

    tally = _Tally()
    for kind in ("conversion", "verification"):
        tally.add("wherry_failures_total", 0, stage=kind)  # a counter that is there from the first scrape on
    for statement in statements(ledger):
        _count(tally, statement)
    tally.set("wherry_ledger_statements", head(ledger).seq)
    rows = sorted([*tally.totals.items(), *tally.last.items()], key=lambda row: (*HELP,).index(row[0][0]))
    return [Sample(name, labels, value) for (name, labels), value in rows], tally.sources


def _count(tally: _Tally, statement: Statement) -> None:
    body, kind = statement.body, statement.kind
    if kind == "conversion":
        _count_conversion(tally, body, statement.time)
    elif kind == "verification":
        outcome = body["verification"]
        if not outcome.get("ok", outcome.get("verdict") == "ok"):
            tally.add("wherry_failures_total", stage="verification")
    elif kind == "note":
        _count_note(tally, body, statement.time)
    elif kind in _EVENTS:
        tally.add("wherry_events_total", kind=kind)
    if kind == "audit":
        _count_audit(tally, body, statement.time)


def _count_conversion(tally: _Tally, body: dict[str, Any], time: str) -> None:
    tally.add("wherry_conversions_total", format=body["target"]["format"])
    for way in ("read", "written"):
        tally.add("wherry_conversion_bytes_total", body[f"bytes_{way}"], direction=way)
    tally.add("wherry_conversion_seconds_total", body["seconds"])
    tally.set("wherry_last_conversion_timestamp_seconds", _seconds(time))
    tally.sources.update(body[side]["uri"] for side in ("source", "target"))


def _count_note(tally: _Tally, body: dict[str, Any], time: str) -> None:
    if body.get("about") == _FAILED:
        tally.add("wherry_failures_total", stage="conversion")
    elif body.get("about") == RUN:
        flow = str(body["flow"])
        if not body["ok"]:
            tally.add("wherry_failures_total", stage=flow)
        _ended(tally, flow, time, ok=body["ok"])
        tally.forget("wherry_last_run_count", flow=flow)
        for came, number in body["counts"].items():
            tally.set("wherry_last_run_count", number, flow=flow, outcome=came)


def _count_audit(tally: _Tally, body: dict[str, Any], time: str) -> None:
    _ended(tally, "audit", time, ok=body["ok"])
    for severity in ("error", "warning", "note"):
        tally.set("wherry_audit_findings", body["counts"][f"{severity}s"], severity=severity)


def _ended(tally: _Tally, flow: str, time: str, *, ok: bool) -> None:
    tally.set("wherry_last_run_timestamp_seconds", _seconds(time), flow=flow)
    tally.set("wherry_last_run_ok", int(ok), flow=flow)
    if ok:
        tally.set("wherry_last_success_timestamp_seconds", _seconds(time), flow=flow)


def _seconds(time: str) -> float:
    return datetime.fromisoformat(time).timestamp()
