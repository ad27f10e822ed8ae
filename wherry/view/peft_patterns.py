"""PEFT's `rank_pattern` and `alpha_pattern`: tables of regular expressions for the ends of the names of modules.

PEFT (tuners/tuners_utils.py of 0.21) takes the first pattern that the end of a name matches, from a dot on. A regular
expression of somebody else can run for ever, so that only simple ones are compiled: names, classes of characters, and
one group and one repetition at most, which need at most the square of a name's length.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from wherry.errors import UnrepresentableError

_ATOM = r"[\w\-/ ]|\.|\\[.dw\-]|\[\^?[\w\-]+\]"
_SIMPLE = re.compile(rf"\^?(?:(?:{_ATOM})(?:[*+?]|\{{\d{{1,4}}\}})?|\||\((?:\?:)?|\))+\$?")
_REPEATS = re.compile(r"(?<!\()[*+?{]")
_LONGEST = 1000  # characters of a pattern, and of a name that is compared with one
_MOST_COMPARISONS = 1_000_000


def pattern_refusal(name: str, table: Any) -> str | None:
    """Why a table of patterns is not supported; None if it is.

    Args:
        name: of the table, for the message.
        table: the table, of any type.
    """
    if table is None:
        return None
    if not isinstance(table, dict):
        return f"{name} is {table!r}, not a table"
    for pattern in table:
        if not is_simple(pattern):
            return f"{name} has the regular expression {pattern[:_LONGEST]!r}, which is not supported"
    return None


def is_simple(pattern: str) -> bool:
    """Whether a regular expression is one that can be matched in little time."""
    if len(pattern) > _LONGEST or not _SIMPLE.fullmatch(pattern):
        return False
    if pattern.count("(") > 1 or re.search(r"\)[*+?{]", pattern) or len(_REPEATS.findall(pattern)) > 1:
        return False
    try:
        re.compile(pattern)
    except re.error:
        return False
    return True


class ModulePatterns:
    """One table of patterns, compiled."""

    def __init__(self, table: Mapping[str, Any] | None) -> None:
        """Compile the patterns, of which `pattern_refusal` refused none."""
        self._rows = [
            (re.compile(rf"(.*\.)?({pattern})$"), value) for pattern, value in (table or {}).items()
        ]
        self._left = _MOST_COMPARISONS

    def value(self, module: str, default: Any) -> Any:
        """The value of the first pattern that a module's name ends with.

        Raises:
            UnrepresentableError: the name is too long for a regular expression, or there are too many.
        """
        self._left -= len(self._rows)
        if self._rows and (len(module) > _LONGEST or self._left < 0):
            raise UnrepresentableError(
                "too many or too long names of modules for the patterns of adapter_config.json",
                path=module[:_LONGEST], cure="merge it with PEFT (merge_and_unload)",
            )  # fmt: skip
        return next((value for pattern, value in self._rows if pattern.match(module)), default)
