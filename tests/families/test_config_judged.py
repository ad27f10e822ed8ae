"""What the table of attributes calls carried was judged in the target's own library.

`python -m tests.support.walk.judged` writes the golden file; tests/oracles/test_walk_judged.py judges anew.
"""

from __future__ import annotations

import json

import pytest

import wherry
from tests.support.judges.judge import judge_for
from tests.support.walk.judged import JUDGED, Seen, carried, collected, judge_class, reason, system_of
from tests.support.walk.models import logits, save, tokens
from tests.support.walk.walk import distance

pytest.importorskip("transformers")
pytest.importorskip("torch")
TABLE = json.loads(JUDGED.read_text())
AT_LEAST = 0.9


def rows(kind):
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
    cells, judged = set(carried()), cells_of(rows("judged"))
    assert len(judged & cells) >= AT_LEAST * len(cells)


def test_every_entry_is_a_carried_cell_once():
    """After a change to the walk, judge the class anew."""
    found = [*rows("judged"), *rows("unseen")]
    assert len(found) == len(set(found))
    assert cells_of(found) <= set(carried())


def test_no_target_computes_something_else():
    wrong = {
        cell: why
        for cell in rows("unseen")
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
