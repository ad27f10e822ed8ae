"""The picture: how many times faster several workers are, measured and simulated, and for more workers only simulated.

Written as SVG by hand, as in `benchmarks.plot`; both axes are logarithmic, so the ideal is a straight line.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

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
