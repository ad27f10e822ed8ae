"""metrics: the state of conversions as metrics for Prometheus.

Completed work is counted from the ledger, which all machines share; waiting work is found in storage, by the routes of
`wherry.toml` or below roots. Useful alerts:

    time() - wherry_last_success_timestamp_seconds{flow="nightly-convert"} > 26 * 3600    a night is missing
    wherry_oldest_unconverted_age_seconds > 2 * 86400                                     something never gets converted
    wherry_last_run_count{outcome=~"damaged|unrouted"} > 0                                left out, though not excluded
    wherry_last_run_ok == 0, or wherry_audit_findings{severity="error"} > 0

The file for a node exporter's textfile collector is replaced atomically, as the collector requires. The counters and
last states come from one pass over the ledger's statements.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wherry.config.file import config_file
from wherry.config.settings import configured_value
from wherry.core.lazy_dataclass import dataclass
from wherry.core.progress import logger
from wherry.errors import WherryError, storage_error
from wherry.formats.discover import discover
from wherry.ledger.replay import FAILURE, RUN, has_failed
from wherry.ledger.statements import damage_of, stored_number, stored_time, stored_word
from wherry.store.folders import replace_file
from wherry.store.local_store import locate
from wherry.store.location import age_of
from wherry.store.sidecar import read_sidecar

if TYPE_CHECKING:
    from wherry.ledger.record import Ledger, Statement


_READABLE_TO_ALL = 0o644  # the collector runs as another user
_log = logger(__name__)


def measure(roots: Sequence[str] | None = None) -> list[MetricSample]:
    """Count completed and waiting work.

    Args:
        roots: folders below which checkpoints that were never converted count (the newest of each run); by default the
            work of the configured routes.

    Raises:
        StorageError: the ledger cannot be read. A root that cannot be read is a metric, not an error.
        UsageError: the configuration is invalid.
    """
    from wherry.ledger.record import open_ledger

    with open_ledger() as ledger:
        counted, sources = ledger_samples(ledger)
    waiting = _of_routes() if roots is None else (_of_root(root, sources) for root in roots)
    return [*counted, *(sample for each in waiting for sample in each)]


def note_run(flow: str, *, ok: bool, counts: Mapping[str, int]) -> None:
    """Record in the ledger how a run of a flow ended, so that alerts can find a missing run.

    Args:
        flow: name of the flow.
        ok: whether nothing failed.
        counts: number of results by outcome.

    Raises:
        StorageError: the ledger cannot be written.
    """
    from wherry.ledger.record import open_ledger, record_event

    with open_ledger() as ledger:
        record_event(ledger, "note", None, {"about": RUN, "flow": flow, "ok": ok, "counts": dict(counts)})


def publish() -> str | None:
    """Write the metrics to the file in `WHERRY_METRICS` or the setting `metrics.file`.

    Returns:
        The file; None where none is configured.

    Raises:
        StorageError: the ledger cannot be read, or the file cannot be written.
        UsageError: the configuration is invalid.
    """
    file = os.environ.get("WHERRY_METRICS") or configured_value("metrics.file")
    if file:
        write(measure(), file)
    return file or None


def after_run(flow: str, *, ok: bool, counts: Mapping[str, int]) -> str:
    """Call `note_run` and `publish` at the end of a flow; their errors do not fail the flow.

    Returns:
        `recorded`, or why not; the reason is logged as a warning too.
    """
    try:
        note_run(flow, ok=ok, counts=counts)
        publish()
    except WherryError as error:
        _log.warning("the end of the run was not recorded for the metrics: %s", error.what)
        return f"not recorded: {error.what}"
    return "recorded"


def text(samples: Iterable[MetricSample]) -> str:
    """The samples in the text format of Prometheus (version 0.0.4), grouped by metric."""
    rows = list(samples)
    lines: list[str] = []
    for name in dict.fromkeys(sample.name for sample in rows):
        kind, says = HELP[name]
        lines += [f"# HELP {name} {says}", f"# TYPE {name} {kind}"]
        for sample in rows:
            if sample.name == name:
                labels = ",".join(f'{label}="{_escape(value)}"' for label, value in sample.labels)
                lines.append(f"{sample.name}{f'{{{labels}}}' if labels else ''} {sample.value:.17g}")
    return "\n".join(lines) + "\n"


def write(samples: Iterable[MetricSample], file: str | os.PathLike[str]) -> None:
    """Write the samples to a file atomically.

    Raises:
        StorageError: it cannot be written.
    """
    path = Path(file).expanduser().absolute()
    try:
        replace_file(path, text(samples).encode(), mode=_READABLE_TO_ALL)
    except OSError as error:
        raise storage_error(error, str(path)) from error


def _of_routes() -> Iterator[list[MetricSample]]:
    """The waiting work of the routes; empty without a configuration."""
    if config_file() is None:
        return
    from wherry.config.config import load_config
    from wherry.nightly.night import plan_night
    from wherry.nightly.survey import UNCONVERTED

    for plan in plan_night(load_config().routes):
        works = (*plan.todo.works, *plan.todo.waiting)
        unusable = [one.uri for one in plan.todo.passed if one.why in UNCONVERTED]
        uris = [*(work.source.found.uri for work in works), *dict.fromkeys(unusable)]
        bytes_ = MetricSample("wherry_unconverted_bytes", (("route", plan.route.name),), plan.todo.nbytes)
        yield [*_waiting("route", plan.route.name, uris, reachable=plan.error is None), bytes_]


def _of_root(root: str, sources: set[str]) -> list[MetricSample]:
    try:
        found = [
            one.uri for one in discover(root, newest=True) if one.uri not in sources and not _is_ours(one.uri)
        ]
    except WherryError:
        return _waiting("root", root, [], reachable=False)
    return _waiting("root", root, found, reachable=True)


def _is_ours(uri: str) -> bool:
    """Whether wherry wrote it, by its sidecar."""
    sidecar = read_sidecar(locate(uri))
    return sidecar is not None and sidecar.receipt is not None


def _waiting(label: str, name: str, uris: Sequence[str], *, reachable: bool) -> list[MetricSample]:
    """Number, bytes and age of the waiting checkpoints; where the root cannot be read, only that fact."""
    labels = ((label, name),)
    state = MetricSample("wherry_root_reachable", labels, int(reachable))
    if not reachable:
        return [state]
    ages = [age for uri in uris if (age := age_of(locate(uri))) is not None]
    oldest = MetricSample("wherry_oldest_unconverted_age_seconds", labels, round(max(ages, default=0.0), 3))
    return [state, MetricSample("wherry_unconverted", labels, len(uris)), oldest]


def _escape(value: str) -> str:
    """Escape the value of a label; names come from storage and may contain any character."""
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


_EVENTS = ("registration", "promotion", "rollback", "deletion", "audit")

# metric → (type, help text).
HELP: dict[str, tuple[str, str]] = {
    "wherry_conversions_total": ("counter", "Conversions in the ledger, by format of the target."),
    "wherry_conversion_bytes_total": ("counter", "Tensor bytes read and written by conversions."),
    "wherry_conversion_seconds_total": ("counter", "Wall time of conversions."),
    "wherry_failures_total": ("counter", "Failed conversions, verifications and runs in the ledger."),
    "wherry_events_total": ("counter", "Other statements in the ledger, by kind."),
    "wherry_last_conversion_timestamp_seconds": ("gauge", "Time at which the last conversion finished."),
    "wherry_last_run_timestamp_seconds": ("gauge", "Time at which a flow last ended."),
    "wherry_last_success_timestamp_seconds": ("gauge", "Time at which a flow last ended without a failure."),
    "wherry_last_run_ok": ("gauge", "Whether the last run of a flow ended without a failure."),
    "wherry_last_run_count": ("gauge", "Counts of the last run of a flow, by outcome."),
    "wherry_audit_findings": ("gauge", "Findings of the last audit, by severity."),
    "wherry_unconverted": ("gauge", "Checkpoints that are not converted yet, or damaged."),
    "wherry_unconverted_bytes": ("gauge", "Bytes of the checkpoints that are not converted yet."),
    "wherry_oldest_unconverted_age_seconds": (
        "gauge",
        "Time since the oldest unconverted checkpoint was written.",
    ),
    "wherry_root_reachable": ("gauge", "Whether the root of a route could be searched for checkpoints."),
    "wherry_ledger_statements": ("gauge", "Number of statements in the ledger."),
}


@dataclass(frozen=True, slots=True)
class MetricSample:
    """One sample: name of the metric, labels and value."""

    name: str
    labels: tuple[tuple[str, str], ...]
    value: float


@dataclass(slots=True)
class _Tally:
    """Accumulates samples over the statements."""

    totals: Counter[tuple[str, tuple[tuple[str, str], ...]]] = field(
        default_factory=Counter[tuple[str, tuple[tuple[str, str], ...]]]
    )
    last: dict[tuple[str, tuple[tuple[str, str], ...]], float] = field(
        default_factory=dict[tuple[str, tuple[tuple[str, str], ...]], float]
    )
    sources: set[str] = field(default_factory=set[str])

    def add(self, name: str, value: float = 1, **labels: str) -> None:
        """Increase a counter."""
        self.totals[name, _label_key(labels)] += stored_number(value)

    def set(self, name: str, value: float, **labels: str) -> None:
        """Set a gauge; the last value counts."""
        self.last[name, _label_key(labels)] = stored_number(value)

    def forget(self, name: str, **labels: str) -> None:
        """Remove the samples of an earlier statement with these labels."""
        wanted = set(labels.items())
        self.last = {
            key: value for key, value in self.last.items() if key[0] != name or not wanted <= {*key[1]}
        }


def _label_key(labels: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple((name, stored_word(value)) for name, value in labels.items())


def ledger_samples(ledger: Ledger) -> tuple[list[MetricSample], set[str]]:
    """Samples from the ledger, and the URIs that conversions read or wrote."""
    from wherry.ledger.record import head, statements

    tally = _Tally()
    for kind in ("conversion", "verification"):
        tally.add("wherry_failures_total", 0, stage=kind)  # so that the counter exists from the first scrape
    for statement in statements(ledger):
        with damage_of(statement.seq):
            _count(tally, statement)
    tally.set("wherry_ledger_statements", head(ledger).seq)
    rows = sorted([*tally.totals.items(), *tally.last.items()], key=lambda row: (*HELP,).index(row[0][0]))
    return [MetricSample(name, labels, value) for (name, labels), value in rows], tally.sources


def _count(tally: _Tally, statement: Statement) -> None:
    body, kind, time = statement.body, statement.kind, statement.time
    if kind == "conversion":
        tally.add("wherry_conversions_total", format=body["target"]["format"])
        for way in ("read", "written"):
            tally.add("wherry_conversion_bytes_total", body[f"bytes_{way}"], direction=way)
        tally.add("wherry_conversion_seconds_total", body["seconds"])
        tally.set("wherry_last_conversion_timestamp_seconds", _seconds(time))
        tally.sources.update(body[side]["uri"] for side in ("source", "target"))
    elif kind == "verification":
        if has_failed(body["verification"]):
            tally.add("wherry_failures_total", stage="verification")
    elif kind == "note":
        _count_note(tally, body, time)
    elif kind in _EVENTS:
        tally.add("wherry_events_total", kind=kind)
    if kind == "audit":
        _end_flow(tally, "audit", time, ok=body["ok"])
        for severity in ("error", "warning", "note"):
            tally.set("wherry_audit_findings", body["counts"][f"{severity}s"], severity=severity)


def _count_note(tally: _Tally, body: dict[str, Any], time: str) -> None:
    if body.get("about") == FAILURE:
        tally.add("wherry_failures_total", stage="conversion")
    elif body.get("about") == RUN:
        flow = str(body["flow"])
        if not body["ok"]:
            tally.add("wherry_failures_total", stage=flow)
        _end_flow(tally, flow, time, ok=body["ok"])
        tally.forget("wherry_last_run_count", flow=flow)
        for came, number in body["counts"].items():
            tally.set("wherry_last_run_count", number, flow=flow, outcome=came)


def _end_flow(tally: _Tally, flow: str, time: str, *, ok: bool) -> None:
    tally.set("wherry_last_run_timestamp_seconds", _seconds(time), flow=flow)
    tally.set("wherry_last_run_ok", int(ok), flow=flow)
    if ok:
        tally.set("wherry_last_success_timestamp_seconds", _seconds(time), flow=flow)


def _seconds(time: str) -> float:
    return stored_time(time).timestamp()
