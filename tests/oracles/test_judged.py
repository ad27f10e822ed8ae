"""The table of judged pairs says what the oracles do: no row without its tests, no tests without their row."""

from __future__ import annotations

import tomllib

import pytest

from tests.oracles import test_lingua, test_maxtext_itself, test_paxml, test_penzai, test_t5x
from tests.oracles.huggingface import MODELS
from tests.oracles.maxtext_cases import CONFIGS, LABELS
from tests.support.house import ROOT
from tests.support.infra import load
from wherry.families import families, load_family

FORWARD, LIBRARY = {"forward"}, {"library"}


@pytest.fixture
def docs(monkeypatch):
    return load("docs", monkeypatch)


def of_families(labels):
    return {MODELS[label].family for label in labels}


def covered():
    """(family, system) → direction → by what, from the cases of the tests."""
    found = {}

    def add(names, system, way, by):
        for name in names:
            found.setdefault((name, system), {}).setdefault(way, set()).update(by)

    add(of_families(LABELS), "maxtext", "into", FORWARD)
    add(of_families(CONFIGS), "maxtext", "out_of", FORWARD)
    add(of_families(label for label, _form in test_maxtext_itself.PAIRS), "maxtext", "into", LIBRARY)
    add(of_families(test_penzai.INTO), "penzai", "into", LIBRARY)
    add(of_families(test_penzai.OUT_OF), "penzai", "out_of", LIBRARY)
    add(of_families(label for label, _form, _to in test_t5x.PAIRS), "t5x", "into", FORWARD)
    add(["t5"] if test_t5x.FORMS else [], "t5x", "out_of", FORWARD)
    for system in test_lingua.SYSTEMS:
        add(["llama"], system, "into", FORWARD)
        add(["llama"], system, "out_of", FORWARD)
    for system, way in test_paxml.WAYS:
        add(["gpt3"], system, way, FORWARD)
    return found


def stated():
    rows = tomllib.loads((ROOT / "infra" / "judged.toml").read_text())
    return {
        (family, system): {way: set(by) for way, by in row.items()}
        for family, systems in rows.items()
        for system, row in systems.items()
    }


def test_the_table_says_what_the_tests_do():
    assert stated() == covered()


def test_every_pair_of_the_registry_has_a_line_in_the_page(docs):
    pairs = {
        (name, system)
        for name in families()
        for system in load_family(name).systems
        if system != "huggingface"
    }
    text = docs.judged_table()
    for name, system in pairs:
        assert f"| `{name}` | {system} |" in text
    assert set(stated()) <= pairs


def test_a_pair_without_a_judge_is_said_to_have_none(docs):
    assert docs.judges({}, "into") == docs.judges({"into": []}, "into") == "not judged"
    assert docs.judges({"into": ["library", "forward"]}, "into") == "own library, forward pass"
