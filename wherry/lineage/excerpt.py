"""excerpt: what one HTML page shows of a lineage, so that the page stays small however large the lineage is.

A checkpoint may have ten thousand results. The page then has the checkpoints nearest to the requested one, at
most `NEIGHBOURS` on each side of a checkpoint: first those that are registered or failed a verification, then those
that were converted last. It states how many more each of them has, and lists all others by name and digest in a compact
form, which its search reads. What does not fit in that list either is counted.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any

from wherry.core.units import short
from wherry.ledger.replay import SOUND
from wherry.lineage.page_json import edge_json, json_text, node_json, short_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from wherry.ledger.nodes import LineageNode
    from wherry.ledger.record import Edge
    from wherry.lineage.lineage import LineageTree

NEIGHBOURS = 200  # checkpoints shown on each side of a checkpoint, if not all can be shown
_SHOWN = 800_000  # bytes of the checkpoints and conversions that are shown
_NAME = 300  # characters of the name of a checkpoint that is only listed
_WORDS = 5  # registrations and further places of a checkpoint that is only listed
_WORD = 100  # characters of one of its other texts
_FORMATS = 50  # formats that are named in the list


@dataclass(slots=True)
class Excerpt:
    """The part of a lineage that a page shows.

    Attributes:
        nodes: digest → its JSON.
        edges: conversion → its JSON; only conversions between shown checkpoints.
        room: bytes that are left.
    """

    nodes: dict[str, str] = field(default_factory=dict[str, str])
    edges: dict[Edge, str] = field(default_factory=dict["Edge", str])
    room: int = _SHOWN

    def add(self, node: LineageNode, edge: Edge | None = None) -> bool:
        """Add a checkpoint, and the conversion that leads to it; False if there is no room for them."""
        text, line = node_json(node), edge_json(edge) if edge else ""
        if len(text) + len(line) > self.room:
            return False
        self.nodes[node.checkpoint_digest] = text
        if edge is not None:
            self.edges[edge] = line
        self.room -= len(text) + len(line) + 2
        return True

    def connect(self, edges: Iterable[Edge]) -> None:
        """Add conversions between shown checkpoints, as long as there is room."""
        for edge in edges:
            if edge not in self.edges and edge.source in self.nodes and edge.target in self.nodes:
                line = edge_json(edge)
                if len(line) > self.room:
                    return
                self.edges[edge] = line
                self.room -= len(line) + 1


def excerpt(tree: LineageTree) -> Excerpt:
    """The whole lineage if it fits, else the checkpoints nearest to its root."""
    whole = _nearest(tree, (tree.root, *tree.nodes), len(tree.nodes))
    if len(whole.nodes) == len(tree.nodes) and len(whole.edges) == len(tree.edges):
        return whole
    return _nearest(tree, (tree.root,), NEIGHBOURS)


def _nearest(tree: LineageTree, seeds: Iterable[str], most: int) -> Excerpt:
    """What is connected to the seeds, as much as there is room for: breadth first, so many neighbours on each side."""
    # Digest → its results, and digest → its sources, each with the last conversion; the last recorded come first.
    below = defaultdict[str, "dict[str, Edge]"](dict)
    above = defaultdict[str, "dict[str, Edge]"](dict)
    for edge in reversed(tree.edges):
        below[edge.source].setdefault(edge.target, edge)
        above[edge.target].setdefault(edge.source, edge)
    found = Excerpt()
    for seed in seeds:
        if seed not in found.nodes and not (
            found.add(tree.nodes[seed]) and _around(found, tree, (below, above), seed, most)
        ):
            break
    found.connect(reversed(tree.edges))
    return found


def _around(
    found: Excerpt,
    tree: LineageTree,
    sides: tuple[Mapping[str, Mapping[str, Edge]], ...],
    seed: str,
    most: int,
) -> bool:
    """Add what is connected to a checkpoint; False when there is no more room."""
    waiting = deque([seed])
    while waiting:
        digest = waiting.popleft()
        for side in sides:
            near = sorted(side.get(digest, {}).items(), key=lambda item: not _is_notable(tree.nodes[item[0]]))
            for other, edge in islice(near, most):
                if other in found.nodes:
                    continue
                if not found.add(tree.nodes[other], edge):
                    return False
                waiting.append(other)
    return True


def _is_notable(node: LineageNode) -> bool:
    failed = node.verified is not None and node.verified.verdict not in SOUND
    return failed or any(row.version for row in node.registrations)


def more_of(tree: LineageTree, shown: Mapping[str, str]) -> dict[str, list[int]]:
    """Digest of a shown checkpoint → how many of its sources and of its results are not shown."""
    found = defaultdict[str, tuple[set[str], set[str]]](lambda: (set(), set()))
    for edge in tree.edges:
        if edge.target in shown and edge.source not in shown:
            found[edge.target][0].add(edge.source)
        if edge.source in shown and edge.target not in shown:
            found[edge.source][1].add(edge.target)
    return {digest: [len(side) for side in sides] for digest, sides in found.items()}


def totals(tree: LineageTree) -> dict[str, Any]:
    """The numbers of the whole lineage."""
    versions = Counter(
        f"{row.name} v{row.version}"
        for node in tree.nodes.values()
        for row in node.registrations
        if row.version
    )
    verdicts = [node.verified.verdict for node in tree.nodes.values() if node.verified is not None]
    return {
        "nodes": len(tree.nodes),
        "edges": len(tree.edges),
        "lossy": sum(not edge.lossless for edge in tree.edges),
        "failed": sum(verdict not in SOUND for verdict in verdicts),
        "versions": len(versions),
        "models": [short_text(name, _NAME) for name in islice(versions, 2)],
    }


def hidden_json(nodes: Iterable[LineageNode], room: int) -> str:
    """The checkpoints that are only listed, as many as there is room for, as JSON.

    `rows` are in the order of their names: short digest, number of characters that the name has in common with the
    name before it, the rest of the name, step, index of the format in `formats`, and further words to search for.
    `unlisted` is the number of those for which there is no room.
    """
    ordered = sorted((_name(node), node.checkpoint_digest, node) for node in nodes)
    names = dict.fromkeys(node.format for _name, _digest, node in ordered)
    formats = {name: index for index, name in enumerate(islice(names, _FORMATS))}
    head, rows, previous = json_text(list(formats), _WORD), list[str](), ""
    left = room - len(head) - 100  # for the other characters
    for name, digest, node in ordered:
        pairs = enumerate(zip(previous, name, strict=False))
        shared = next((index for index, (a, b) in pairs if a != b), min(len(previous), len(name)))
        words = " ".join(_words(node, name))
        row = (short(digest), shared, name[shared:], node.step, formats.get(node.format))
        text = json_text((*row, words) if words else row)
        left -= len(text) + 1
        if left < 0:
            break
        rows.append(text)
        previous = name
    return f'{{"formats":{head},"rows":[{",".join(rows)}],"unlisted":{len(ordered) - len(rows)}}}'


def _name(node: LineageNode) -> str:
    """The URI at which a checkpoint is, or was."""
    present = (place.uri for place in node.places if not place.gone)
    return _tail(next(present, node.places[0].uri if node.places else ""))


def _tail(uri: str) -> str:
    """A URI, or the end of a long one, where URIs differ."""
    return short_text(uri if len(uri) <= _NAME else f"…{uri[-_NAME:]}")


def _words(node: LineageNode, name: str) -> Iterator[str]:
    """Further words by which a checkpoint is found: its model versions, its other places and what is wrong with it."""
    versions = (f"{row.name} v{row.version}" for row in node.registrations if row.version)
    yield from (short_text(text, _WORD) for text in islice(versions, _WORDS))
    yield from islice((uri for place in node.places if (uri := _tail(place.uri)) != name), _WORDS)
    if node.places and all(place.gone for place in node.places):
        yield "deleted"
    if node.verified is not None and node.verified.verdict not in SOUND:
        yield short_text(node.verified.verdict, _WORD)
