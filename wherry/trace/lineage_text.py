"""text: a lineage as a plain-text tree, with nodes and edges on one line each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from wherry.core.units import plural, short
from wherry.errors import printable
from wherry.store.local_store import is_live
from wherry.trace.nearest import by_end, count_by_end

if TYPE_CHECKING:
    from wherry.ledger.nodes import LineageNode
    from wherry.ledger.record import Edge
    from wherry.trace.lineage import LineageTree

DEEPEST = 40  # levels that are indented; deeper lines state their distance, as a chain may be thousands long


def render(tree: LineageTree) -> str:
    """The tree as plain text."""
    root = tree.nodes[tree.root]
    lines = [title(root), *(f"  {line}" for line in facts(root))]
    for headline, up in (("converted from", True), ("converted to", False)):
        branches = list(_branches(tree, up=up))
        if branches:
            lines += [headline, *branches]
    return join_lines([*lines, *omission_line(tree.edges, tree.rest)])


def join_lines(lines: Iterable[str]) -> str:
    """Lines as one text; a line end within a name does not begin another line."""
    return "\n".join(map(printable, lines))


def omission_line(shown: Sequence[object], rest: Sequence[object]) -> Iterator[str]:
    """The line that says that not all conversions are shown."""
    if rest:
        total = len(shown) + len(rest)
        yield f"{len(shown):,} of {plural(total, 'conversion')} are shown; add --all to see every one"


class _Row(NamedTuple):
    """A conversion below a node, or the number of those that are not shown."""

    what: Edge | int
    bar: str
    depth: int
    last: bool


def _branches(tree: LineageTree, *, up: bool) -> Iterator[str]:
    """The lines below the root; a subtree that several paths reach is printed once."""
    edges, more = by_end(tree.edges, up=up), count_by_end(tree.rest, up=up)

    def rows(digest: str, bar: str, depth: int) -> list[_Row]:
        """The node's edges in reverse order, because they are popped from the end."""
        here = [*edges.get(digest, ()), *([more[digest]] if digest in more else [])]
        return [_Row(one, bar, depth, one is here[-1]) for one in reversed(here)]

    printed, waiting = {tree.root}, rows(tree.root, "", 1)
    while waiting:  # no recursion: a chain of nightly conversions may be thousands long
        edge, bar, depth, last = waiting.pop()
        if isinstance(edge, int):
            yield f"{bar}└─ and {edge:,} more"
            continue
        other = edge.source if up else edge.target
        again = other in printed and (other in edges or other in more)
        far = f" ({plural(depth, 'conversion')} away)" if depth > DEEPEST else ""
        seen = " (see above)" if again else ""
        yield f"{bar}{'└─' if last else '├─'} {title(tree.nodes[other])}{far}{seen}"
        inner = bar + ("   " if last else "│  ")
        yield from (f"{inner}  {line}" for line in (how(edge), *facts(tree.nodes[other])))
        printed.add(other)
        waiting += [] if again else rows(other, bar if depth > DEEPEST else inner, depth + 1)


def title(node: LineageNode) -> str:
    """A node in one line."""
    step = "" if node.step is None else f", step {node.step}"
    version = f" ({node.format_version})" if node.format_version else ""
    tensors = plural(node.tensors, "tensor")
    return f"{short(node.checkpoint_digest)} {node.format}{version}: {node.kind}, {tensors}{step}"


def facts(node: LineageNode) -> Iterator[str]:
    """Further lines about a node: places, registrations, the last verification."""
    for place in node.places:
        state = " (memory of a training run; not on disk)" if is_live(place.uri) else ""
        yield place.uri + (f" (missing since {place.gone})" if place.gone else state)
    for row in node.registrations:
        yield (
            f"registered as {row.name} version {row.version} in {row.registry}"
            if row.version
            else (f"registration as {row.name} in {row.registry} is {row.state}")
        )
    if node.verified is not None:
        yield f"verified at level {node.verified.level}: {node.verified.verdict} ({node.verified.time})"


def how(edge: Edge) -> str:
    """A conversion in one line."""
    origin = "its sidecar" if edge.statement is None else f"statement {edge.statement}"
    exactness = "lossless" if edge.lossless else "lossy"
    return f"{exactness}, plan {short(edge.plan_digest)}, {edge.time} ({origin})"
