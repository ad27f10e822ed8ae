r"""The lineage as one HTML page: a graph, the details of each checkpoint and a search, in a single file.

It uses no network: style and script are inline, and its content security policy allows only these two, by their hashes.
Names come from checkpoints, which are untrusted input: they are data in a JSON block that no name can close, and are
inserted as text, never as markup. Invisible characters and those that change the writing direction are escaped
(`\u202e`), so that no name looks like another. Without JavaScript the plain-text tree is shown.
"""

from __future__ import annotations

import html
import json
import re
import unicodedata
from base64 import b64encode
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wherry.core.receipt import utc_now
from wherry.core.units import short
from wherry.lineage.text import render

if TYPE_CHECKING:
    from collections.abc import Mapping

    from wherry.ledger.nodes import LineageNode
    from wherry.lineage.lineage import LineageTree

SCHEMA = 1
_PARTS = Path(__file__).parent / "pages"
_SCRIPTS = ("lineage_layout.js", "lineage.js", "lineage_details.js")
_LONGEST = 2000  # maximum characters of one text
# Unicode categories of invisible characters and of those that change how others are displayed.
_HIDDEN = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})


def page(tree: LineageTree, *, made: str | None = None) -> str:
    """The lineage as the text of one HTML file; write it as UTF-8.

    Args:
        tree: the result of `wherry.lineage.lineage.show`.
        made: time of creation, UTC in ISO 8601; now by default.
    """
    style = (_PARTS / "lineage.css").read_text("utf-8")
    script = _script()
    texts = {
        "title": html.escape(_title(tree.nodes[tree.root])),
        "policy": _policy(style, script),
        "generator": html.escape(f"wherry {version('wherry')}"),
        "made": html.escape((made or utc_now()).replace("T", " ")),
        "text": html.escape(_seen(render(tree), "\n")),
        "style": style,
        "script": script,
        "data": _data(tree),
    }
    template = (_PARTS / "lineage.html").read_text("utf-8")
    return re.sub(r"\{\{(\w+)\}\}", lambda found: texts[found[1]], template)


def _script() -> str:
    """The parts in one function, so that their names do not conflict with those of the browser."""
    parts = "\n".join((_PARTS / name).read_text("utf-8") for name in _SCRIPTS)
    return f'(() => {{\n"use strict";\n{parts}\n}})();'


def _title(node: LineageNode) -> str:
    uri = node.places[0].uri if node.places else ""
    name = "/".join([part for part in uri.split("/") if part][-2:]) or short(node.checkpoint_digest)
    return _short(f"Lineage of {name} ({node.format})")


def _policy(style: str, script: str) -> str:
    allowed = {"style-src": style, "script-src": script}
    rules = [
        f"{name} 'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"
        for name, text in allowed.items()
    ]
    return "; ".join(["default-src 'none'", *rules, "base-uri 'none'", "form-action 'none'"])


def _data(tree: LineageTree) -> str:
    """The tree as JSON without `<`, so that no name can end the script block."""
    text = json.dumps({"schema": SCHEMA, **_visible(tree.to_json())}, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _visible(value: Any) -> Any:
    if isinstance(value, str):
        return _short(value)
    if isinstance(value, dict):
        mapping: Mapping[str, Any] = value
        return {name: _visible(item) for name, item in mapping.items()}
    if isinstance(value, list | tuple):
        return [_visible(item) for item in value]
    return value


def _short(text: str) -> str:
    if len(text) <= _LONGEST:
        return _seen(text)
    return f"{_seen(text[:_LONGEST])}… ({len(text):,} characters)"


def _seen(text: str, kept: str = "") -> str:
    return "".join(
        f"\\u{ord(char):04x}" if unicodedata.category(char) in _HIDDEN and char not in kept else char
        for char in text
    )
