"""The journal believes only whole lines of the very same conversion."""

from __future__ import annotations

import pytest

from wherry.core.account import Losses
from wherry.core.digest import LEAF
from wherry.core.tensorspec import Span
from wherry.target.durable_move import DurableMove
from wherry.target.journal import open_journal

HEADER = {"plan": "p", "source": "s", "version": "1"}
ROWS = [DurableMove((f"tensor {number}",), Span(0, 8), {0: bytes([number]) * 32}) for number in range(3)]


def written(path, rows=ROWS, header=HEADER):
    """A journal with a line for each row, closed; its path."""
    journal = open_journal(path, header)
    for row in rows:
        journal.record([row])
    journal.close()
    return path


def found(path, header=HEADER):
    """What a later run finds done, and why nothing where it is nothing."""
    journal = open_journal(path, header)
    journal.close()
    return list(journal.done), journal.reason


def test_what_was_recorded_is_found(tmp_path):
    assert found(written(tmp_path / "journal")) == (ROWS, None)


def test_what_is_no_small_tensor_is_recorded_as_it_is(tmp_path):
    """Two leaves, a part that does not begin with the tensor, checksums, losses."""
    leaf = bytes(32)
    rows = [
        DurableMove(("two leaves",), Span(0, LEAF + 8), {0: leaf, 1: leaf}),
        DurableMove(("end",), Span(8, 16), {0: leaf}),
        DurableMove(("box",), Span(0, 8), {}),
        DurableMove(("checks",), Span(0, 8), {0: leaf}, ((0, 8, 1),)),
        DurableMove(("losses",), Span(0, 8), {0: leaf}, (), Losses(nan=1)),
        DurableMove(("two algorithms",), Span(0, 8), {0: 2 * leaf}),
    ]
    assert found(written(tmp_path / "journal", rows)) == (rows, None)
    assert found(written(tmp_path / "together", [])) == ([], None)
    journal = open_journal(tmp_path / "together", HEADER)
    journal.record(rows)
    journal.close()
    assert sorted(found(tmp_path / "together")[0]) == sorted(rows)


@pytest.mark.parametrize(
    "small",
    [
        {"paths": ["w"], "sizes": [0], "leaves": "AAAA"},
        {"paths": ["w"], "sizes": [LEAF + 1], "leaves": "AAAA"},
        {"paths": ["w"], "sizes": ["8"], "leaves": "AAAA"},
        {"paths": ["w"], "sizes": [], "leaves": "AAAA"},
        {"paths": ["w"], "sizes": [8], "leaves": "?"},
        {"paths": ["w"]},
        [],
    ],
)
def test_columns_that_cannot_be_read_make_all_of_it_worthless(tmp_path, small):
    journal = open_journal(tmp_path / "journal", HEADER)
    journal.log.append({"done": [], "small": small})
    journal.close()
    assert found(tmp_path / "journal")[0] == []


@pytest.mark.parametrize("name", HEADER)
def test_another_conversion_finds_nothing_and_says_why(tmp_path, name):
    path = written(tmp_path / "journal")
    done, reason = found(path, {**HEADER, name: "another"})
    assert done == []
    assert name in reason
    assert found(path, {**HEADER, name: "another"}) == ([], None), "it was begun anew"


def test_a_torn_line_is_forgotten_whole_and_the_next_one_is_not_joined_to_it(tmp_path):
    path = written(tmp_path / "journal")
    whole = path.read_bytes()
    last = whole.rindex(b"\n", 0, -1) + 1
    for stop in range(last, len(whole)):
        path.write_bytes(whole[:stop])
        assert found(path) == (ROWS[:2], None), stop
        assert found(written(path, ROWS[2:])) == (ROWS, None), stop


def test_a_line_whose_end_is_missing_is_torn_even_where_it_reads_well(tmp_path):
    path = written(tmp_path / "journal")
    path.write_bytes(path.read_bytes()[:-1])
    assert found(path) == (ROWS[:2], None)


@pytest.mark.parametrize(
    "line", [b"nonsense", b"[]", b'{"done": 1}', b'{"done": []}', b'{"done": [[]]}', b"\xff\xfe"]
)
def test_a_line_that_cannot_be_read_makes_all_of_it_worthless(tmp_path, line):
    path = written(tmp_path / "journal")
    path.write_bytes(path.read_bytes() + line + b"\n")
    done, reason = found(path)
    assert done == []
    assert reason
