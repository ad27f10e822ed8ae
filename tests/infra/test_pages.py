"""The pages of `docs/` can be read: short paragraphs, and a glossary whose words lead to where they are explained."""

from __future__ import annotations

import re
from pathlib import PurePosixPath

import pytest

from tests.support.infra import ROOT
from tests.support.readme import PAGES, TEXTS

MOST_WORDS = 80
# Words that a reader meets before anything explains them.
NEEDED = {
    "system", "family", "layout", "leaf", "settled", "statement", "fact", "container", "kind", "sidecar", "companion",
    "manifest", "receipt", "ledger", "lineage", "verdict", "level", "route", "policy", "gate", "finding", "anchor",
    "unit", "engine", "journal", "lease", "read-back", "commit member", "staging area", "adapter", "key path",
}  # fmt: skip
# Everyday words, and words of the code, that pages use as anybody does.
PLAIN = {
    "region", "way", "checksum", "upload", "part", "option", "request", "pass", "place", "work", "outcome",
    "verification",
}  # fmt: skip


def paragraphs(text):
    """The paragraphs of a page, and the items of its lists; without code, tables, headings and what is generated."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"<!-- (\w+):start -->.*?<!-- \1:end -->", "", text, flags=re.DOTALL)
    text = re.sub(r"^[ \t]*(?:\||#).*$", "\n", text, flags=re.MULTILINE)
    blocks = (
        block
        for part in re.split(r"\n\s*\n", text)
        for block in re.split(r"^\s*(?:[-*]|\d+\.) ", part, flags=re.MULTILINE)
    )
    return [block.strip() for block in blocks if block.strip()]


@pytest.mark.parametrize("page", [name for name in PAGES if not name.startswith("reference/")])
def test_no_paragraph_is_longer_than_a_reader_holds(page):
    long = [text[:60] for text in paragraphs(PAGES[page]) if len(text.split()) > MOST_WORDS]
    assert not long, f"split them: more than {MOST_WORDS} words"


def slug(heading):
    """The anchor of a heading, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-")


def section_at(link):
    """The heading and the text of what a link of the glossary leads to; the whole page without an anchor."""
    path, _, anchor = link.partition("#")
    page = PAGES[PurePosixPath(path).with_suffix("").as_posix()]
    if not anchor:
        return page
    parts = re.split(r"^#+ (.*)$", page, flags=re.MULTILINE)
    return next("\n".join(parts[at : at + 2]) for at in range(1, len(parts), 2) if slug(parts[at]) == anchor)


def entries():
    """Each word of the glossary, with its meaning and its link."""
    rows = re.findall(r"^\| ([^|]+?) \| (.+) \| \[[^\]]*\]\(([^)]+)\) \|$", PAGES["glossary"], re.MULTILINE)
    return [(word, meaning, link) for words, meaning, link in rows for word in words.split(", ")]


@pytest.mark.parametrize(("word", "meaning", "link"), entries())
def test_a_word_of_the_glossary_leads_to_where_it_is_used(word, meaning, link):
    assert len(meaning) > 10
    text = " ".join(section_at(link).split())
    stem = {"leaf": "lea(f|ves)", "tensor spec": "tensor ?spec"}.get(word, re.escape(word.removesuffix("y")))
    assert re.search(rf"\b{stem}", text, re.IGNORECASE), f"{link} does not use it"


def test_the_glossary_has_the_words_that_readers_need():
    rows = re.findall(r"^\| (?!word|---)", PAGES["glossary"], re.MULTILINE)
    words = [word for word, _meaning, _link in entries()]
    assert len(
        re.findall(r"^\| (?!word|-)[^|]+\|[^\n]*\]\([^)]+\) \|$", PAGES["glossary"], re.MULTILINE)
    ) == len(rows)
    assert len(words) == len(set(words)), "a word is explained twice"
    assert set(words) >= NEEDED


def test_every_word_of_the_lexicon_that_several_pages_use_is_in_the_glossary():
    lexicon = (ROOT / "infra" / "lexicon.md").read_text().partition("\n## Help and pages\n")[0]
    rows = re.findall(r"^\| ([^|]+?) \| ", lexicon, re.MULTILINE)
    words = {re.sub(r" \(.*\)", "", one) for row in rows for one in row.split(", ")} - {"word"}
    guides = [text.lower() for name, text in PAGES.items() if "/" not in name and name != "glossary"]
    several = {
        word
        for word in words
        if sum(bool(re.search(rf"\b{re.escape(word)}s?\b", text)) for text in guides) >= 5
    }
    assert several - {word for word, _meaning, _link in entries()} - PLAIN == set()


def test_the_doors_lead_to_the_glossary():
    """A reader of a guide finds the words: each guide for a need links to them."""
    for page in (
        "README",
        "concepts",
        "platform",
        "trainers",
        "audit",
        "between-systems",
        "proof",
        "bad-night",
    ):
        assert "glossary.md" in TEXTS[f"docs/{page}.md"], page
