"""Compares what was measured with what is required: medians of the rounds, one judgement for each requirement.

Each pair gets a verdict for each peer, and one for the machine: the bound, the cost of read-back, and memory. A row
that could not be measured is a verdict too, with the reason; nothing is left out.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from benchmarks.bound import Bound, Job, find_bound
from benchmarks.cases import Pair, Probe, Run, floor

if TYPE_CHECKING:
    from benchmarks.bound import Rates
    from benchmarks.measure import Cost

PEER, MACHINE, PROBE = "peer", "machine", "probe"


class Summary(NamedTuple):
    """The rounds of one run: medians, and peaks as the highest of all rounds, since they are held against limits."""

    run: str
    source: str
    source_bytes: int
    written_bytes: int
    rounds: int
    wall_s: float
    wall_least_s: float
    wall_most_s: float
    work_s: float
    cpu_s: float
    peak_bytes: int
    anonymous_bytes: int
    value: float | None


class Rule(NamedTuple):
    """How one kind of requirement is judged and reported.

    Attributes:
        at_least: whether the number must not be smaller; otherwise it must not be larger.
        text: what is said when it is not met.
        unit: what the numbers are divided by before they are printed.
    """

    at_least: bool
    text: str
    unit: float = 1.0


# Attribute of `Required` → rule.
RULES = {
    "faster": Rule(True, "{:.2f}× of {:g}×"),
    "faster_read_back": Rule(True, "with read-back {:.2f}× of {:g}×"),
    "read_back": Rule(False, "read-back takes the time {:.2f}×, at most {:g}×"),
    "multiple": Rule(False, "{:.2f}× the bound, at most {:g}×"),
    "multiple_read_back": Rule(False, "with read-back {:.2f}× the bound, at most {:g}×"),
    "memory": Rule(False, "peak {:.0f} MB of {:.0f} MB", 1e6),
    "value": Rule(False, "{:.3g} of {:g}"),
}


class Judgement(NamedTuple):
    """One requirement of a row.

    Attributes:
        of: a key of `RULES`.
        measured, required: the numbers.
        reached: whether it is met.
        goal: whether it is a goal of this project, which does not count for the row.
    """

    of: str
    measured: float
    required: float
    reached: bool
    goal: bool = False

    @property
    def text(self) -> str:
        """The numbers in words, for a requirement that is not met."""
        rule = RULES[self.of]
        return rule.text.format(self.measured / rule.unit, self.required / rule.unit)


class Verdict(NamedTuple):
    """One line of a table.

    Attributes:
        kind: `peer`, `machine` or `probe`.
        row: the case.
        peer: what ours was compared with; empty where it was not compared with a peer.
        measures: key of `RULES` → number, required or not; empty if the row was not measured.
        judgements: those that are required, and goals.
        missing: why it was not measured; empty if it was.
        unit: of the value of a probe.
        ours, default, other, floor: what was measured.
        bound, bound_read_back: the least times of ours on this machine, without and with read-back.
        peak_bytes: of ours, the higher of both ways.
        anonymous_bytes: the same, of memory that no file backs.
    """

    kind: str
    row: str
    peer: str = ""
    measures: Mapping[str, float] = {}
    judgements: tuple[Judgement, ...] = ()
    missing: str = ""
    unit: str = ""
    ours: Summary | None = None
    default: Summary | None = None
    other: Summary | None = None
    floor: Summary | None = None
    bound: Bound | None = None
    bound_read_back: Bound | None = None
    peak_bytes: int | None = None
    anonymous_bytes: int | None = None

    @property
    def why(self) -> str:
        """What is not met or not measured; empty if every requirement is met."""
        unmet = (one.text for one in self.judgements if not one.reached and not one.goal)
        return self.missing or "; ".join(unmet)

    @property
    def reached(self) -> bool:
        """Whether every requirement is met; goals do not count."""
        return not self.why


def summarise(run: Run, costs: Sequence[Cost], nbytes: int) -> Summary:
    """Medians of one run."""
    walls = [cost.wall for cost in costs]
    values = [cost.value for cost in costs if cost.value is not None]
    return Summary(
        run=run.name,
        source=run.source,
        source_bytes=nbytes,
        written_bytes=max(cost.written for cost in costs),
        rounds=len(costs),
        wall_s=statistics.median(walls),
        wall_least_s=min(walls),
        wall_most_s=max(walls),
        work_s=statistics.median(cost.work for cost in costs),
        cpu_s=statistics.median(cost.cpu for cost in costs),
        peak_bytes=max(cost.peak for cost in costs),
        anonymous_bytes=max(cost.anonymous for cost in costs),
        value=statistics.median(values) if values else None,
    )


def judge(
    case: Pair | Probe, found: Mapping[str, Summary], failed: Mapping[str, str], rates: Rates
) -> list[Verdict]:
    """The lines of one case: of a pair one for each peer and one for the machine.

    Args:
        case: what is required.
        found: name of a run → what was measured.
        failed: name of a run, or of a case as a whole → why it was not measured.
        rates: what the machine does.
    """
    if isinstance(case, Probe):
        return [_judge_probe(case, found, failed)]
    against = [_judge_peer(case, peer, found, failed, rates) for peer in case.peers]
    return [*against, _judge_machine(case, found, failed, rates)]


def _judge_probe(case: Probe, found: Mapping[str, Summary], failed: Mapping[str, str]) -> Verdict:
    verdict = Verdict(PROBE, case.name, unit=case.unit)
    if missing := _missing(case, case.runs, found, failed):
        return verdict._replace(missing=missing)
    summaries = [found[run.name] for run in case.runs]
    peaks = [summary.peak_bytes for summary in summaries]
    if case.of == "peak":
        value = max(peaks) / min(peaks)
    else:
        value = max(summary.value for summary in summaries if summary.value is not None)
    return verdict._replace(
        measures={"value": value},
        judgements=(Judgement("value", value, case.most, value <= case.most),),
        peak_bytes=max(peaks),
        anonymous_bytes=max(one.anonymous_bytes for one in summaries),
    )


def _judge_peer(
    case: Pair, peer: Run, found: Mapping[str, Summary], failed: Mapping[str, str], rates: Rates
) -> Verdict:
    if missing := _missing(case, [*_ours(case), peer], found, failed):
        return Verdict(PEER, case.name, peer.name, missing=missing)
    verdict, other = _measure_verdict(PEER, case, found, rates)._replace(peer=peer.name), found[peer.name]
    measures = {"faster": other.wall_s / found[case.ours.name].wall_s}
    if verdict.default:
        measures["faster_read_back"] = other.wall_s / verdict.default.wall_s
    return verdict._replace(other=other, measures=measures, judgements=_judgements(case, measures))


def _judge_machine(
    case: Pair, found: Mapping[str, Summary], failed: Mapping[str, str], rates: Rates
) -> Verdict:
    copies = [floor(case.ours.source)] if case.floor else []
    if missing := _missing(case, [*_ours(case), *copies], found, failed):
        return Verdict(MACHINE, case.name, missing=missing)
    verdict, ours = _measure_verdict(MACHINE, case, found, rates), found[case.ours.name]
    peaks = [(found[run.name].peak_bytes, found[run.name].anonymous_bytes) for run in _ours(case)]
    peak = max(peak for peak, _anonymous in peaks)
    measures = {"memory": float(peak)}
    if verdict.bound:
        measures["multiple"] = ours.wall_s / verdict.bound.seconds
    if verdict.default and verdict.bound_read_back:
        measures["read_back"] = verdict.default.wall_s / ours.wall_s
        measures["multiple_read_back"] = verdict.default.wall_s / verdict.bound_read_back.seconds
    return verdict._replace(
        floor=next((found[run.name] for run in copies), None),
        measures=measures,
        judgements=_judgements(case, measures),
        peak_bytes=peak,
        anonymous_bytes=max(anonymous for _peak, anonymous in peaks),
    )


def _measure_verdict(kind: str, case: Pair, found: Mapping[str, Summary], rates: Rates) -> Verdict:
    """A verdict with our times and their bounds."""
    ours, default = found[case.ours.name], found[case.default.name] if case.default else None
    return Verdict(
        kind,
        case.name,
        ours=ours,
        default=default,
        bound=_find_bound(case, ours, rates),
        bound_read_back=_find_bound(case, default, rates, read_back=True) if default else None,
    )


def _judgements(case: Pair, measures: Mapping[str, float]) -> tuple[Judgement, ...]:
    """One for each measured number that something is required of."""
    required = ((name, getattr(case.required, name)) for name in RULES if name in measures)
    return tuple(
        Judgement(
            name, measures[name], limit, _meets(name, measures[name], limit), name in case.required.goals
        )
        for name, limit in required
        if limit is not None
    )


def _meets(name: str, measured: float, limit: float) -> bool:
    return measured >= limit if RULES[name].at_least else measured <= limit


def _find_bound(case: Pair, ours: Summary, rates: Rates, *, read_back: bool = False) -> Bound:
    written = 0 if case.ours.cold else ours.written_bytes
    return find_bound(Job(ours.source_bytes, written, case.codecs, case.ours.cold, read_back), rates)


def _ours(case: Pair) -> list[Run]:
    return [run for run in (case.ours, case.default) if run]


def _missing(
    case: Pair | Probe, runs: Iterable[Run], found: Mapping[str, Summary], failed: Mapping[str, str]
) -> str:
    """Why a case was not measured; the first reason is enough for a table."""
    if case.name in failed:
        return failed[case.name]
    return next(
        (f"{run.name}: {failed.get(run.name, 'not run')}" for run in runs if run.name not in found), ""
    )
