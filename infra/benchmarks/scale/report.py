"""Report: infra/bench-scale.json, .md and .svg, and the same tables between marks in the docs and README.

A number that misses its goal is bold. The picture shows how many times faster several workers are, measured and
simulated, and for more workers only simulated; both axes are logarithmic, so the ideal is a straight line.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks.scale.fleet import MEMORY, row_from
from benchmarks.scale.model import BEND, MOST_ERROR, comparison, curves, goal
from benchmarks.scale.server import layer_bytes

if TYPE_CHECKING:
    from benchmarks.scale.fleet import Row

LEAST_SPEEDUP = 0.85  # for each worker
MOST_MB = 250
MOST_MOVED = 1.1  # of the bytes of a run without losses
CARRIER_NAMES = {"work": "`wherry work`", "dask": "Dask", "convert": "one process"}


def measured_table(found: Mapping[str, Any]) -> str:
    """The rows of the curves, with the times of the simulation."""
    head = ("carrier", "workers", "units, s", "faster, for each worker", "simulated, s", "memory each, MB",
            "start, s", "commit, s", "CPU, s a GB", "same digest")  # fmt: skip
    rows = [row for row in found["rows"] if _is_curve(row)]
    return table(head, [_curve_cells(found, row) for row in rows])


def faults(found: Mapping[str, Any]) -> str:
    """The rows of which workers were killed and paused."""
    head = ("carrier", "GB", "workers", "killed", "paused", "units, s", "simulated, s", "bytes moved",
            "memory each, MB", "same digest")  # fmt: skip
    return table(head, [_fault_cells(found, row) for row in found["rows"] if row["row"]["killed"]])


def simulated_table(found: Mapping[str, Any]) -> str:
    """The curves of the simulation."""
    curves = found["curves"]
    head = (
        "workers",
        *(f"{_title(one['title'])}, min" for one in curves),
        *(f"{_title(one['title'])}, for each" for one in curves),
    )
    rows = [
        [
            str(points[0]["workers"]),
            *(f"{point['seconds'] / 60:.1f}" for point in points),
            *(bold(f"{point['efficiency']:.2f}", point["efficiency"] >= BEND) for point in points),
        ]
        for points in zip(*(one["points"] for one in curves), strict=True)
    ]
    return table(head, rows)


def short(found: Mapping[str, Any]) -> str:
    """The table of README: speed-up and memory by number of workers."""
    rows = [row for row in found["rows"] if _is_curve(row)]
    fleets = sorted({row["row"]["workers"] for row in rows})
    head = (
        "carrier",
        *(f"{count} workers" if count > 1 else "1 worker" for count in fleets),
        "memory each",
        "20 % killed, one paused",
    )
    lines: list[list[str]] = []
    for carrier in dict.fromkeys(row["row"]["carrier"] for row in rows):
        own = {row["row"]["workers"]: row for row in rows if row["row"]["carrier"] == carrier}
        peak = max(row["peak"] for row in own.values()) / 1e6
        lost = next(
            (row for row in found["rows"] if row["row"]["killed"] and row["row"]["carrier"] == carrier), None
        )
        after = "" if lost is None else f"{moved_ratio(lost):.3f}× the bytes, {_same(found, lost)}"
        cells = [
            f"{own[1]['seconds'] / own[count]['seconds']:.2f}×" if count in own else "" for count in fleets
        ]
        lines.append([CARRIER_NAMES[carrier], *cells, f"{peak:.0f} MB", after])
    return table(head, lines)


def problems(found: Mapping[str, Any]) -> list[str]:
    """What is not reached."""
    rows = [f"{one['row']}: {one['reason']}" for one in found["failed"]]
    rows += [
        f"the simulation differs by {one['error']:+.0%} from {one['carrier']}, {one['workers']} workers"
        for one in found["comparison"]
        if abs(one["error"]) > MOST_ERROR
    ]
    for row in found["rows"]:
        words = f"{row['row']['carrier']}, {row['row']['workers']} workers"
        checks = {
            f"speed-up of {words}": not _is_curve(row) or speedup(found, row) >= LEAST_SPEEDUP,
            f"memory of {words}": row["row"]["carrier"] == "convert" or row["peak"] <= MOST_MB * 1e6,
            f"digest of {words}": _same(found, row) == "same digest",
            f"bytes moved by {words}": not row["row"]["killed"] or moved_ratio(row) <= MOST_MOVED,
        }
        rows += [name for name, reached in checks.items() if not reached]
    if not found.get("disk", {"same_digest": True})["same_digest"]:
        rows.append("digest on SeaweedFS")
    if max(found["goal"]["seconds"].values()) > found["goal"]["required"]:
        rows.append("1 TB on 16 workers in 12 minutes, simulated")
    return rows


def speedup(found: Mapping[str, Any], row: Mapping[str, Any]) -> float:
    """How many times faster a row is than that of one worker, divided by its workers."""
    one = next(
        (other for other in found["rows"] if _is_curve(other) and other["row"]["workers"] == 1
         and other["row"]["carrier"] == row["row"]["carrier"]), row,
    )  # fmt: skip
    return (
        one["seconds"]
        / row["seconds"]
        / row["row"]["workers"]
        * (1 if one is not row else row["row"]["workers"])
    )


def moved_ratio(row: Mapping[str, Any]) -> float:
    """Bytes that all workers read and wrote, divided by those of the checkpoint, each way."""
    whole = layer_bytes(row["row"]["size"], row["row"]["units"]) * row["row"]["units"]
    return (row["bytes_in"] + row["bytes_out"]) / (2 * whole)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of Markdown, the first column of which is text."""
    rule = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, rule, *rows))


def bold(text: str, reached: bool) -> str:
    """A number, bold where it misses its goal."""
    return text if reached else f"**{text}**"


def _is_curve(row: Mapping[str, Any]) -> bool:
    return row["row"]["carrier"] != "convert" and not row["row"]["killed"]


def _curve_cells(found: Mapping[str, Any], row: Mapping[str, Any]) -> list[str]:
    each, peak = speedup(found, row), row["peak"] / 1e6
    return [
        CARRIER_NAMES[row["row"]["carrier"]], str(row["row"]["workers"]), f"{row['seconds']:.1f}",
        bold(f"{each:.2f}", each >= LEAST_SPEEDUP), _simulated_cell(found, row), bold(f"{peak:.0f}", peak <= MOST_MB),
        f"{row['start']:.0f}", f"{row['commit']:.0f}",
        f"{(row['worker_cpu'] + row['double_cpu']) / row['row']['size'] * 1e9:.0f}", _yes(found, row),
    ]  # fmt: skip


def _fault_cells(found: Mapping[str, Any], row: Mapping[str, Any]) -> list[str]:
    peak, what = row["peak"] / 1e6, row["row"]
    return [
        CARRIER_NAMES[what["carrier"]], f"{what['size'] / 1e9:.2g}", str(what["workers"]), str(what["killed"]),
        str(what["paused"]), f"{row['seconds']:.1f}", _simulated_cell(found, row),
        bold(f"{moved_ratio(row):.3f}×", moved_ratio(row) <= MOST_MOVED),
        bold(f"{peak:.0f}", peak <= MOST_MB), _yes(found, row),
    ]  # fmt: skip


def _simulated_cell(found: Mapping[str, Any], row: Mapping[str, Any]) -> str:
    fields = ("carrier", "workers", "killed")
    own = [one for one in found["comparison"] if all(one[name] == row["row"][name] for name in fields)]
    if not own:
        return ""
    return bold(f"{own[0]['simulated']:.1f} ({own[0]['error']:+.0%})", abs(own[0]["error"]) <= MOST_ERROR)


def _yes(found: Mapping[str, Any], row: Mapping[str, Any]) -> str:
    return bold("yes" if _same(found, row) == "same digest" else "no", _same(found, row) == "same digest")


def _same(found: Mapping[str, Any], row: Mapping[str, Any]) -> str:
    """Whether the digest of a row is that of one process."""
    alone = [one["digest"] for one in found["rows"]
             if one["row"]["carrier"] == "convert" and one["row"]["size"] == row["row"]["size"]
             and one["row"]["units"] == row["row"]["units"]]  # fmt: skip
    if not alone:
        return "not compared"
    return "same digest" if row["digest"] == alone[0] else "**another digest**"


def _title(name: str) -> str:
    return {"work": "`work`", "work, looking at all claims": "`work`, all claims", "dask": "Dask"}[name]


_WIDTH, _HEIGHT, _PANEL, _TOP, _SIDE, _GAP = 1200, 470, 480, 70, 320, 130
_INK, _GREY, _GRID = "#222222", "#555555", "#e2e2e2"
_COLOURS = {"work": "#2a7f62", "dask": "#b3432b", "work, looking at all claims": "#8fbfae"}


class Line(NamedTuple):
    """One curve: its name, number of workers and speed-up of each point, and whether it was simulated."""

    name: str
    points: Sequence[tuple[float, float]]
    simulated: bool


def svg(found: Mapping[str, Any], place: str) -> str:
    """Both panels.

    Args:
        found: the results, with `comparison` and `curves`.
        place: where and when they were measured.
    """
    left = [*_measured_lines(found, "measured", False), *_measured_lines(found, "simulated", True)]
    right = [Line(one["title"], _speedups(one["points"], "seconds"), True) for one in found["curves"]]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#ffffff"/>',
        _text(12, 22, "How many times faster several workers are than one", size=15),
        _text(12, 40, f"dots: measured · lines: simulated · grey: ideal · {place}", _GREY),
        *_panel(60, "measured on this machine, and simulated", left),
        *_panel(
            60 + _PANEL + _GAP,
            f"simulated: {found['curves'][0]['size'] / 1e12:g} TB, 400 MB/s a worker",
            right,
        ),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _measured_lines(found: Mapping[str, Any], field: str, simulated: bool) -> list[Line]:
    lines: list[Line] = []
    for carrier in dict.fromkeys(row["carrier"] for row in found["comparison"]):
        rows = [row for row in found["comparison"] if row["carrier"] == carrier and not row["killed"]]
        lines.append(Line(carrier, _speedups(rows, field), simulated))
    return lines


def _speedups(rows: Sequence[Mapping[str, Any]], field: str) -> list[tuple[float, float]]:
    return [(row["workers"], rows[0][field] / row[field]) for row in rows]


def _panel(x: int, title: str, lines: Sequence[Line]) -> list[str]:
    most = max([2.0, *(point[0] for line in lines for point in line.points)])
    bottom = _TOP + _SIDE

    def at(workers: float, times: float) -> tuple[float, float]:
        return x + _PANEL * math.log2(workers) / math.log2(most), bottom - _SIDE * math.log2(
            max(times, 1)
        ) / math.log2(most)

    parts = [_text(x, _TOP - 10, title, _GREY, size=13)]
    for step in range(int(math.log2(most)) + 1):
        across, up = at(2**step, 2**step)
        parts += [
            f'<line x1="{across:.1f}" y1="{_TOP}" x2="{across:.1f}" y2="{bottom}" stroke="{_GRID}"/>',
            f'<line x1="{x}" y1="{up:.1f}" x2="{x + _PANEL}" y2="{up:.1f}" stroke="{_GRID}"/>',
            _text(across, bottom + 18, f"{2**step}", _GREY, anchor="middle"),
            _text(x - 6, up + 4, f"{2**step}×", _GREY, anchor="end"),
        ]
    parts.append(_line([at(1, 1), at(most, most)], "#bbbbbb", "4 3"))
    parts.append(_text(x + _PANEL / 2, bottom + 36, "workers", _GREY, anchor="middle"))
    names = list(dict.fromkeys(line.name for line in lines))
    for number, name in enumerate(names):
        parts.append(_text(x + 12, _TOP + 20 + 16 * number, f"— {name}", _COLOURS[name]))
    for line in lines:
        places = [at(*point) for point in line.points]
        if line.simulated:
            parts.append(_line(places, _COLOURS[line.name], "none"))
        else:
            parts += [
                f'<circle cx="{a:.1f}" cy="{b:.1f}" r="4" fill="{_COLOURS[line.name]}"/>' for a, b in places
            ]
    return parts


def _line(places: Sequence[tuple[float, float]], colour: str, dashes: str) -> str:
    points = " ".join(f"{a:.1f},{b:.1f}" for a, b in places)
    return f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2" stroke-dasharray="{dashes}"/>'


def _text(
    x: float, y: float, words: str, colour: str = _INK, *, anchor: str = "start", size: int = 12
) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text {place} fill="{colour}" font-size="{size}">{escape(words)}</text>'


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
    missed = problems(whole)
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
    if missed := problems(found):
        parts.append("Not reached: " + "; ".join(missed) + ".")
    return "\n\n".join(parts) + "\n"


def docs_text(found: Mapping[str, Any]) -> str:
    """The tables of docs/many-machines.md."""
    parts = [
        f"Measured: {place(found)}.",
        measured_table(found),
        faults(found),
        *([_disk_words(found["disk"])] if "disk" in found else []),
        f"Simulated: {SIMULATED_BYTES / 1e12:g} TB, units of 1 GiB, 400 MB/s a worker, with read-back by the workers:",
        simulated_table(found),
        _goal_words(found["goal"]) + _model_words(found),
    ]
    return "\n\n".join(part for part in parts if part)


def readme_text(found: Mapping[str, Any]) -> str:
    """The table of README."""
    minutes = max(found["goal"]["seconds"].values()) / 60
    alone = found["goal"]["seconds_commit_alone"] / 60
    return (
        f"{short(found)}\n\nMeasured: {place(found)}. Simulated, 1 TB, 16 workers of 400 MB/s, three killed: "
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
    judged = bold(f"{work:.1f}", work <= required), bold(f"{dask:.1f}", dask <= required)
    return (
        f"The goal, 1 TB on 16 workers of which three are killed, in {required:.0f} minutes with read-back: simulated "
        f"{judged[0]} minutes with `wherry work` and {judged[1]} with Dask; {alone:.0f} if the commit read the target "
        "back alone."
    )
