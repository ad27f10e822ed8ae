"""Every claim of SECURITY.md and docs/security.md has tests that attack it: tests/security_claims.toml names them.

A sentence of the sections that make claims is in the table word by word, as a claim with its tests or as a statement
with the reason why it needs none; so one that is added or changed fails here until somebody has looked at it.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections import Counter

import pytest

from tests.support.infra import ROOT
from wherry.text.limits import MOST_ENTRIES, MOST_TENSORS

TABLE = tomllib.loads((ROOT / "tests" / "security_claims.toml").read_text())
CLAIMS = TABLE["claim"]
# Page → the sections of which every sentence is in the table; of others, only the claims are.
WHOLE = {
    "SECURITY.md": ("What is promised", "What is not promised"),
    "docs/security.md": (
        "Links and roots",
        "Which servers a URI can reach",
        "Altered sidecars",
        "Least privilege",
        "Packages, images and clusters",
    ),
}


def sentences(text):
    """The sentences of a page without its blocks of code: of paragraphs, entries of lists and rows of tables."""
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    for block in re.split(r"\n\s*\n|\n(?=- )|\n(?=\|)|\n(?=#)", text):
        line = " ".join(block.split())
        if line and not line.startswith(("#", "|--", "| --")):
            yield from re.split(r"(?<=[.;:]) (?=[A-Z`*\[])", line)


def section(page, title):
    return (ROOT / page).read_text().partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def functions(path):
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("page", WHOLE)
def test_every_sentence_of_the_claiming_sections_is_in_the_table(page):
    known = {row["text"] for row in (*CLAIMS, *TABLE["statement"]) if row["page"] == page}
    stated = [one for title in WHOLE[page] for one in sentences(section(page, title))]
    assert len(stated) > 10
    assert [one for one in stated if one not in known] == []


def test_what_the_table_quotes_stands_on_its_page_once():
    for row in (*CLAIMS, *TABLE["statement"]):
        assert Counter(sentences((ROOT / row["page"]).read_text()))[row["text"]] == 1, row["text"]


@pytest.mark.parametrize("row", CLAIMS, ids=lambda row: row["text"][:40])
def test_the_tests_of_a_claim_are_there(row):
    assert row["tests"]
    for name in row["tests"]:
        file, _, function = name.partition("::")
        assert function.startswith("test_")
        assert function in functions(ROOT / file), name


def test_a_statement_has_a_reason():
    assert all(len(row["reason"]) > 5 for row in TABLE["statement"])


def test_the_limits_are_the_numbers_of_the_page():
    """Tests of bombs lower the limits, and say nothing of the numbers."""
    assert (MOST_ENTRIES, MOST_TENSORS) == (250_000, 250_000)
