"""The plot: a bar for each comparison, as long as the peer's time divided by ours, with a mark where it must reach.

Written as SVG by hand, since a plot of bars is not worth a plotting library; it is readable on light and dark pages.
"""

from __future__ import annotations

import math
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.judge import Verdict

_WIDTH, _LEFT, _RIGHT, _TOP, _STEP, _BAR = 900, 390, 60, 56, 30, 11
_REACHED, _MISSED, _READ_BACK, _MARK, _GREY = "#2a7f62", "#b3432b", "#8fbfae", "#222222", "#555555"


def svg(verdicts: Sequence[Verdict], place: str) -> str:
    """The plot of all pairs; a pair that was not measured has its name and no bar."""
    pairs = [one for one in verdicts if one.peer]
    longest = max([1.0, *(max(one.measured or 0, one.bound) for one in pairs)])
    scale = (_WIDTH - _LEFT - _RIGHT) / longest
    height = _TOP + _STEP * len(pairs) + 34
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif">',
        f'<rect width="{_WIDTH}" height="{height}" fill="#ffffff"/>',
        _text(12, 22, "How many times faster than the peer", size=15),
        _text(12, 40, f"wide: --verify none · narrow: with read-back · line: required · {place}", _GREY),
        *_axis(longest, scale, height),
        *(part for at, one in enumerate(pairs) for part in _bars(one, _TOP + _STEP * at, scale)),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


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
    if one.measured is None:
        return [*parts, _text(_LEFT + 6, top + _BAR, "not measured", _MISSED)]
    parts.append(_bar(top, _BAR, one.measured * scale, _REACHED if one.reached else _MISSED))
    if one.default_ratio is not None:
        parts.append(_bar(top + _BAR + 1, 6, one.default_ratio * scale, _READ_BACK))
    mark = _LEFT + one.bound * scale
    end = _LEFT + max(one.measured, one.bound) * scale
    return [
        *parts,
        f'<line x1="{mark:.1f}" y1="{top - 3}" x2="{mark:.1f}" y2="{top + 20}" stroke="{_MARK}" stroke-width="2"/>',
        _text(end + 6, top + _BAR - 1, f"{one.measured:.1f}×"),
    ]


def _bar(top: int, height: int, width: float, colour: str) -> str:
    return f'<rect x="{_LEFT}" y="{top}" width="{width:.1f}" height="{height}" fill="{colour}"/>'


def _text(
    x: float, y: float, words: str, colour: str = _MARK, *, anchor: str = "start", size: int = 12
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y}" fill="{colour}" text-anchor="{anchor}" font-size="{size}">'
        f"{escape(words)}</text>"
    )
