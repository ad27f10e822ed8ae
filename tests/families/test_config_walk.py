"""A config is part of the model: each attribute of each class reaches each system, or is refused.

The whole walk is behind `--slow`; `python -m tests.support.walk.record` writes its golden file. Here the base model of
each class takes every way into every system, and every 60th case one way.
"""

from __future__ import annotations

from fnmatch import fnmatchcase

import pytest

from tests.support.walk.change import ABSENT
from tests.support.walk.models import BASES, attributes_of
from tests.support.walk.record import BASE, failures, golden, row, rows
from tests.support.walk.values import IN_FILES, NONE, SIZES, VALUES, harmless, values_of
from tests.support.walk.walk import PASSED, ROUTES, all_cases, routes_of, systems_of, walk
from wherry.families import load_family

pytest.importorskip("transformers")
pytest.importorskip("torch")
EVERY_NTH = 60
LABELS = list(BASES)


@pytest.mark.parametrize("label", LABELS)
def test_every_attribute_has_alternatives(label):
    """A release of transformers that adds an attribute fails here, until somebody decides what becomes of it."""
    undecided = attributes_of(label) - set(values_of(label)) - set(NONE)
    assert not undecided, (
        f"{label}: state alternatives in tests/support/walk/values.py for {sorted(undecided)}"
    )


@pytest.mark.parametrize("label", LABELS)
def test_every_alternative_is_of_an_attribute(label):
    stated = {
        name for table in (SIZES, VALUES) for name, by in table.items() if label in " ".join(by).split()
    }
    assert stated <= attributes_of(label)
    for table in (SIZES, VALUES, IN_FILES):
        for by in table.values():
            assert sum(labels.split().count(label) for labels in by) <= 1


@pytest.mark.parametrize("label", LABELS)
def test_every_system_of_the_family_is_walked(label):
    assert set(systems_of(label)) <= set(ROUTES)
    for system in systems_of(label):
        known = load_family(BASES[label].family).system(system)
        for route in routes_of(label, system):
            assert route.to in known.formats
            assert set(route.options) <= set(known.forms)


@pytest.mark.parametrize("label", LABELS)
def test_base_and_sample(label):
    """The base model arrives by every way, so that a refusal of everything cannot pass."""
    whole, expected = all_cases(label), golden(label)
    base = walk(whole[0])
    assert not failures(base)
    assert all(end.word != "refused" for ends in base.ends.values() for end in ends.values()), base.ends
    assert row(base) == expected[BASE]["base"]
    at = LABELS.index(label) * 7 % EVERY_NTH + 1
    for number in range(at, len(whole), EVERY_NTH):
        walked = walk(whole[number], number)
        assert not failures(walked)
        if walked.is_model:
            assert row(walked) == expected[walked.case.attribute][walked.case.text]


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("label", LABELS)
def test_the_whole_walk(label):
    walked = [walk(case, number) for number, case in enumerate(all_cases(label))]
    assert not [line for one in walked for line in failures(one)]
    assert rows(walked) == golden(label)


def ignored(label):
    """The attributes whose values a family's layouts ignore, and those of which only one value passes."""
    rules = load_family(BASES[label].family).system("huggingface").config
    names = {name for name in golden(label) if any(fnmatchcase(name, one) for one in rules.ignored)}
    return names - (set(rules.usual) - set(rules.ignored)), set(rules.usual)


@pytest.mark.parametrize("label", LABELS)
def test_what_is_ignored_changes_nothing(label):
    """The walk measured it: no value of an attribute that a family ignores changes what the model computes."""
    changing = {
        f"{name} = {text}"
        for name in ignored(label)[0]
        for text, found in golden(label)[name].items()
        if found["changes"] != "no"
    }
    assert not changing, f"{label}: declared as ignored, and yet the outputs change: {sorted(changing)}"


@pytest.mark.parametrize("label", LABELS)
def test_the_golden_file_has_every_attribute_and_no_failure(label):
    stated = {
        name for name, values in values_of(label).items() if any(one.value is not ABSENT for one in values)
    }
    assert stated <= set(golden(label))
    ends = {
        word
        for values in golden(label).values()
        for found in values.values()
        for system, words in found.items()
        if system != "changes"
        for word in words.split("/")
    }
    assert ends <= set(PASSED)
    assert "refused" not in "".join(golden(label)[BASE]["base"].values())


@pytest.mark.parametrize("label", LABELS)
def test_an_alternative_of_what_matters_changes_the_outputs(label):
    """A value that changes nothing proves nothing, except of attributes that are known to have no effect."""
    without = {
        name
        for name, values in golden(label).items()
        if name != BASE and all(found["changes"] == "no" for found in values.values())
    }
    assert not without - set.union(*ignored(label)) - set(NONE) - harmless(label)


@pytest.mark.parametrize("label", LABELS)
def test_what_is_harmless_has_no_effect(label):
    for name in harmless(label):
        assert {found["changes"] for found in golden(label)[name].values()} == {"no"}, name
