"""The tables of a run, for infra/bench-scale.md, the docs and README; a number that misses its goal is bold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.scale.content import layer_bytes
from benchmarks.scale.forecast import BEND, MOST_ERROR

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
