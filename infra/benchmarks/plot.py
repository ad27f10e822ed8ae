"""The plot: a bar for each comparison, as long as the peer's time divided by ours, with marks at what is required.

A dashed mark is the peer's time divided by the bound: nothing on this machine could be further right.

Written as SVG by hand, since a plot of bars is not worth a plotting library; it is readable on light and dark pages.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.judge import Verdict

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
