"""nearest: the conversions of a large lineage that its text shows, so that the text stays readable.

A checkpoint may have ten thousand results. Of one checkpoint, the text then has at most `NEIGHBOURS` sources and as
many results: first those that are registered or failed a verification, then those that were converted last. It has at
most `MOST` conversions on each side of the requested checkpoint, the nearest ones. The others are counted.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from wherry.ledger.record import Edge


_Notable = Callable[[set[str]], set[str]]

NEIGHBOURS = 50  # sources and results of one checkpoint
MOST = 1000  # conversions above, and below, the requested checkpoint


def nearest(edges: Sequence[Edge], root: str, notable: _Notable) -> tuple[tuple[Edge, ...], tuple[Edge, ...]]:
    """The conversions that are shown, and the rest, both in the given order.

    Args:
        edges: the conversions, in the order in which they were recorded.
        root: digest of the requested checkpoint.
        notable: gives those of some digests that come first. It is only called for the neighbours of a checkpoint that
            has too many of them.
    """
    if len(edges) <= NEIGHBOURS:
        return tuple(edges), ()
    chosen = {edge for up in (True, False) for edge in islice(_walk(edges, root, notable, up=up), MOST)}
    return tuple(edge for edge in edges if edge in chosen), tuple(
        edge for edge in edges if edge not in chosen
    )


def by_end(edges: Iterable[Edge], *, up: bool) -> Mapping[str, list[Edge]]:
    """Digest → the conversions that lead to it, or away from it."""
    found = defaultdict[str, "list[Edge]"](list)
    for edge in edges:
        found[edge.target if up else edge.source].append(edge)
    return found


def count_by_end(edges: Iterable[Edge], *, up: bool) -> Mapping[str, int]:
    """Digest → the number of conversions that end there (`up`), or that begin there."""
    return Counter(edge.target if up else edge.source for edge in edges)


def _walk(edges: Iterable[Edge], root: str, notable: _Notable, *, up: bool) -> Iterator[Edge]:
    """The conversions in one direction, breadth first."""
    around = by_end(edges, up=up)
    waiting, seen = deque([root]), {root}
    while waiting:
        for edge in _first(around.get(waiting.popleft(), []), notable, up=up):
            yield edge
            other = edge.source if up else edge.target
            if other not in seen:
                seen.add(other)
                waiting.append(other)


def _first(edges: Sequence[Edge], notable: _Notable, *, up: bool) -> Sequence[Edge]:
    """The conversions of one checkpoint that are shown."""
    if len(edges) <= NEIGHBOURS:
        return edges
    others = [edge.source if up else edge.target for edge in edges]
    before = notable(set(others))
    last_first = sorted(range(len(edges)), key=lambda number: (others[number] not in before, -number))
    return [edges[number] for number in last_first[:NEIGHBOURS]]
