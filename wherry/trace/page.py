r"""The lineage as one HTML page: a graph, the details of each checkpoint and a search, in a single file.

It uses no network: style and script are inline, and its content security policy allows only these two, by their hashes.
Names come from checkpoints, which are untrusted input: they are data in a JSON block, and are inserted as text, never
as markup. No text can close the script block that holds the JSON. Invisible characters and those that change the
writing direction are escaped (`\u202e`), so that no name looks like another. Without JavaScript the plain-text tree is
shown.

The page has at most `MOST_BYTES`, however large the lineage is, however many places a checkpoint has and however long
its names are. A checkpoint may have ten thousand results. The page then has the checkpoints nearest to the requested
one, at most `NEIGHBOURS` on each side of a checkpoint: first those that are registered or failed a verification, then
those that were converted last. It states how many more each of them has, and lists all others by name and digest in a
compact form, which its search reads. Checkpoints that do not fit in that list either are only counted.
"""

from __future__ import annotations

import html
import json
import re
import unicodedata
from base64 import b64encode
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import field, replace
from hashlib import sha256
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wherry.core.lazy_dataclass import dataclass
from wherry.core.receipt import utc_now
from wherry.core.units import plural, short
from wherry.errors import printable
from wherry.ledger.replay import SOUND
from wherry.trace.lineage_text import render

if TYPE_CHECKING:
    from wherry.ledger.nodes import LineageNode
    from wherry.ledger.record import Edge
    from wherry.trace.lineage import LineageTree


SCHEMA = 1
MOST_BYTES = 2_000_000  # of the whole page
_TEXT = 200_000  # bytes of the plain-text tree
# Stands for the checkpoints that are only listed. A name cannot contain it: the JSON has no `<`, and the rest of the
# page is escaped.
_HIDDEN = "<hidden>"
_PARTS = Path(__file__).parent / "pages"
_SCRIPTS = ("lineage_layout.js", "lineage.js", "lineage_hidden.js", "lineage_details.js")


def page(tree: LineageTree) -> str:
    """The lineage as the text of one HTML file; write it as UTF-8.

    Args:
        tree: the result of `wherry.trace.lineage.show`.
    """
    style = (_PARTS / "lineage.css").read_text("utf-8")
    # One function, so that the names of the parts do not conflict with those of the browser.
    parts = "\n".join((_PARTS / name).read_text("utf-8") for name in _SCRIPTS)
    script = f'(() => {{\n"use strict";\n{parts}\n}})();'
    allowed = [
        f"{name} 'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"
        for name, text in (("style-src", style), ("script-src", script))
    ]
    shown, root = excerpt(tree), tree.nodes[tree.root]
    uri = root.places[0].uri if root.places else ""
    name = "/".join([part for part in uri.split("/") if part][-2:]) or short(root.checkpoint_digest)
    fields = {
        "schema": str(SCHEMA),
        "root": json_text(tree.root),
        "totals": json_text(totals(tree)),
        "more": json_text(more_of(tree, shown.nodes)),
        "nodes": f"[{','.join(shown.nodes[digest] for digest in tree.nodes if digest in shown.nodes)}]",
        "edges": f"[{','.join(shown.edges[edge] for edge in tree.edges if edge in shown.edges)}]",
        "hidden": _HIDDEN,
    }
    texts = {
        "title": html.escape(short_text(f"Lineage of {name} ({root.format})")),
        "policy": "; ".join(["default-src 'none'", *allowed, "base-uri 'none'", "form-action 'none'"]),
        "generator": html.escape(f"wherry {version('wherry')}"),
        "made": html.escape(utc_now().replace("T", " ")),
        "text": _plain(tree, shown),
        "style": style,
        "script": script,
        "data": "{" + ",".join(f'"{field}":{text}' for field, text in fields.items()) + "}",
    }
    template = (_PARTS / "lineage.html").read_text("utf-8")
    whole = re.sub(r"\{\{(\w+)\}\}", lambda found: texts[found[1]], template)
    rest = (node for digest, node in tree.nodes.items() if digest not in shown.nodes)
    hidden = hidden_json(rest, MOST_BYTES - len(whole.encode()))
    return whole.replace(_HIDDEN, hidden, 1)


def _plain(tree: LineageTree, shown: Excerpt) -> str:
    """The shown part as escaped text, cut at the end of a line."""
    nodes = {digest: node for digest, node in tree.nodes.items() if digest in shown.nodes}
    part = replace(tree, nodes=nodes, edges=tuple(edge for edge in tree.edges if edge in shown.edges))
    text = html.escape("\n".join(map(escape_unseen, render(part).split("\n"))))
    cut = text.encode()[:_TEXT].decode(errors="ignore")
    if cut == text and len(nodes) == len(tree.nodes):
        return text
    kept = cut if cut == text else cut.rpartition("\n")[0]
    return (
        f"{kept}\n(not all of {plural(len(tree.nodes), 'checkpoint')}; `wherry lineage show` prints the rest)"
    )


# ---- what is shown ---------------------------------------------------------------------------------------------------


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
    """The checkpoints nearest to the seeds, at most `most`: breadth first, with a limited number of neighbours each."""
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


# ---- checkpoints and conversions as JSON -----------------------------------------------------------------------------


LONGEST = 2000  # maximum characters of one text
_LARGE = 50_000  # bytes of one checkpoint from which its texts are shortened further
_SHORTER = 300  # maximum characters of one text then
_ROWS = 50  # places of a checkpoint that are listed, and as many registrations; a tenth if it is large
# Unicode categories of invisible characters and of those that change how others are displayed.
_UNSEEN = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})


def node_json(node: LineageNode) -> str:
    """A checkpoint; `more` has the numbers of places and registrations that are left out."""
    data = node.to_json()
    text = json_text(_with_first(data, _ROWS))
    return text if len(text) <= _LARGE else json_text(_with_first(data, _ROWS // 10), _SHORTER)


def edge_json(edge: Edge) -> str:
    """A conversion."""
    return json_text(edge.to_json())


def json_text(value: Any, longest: int = LONGEST) -> str:
    """A value as ASCII JSON without `<`, so that no name can end the script block."""
    text = json.dumps(_visible(value, longest), separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def short_text(text: str, longest: int = LONGEST) -> str:
    """A text in which every character is visible, of at most this many characters of the original."""
    if len(text) <= longest:
        return escape_unseen(text)
    return f"{escape_unseen(text[:longest])}… ({len(text):,} characters)"


def escape_unseen(text: str) -> str:
    """A text with escapes for characters that cannot be seen."""
    if text.isascii() and text.isprintable():  # then no character is hidden
        return text
    return "".join(f"\\u{ord(char):04x}" if _is_hidden(char) else char for char in text)


def _is_hidden(char: str) -> bool:
    """Whether nobody sees a character: by its category, or as a selector of variations or a filler."""
    return unicodedata.category(char) in _UNSEEN or printable(char) != char


def _with_first(data: Mapping[str, Any], most: int) -> dict[str, Any]:
    cut = {name: data[name][:most] for name in ("places", "registrations")}
    more = {name: len(data[name]) - most for name in cut if len(data[name]) > most}
    return {**data, **cut, **({"more": more} if more else {})}


def _visible(value: Any, longest: int) -> Any:
    if isinstance(value, str):
        return short_text(value, longest)
    if isinstance(value, dict):
        mapping: Mapping[str, Any] = value
        return {name: _visible(item, longest) for name, item in mapping.items()}
    if isinstance(value, list | tuple):
        return [_visible(item, longest) for item in value]
    return value
