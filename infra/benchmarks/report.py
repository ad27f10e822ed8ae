"""The table for people, the same as JSON for machines, and where the plot goes."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from benchmarks import plot
from benchmarks.judge import Summary, Verdict

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

NAME = "bench-results"
DETAILS = "## Every process"  # docs/speed.md shows what stands above this line
_PAIRS = (
    "row", "peer", "peer s", "ours s", "ratio", "required", "with read-back s", "ratio", "required", "floor s",
    "peak MB", "anonymous MB", "allowed MB", "peer's peak MB", "reached",
)  # fmt: skip
_PROBES = ("row", "measured", "required", "peak MB", "anonymous MB", "reached")
_RUNS = ("process", "input", "GB", "s", "least – most", "work s", "CPU s", "peak MB", "anonymous MB", "value")
_NOTES = """\
Each process runs alone, in turn with all others, {rounds} times; times are medians, memory is the maximum over all
rounds and the process tree. *s* is the wall time of the process, with interpreter start and imports, until its output
is durable (the output of a peer is synced within its time). *ratio* is the time of the peer divided by that of wherry:
first with `--verify none`, which computes digests of every byte, as no peer does; then with the default, which also
reads everything back from storage and has half the required ratio. *floor* copies the same bytes durably and hashes
them. *peak* is resident memory, including mapped file pages; *anonymous* is the part without a file behind it. The
source is in the page cache before each run.
"""


def write(
    folder: Path, machine: Mapping[str, Any], verdicts: Sequence[Verdict], summaries: Sequence[Summary]
) -> str:
    """Write `bench-results.md`, `.json` and `.svg`, and return the first."""
    text = markdown(machine, verdicts, summaries)
    (folder / f"{NAME}.md").write_text(text)
    record = {
        "schema": 2,
        "machine": machine,
        "rows": [_record(verdict) for verdict in verdicts],
        "processes": [summary._asdict() for summary in summaries],
    }
    (folder / f"{NAME}.json").write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n")
    (folder / f"{NAME}.svg").write_text(plot.svg(verdicts, f"{machine['date'][:10]}, {machine['processor']}"))
    return text


def markdown(machine: Mapping[str, Any], verdicts: Sequence[Verdict], summaries: Sequence[Summary]) -> str:
    """The tables, with the machine that they were measured on."""
    rounds = max((summary.rounds for summary in summaries), default=0)
    pairs, probes = [one for one in verdicts if one.peer], [one for one in verdicts if not one.peer]
    parts = [
        "# Benchmark results",
        "Written by `infra/bench`; do not edit.",
        _machine(machine),
        f"![ratios]({NAME}.svg)",
        _table(_PAIRS, map(_pair_cells, pairs), 2) if pairs else "",
        _table(_PROBES, map(_probe_cells, probes), 1) if probes else "",
        _unreached(verdicts),
        _NOTES.format(rounds=rounds),
        DETAILS,
        _table(_RUNS, map(_run_cells, summaries), 2),
    ]
    return "\n\n".join(part.strip() for part in parts if part) + "\n"


def problems(verdicts: Iterable[Verdict]) -> list[str]:
    """The rows that do not reach what is required of them, or were not measured."""
    return [f"{_title(verdict)}: {verdict.why}" for verdict in verdicts if not verdict.reached]


def _unreached(verdicts: Iterable[Verdict]) -> str:
    lines = [f"- {problem}" for problem in problems(verdicts)]
    return "\n".join(["Not reached:\n", *lines]) if lines else "Every requirement is reached."


def _title(verdict: Verdict) -> str:
    return f"{verdict.row} ({verdict.peer})" if verdict.peer else verdict.row


def _record(verdict: Verdict) -> dict[str, Any]:
    """A verdict; the runs that it compares are named, and found among the processes."""
    return {
        name: value.run if isinstance(value, Summary) else value for name, value in verdict._asdict().items()
    }


def _machine(machine: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {number}" for name, number in machine["versions"].items())
    return (
        f"{machine['date']} · {machine['cores']} cores ({machine['processor']}) · "
        f"{machine['memory_bytes'] / 1e9:.0f} GB memory · Linux {machine['kernel']} · {machine['disk']} · "
        f"load before the run {machine['load_before']}\n\nPython {machine['python']}, {versions}"
    )


def _pair_cells(one: Verdict) -> list[str]:
    return [
        one.row,
        one.peer,
        _seconds(one.other),
        _seconds(one.ours),
        _times(one.measured),
        one.required,
        _seconds(one.default),
        _times(one.default_ratio),
        f"≥ {one.default_bound:g}×" if one.default_bound else "",
        _seconds(one.floor),
        _megabytes(one.peak_bytes),
        _megabytes(one.anonymous_bytes),
        _megabytes(one.memory),
        _megabytes(one.other.peak_bytes if one.other else None),
        _reached(one),
    ]


def _probe_cells(one: Verdict) -> list[str]:
    measured = "" if one.measured is None else f"{one.measured:.3g} {one.unit}"
    memory = (_megabytes(one.peak_bytes), _megabytes(one.anonymous_bytes))
    return [one.row, measured, one.required, *memory, _reached(one)]


def _run_cells(one: Summary) -> list[str]:
    return [
        one.run,
        one.source,
        f"{one.source_bytes / 1e9:.3g}",
        f"{one.wall_s:.2f}",
        f"{one.wall_least_s:.2f} – {one.wall_most_s:.2f}",
        f"{one.work_s:.2f}",
        f"{one.cpu_s:.2f}",
        _megabytes(one.peak_bytes),
        _megabytes(one.anonymous_bytes),
        "" if one.value is None else f"{one.value:.3g}",
    ]


def _reached(one: Verdict) -> str:
    if one.measured is None:
        return "**not measured**"
    return "yes" if one.reached else "**no**"


def _seconds(one: Summary | None) -> str:
    return "" if one is None else f"{one.wall_s:.2f}"


def _times(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}×"


def _megabytes(nbytes: int | None) -> str:
    return "" if nbytes is None else f"{nbytes / 1e6:.0f}"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], words: int) -> str:
    """A Markdown table whose first columns, so many, hold words and the others numbers."""
    rule = ["---"] * words + ["---:"] * (len(head) - words)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, rule, *rows))
