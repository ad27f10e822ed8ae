"""Compares what was measured with what is required: medians of the rounds, one judgement for each requirement.

Each pair gets a verdict for each peer, and one for the machine: the bound, the cost of read-back, and memory. A row
that could not be measured is a verdict too, with the reason; nothing is left out.

The bound of a row is the least time that this machine needs for it, from the rates that `rates.py` measured.

The device and the cores work at the same time, so the bound is the longer of two times:

- *device*: bytes written, divided by the rate of durable writes. With read-back the same bytes are also read from
  storage: either afterwards, at the rate of reads, or meanwhile, at the rate of writing and reading back; whichever is
  faster. The source is in the page cache and takes no device time, except where the row reads it cold.
- *processor*: the sum of what no implementation can avoid, divided by the number of cores: the source is copied from
  the page cache (unless it is cold), decoded or encoded where the row has a codec, and hashed once with BLAKE3; what is
  read back is hashed too. Codecs and the hash of the source count uncompressed bytes.

Nothing else is counted: neither the start of the interpreter, nor checksums of a container, nor transposition.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks.cases import Pair, Probe, Run, floor, ours_of

if TYPE_CHECKING:
    from benchmarks.measure import Cost

_HASH, _CACHE = "BLAKE3", "page cache read"


class Rates(NamedTuple):
    """What the machine does in bytes per second.

    Attributes:
        cores: number of cores.
        core: name of an operation → rate of one core while all of them work.
        write, read: rates of the device.
        write_and_read: rate at which bytes are written and read back meanwhile.
    """

    cores: int
    core: Mapping[str, float]
    write: float
    read: float
    write_and_read: float


class Job(NamedTuple):
    """The bytes of a row and what happens to them.

    Attributes:
        source, written: bytes of the input and of the output, as they are stored.
        codecs: operations that the tensors go through.
        cold: whether the source is read from storage.
        read_back: whether the output is read back from storage.
    """

    source: int
    written: int
    codecs: tuple[str, ...] = ()
    cold: bool = False
    read_back: bool = False


class Bound(NamedTuple):
    """The least seconds of the device and of the processor."""

    device: float
    processor: float

    @property
    def seconds(self) -> float:
        """The least time of the row."""
        return max(self.device, self.processor)


def rates_of(measured: Mapping[str, Any]) -> Rates:
    """The rates from what `rates.py` prints."""
    device = {name: rate["best"] for name, rate in measured["device"]["rates"].items()}
    core = {name: rate["per_core"] for name, rate in measured["core"].items()}
    return Rates(measured["cores"], core, device["write"], device["read"], device["write and read back"])


def find_bound(job: Job, rates: Rates) -> Bound:
    """The bound of a row."""
    return Bound(_device_seconds(job, rates), _processor_seconds(job, rates))


def _device_seconds(job: Job, rates: Rates) -> float:
    reading = job.source / rates.read if job.cold else 0.0
    written, read = job.written / rates.write, job.written / rates.read
    if job.read_back:
        return reading + min(written + read, job.written / rates.write_and_read)
    return reading + written


def _processor_seconds(job: Job, rates: Rates) -> float:
    tensors = max(job.source, job.written)  # of a row with a codec, the compressed side is the smaller one
    seconds = sum(tensors / rates.core[name] for name in (_HASH, *job.codecs))
    if not job.cold:
        seconds += job.source / rates.core[_CACHE]
    if job.read_back:
        seconds += job.written / rates.core[_HASH]
    return seconds / rates.cores


PEER, MACHINE, LINE, PROBE = "peer", "machine", "line", "probe"


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
    "multiple": Rule(False, "{:.2f}× the machine's time, at most {:g}×"),
    "multiple_read_back": Rule(False, "with read-back {:.2f}× the machine's time, at most {:g}×"),
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
        kind: `peer`, `machine`, `line` or `probe`.
        row: the case.
        peer: what ours was compared with; empty where it was not compared with a peer.
        measures: key of `RULES` → number, required or not; of a line, what `_measure_line` names. Empty if the row was
            not measured.
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
    """The rows of one case: of a pair one for each peer, one for the machine, and the line of its sizes.

    Args:
        case: what is required.
        found: name of a run → what was measured.
        failed: name of a run, or of a case as a whole → why it was not measured.
        rates: what the machine does.
    """
    if isinstance(case, Probe):
        return [_judge_probe(case, found, failed)]
    against = [_judge_peer(case, peer, found, failed, rates) for peer in case.peers]
    return [*against, _judge_machine(case, found, failed, rates), _judge_line(case, found, failed)]


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
    if missing := _missing(case, [*ours_of(case), peer], found, failed):
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
    if missing := _missing(case, [*ours_of(case), *copies], found, failed):
        return Verdict(MACHINE, case.name, missing=missing)
    verdict, ours = _measure_verdict(MACHINE, case, found, rates), found[case.ours.name]
    peaks = [(found[run.name].peak_bytes, found[run.name].anonymous_bytes) for run in ours_of(case)]
    peak = max(peak for peak, _anonymous in peaks)
    measures = {"memory": float(peak)}
    start = case.required.start
    if verdict.bound:
        measures["multiple"] = ours.wall_s / (verdict.bound.seconds + start)
    if verdict.default and verdict.bound_read_back:
        measures["multiple_read_back"] = verdict.default.wall_s / (verdict.bound_read_back.seconds + start)
    return verdict._replace(
        floor=next((found[run.name] for run in copies), None),
        measures=measures,
        judgements=_judgements(case, measures),
        peak_bytes=peak,
        anonymous_bytes=max(anonymous for _peak, anonymous in peaks),
    )


def _judge_line(case: Pair, found: Mapping[str, Summary], failed: Mapping[str, str]) -> Verdict:
    """What a row costs before its first byte, and for each GB; nothing is required of it."""
    pairs = [(run, run.tenth) for run in ours_of(case)]
    if missing := _missing(case, [run for pair in pairs for run in pair], found, failed):
        return Verdict(LINE, case.name, missing=missing)
    ends = ["", "_read_back"]
    return Verdict(LINE, case.name, measures={
        f"{name}{end}": value
        for end, (whole, tenth) in zip(ends, pairs, strict=False)
        for name, value in _measure_line(found[whole.name], found[tenth.name]).items()
    })  # fmt: skip


def _measure_line(whole: Summary, tenth: Summary) -> dict[str, float]:
    """Start in seconds and seconds a GB of source, by the clock and of processors, from two sizes."""
    gigabytes = (whole.source_bytes - tenth.source_bytes) / 1e9
    slope = (whole.wall_s - tenth.wall_s) / gigabytes
    cpu_slope = (whole.cpu_s - tenth.cpu_s) / gigabytes
    size = whole.source_bytes / 1e9
    return {
        "start": whole.wall_s - slope * size, "slope": slope,
        "cpu_start": whole.cpu_s - cpu_slope * size, "cpu_slope": cpu_slope,
    }  # fmt: skip


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


def _missing(
    case: Pair | Probe, runs: Iterable[Run], found: Mapping[str, Summary], failed: Mapping[str, str]
) -> str:
    """Why a case was not measured; the first reason is enough for a table."""
    if case.name in failed:
        return failed[case.name]
    return next(
        (f"{run.name}: {failed.get(run.name, 'not run')}" for run in runs if run.name not in found), ""
    )
