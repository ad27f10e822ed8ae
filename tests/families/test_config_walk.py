"""A config is part of the model: each attribute of each class reaches each system, or is refused; judges say so."""

from __future__ import annotations

import json
from fnmatch import fnmatchcase

import pytest

import wherry
from tests.support.judges.judge import judge_for
from tests.support.walk.change import ABSENT
from tests.support.walk.judged import JUDGED, Seen, carried, collected, judge_class, reason, system_of
from tests.support.walk.models import BASES, attributes_of, logits, save, tokens
from tests.support.walk.record import BASE, failures, golden, row, rows
from tests.support.walk.values import IN_FILES, NONE, SIZES, VALUES, harmless, values_of
from tests.support.walk.walk import PASSED, ROUTES, all_cases, distance, routes_of, systems_of, walk
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


# What the table of attributes calls carried was judged in the target's own library.


pytest.importorskip("transformers")
pytest.importorskip("torch")
TABLE = json.loads(JUDGED.read_text())
AT_LEAST = 0.9


def rows_of_judged(kind):
    """Name of a judge, class, attribute and value of each entry of the golden file."""
    return [
        (name, label, attribute, value)
        for name, entry in TABLE.items()
        for label, by in entry["classes"].items()
        for attribute, values in by[kind].items()
        for value in values
    ]


def cells_of(found):
    """The cells of the table that entries are of."""
    return {(system_of(name), *cell) for name, *cell in found}


def test_nine_of_ten_carried_values_are_judged():
    cells, judged = set(carried()), cells_of(rows_of_judged("judged"))
    assert len(judged & cells) >= AT_LEAST * len(cells)


def test_every_entry_is_a_carried_cell_once():
    """After a change to the walk, judge the class anew."""
    found = [*rows_of_judged("judged"), *rows_of_judged("unseen")]
    assert len(found) == len(set(found))
    assert cells_of(found) <= set(carried())


def test_no_target_computes_something_else():
    wrong = {
        cell: why
        for cell in rows_of_judged("unseen")
        if (why := TABLE[cell[0]]["classes"][cell[1]]["unseen"][cell[2]][cell[3]]).startswith("differs")
    }
    assert not wrong


def test_the_judges_are_those_of_the_code():
    assert {name: entry["by"] for name, entry in TABLE.items()} == {
        name: judge_for(name).name for name in TABLE
    }


def test_a_difference_is_written_down_with_its_reason():
    seen = [
        Seen("megatron", "llama", "rope_theta", "777.5", "differs by 1.0e-01", 0.1, 0.2),
        Seen("megatron", "llama", "rope_theta", "1.0", "", 1e-7, 0.2),
    ]
    made = collected(seen, {})["megatron"]["classes"]["llama"]
    assert made["judged"] == {"rope_theta": ["1.0"]}
    assert made["unseen"] == {"rope_theta": {"777.5": "differs by 1.0e-01"}}


@pytest.mark.parametrize(
    ("system", "label"), [("huggingface", "llama"), ("lingua", "llama"), ("t5x", "umt5")]
)
def test_a_changed_model_is_judged_anew(system, label):
    """One cell each of systems whose judge runs in this environment; tests/oracles/test_walk_judged.py judges all."""
    cells = sorted(cell for cell in carried([system]) if cell[1] == label)
    with judge_for(system) as judge:
        seen = list(judge_class(label, {system: judge}, set(cells[:-1])))
    assert [(one.cell, one.why) for one in seen] == [(cells[-1], "")]


def test_a_target_that_states_something_else_differs(tmp_path):
    source = save(tmp_path / "source", "llama")
    wherry.convert(source, tmp_path / "out", to="lingua", lineage=False)
    file = tmp_path / "out" / "params.json"
    stated = json.loads(file.read_text())
    with judge_for("lingua") as judge:
        far = []
        for theta in (stated["model"]["rope_theta"], 777.0):
            stated["model"]["rope_theta"] = theta
            file.write_text(json.dumps(stated))
            found = judge.logits(tmp_path / "out", tokens().numpy(), "llama")
            far.append(distance(found, logits(source, "llama")[0]))
    assert reason(far[0], None, judge.allowed) == ""
    assert reason(far[1], None, judge.allowed).startswith("differs")


def test_what_changes_less_than_the_library_rounds_is_not_judged():
    assert reason(1e-5, 2e-5, 3e-5) == "the library rounds more than the value changes"
    assert reason(1e-6, 2e-5, 3e-5) == ""
