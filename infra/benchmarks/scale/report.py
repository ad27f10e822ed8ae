"""Report: infra/bench-scale.json, .md and .svg, and the same tables between marks in the docs and README."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.scale import tables
from benchmarks.scale.carry import MEMORY
from benchmarks.scale.curves import svg
from benchmarks.scale.forecast import MOST_ERROR, comparison, curves, goal
from benchmarks.scale.rows import row_from

if TYPE_CHECKING:
    from benchmarks.scale.place import Row

ROOT = Path(__file__).resolve().parents[3]
NAME = "bench-scale"
SIMULATED_BYTES = 2e12


def name(row: Row) -> str:
    """As it is printed."""
    losses = f", {row.killed} killed, {row.paused} paused" if row.killed or row.paused else ""
    return f"{row.carrier}, {row.workers} workers, {row.size / 1e9:.3g} GB{losses}"


def write(results: Path, found: Mapping[str, Any], *, docs: bool = False) -> int:
    """Add the forecast, write the files, and print what is not reached.

    Args:
        results: folder for the files.
        found: what was measured.
        docs: put the tables into docs and README.

    Returns:
        1 if something is not reached.
    """
    whole = {
        **found,
        "comparison": comparison([row_from(row) for row in found["rows"]]),
        "curves": curves(SIMULATED_BYTES),
        "goal": goal(),
    }
    (results / f"{NAME}.json").write_text(json.dumps(whole, indent=1) + "\n")
    (results / f"{NAME}.md").write_text(markdown(whole))
    (results / f"{NAME}.svg").write_text(svg(whole, place(whole)))
    if docs:
        put_into_docs(whole)
    print("\n" + markdown(whole))
    missed = tables.problems(whole)
    for problem in missed:
        print(f"not reached: {problem}", file=sys.stderr)
    return int(bool(missed))


def place(found: Mapping[str, Any]) -> str:
    """Size, machine, moment and load."""
    machine = found["machine"]
    loads = [row["load"] for row in found["rows"]] or [0.0]
    size, rate = f"{found['size'] / 1e9:.3g} GB", f"{found['rate'] / 1e6:g} MB/s a worker each way"
    processors = f"{machine['cores']} cores ({machine['processor']})"
    return ", ".join((
        f"{size} at {rate}", f"`--memory {MEMORY >> 20}MiB`", machine["date"][:10], processors,
        f"load {min(loads):.0f} to {max(loads):.0f}",
    ))  # fmt: skip


def markdown(found: Mapping[str, Any]) -> str:
    """Everything."""
    parts = [f"# Scale\n\n{place(found)}. `infra/bench --scale` writes this page.", docs_text(found)]
    if missed := tables.problems(found):
        parts.append("Not reached: " + "; ".join(missed) + ".")
    return "\n\n".join(parts) + "\n"


def docs_text(found: Mapping[str, Any]) -> str:
    """The tables of docs/many-machines.md."""
    parts = [
        f"Measured: {place(found)}.",
        tables.measured_table(found),
        tables.faults(found),
        *([_disk_words(found["disk"])] if "disk" in found else []),
        f"Simulated: {SIMULATED_BYTES / 1e12:g} TB, units of 1 GiB, 400 MB/s a worker, with read-back by the workers:",
        tables.simulated_table(found),
        _goal_words(found["goal"]) + _model_words(found),
    ]
    return "\n\n".join(part for part in parts if part)


def readme_text(found: Mapping[str, Any]) -> str:
    """The table of README."""
    minutes = max(found["goal"]["seconds"].values()) / 60
    alone = found["goal"]["seconds_commit_alone"] / 60
    return (
        f"{tables.short(found)}\n\nMeasured: {place(found)}. Simulated, 1 TB, 16 workers of 400 MB/s, three killed: "
        f"{minutes:.1f} minutes with read-back; {alone:.0f} if the commit read the target back alone."
        f"{_model_words(found)}"
    )


def _model_words(found: Mapping[str, Any]) -> str:
    """How far the simulation is from the rows that were measured; empty if it is near enough."""
    worst = max((abs(one["error"]) for one in found["comparison"]), default=0.0)
    if worst <= MOST_ERROR:
        return ""
    return f" The simulation is not valid yet: it differs from measured rows by up to {worst:.0%}."


def put_into_docs(found: Mapping[str, Any]) -> None:
    """Replace the tables of docs/many-machines.md and README, and the picture that they show."""
    for file, text in (
        (ROOT / "docs" / "many-machines.md", docs_text(found)),
        (ROOT / "README.md", readme_text(found)),
    ):
        block = f"<!-- scale:start -->\n\n{text}\n\n<!-- scale:end -->"
        file.write_text(
            re.sub(
                r"<!-- scale:start -->.*<!-- scale:end -->",
                lambda _found, block=block: block,
                file.read_text(),
                flags=re.DOTALL,
            )
        )


def _disk_words(disk: Mapping[str, Any]) -> str:
    same = "the digest of one process" if disk["same_digest"] else "**another digest than one process**"
    return (
        f"On SeaweedFS, {disk['size'] / 1e9:.2g} GB through {disk['workers']} workers: units {disk['seconds']:.0f} s, "
        f"commit with read-back {disk['commit']:.0f} s (level {disk['verification']['level']}), {same}; "
        f"load {disk['load']:.0f}."
    )


def _goal_words(goal: Mapping[str, Any]) -> str:
    work, dask = goal["seconds"]["work"] / 60, goal["seconds"]["dask"] / 60
    alone, required = goal["seconds_commit_alone"] / 60, goal["required"] / 60
    judged = tables.bold(f"{work:.1f}", work <= required), tables.bold(f"{dask:.1f}", dask <= required)
    return (
        f"The goal, 1 TB on 16 workers of which three are killed, in {required:.0f} minutes with read-back: simulated "
        f"{judged[0]} minutes with `wherry work` and {judged[1]} with Dask; {alone:.0f} if the commit read the target "
        "back alone."
    )
