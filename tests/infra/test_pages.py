"""The pages of `docs/`: short paragraphs, a glossary, every block valid, every claim tested."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import subprocess
import sys
import textwrap
import tomllib
from collections import Counter
from importlib.machinery import SourceFileLoader
from pathlib import Path, PurePosixPath

import click
import pytest
import yaml
from jsonschema import Draft202012Validator

from tests.support.infra import INFRA, ROOT, load
from tests.support.readme import PAGES, TEXTS, blocks, code, commands
from wherry import errors
from wherry.cli import cli
from wherry.core.limits import MOST_ENTRIES, MOST_TENSORS
from wherry.nightly.first import FirstRoute, first_config

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


# infra/docs: every page is in the navigation, keeps its place, and a link that leads nowhere fails the
# build.


@pytest.fixture
def docs(monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    loader = SourceFileLoader("docs", str(INFRA / "docs"))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("docs", loader))
    loader.exec_module(module)
    return module


class Loader(yaml.SafeLoader):
    """Reads what MkDocs reads, without calling what it names."""


Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda *_: None)


def named(entry):
    """The pages of a navigation."""
    if isinstance(entry, str):
        return [entry]
    return [page for part in (entry.values() if isinstance(entry, dict) else entry) for page in named(part)]


def test_every_page_stands_once_in_the_navigation(docs):
    configuration = yaml.load(docs.with_systems((INFRA / "mkdocs.yml").read_text()), Loader)
    pages = [str(page) for page in docs.pages() if page.suffix == ".md"]
    assert sorted(named(configuration["nav"])) == sorted(pages)
    assert set(TEXTS) <= set(pages)
    assert {"infra/pictures/lineage.png", "docs/prices.example.toml"} <= {str(page) for page in docs.pages()}


def test_pages_keep_their_places(docs, tmp_path):
    configuration = docs.stage(tmp_path)
    assert configuration == tmp_path / "mkdocs.yml"
    assert (tmp_path / "pages" / "SECURITY.md").read_text() == (ROOT / "SECURITY.md").read_text()
    assert '<details markdown="1"><summary>' in (tmp_path / "pages" / "docs" / "trainers.md").read_text()
    assert not re.search(r"^/(?!site/).*site", (ROOT / ".gitignore").read_text(), re.MULTILINE)
    assert "/site/" in (ROOT / ".gitignore").read_text().splitlines(), "what is built is not committed"


def test_the_schemas_are_those_of_the_code_and_take_what_the_pages_show(monkeypatch):
    reference = load("reference", monkeypatch)
    for path, text in reference.schemas().items():
        assert path.read_text() == text, "run infra/docs.py"
        Draft202012Validator.check_schema(json.loads(text))
    folder = ROOT / "docs" / "reference" / "schemas"
    assert {path.name for path in folder.iterdir()} == {path.name for path in reference.schemas()}
    for name, page in (("wherry-toml", "platform"), ("policy", "audit")):
        check = Draft202012Validator(json.loads((folder / f"{name}.json").read_text()))
        (shown,) = blocks(page, "toml")
        check.validate(tomllib.loads(shown))
        assert not check.is_valid({**tomllib.loads(shown), "colour": "red"})


def test_the_schema_of_wherry_toml_takes_every_file_that_is_shown_and_finds_mistakes():
    """An editor must not underline what wherry takes: sizes and durations in both forms, and environments."""
    schema = ROOT / "docs" / "reference" / "schemas" / "wherry-toml.json"
    check = Draft202012Validator(json.loads(schema.read_text()))
    example = tomllib.loads((ROOT / "infra" / "wherry.toml").read_text())
    for shown in (example, tomllib.loads(first_config(FirstRoute("gs://runs", registry="none")))):
        check.validate(shown)
    route = example["routes"]["t5x"]
    check.validate({"routes": {"a": {**route, "min_age": 60, "max_bytes": 10**9, "unit": "1GiB"}}})
    for wrong in (
        {"ledgr": "x"},
        {"memory": []},
        {"notify": {"on": "sometimes"}},
        {"routes": {"a": {"root": "runs"}}},
        {"routes": {"a": {**route, "source_format": "hf"}}},
        {"routes": {"a": {**route, "targets": [{"to": "hf", "uri": "x"}]}}},
        {"env": {"prod": {"ledgr": "x"}}},
        {"env": {"prod": {"routes": {"a": {"levle": "digest"}}}}},
    ):
        assert not check.is_valid(wrong), wrong


def test_the_catalogue_has_the_errors_of_the_code(monkeypatch):
    reference = load("reference", monkeypatch)
    rows = list(reference._find_errors())
    assert ("UsageError", "the source has no step number", "pass --as-step N") in rows
    assert ("StorageError", "out of memory", "…") in rows
    assert len(rows) > 600
    without = {kind for kind, _what, cure in rows if not cure and getattr(errors, kind).usual_cure is None}
    assert without == {"UsageError", "InternalError"}  # of which the message is the cure, and a fault of ours
    assert {kind for kind, _what, _cure in rows} == set(reference.CAUSES)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_site_is_built_and_a_broken_link_fails_it(docs, tmp_path):
    made = {**os.environ, "WHERRY_VENV": str(tmp_path / "venv")}
    subprocess.run([INFRA / "docs", tmp_path / "site"], env=made, check=True)
    for page in ("index.html", "docs/index.html", "docs/reference/errors.html", "search/search_index.json"):
        assert (tmp_path / "site" / page).is_file()
    shown = (tmp_path / "site" / "docs" / "trainers.html").read_text()
    assert "```" not in shown, "the hooks are code, not text"
    assert "fonts.googleapis.com" not in shown
    for link in ("nowhere.md", "audit.md#nowhere"):
        configuration = docs.stage(tmp_path / "broken")
        page = tmp_path / "broken" / "pages" / "docs" / "look.md"
        page.write_text(f"{page.read_text()}\n[a link]({link})\n")
        assert docs.build(tmp_path / "venv" / "bin" / "python", configuration, Path(tmp_path / "no")), link


# Every block of code in README and `docs/` is one that its language takes; most of them are run elsewhere
# too.


# Languages that are parsed here; output and pictures are compared where the page is run.
PARSED = ("sh", "python", "toml")
OTHERS = {"console", "text", "mermaid", "json", "yaml", "dockerfile", ""}


def of(language):
    """Each block of a language, by its page and number."""
    return [
        pytest.param(text, id=f"{page}-{number}")
        for page, pages in TEXTS.items()
        if page != "docs/reference/python.md"  # signatures, which are generated
        for number, text in enumerate(code(pages, language))
    ]


def test_every_block_says_its_language():
    fence = re.compile(r"^```(\S*)[^\n]*\n(?:.*?)^```", re.DOTALL | re.MULTILINE)
    fences = {one for text in TEXTS.values() for one in fence.findall(text)}
    assert set(PARSED) <= fences <= {*PARSED, *OTHERS}


@pytest.mark.parametrize("block", of("sh"))
def test_commands_are_understood(block, monkeypatch):
    monkeypatch.setattr(click.Command, "invoke", lambda _self, context: context.info_name)
    for words in commands(block):
        if words[0] != "wherry":
            continue
        end = next((at for at, word in enumerate(words) if re.fullmatch(r"\d?>>?|\||&&|&|;", word)), None)
        cli.main(words[1:end], standalone_mode=False)


@pytest.mark.parametrize("block", of("python"))
def test_programs_are_programs(block):
    entry = re.match(r'\s*"\w+":', block)  # of a dictionary that the page speaks of
    assert ast.parse(f"{{{block}}}" if entry else textwrap.dedent(block)).body


@pytest.mark.parametrize("block", of("toml"))
def test_tables_are_tables(block):
    assert tomllib.loads(block)


def test_an_option_that_does_not_exist_is_seen(monkeypatch):
    with pytest.raises(click.NoSuchOption):
        test_commands_are_understood("wherry convert a b --too orbax\n", monkeypatch)


# Every claim of SECURITY.md and docs/security.md has tests that attack it: tests/security_claims.toml
# names them.


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
