"""pictures: the two pictures of the pages, as SVG without a script: the timeline of a run, and a bar for a share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from wherry.site.shell import text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from wherry.catalog.entries import CatalogEntry

_WIDTH, _HEIGHT, _MARGIN = 1000, 44, 12


def timeline(entries: Sequence[CatalogEntry]) -> str:
    """The steps of a run along a line; a hollow mark is a checkpoint that was deleted.

    Args:
        entries: its checkpoints; those without a step are not drawn.
    """
    steps = [entry.step for entry in entries if entry.step is not None]
    if not steps:
        return ""
    first, last = min(steps), max(steps)
    marks = "".join(_mark(entry, first, last) for entry in entries if entry.step is not None)
    between = "step" if first == last else "steps"
    label = f"{between} {first:,}" if first == last else f"{between} {first:,} to {last:,}"
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{text(label)}">'
        f'<line x1="{_MARGIN}" x2="{_WIDTH - _MARGIN}" y1="22" y2="22" stroke-width="3"/>{marks}</svg>'
        f'<p class="facts">{text(label)}</p>'
    )


def _mark(entry: CatalogEntry, first: int, last: int) -> str:
    share = ((entry.step or 0) - first) / (last - first) if last > first else 0.5
    at = _MARGIN + share * (_WIDTH - 2 * _MARGIN)
    state = ' class="gone"' if entry.gone else ""
    title = f"step {entry.step}, {entry.format}"
    return f'<circle cx="{at:.1f}" cy="22" r="9"{state}><title>{text(title)}</title></circle>'


def bar(share: float) -> str:
    """A bar that is filled to a share of its width, from 0 to 1; its number is in the text next to it."""
    return (
        f'<svg viewBox="0 0 {_WIDTH} 12" preserveAspectRatio="none" height="8" aria-hidden="true">'
        f'<rect class="track" width="{_WIDTH}" height="12"/>'
        f'<rect class="bar" width="{share * _WIDTH:.0f}" height="12"/></svg>'
    )
