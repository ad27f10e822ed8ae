"""Shares of units in one tensor: the unit of a file writes its chunks, and each unit can hash what it moves."""

from __future__ import annotations

import math

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from wherry.core.digest import LEAF, leaf_count
from wherry.core.tensorspec import Span
from wherry.units.cut import PlanContents, cut
from wherry.units.spread import shares
from wherry.units.target_files import FilesOfMove, TargetFiles

UNHURRIED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # the machine may be loaded


@st.composite
def tensors(draw):
    """The moves of one tensor, whose chunks lie in files one after another, and the unit of each file."""
    chunk = draw(st.integers(1 << 18, 3 * LEAF))
    chunks = draw(st.integers(2, 40))
    in_file, in_move = draw(st.integers(1, 9)), draw(st.integers(1, 4))
    box = draw(st.booleans())
    rows = [
        FilesOfMove(
            Span(first * chunk, min(first + in_move, chunks) * chunk),
            box,
            frozenset(f"f{number // in_file}" for number in range(first, min(first + in_move, chunks))),
        )
        for first in range(0, chunks, in_move)
    ]
    in_unit = draw(st.integers(1, 3))
    return rows, {f"f{number}": number // in_unit for number in range(math.ceil(chunks / in_file))}


def inside(spans, row):
    return any(span.start <= row.span.start < span.stop for span in spans)


@UNHURRIED
@given(tensors())
def test_a_move_belongs_to_the_units_of_its_files_and_to_no_others(tensor):
    rows, unit_of = tensor
    for share in shares(rows, unit_of):
        for row in rows:
            assert inside(share.own, row) == (share.unit in {unit_of[name] for name in row.files})


@UNHURRIED
@given(tensors())
def test_each_leaf_of_what_a_unit_moves_is_read_whole_by_it(tensor):
    rows, unit_of = tensor
    whole = rows[-1].span.stop
    for share in shares(rows, unit_of):
        if rows[0].box:
            assert share.beside == []
            continue
        read = sorted([*share.own, *share.beside])
        for own in share.own:
            for leaf in range(own.start // LEAF, leaf_count(own.stop)):
                start, stop = leaf * LEAF, min((leaf + 1) * LEAF, whole)
                held = sum(max(0, min(stop, one.stop) - max(start, one.start)) for one in read)
                assert held == stop - start


@UNHURRIED
@given(tensors())
def test_what_is_read_beside_is_never_more_than_a_leaf_needs(tensor):
    rows, unit_of = tensor
    longest = max(row.span.nbytes for row in rows)
    for share in shares(rows, unit_of):
        for span in share.beside:
            assert span.nbytes <= 2 * (LEAF + longest)


@UNHURRIED
@given(tensors())
def test_a_unit_knows_its_moves_and_those_beside_them(tensor):
    rows, _unit_of = tensor
    names = sorted({name for row in rows for name in row.files}, key=lambda name: int(name[1:]))
    whole = rows[-1].span.stop
    files = TargetFiles(dict.fromkeys(names, 10), {}, spread={("t",): rows})
    contents = PlanContents("plan", {("t",): ("t",)}, {("t",): whole}, {("t",): whole}, lambda path: [path])
    units = cut(contents, files, 10)
    for row in rows:
        owners = [unit for unit in units if unit.has(("t",), row.span)]
        assert {file.name for unit in owners for file in unit.files} == row.files
        assert all(unit.reads(("t",), row.span) for unit in owners)
