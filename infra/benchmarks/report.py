"""The table for people, the same as JSON for machines, and where the plot goes.

In the plot there is a bar for each comparison, as long as the peer's time divided by ours, with marks at what is
required. A dashed mark is the peer's time divided by the bound: nothing on this machine could be further right. It is
written as SVG by hand, since a plot of bars is not worth a plotting library; it is readable on light and dark pages.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.cases import START
from benchmarks.judge import LINE, MACHINE, PEER, PROBE, RULES, Judgement, Summary, Verdict

if TYPE_CHECKING:
    from benchmarks.judge import Bound

_WIDTH, _LEFT, _RIGHT, _TOP, _STEP, _BAR = 1200, 640, 100, 56, 30, 11
_REACHED, _MISSED, _READ_BACK, _MARK, _GREY = "#2a7f62", "#b3432b", "#8fbfae", "#222222", "#555555"
# Name of a ratio → where its bar begins, how high it is, and its colour.
_PLACES = {"faster": (0, _BAR, _REACHED), "faster_read_back": (_BAR + 1, 6, _READ_BACK)}


def svg(verdicts: Sequence[Verdict], place: str) -> str:
    """The plot of all comparisons with peers; one that was not measured has its name and no bar."""
    pairs = [one for one in verdicts if one.peer]
    longest = max([1.0, *(end for one in pairs for end in _ends(one))])
    scale = (_WIDTH - _LEFT - _RIGHT) / longest
    height = _TOP + _STEP * len(pairs) + 34
    legend = "wide: --verify none · narrow: with read-back · line: required · dashed: the machine's bound"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif">',
        f'<rect width="{_WIDTH}" height="{height}" fill="#ffffff"/>',
        _text(12, 22, "How many times faster than the peer", size=15),
        _text(12, 40, f"{legend} · {place}", _GREY),
        *_axis(longest, scale, height),
        *(part for at, one in enumerate(pairs) for part in _bars(one, _TOP + _STEP * at, scale)),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _ends(one: Verdict) -> list[float]:
    """Every position on the axis that a comparison needs."""
    limits = [judgement.required for judgement in one.judgements]
    return [*one.measures.values(), *limits, *_bounds(one).values()]


def _bounds(one: Verdict) -> dict[str, float]:
    """The ratios that the bounds would have."""
    bounds = {"faster": one.bound, "faster_read_back": one.bound_read_back}
    return {name: one.other.wall_s / least.seconds for name, least in bounds.items() if least and one.other}


def _axis(longest: float, scale: float, height: int) -> list[str]:
    step = max(1, math.ceil(longest / 10))
    parts: list[str] = []
    for tick in range(0, math.floor(longest) + 1, step):
        x = _LEFT + tick * scale
        parts.append(f'<line x1="{x:.1f}" y1="{_TOP - 4}" x2="{x:.1f}" y2="{height - 26}" stroke="#e2e2e2"/>')
        parts.append(_text(x, height - 10, f"{tick}×", _GREY, anchor="middle"))
    return parts


def _bars(one: Verdict, top: int, scale: float) -> list[str]:
    parts = [_text(_LEFT - 8, top + _BAR, f"{one.row} · {one.peer}", anchor="end")]
    if one.missing:
        return [*parts, _text(_LEFT + 6, top + _BAR, "not measured", _MISSED)]
    reached = {judgement.of: judgement.reached for judgement in one.judgements}
    for name, (place, height, colour) in _PLACES.items():
        if name in one.measures:
            filled = colour if reached.get(name, True) else _MISSED
            parts.append(_bar(top + place, height, one.measures[name] * scale, filled))
    parts += [_mark(top, judgement.of, judgement.required * scale) for judgement in one.judgements]
    parts += [_mark(top, name, at * scale, dashes="2 2") for name, at in _bounds(one).items()]
    numbers = " / ".join(f"{ratio:.1f}×" for ratio in one.measures.values())
    return [*parts, _text(_WIDTH - 8, top + _BAR, numbers, anchor="end")]


def _mark(top: int, name: str, x: float, dashes: str = "none") -> str:
    """A line across the bar of this name."""
    place, height, _colour = _PLACES[name]
    start, end = top + place - 2, top + place + height + 2
    return (
        f'<line x1="{_LEFT + x:.1f}" y1="{start}" x2="{_LEFT + x:.1f}" y2="{end}" stroke="{_MARK}" '
        f'stroke-width="2" stroke-dasharray="{dashes}"/>'
    )


def _bar(top: int, height: int, width: float, colour: str) -> str:
    return f'<rect x="{_LEFT}" y="{top}" width="{width:.1f}" height="{height}" fill="{colour}"/>'


def _text(
    x: float, y: float, words: str, colour: str = _MARK, *, anchor: str = "start", size: int = 12
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y}" fill="{colour}" text-anchor="{anchor}" font-size="{size}">'
        f"{escape(words)}</text>"
    )


NAME = "bench-results"
DETAILS = "## Every process"  # docs/speed.md shows what stands above this line
_RATES = ("rate of the machine", "GB/s", "one core alone", "measured with")
_PEERS = (
    "row", "peer", "peer s", "CPU s", "peak MB", "ours s", "CPU s", "ratio", "required", "with read-back s", "CPU s",
    "ratio", "required", "reached",
)  # fmt: skip
_MACHINES = (
    "row", "bound s", "ours s", "multiple", "allowed", "bound with read-back s", "with read-back s", "multiple",
    "allowed", "floor s", "peak MB", "anonymous MB", "allowed MB", "reached",
)  # fmt: skip
_LINES = (
    "row", "start s", "s a GB", "start CPU s", "CPU s a GB", "with read-back: start s", "s a GB", "start CPU s",
    "CPU s a GB",
)  # fmt: skip
_LINE_MEASURES = ("start", "slope", "cpu_start", "cpu_slope")
_PROBES = ("row", "measured", "required", "peak MB", "anonymous MB", "reached")
_RUNS = (
    "process", "input", "GB", "written GB", "s", "least – most", "work s", "CPU s", "peak MB", "anonymous MB", "value",
)  # fmt: skip
_NOTES = """\
Each process runs alone, in turn with all others, {rounds} times; times are medians, memory is the maximum over all
rounds and the process tree. *s* is the wall time of the process, with interpreter start and imports, until its output
is durable (the output of a peer is synced within its time). *ratio* is the time of the peer divided by that of wherry:
first with `--verify none`, which computes digests of every byte, as no peer does; then with the default, which also
reads everything back from storage and has requirements of its own. The source is in the page cache before each run,
except in the row *verify*, where wherry and its peer both read it from storage. A number that misses its requirement is
**bold**; a *goal* is not required.

The rates are measured before all rows, by a program that shares no code with wherry (`infra/benchmarks/rates.py`):
those of the processor for each core while all cores work. *bound* is the least time that follows from them: the longer
of device time (bytes written by the rate of writes; with read-back also bytes read, afterwards or meanwhile, whichever
is faster) and processor time divided by the cores (copy from the page cache, codec, BLAKE3 of the source, BLAKE3 of
what is read back), and nothing else; the word behind it says which one is the longer. *multiple* is the time of wherry
divided by it, with {start} s more for the start of a process in rows without a codec. *start* and the cost of a GB are
those of the line through the row and the same row with a tenth of the bytes. *floor* is a program of its own that
copies the same bytes durably and hashes them with BLAKE3. *peak* is resident memory, including mapped file pages;
*anonymous* is the part without a file behind it.
"""


def write(
    folder: Path, machine: Mapping[str, Any], verdicts: Sequence[Verdict], summaries: Sequence[Summary]
) -> str:
    """Write `bench-results.md`, `.json` and `.svg`, and return the first."""
    text = markdown(machine, verdicts, summaries)
    (folder / f"{NAME}.md").write_text(text)
    record = {
        "schema": 4,
        "machine": machine,
        "rows": [_record(verdict) for verdict in verdicts],
        "processes": [summary._asdict() for summary in summaries],
    }
    (folder / f"{NAME}.json").write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n")
    (folder / f"{NAME}.svg").write_text(svg(verdicts, f"{machine['date'][:10]}, {machine['processor']}"))
    return text


def markdown(machine: Mapping[str, Any], verdicts: Sequence[Verdict], summaries: Sequence[Summary]) -> str:
    """The tables, with the machine that they were measured on."""
    rounds = max((summary.rounds for summary in summaries), default=0)
    tables = [
        ("", _PEERS, _peer_cells, PEER, 2),
        ("Against the bound of this machine:", _MACHINES, _machine_cells, MACHINE, 1),
        (
            "What a conversion costs before its first byte, and each GB of its source:",
            _LINES,
            _line_cells,
            LINE,
            1,
        ),
        ("", _PROBES, _probe_cells, PROBE, 1),
    ]
    parts = [
        "# Benchmark results",
        "Written by `infra/bench`; do not edit.",
        _machine(machine),
        _table(_RATES, rate_cells(machine["rates"]), 1),
        f"![ratios]({NAME}.svg)",
        *(
            f"{words}\n\n{_table(head, map(cells, kept), columns)}"
            for words, head, cells, kind, columns in tables
            if (kept := [one for one in verdicts if one.kind == kind])
        ),
        _list_unreached(verdicts),
        _NOTES.format(rounds=rounds, start=START),
        DETAILS,
        _table(_RUNS, map(_run_cells, summaries), 2),
    ]
    return "\n\n".join(part.strip() for part in parts if part) + "\n"


def problems(verdicts: Iterable[Verdict]) -> list[str]:
    """The rows that do not reach what is required of them, or were not measured."""
    return [f"{_title(verdict)}: {verdict.why}" for verdict in verdicts if not verdict.reached]


def _list_unreached(verdicts: Iterable[Verdict]) -> str:
    lines = [f"- {problem}" for problem in problems(verdicts)]
    return "\n".join(["Not reached:\n", *lines]) if lines else "Every requirement is reached."


def _title(verdict: Verdict) -> str:
    return f"{verdict.row} ({verdict.peer})" if verdict.peer else verdict.row


def _record(verdict: Verdict) -> dict[str, Any]:
    """A verdict; the runs that it compares are named, and found among the processes."""
    fields = {
        name: value.run if isinstance(value, Summary) else value for name, value in verdict._asdict().items()
    }
    bounds = {
        name: one and {**one._asdict(), "seconds": one.seconds}
        for name, one in (("bound", verdict.bound), ("bound_read_back", verdict.bound_read_back))
    }
    judgements = [one._asdict() for one in verdict.judgements]
    return {**fields, **bounds, "judgements": judgements, "reached": verdict.reached, "why": verdict.why}


def _machine(machine: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {number}" for name, number in machine["versions"].items())
    return (
        f"{machine['date']} · {machine['cores']} cores ({machine['processor']}, "
        f"{sha_words(machine)}) · "
        f"{machine['memory_bytes'] / 1e9:.0f} GB memory · Linux {machine['kernel']} · {machine['disk']} · "
        f"load before the run {machine['load_before']}\n\nPython {machine['python']}, {versions}"
    )


def sha_words(machine: Mapping[str, Any]) -> str:
    """Whether the processor has instructions for SHA-256."""
    flag = machine["sha_instructions"]
    return f"SHA instructions: {flag}" if flag else "no SHA instructions"


def rate_cells(rates: Mapping[str, Any]) -> list[list[str]]:
    """What the machine does: each core, then the device."""
    cores = [
        [f"{name}, per core", _gigabytes(one["per_core"]), _gigabytes(one["alone"]), one["implementation"]]
        for name, one in rates["core"].items()
    ]
    how = "direct I/O" if rates["device"]["direct"] else "page cache: the file system has no direct I/O"
    device = rates["device"]["rates"].items()
    return [*cores, *([f"device: {name}", _gigabytes(one["best"]), "", how] for name, one in device)]


def _peer_cells(one: Verdict) -> list[str]:
    return [
        one.row, one.peer, *_times_of(one.other), _megabytes(one.other.peak_bytes if one.other else None),
        *_times_of(one.ours), *_judge_ratio(one, "faster"),
        *_times_of(one.default), *_judge_ratio(one, "faster_read_back"), _yes_or_no(one),
    ]  # fmt: skip


def _machine_cells(one: Verdict) -> list[str]:
    memory = _judgement(one, "memory")
    return [
        one.row, _least(one.bound), _seconds(one.ours), *_judge_ratio(one, "multiple"),
        _least(one.bound_read_back), _seconds(one.default), *_judge_ratio(one, "multiple_read_back"),
        _seconds(one.floor), _bold(_megabytes(one.peak_bytes), memory),
        _megabytes(one.anonymous_bytes), _megabytes(int(memory.required) if memory else None),
        _yes_or_no(one),
    ]  # fmt: skip


def _line_cells(one: Verdict) -> list[str]:
    names = [f"{name}{end}" for end in ("", "_read_back") for name in _LINE_MEASURES]
    return [one.row, *(f"{one.measures[name]:.2f}" if name in one.measures else "" for name in names)]


def _probe_cells(one: Verdict) -> list[str]:
    value = _judgement(one, "value")
    measured = _bold(f"{value.measured:.3g} {one.unit}", value) if value else ""
    required = f"≤ {value.required:g} {one.unit}" if value else ""
    memory = (_megabytes(one.peak_bytes), _megabytes(one.anonymous_bytes))
    return [one.row, measured, required, *memory, _yes_or_no(one)]


def _judge_ratio(one: Verdict, name: str) -> tuple[str, str]:
    """A ratio, and what is required of it; the ratio is bold if it misses that."""
    found = _judgement(one, name)
    measured = _times(one.measures.get(name))
    if found is None:
        return measured, ""
    sign = "≥" if RULES[name].at_least else "≤"
    return _bold(measured, found), f"{sign} {found.required:g}×{' (goal)' if found.goal else ''}"


def _judgement(one: Verdict, name: str) -> Judgement | None:
    return next((judgement for judgement in one.judgements if judgement.of == name), None)


def _bold(text: str, judgement: Judgement | None) -> str:
    return f"**{text}**" if judgement and not judgement.reached else text


def _least(least: Bound | None) -> str:
    if least is None:
        return ""
    return f"{least.seconds:.2f} {'device' if least.device >= least.processor else 'processor'}"


def _run_cells(one: Summary) -> list[str]:
    return [
        one.run, one.source, f"{one.source_bytes / 1e9:.3g}", f"{one.written_bytes / 1e9:.3g}",
        f"{one.wall_s:.2f}", f"{one.wall_least_s:.2f} – {one.wall_most_s:.2f}", f"{one.work_s:.2f}",
        f"{one.cpu_s:.2f}", _megabytes(one.peak_bytes), _megabytes(one.anonymous_bytes),
        "" if one.value is None else f"{one.value:.3g}",
    ]  # fmt: skip


def _yes_or_no(one: Verdict) -> str:
    if one.missing:
        return "**not measured**"
    return "yes" if one.reached else "**no**"


def _times_of(one: Summary | None) -> tuple[str, str]:
    """By the clock, and of processors."""
    return _seconds(one), "" if one is None else f"{one.cpu_s:.2f}"


def _seconds(one: Summary | None) -> str:
    return "" if one is None else f"{one.wall_s:.2f}"


def _times(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}×"


def _megabytes(nbytes: int | None) -> str:
    return "" if nbytes is None else f"{nbytes / 1e6:.0f}"


def _gigabytes(rate: float) -> str:
    return f"{rate / 1e9:.3g}"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], words: int) -> str:
    """A Markdown table whose first columns, so many, hold words and the others numbers."""
    rule = ["---"] * words + ["---:"] * (len(head) - words)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, rule, *rows))
