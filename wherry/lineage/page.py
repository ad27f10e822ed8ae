"""The lineage as one HTML page: a graph, the details of each checkpoint and a search, in a single file.

It uses no network: style and script are inline, and its content security policy allows only these two, by their hashes.
Names come from checkpoints, which are untrusted input: they are data in a JSON block (`page_json`), and are inserted as
text, never as markup. Without JavaScript the plain-text tree is shown. The page has at most `MOST_BYTES`: of a lineage
that is larger it shows an `excerpt`, and states how much more there is.
"""

from __future__ import annotations

import html
import re
from base64 import b64encode
from dataclasses import replace
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from wherry.core.receipt import utc_now
from wherry.core.units import plural, short
from wherry.lineage.excerpt import excerpt, hidden_json, more_of, totals
from wherry.lineage.page_json import escape_unseen, json_text, short_text
from wherry.lineage.text import render

if TYPE_CHECKING:
    from wherry.lineage.excerpt import Excerpt
    from wherry.lineage.lineage import LineageTree

SCHEMA = 1
MOST_BYTES = 2_000_000  # of the whole page
_TEXT = 200_000  # bytes of the plain-text tree
# Stands for the checkpoints that are only listed. A name cannot contain it: the JSON has no `<`, and the rest of the
# page is escaped.
_HIDDEN = "<hidden>"
_PARTS = Path(__file__).parent / "pages"
_SCRIPTS = ("lineage_layout.js", "lineage.js", "lineage_hidden.js", "lineage_details.js")


def page(tree: LineageTree, *, made: str | None = None) -> str:
    """The lineage as the text of one HTML file; write it as UTF-8.

    Args:
        tree: the result of `wherry.lineage.lineage.show`.
        made: time of creation, UTC in ISO 8601; now by default.
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
        "made": html.escape((made or utc_now()).replace("T", " ")),
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
