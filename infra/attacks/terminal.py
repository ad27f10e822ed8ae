"""What a terminal would do with the output of a verb: obey a control character of a name, or show a line that is a lie.

Every second case runs on a terminal, with its colours and its progress bar; the others on a pipe.
"""

from __future__ import annotations

import io
import re
import zlib
from collections.abc import Sequence

WIDTH = 4000  # columns: no line of a path is folded
VARIABLES = {"TERM": "xterm-256color", "COLUMNS": str(WIDTH)}
# Colours, erased lines, moves up and the hidden cursor of the progress bar; no name of the attack has one of these.
_OWN = re.compile("\x1b\\[\\?25h\r|\r(?=\x1b\\[)|\x1b\\[[0-9;]*[mKA]|\x1b\\[\\?25[lh]")
_OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff]")
_FORGED = re.compile(r"^\s*b: forged", re.MULTILINE)  # the second line of a name
_MARKUP = re.compile(r"(?<!\])MARKUP")  # a name whose markup was obeyed


class Terminal(io.StringIO):
    """Text that is taken for a terminal."""

    def isatty(self) -> bool:
        """It is."""
        return True


def on_terminal(case: str) -> bool:
    """Whether a case of this name runs on a terminal."""
    return bool(zlib.crc32(case.encode("utf-8", "surrogatepass")) % 2)


def words_for(words: Sequence[str], *, terminal: bool) -> list[str]:
    """The command line: on a terminal, its progress bar is shown."""
    return [word for word in words if not (terminal and word == "--quiet")]


def obeys(text: str) -> bool:
    """Whether a terminal would obey something in the text that is not the program's own, or show a forged line."""
    plain = _OWN.sub("", text)
    return any(pattern.search(plain) for pattern in (_OBEYED, _FORGED, _MARKUP))
