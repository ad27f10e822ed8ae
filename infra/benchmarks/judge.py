"""Holds what was measured against what is required: medians of the rounds, one verdict for each comparison.

A row that could not be measured is a verdict too, with the reason; nothing is left out.
"""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, NamedTuple

from benchmarks.cases import Pair, Probe, Run, floor, runs_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from benchmarks.measure import Cost


class Summary(NamedTuple):
    """The rounds of one run: medians, and peaks as the highest of all rounds, since they are held against limits."""

    run: str
    source: str
    source_bytes: int
    rounds: int
    wall_s: float
    wall_least_s: float
    wall_most_s: float
    work_s: float
    cpu_s: float
    peak_bytes: int
    anonymous_bytes: int
    value: float | None


class Verdict(NamedTuple):
    """One line of the table.

    Attributes:
        row: the case.
        peer: what ours was compared with; empty for a probe.
        measured: the ratio of a pair (the peer's time divided by ours), the number of a probe; None if not measured.
        required: what it must be, as text.
        bound: the same as a number.
        reached: whether every requirement is met.
        why: what is not met or not measured; empty if all is well.
        unit: of `measured`.
        ours, default, other, floor: what was measured, for a pair.
        default_ratio: as `measured`, with read-back.
        default_bound: what that must be; None where nothing is required.
        memory: most resident bytes allowed.
        peak_bytes: of ours, the higher of both ways.
        anonymous_bytes: the same, of memory that no file backs.
    """

    row: str
    peer: str
    measured: float | None
    required: str
    bound: float
    reached: bool
    why: str
    unit: str = ""
    ours: Summary | None = None
    default: Summary | None = None
    other: Summary | None = None
    floor: Summary | None = None
    default_ratio: float | None = None
    default_bound: float | None = None
    memory: int | None = None
    peak_bytes: int | None = None
    anonymous_bytes: int | None = None


def summarise(run: Run, costs: Sequence[Cost], nbytes: int) -> Summary:
    """Medians of one run."""
    walls = [cost.wall for cost in costs]
    values = [cost.value for cost in costs if cost.value is not None]
    return Summary(
        run=run.name,
        source=run.source,
        source_bytes=nbytes,
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


def judge(case: Pair | Probe, found: Mapping[str, Summary], failed: Mapping[str, str]) -> list[Verdict]:
    """The lines of one case: one for each peer.

    Args:
        case: what is required.
        found: name of a run → what was measured.
        failed: name of a run, or of a case as a whole → why it was not measured.
    """
    if isinstance(case, Probe):
        return [_judge_probe(case, found, failed)]
    return [_judge_pair(case, peer, found, failed) for peer in case.peers]


def _judge_probe(case: Probe, found: Mapping[str, Summary], failed: Mapping[str, str]) -> Verdict:
    required = f"≤ {case.most:g} {case.unit}"
    summaries = [found[run.name] for run in case.runs if run.name in found]
    why = _missing(case, case.runs, found, failed)
    if why:
        return Verdict(case.name, "", None, required, case.most, reached=False, why=why, unit=case.unit)
    peaks = [summary.peak_bytes for summary in summaries]
    if case.of == "peak":
        measured = max(peaks) / min(peaks)
    else:
        measured = max(summary.value for summary in summaries if summary.value is not None)
    reached = measured <= case.most
    return Verdict(
        case.name, "", measured, required, case.most, reached, "" if reached else f"{measured:.3g} {case.unit}",
        unit=case.unit, peak_bytes=max(peaks), anonymous_bytes=max(one.anonymous_bytes for one in summaries),
    )  # fmt: skip


def _judge_pair(case: Pair, peer: Run, found: Mapping[str, Summary], failed: Mapping[str, str]) -> Verdict:
    wanted = [run for run in runs_of(case) if run not in case.peers or run is peer]
    why = _missing(case, wanted, found, failed)
    required = f"≥ {case.faster:g}×"
    if why:
        return Verdict(case.name, peer.name, None, required, case.faster, reached=False, why=why)
    ours, other = found[case.ours.name], found[peer.name]
    default = found[case.default.name] if case.default else None
    mine = [one for one in (ours, default) if one]
    verdict = Verdict(
        case.name, peer.name, other.wall_s / ours.wall_s, required, case.faster, reached=True, why="",
        ours=ours, default=default, other=other, floor=found[floor(case.ours.source).name],
        default_ratio=other.wall_s / default.wall_s if default else None,
        default_bound=case.faster / 2 if default and case.halved else None,
        memory=case.memory, peak_bytes=max(one.peak_bytes for one in mine),
        anonymous_bytes=max(one.anonymous_bytes for one in mine),
    )  # fmt: skip
    why = "; ".join(_unmet(verdict))
    return verdict._replace(reached=not why, why=why)


def _unmet(verdict: Verdict) -> list[str]:
    unmet: list[str] = []
    if verdict.measured is not None and verdict.measured < verdict.bound:
        unmet.append(f"{verdict.measured:.2f}× of {verdict.bound:g}×")
    if verdict.default_bound and verdict.default_ratio and verdict.default_ratio < verdict.default_bound:
        unmet.append(f"with read-back {verdict.default_ratio:.2f}× of {verdict.default_bound:g}×")
    if verdict.memory and verdict.peak_bytes and verdict.peak_bytes > verdict.memory:
        unmet.append(f"peak {verdict.peak_bytes / 1e6:.0f} MB of {verdict.memory / 1e6:.0f} MB")
    return unmet


def _missing(
    case: Pair | Probe, runs: Sequence[Run], found: Mapping[str, Summary], failed: Mapping[str, str]
) -> str:
    """Why a case was not measured; the first reason is enough for a table."""
    if case.name in failed:
        return failed[case.name]
    return next(
        (f"{run.name}: {failed.get(run.name, 'not run')}" for run in runs if run.name not in found), ""
    )
