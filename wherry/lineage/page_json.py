r"""page_json: checkpoints and conversions as the JSON of a lineage page, with bounded and harmless texts.

Names come from checkpoints, which are untrusted input. No text can close the script block that holds the JSON.
Invisible characters and those that change the writing direction are escaped (`\u202e`), so that no name looks like
another. The JSON of one checkpoint is bounded, however many places it has and however long its names are.
"""

from __future__ import annotations

import json
import unicodedata
from typing import TYPE_CHECKING, Any

from wherry.errors import printable

if TYPE_CHECKING:
    from collections.abc import Mapping

    from wherry.ledger.nodes import LineageNode
    from wherry.ledger.record import Edge

LONGEST = 2000  # maximum characters of one text
_LARGE = 50_000  # bytes of one checkpoint from which its texts are shortened further
_SHORTER = 300  # maximum characters of one text then
_ROWS = 50  # places of a checkpoint that are listed, and as many registrations; a tenth if it is large
# Unicode categories of invisible characters and of those that change how others are displayed.
_HIDDEN = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})


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
    """A text that is visible throughout and not longer than so many characters of the original."""
    if len(text) <= longest:
        return escape_unseen(text)
    return f"{escape_unseen(text[:longest])}… ({len(text):,} characters)"


def escape_unseen(text: str, kept: str = "") -> str:
    """A text with escapes for characters that cannot be seen; those in `kept` stay."""
    if text.isascii() and text.isprintable():  # then no character is hidden
        return text
    return "".join(f"\\u{ord(char):04x}" if _is_hidden(char) and char not in kept else char for char in text)


def _is_hidden(char: str) -> bool:
    """Whether nobody sees a character: by its category, or as a selector of variations or a filler."""
    return unicodedata.category(char) in _HIDDEN or printable(char) != char


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
