"""The table of judged pairs says what the oracles do: no row without its tests, no tests without their row."""

from __future__ import annotations

import pytest

from tests.support import flax_classes
from tests.support.infra import load
from tests.support.oracles import cases
from tests.support.oracles.huggingface import MODELS
from wherry.families import adapter_families, families, load_family
from wherry.families.adapters import SUFFIX
from wherry.transform.overview import judges, read_judges

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

    add(of_families(cases.LABELS), "maxtext", "into", FORWARD)
    add(of_families(cases.CONFIGS), "maxtext", "out_of", FORWARD)
    add(of_families(label for label, _form in cases.ITSELF_PAIRS), "maxtext", "into", LIBRARY)
    add(of_families(cases.PENZAI_INTO), "penzai", "into", LIBRARY)
    add(of_families(cases.PENZAI_OUT_OF), "penzai", "out_of", LIBRARY)
    add(of_families(model for model, _config in cases.DEEPMIND.values()), "deepmind", "out_of", FORWARD)
    add(of_families(cases.GGUF_BY_TRANSFORMERS), "gguf", "out_of", LIBRARY)
    add(of_families(cases.GGUF_WRITTEN), "gguf", "into", LIBRARY)
    for way in ("into", "out_of"):
        add(of_families(cases.TORCHTITAN), "torchtitan", way, LIBRARY)
    add(of_families(label for label, _form, _to in cases.T5X_PAIRS), "t5x", "into", FORWARD)
    add(["t5"] if cases.T5X_FORMS else [], "t5x", "out_of", FORWARD)
    for system, labels in zip(cases.LINGUA_SYSTEMS, (cases.LINGUA_INTO, cases.META_INTO), strict=True):
        add(of_families(labels), system, "into", FORWARD)
        add(of_families(cases.LLAMA_OUT_OF), system, "out_of", FORWARD)
    add(flax_classes.families_of(flax_classes.MODELS), "huggingface-flax", "into", LIBRARY)
    add(flax_classes.families_of(flax_classes.OUT_OF), "huggingface-flax", "out_of", LIBRARY)
    add(of_families(cases.MEGATRON_INTO), "megatron", "into", LIBRARY)
    add(of_families(cases.MEGATRON_OUT_OF), "megatron", "out_of", LIBRARY)
    for way in ("into", "out_of"):
        labels = [label for label, _form in cases.ADAPTER_PAIRS]
        add([f"{name}{SUFFIX}" for name in of_families(labels)], "maxtext", way, LIBRARY)
    for system, way in cases.GPT3_WAYS:
        add(["gpt3"], system, way, FORWARD)
    return found


def stated():
    return {
        (family, system): {way: set(by) for way, by in row.items()}
        for family, systems in read_judges().items()
        for system, row in systems.items()
    }


def test_the_table_says_what_the_tests_do():
    assert stated() == covered()


def test_every_pair_of_the_registry_has_a_line_in_the_page(docs):
    pairs = {
        (name, system)
        for name in (*families(), *adapter_families())
        for system in load_family(name).systems
        if system != "huggingface"
    }
    text = docs.judged_table()
    for name, system in pairs:
        assert f"| `{name}` | {system} |" in text
    assert set(stated()) <= pairs


def test_a_pair_without_a_judge_is_said_to_have_none():
    assert judges({}, "into") == judges({"into": ()}, "into") == "not judged"
    assert judges({"into": ("library", "forward")}, "into") == "own library, forward pass"
