"""spread: shares out the moves of one tensor whose chunks lie in the files of several units. A pure function.

A move with chunks in the files of two units belongs to both: each writes the chunks that are its own. The digest of a
tensor has leaves of 4 MiB, which chunks do not respect: a unit whose moves end within a leaf also reads the moves that
hold the rest of that leaf, so that it can hash it. So units need nothing of each other, and read little twice.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import TYPE_CHECKING, NamedTuple

from wherry.core.digest import LEAF
from wherry.core.tensorspec import Span

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from wherry.units.target_files import FilesOfMove


class Share(NamedTuple):
    """The share of one unit in a tensor.

    Attributes:
        unit: its number.
        own: ranges of moves with chunks of its own.
        beside: ranges of moves that it reads for the sake of leaves.
    """

    unit: int
    own: list[Span]
    beside: list[Span]


def shares(rows: Sequence[FilesOfMove], unit_of: Mapping[str, int]) -> Iterator[Share]:
    """Share out a tensor; its moves, in their order, and the number of the unit that makes each file.

    Args:
        rows: the moves.
        unit_of: name of a file → number of its unit.
    """
    mine: dict[int, list[int]] = {}
    for number, row in enumerate(rows):
        for unit in {unit_of[name] for name in row.files}:
            mine.setdefault(unit, []).append(number)
    starts, stops = [row.span.start for row in rows], [row.span.stop for row in rows]
    for unit in sorted(mine):
        own = mine[unit]
        more: set[int] = set()
        if not rows[0].box:  # of boxes, units exchange what they have of a leaf
            for span in _join_spans(rows, own):
                first = bisect_right(stops, span.start // LEAF * LEAF)
                last = bisect_left(starts, -(-span.stop // LEAF) * LEAF)
                more.update(range(first, last))
        yield Share(unit, _join_spans(rows, own), _join_spans(rows, sorted(more.difference(own))))


def _join_spans(rows: Sequence[FilesOfMove], numbers: Sequence[int]) -> list[Span]:
    """The ranges of some moves, adjacent ones joined."""
    found: list[Span] = []
    for number in numbers:
        span = rows[number].span
        if found and found[-1].stop == span.start:
            found[-1] = Span(found[-1].start, span.stop)
        else:
            found.append(span)
    return found
