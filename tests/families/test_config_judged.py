"""What the table of attributes calls carried was judged in the target's own library.

`python -m tests.support.walk.judged` writes the golden file; tests/oracles/test_walk_judged.py judges anew.
"""

from __future__ import annotations

import json

from tests.support.judges.judge import judge_for
from tests.support.walk.judged import JUDGED, Seen, carried, collected

TABLE = json.loads(JUDGED.read_text())
AT_LEAST = 0.9


def rows(kind):
    """System, class, attribute and value of each entry of the golden file."""
    return [
        (system, label, attribute, value)
        for system, entry in TABLE.items()
        for label, by in entry["classes"].items()
        for attribute, values in by[kind].items()
        for value in values
    ]


def test_nine_of_ten_carried_values_are_judged():
    cells, judged = set(carried()), set(rows("judged"))
    assert len(judged & cells) >= AT_LEAST * len(cells)


def test_every_entry_is_a_carried_cell_once():
    """After a change to the walk, judge the class anew."""
    found = [*rows("judged"), *rows("unseen")]
    assert len(found) == len(set(found))
    assert set(found) <= set(carried())


def test_no_target_computes_something_else():
    wrong = {
        cell: why
        for cell in rows("unseen")
        if (why := TABLE[cell[0]]["classes"][cell[1]]["unseen"][cell[2]][cell[3]]).startswith("differs")
    }
    assert not wrong


def test_the_judges_are_those_of_the_code():
    assert {system: entry["by"] for system, entry in TABLE.items()} == {
        system: judge_for(system).name for system in TABLE
    }


def test_a_difference_is_written_down_with_its_reason():
    seen = [
        Seen("megatron", "llama", "rope_theta", "777.5", "differs by 1.0e-01", 0.1, 0.2),
        Seen("megatron", "llama", "rope_theta", "1.0", "", 1e-7, 0.2),
    ]
    made = collected(seen, {})["megatron"]["classes"]["llama"]
    assert made["judged"] == {"rope_theta": ["1.0"]}
    assert made["unseen"] == {"rope_theta": {"777.5": "differs by 1.0e-01"}}
