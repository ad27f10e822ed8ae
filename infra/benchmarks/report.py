"""Medians of the rounds, as a table for people and as JSON for machines."""

from __future__ import annotations

import json
import statistics
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from benchmarks.measure import Cost
    from benchmarks.rows import Row

LIMIT = 400_000_000
_HEAD = ("", "wall s", "least – most", "work s", "CPU s", "peak MB", "anonymous MB", "GB/s", "× floor")
_NOTES = """\
Each row is a process of its own; the rounds go through all rows in turn, and the numbers are medians over the
rounds. *wall* is the whole process, start of the interpreter and imports included, until its output is durable
(the peers' output is fsynced within the measured time, since wherry's is); *work* is the part after the imports.
*peak* is resident memory, file pages that a process maps included; *anonymous* is the part that no file backs.
The source lies in the page cache before each run. *× floor* compares *wall* with the first row of the group,
which copies and hashes the same bytes and knows nothing of checkpoints.
"""


def summarise(row: Row, costs: Sequence[Cost], nbytes: int, floor: float | None) -> dict[str, Any]:
    """Medians of one row; peaks are the highest of all rounds, since they are held against a limit."""
    wall = statistics.median(cost.wall for cost in costs)
    return {
        "row": row.name,
        "group": row.group,
        "ours": row.ours,
        "rounds": len(costs),
        "source_bytes": nbytes,
        "wall_s": wall,
        "wall_least_s": min(cost.wall for cost in costs),
        "wall_most_s": max(cost.wall for cost in costs),
        "work_s": statistics.median(cost.work for cost in costs),
        "cpu_s": statistics.median(cost.cpu for cost in costs),
        "peak_bytes": max(cost.peak for cost in costs),
        "anonymous_bytes": max(cost.anonymous for cost in costs),
        "times_floor": wall / floor if floor else None,
    }


def markdown(machine: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
    """The table, with the machine that it was measured on."""
    parts = ["# Benchmark results", "Written by `infra/bench`; do not edit.", _machine(machine), _NOTES]
    for group in dict.fromkeys(row["group"] for row in rows):
        of_group = [row for row in rows if row["group"] == group]
        size = of_group[0]["source_bytes"]
        lines = [_line(_HEAD), _line(["---", *["---:"] * (len(_HEAD) - 1)]), *map(_cells, of_group)]
        parts += [f"## {group}, {size / 1e9:.3g} GB", "\n".join(lines)]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def write(folder: Path, machine: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
    """Write `bench-results.md` and `.json`, and return the former."""
    text = markdown(machine, rows)
    (folder / "bench-results.md").write_text(text)
    record = {"schema": 1, "machine": machine, "rows": rows}
    (folder / "bench-results.json").write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n")
    return text


def over_limit(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The rows of ours that needed more memory than they may."""
    return [
        f"{row['row']}: peak {row['peak_bytes'] / 1e6:.0f} MB, limit {LIMIT / 1e6:.0f} MB"
        for row in rows
        if row["ours"] and row["peak_bytes"] >= LIMIT
    ]


def _machine(machine: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {number}" for name, number in machine["versions"].items())
    return (
        f"{machine['date']} · {machine['cores']} cores ({machine['processor']}) · "
        f"{machine['memory_bytes'] / 1e9:.0f} GB memory · Linux {machine['kernel']} · {machine['disk']} · "
        f"load before the run {machine['load_before']}\n\nPython {machine['python']}, {versions}"
    )


def _cells(row: Mapping[str, Any]) -> str:
    times = "" if row["times_floor"] is None else f"{row['times_floor']:.2f}"
    return _line(
        [
            row["row"],
            f"{row['wall_s']:.2f}",
            f"{row['wall_least_s']:.2f} – {row['wall_most_s']:.2f}",
            f"{row['work_s']:.2f}",
            f"{row['cpu_s']:.2f}",
            f"{row['peak_bytes'] / 1e6:.0f}",
            f"{row['anonymous_bytes'] / 1e6:.0f}",
            f"{row['source_bytes'] / 1e9 / row['wall_s']:.2f}",
            times,
        ]
    )


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
