"""Nobody reads "1 steps": a number and its noun come from `counted`, which knows both forms."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tests.support.house import MODULES, label
from wherry.core.units import plural

# What wherry counts, in the words of its commands, errors and flows.
NOUNS = (
    "tensors statements versions checkpoints conversions steps files units workers edges places targets arrays "
    "parameters weights chunks problems findings routes"
).replace(" ", "|")
_PLURAL = re.compile(rf" (?:[a-z]+ )?(?:{NOUNS})\b")
# The program of an evidence bundle imports nothing of ours; formats say what they saw, for experts.
_APART = ("wherry/auditor/check.py", "wherry/core/units.py", "integrations/")


def plurals(tree: ast.AST) -> Iterator[str]:
    """Each number in a text with a plural noun behind it; constants, which are never 1, and sizes are not meant."""
    for text in (node for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)):
        for value, after in zip(text.values, text.values[1:], strict=False):
            if isinstance(value, ast.FormattedValue) and isinstance(after, ast.Constant):
                number = ast.unparse(value.value)
                found = _PLURAL.match(str(after.value))
                if found and not number.isupper() and not number.startswith("show_"):
                    yield f"{{{number}}}{found[0]}"


def test_numbers_agree_with_their_nouns():
    found = {
        f"{label(path)}: {one}"
        for path in MODULES
        if not label(path).startswith(_APART)
        for one in plurals(ast.parse(path.read_text()))
    }
    assert found == set(), "write {counted(number, 'noun')}"


def test_a_plural_that_stands_in_a_text_is_seen():
    tree = ast.parse('f"{len(steps)} complete steps", f"{count:,} files", f"{MOST} files", f"{n} bytes"')
    assert list(plurals(tree)) == ["{len(steps)} complete steps", "{count} files"]


def test_both_forms_and_their_verbs():
    assert [plural(number, "tensor") for number in (0, 1, 2000)] == [
        "0 tensors",
        "1 tensor",
        "2,000 tensors",
    ]
    assert [plural(number, "chunk", "is/are") for number in (1, 2)] == ["1 chunk is", "2 chunks are"]
