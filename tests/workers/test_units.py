"""Units of a plan: every byte in exactly one, their order, shares of a tensor, and second attempts."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from itertools import pairwise
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.unit_fixtures import PlanContents
from wherry.core.digest import LEAF, leaf_count
from wherry.core.tensorspec import Span
from wherry.mover.move import RAW_BYTES, Move
from wherry.workers.coordinator import stragglers
from wherry.workers.records import Task, TaskKind
from wherry.workers.unit import FilesOfMoves, TargetFiles, UnitFile, shares
from wherry.workers.work import LOOKED_AT, LOOKED_AT_LAST, in_order

MIB = 1 << 20
UNHURRIED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # the machine may be loaded


def in_one_file(nbytes, name):
    return FilesOfMoves(array("q", [nbytes]), [frozenset([name])])


@st.composite
def targets(draw, *, is_view=False):
    """A plan and the files of its target: tensors in files, each made of one or several stored tensors."""
    sizes = draw(st.lists(st.integers(0, 40 * MIB), min_size=1, max_size=30))
    files = draw(st.integers(1, 12))
    homes = {(f"t{n}",): f"file-{draw(st.integers(0, files - 1))}" for n in range(len(sizes))}
    nbytes = {(f"t{n}",): size for n, size in enumerate(sizes)}
    held = {
        f"file-{n}": 100 + sum(nbytes[path] for path, home in homes.items() if home == f"file-{n}")
        for n in range(files)
    }
    stored = {(f"s{n}",): draw(st.integers(1, 40 * MIB)) for n in range(draw(st.integers(1, 20)))}
    needs = {path: draw(st.lists(st.sampled_from(sorted(stored)), min_size=1, max_size=3)) for path in nbytes}
    contents = PlanContents(
        "plan", {path: path for path in nbytes}, nbytes, stored, needs.__getitem__, is_view
    )
    return contents, TargetFiles(
        held, {path: in_one_file(nbytes[path], home) for path, home in homes.items() if nbytes[path]}
    )


def moves_of(contents):
    for path, nbytes in contents.nbytes.items():
        for start in range(0, nbytes, RAW_BYTES):
            yield Move(path, Span(start, min(start + RAW_BYTES, nbytes)), None)


@UNHURRIED
@given(targets(), st.integers(1, 100 * MIB))
def test_every_file_and_every_move_is_in_exactly_one_unit(target, size):
    contents, files = target
    units = contents.cut(files, size)
    made = [file for unit in units for file in unit.files]
    assert sorted(made) == sorted(UnitFile(name, nbytes) for name, nbytes in files.sizes.items())
    for move in moves_of(contents):
        [unit] = [one for one in units if one.has(move.source, move.span)]
        [home] = files.moves[move.source].files
        assert home <= {file.name for file in unit.files}
    moved = sum(part.nbytes for unit in units for part in unit.parts)
    assert moved == sum(contents.nbytes.values())


@UNHURRIED
@given(targets(), st.integers(1, 100 * MIB))
def test_a_unit_is_not_larger_than_was_chosen_unless_one_file_is(target, size):
    for unit in target[0].cut(target[1], size):
        assert unit.nbytes <= size or len(unit.files) == 1


@UNHURRIED
@given(targets(is_view=True), st.integers(1, 100 * MIB))
def test_every_stored_tensor_is_hashed_by_exactly_one_unit_that_needs_it_if_there_is_one(target, size):
    contents, files = target
    units = contents.cut(files, size)
    hashed = [path for unit in units for path in unit.hashed]
    assert sorted(hashed) == sorted(contents.stored)
    needed = {path for unit in units for path in unit.sources}
    for unit in units:
        assert set(unit.hashed) & needed <= set(unit.sources)
        assert unit.nbytes_in == sum(part.nbytes for part in unit.parts) + sum(
            contents.stored[path] for path in unit.hashed
        )


def test_hashing_is_shared_out_evenly():
    """Scanned kernels are needed by every unit; the first unit must not hash all of them."""
    tensors = {(f"t{n}",): 10 for n in range(8)}
    stored = {(f"s{n}",): 100 for n in range(8)}
    contents = PlanContents(
        "plan", {path: path for path in tensors}, tensors, stored, lambda _path: list(stored), True
    )
    files = TargetFiles(
        {f"file-{n}": 10 for n in range(8)},
        {path: in_one_file(10, f"file-{n}") for n, path in enumerate(tensors)},
    )
    assert [len(unit.hashed) for unit in contents.cut(files, 10)] == [1] * 8


@UNHURRIED
@given(targets(), st.integers(1, 100 * MIB))
def test_units_depend_on_the_plan_alone(target, size):
    contents, files = target
    one, other = contents.cut(files, size), contents.cut(files, size)
    assert [unit.name for unit in one] == [unit.name for unit in other]
    elsewhere = PlanContents("other", contents.pairs, contents.nbytes, contents.stored, contents.made_of)
    assert {unit.digest for unit in elsewhere.cut(files, size)}.isdisjoint(unit.digest for unit in one)


@UNHURRIED
@given(targets())
def test_a_target_that_cannot_be_cut_is_one_unit(target):
    contents, files = target
    [unit] = contents.cut(TargetFiles(files.sizes, {}, "its bytes are encoded"), MIB)
    assert all(unit.has(move.source, move.span) for move in moves_of(contents))
    assert {file.name for file in unit.files} == set(files.sizes)


# Shares of units in one tensor: the unit of a file writes its chunks, and each unit can hash what it
# moves.


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


def moves_of_spread(rows):
    return list(zip(spans(rows), rows.files, strict=True))


@UNHURRIED
@given(tensors())
def test_a_move_belongs_to_the_units_of_its_files_and_to_no_others(tensor):
    rows, unit_of = tensor
    for share in shares(rows, unit_of):
        for move, names in moves_of_spread(rows):
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
    for move, files_of_move in moves_of_spread(rows):
        owners = [unit for unit in units if unit.has(("t",), move)]
        assert {file.name for unit in owners for file in unit.files} == files_of_move
        assert all(unit.reads(("t",), move) for unit in owners)


# The order in which a worker tries to claim units: few looks at claims of others, and rarely the choice
# of another.


def units(count):
    return [Task(TaskKind.MAKE, SimpleNamespace(number=number)) for number in range(count)]


def claims(*numbers):
    return [f"claim-receipt-{number:05d}-0" for number in numbers]


def numbers(order):
    return [task.unit.number for task in order]


def test_a_worker_that_is_alone_goes_in_order():
    assert numbers(in_order(units(200), ["job.json"]))[0] == 0


def test_few_claims_of_others_are_looked_at_before_a_free_unit_and_every_free_unit_follows():
    order = numbers(in_order(units(200), claims(*range(10, 80)), "a worker"))
    assert set(order[:LOOKED_AT]) <= set(range(10, 80))
    assert sorted(order[LOOKED_AT:]) == [*range(10), *range(80, 200)]


def test_a_worker_looks_at_the_same_claims_again_as_long_as_they_are_there():
    orders = [numbers(in_order(units(80 + more), claims(*range(80)), "a worker")) for more in range(5)]
    assert len({tuple(order[:LOOKED_AT]) for order in orders}) == 1


def test_many_workers_together_look_at_every_claim_once_no_unit_is_free():
    orders = [numbers(in_order(units(50), claims(*range(50)), f"worker {number}")) for number in range(100)]
    assert all(len(order) == LOOKED_AT_LAST for order in orders)
    assert {number for order in orders for number in order} == set(range(50))


def test_workers_rarely_choose_the_same_unit():
    chosen = Counter(numbers(in_order(units(200), claims(0)))[LOOKED_AT - 1] for _worker in range(64))
    assert max(chosen.values()) < 16


# The rule for second attempts: at least 10 started, half of them done, and 3 times the median.


@pytest.mark.parametrize(
    ("running", "finished", "late"),
    [
        ({1: 31.0}, [10.0] * 9, [1]),
        ({1: 30.0}, [10.0] * 9, []),  # not more than 3 times the median
        ({1: 31.0}, [10.0] * 8, []),  # 9 were started
        (dict.fromkeys(range(6), 31.0), [10.0] * 5, []),  # fewer than half are done
        ({1: 40.0, 2: 50.0, 3: 5.0}, [10.0] * 7, [2, 1]),
        ({1: 31.0}, [10.0] * 5 + [100.0] * 4, [1]),  # the median, not the mean
        ({}, [10.0] * 20, []),
        ({1: 0.9, 2: 1.1}, [0.01] * 9, [2]),  # a second attempt costs more than it saves
    ],
)
def test_stragglers(running, finished, late):
    assert stragglers(running, finished) == late
