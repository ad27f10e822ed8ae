"""Units of a plan: every byte of every file and every tensor is in exactly one, whatever the order and the sizes."""

from __future__ import annotations

from array import array

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.unit_fixtures import PlanContents
from wherry.core.tensorspec import Span
from wherry.mover.move import RAW_BYTES, Move
from wherry.workers.unit import FilesOfMoves, TargetFiles, UnitFile

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
