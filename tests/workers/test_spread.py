"""Shares of units in one tensor: the unit of a file writes its chunks, and each unit can hash what it moves."""

from __future__ import annotations

import math
from array import array
from itertools import pairwise

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.unit_fixtures import PlanContents
from wherry.core.digest import LEAF, leaf_count
from wherry.core.tensorspec import Span
from wherry.workers.unit import FilesOfMoves, TargetFiles, shares

UNHURRIED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # the machine may be loaded


@st.composite
def tensors(draw):
    """The moves of one tensor, whose chunks lie in files one after another, and the unit of each file."""
    chunk = draw(st.integers(1 << 18, 3 * LEAF))
    chunks = draw(st.integers(2, 40))
    in_file, in_move = draw(st.integers(1, 9)), draw(st.integers(1, 4))
    box = draw(st.booleans())
    firsts = range(0, chunks, in_move)
    rows = FilesOfMoves(
        array("q", [min(first + in_move, chunks) * chunk for first in firsts]),
        [
            frozenset(f"f{n // in_file}" for n in range(first, min(first + in_move, chunks)))
            for first in firsts
        ],
        box,
    )
    in_unit = draw(st.integers(1, 3))
    return rows, {f"f{number}": number // in_unit for number in range(math.ceil(chunks / in_file))}


def inside(spans, move):
    return any(span.start <= move.start < span.stop for span in spans)


def spans(rows):
    return [Span(start, stop) for start, stop in pairwise([0, *rows.stops])]


def moves_of(rows):
    return list(zip(spans(rows), rows.files, strict=True))


@UNHURRIED
@given(tensors())
def test_a_move_belongs_to_the_units_of_its_files_and_to_no_others(tensor):
    rows, unit_of = tensor
    for share in shares(rows, unit_of):
        for move, names in moves_of(rows):
            assert inside(share.own, move) == (share.unit in {unit_of[name] for name in names})


@UNHURRIED
@given(tensors())
def test_each_leaf_of_what_a_unit_moves_is_read_whole_by_it(tensor):
    rows, unit_of = tensor
    whole = rows.stops[-1]
    for share in shares(rows, unit_of):
        if rows.box:
            assert share.also_read == []
            continue
        read = sorted([*share.own, *share.also_read])
        for own in share.own:
            for leaf in range(own.start // LEAF, leaf_count(own.stop)):
                start, stop = leaf * LEAF, min((leaf + 1) * LEAF, whole)
                held = sum(max(0, min(stop, one.stop) - max(start, one.start)) for one in read)
                assert held == stop - start


@UNHURRIED
@given(tensors())
def test_what_is_also_read_is_never_more_than_a_leaf_needs(tensor):
    rows, unit_of = tensor
    longest = max(span.nbytes for span in spans(rows))
    for share in shares(rows, unit_of):
        for span in share.also_read:
            assert span.nbytes <= 2 * (LEAF + longest)


@UNHURRIED
@given(tensors())
def test_a_unit_has_its_moves_and_reads_them(tensor):
    rows, _unit_of = tensor
    names = sorted({name for names in rows.files for name in names}, key=lambda name: int(name[1:]))
    whole = rows.stops[-1]
    files = TargetFiles(dict.fromkeys(names, 10), {("t",): rows})
    contents = PlanContents("plan", {("t",): ("t",)}, {("t",): whole}, {("t",): whole}, lambda path: [path])
    units = contents.cut(files, 10)
    for move, files_of_move in moves_of(rows):
        owners = [unit for unit in units if unit.has(("t",), move)]
        assert {file.name for unit in owners for file in unit.files} == files_of_move
        assert all(unit.reads(("t",), move) for unit in owners)
