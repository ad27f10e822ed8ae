"""infra/docs: every page is in the navigation, keeps its place, and a link that leads nowhere fails the build."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import tomllib
from importlib.machinery import SourceFileLoader
from pathlib import Path

import pytest
import yaml
from jsonschema import Draft202012Validator

from tests.support.infra import INFRA, ROOT, load
from tests.support.readme import TEXTS, blocks
from wherry import errors
from wherry.routes.first import FirstRoute, first_config


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
