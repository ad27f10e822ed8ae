"""Every pair of formats that hold the same tree: there and back keeps the weights digest, as docs/reference shows."""

from __future__ import annotations

from itertools import permutations

import pytest

from tests.support.infra import ROOT, load
from wherry.formats.registry import find_format


@pytest.fixture(scope="module")
def pairs():
    with pytest.MonkeyPatch.context() as patch:
        yield load("pairs", patch)


@pytest.fixture(scope="module")
def measured(pairs, tmp_path_factory):
    return pairs.measure(tmp_path_factory.mktemp("pairs"))


def test_every_pair_keeps_the_weights_digest(measured):
    assert [pair for pair in measured if not pair.kept] == []


def test_a_tree_is_refused_only_where_the_row_says_that_it_is_not_held(pairs, measured):
    wanted = {
        (tree.name, *pair)
        for tree in pairs.TREES
        for pair in permutations(pairs.candidates(tree), 2)
        if pairs.is_related(tree, *pair)
    }
    assert {(pair.tree, pair.source, pair.target) for pair in measured} == wanted


def test_every_format_that_is_written_holds_some_tree(pairs, measured):
    assert {pair.source for pair in measured} == set(pairs.writable_names())


def test_what_a_row_holds_decides_what_is_carried(pairs):
    trees = {(tree.name, tree.owner): set(pairs.candidates(tree)) for tree in pairs.TREES}
    flat, nested = trees["flat", ""], trees["nested", ""]
    assert flat - nested == {name for name in flat if find_format(name).holds.depth}
    for (_name, owner), held in trees.items():
        system = find_format(owner).system if owner else ""
        if owner and find_format(owner).holds.needs:
            assert held - {owner} == {name for name in held & flat if find_format(name).holds.companions}
        if owner:  # the nested tree is a Flax tree, which T5X, PaxML and Penzai take
            assert {find_format(name).system for name in held if find_format(name).form} <= {system}


def test_a_system_holds_only_trees_of_its_form(pairs, measured, tmp_path):
    """Nothing of another system is among the pairs, in either direction: its conversion is refused."""
    for pair in measured:
        systems = {find_format(name).system for name in (pair.source, pair.target)} - {""}
        assert len(systems) <= 1
    tried = 0
    for tree in (tree for tree in pairs.TREES if tree.owner):
        place = tmp_path / tree.owner
        place.mkdir()
        seed, own = pairs._make_seed(tree, place), find_format(tree.owner).system
        for name in pairs.writable_names():
            if find_format(name).form and find_format(name).system != own:
                assert pairs._carry_weights(seed, place / name, name) is None, (tree.owner, name)
                tried += 1
    assert tried > len(pairs.TREES)
    owners = {tree.owner for tree in pairs.TREES} - {""}
    assert {name for name in pairs.writable_names() if find_format(name).form} <= owners


def test_the_page_shows_it(pairs, measured):
    block = (
        (ROOT / "docs" / "reference" / "pairs.md")
        .read_text()
        .partition("<!-- pairs:start -->")[2]
        .partition("<!-- pairs:end -->")[0]
    )
    assert block.strip() == pairs.render(measured).strip(), "run infra/pairs.py"


def test_a_digest_that_changed_is_not_in_the_table(pairs):
    lost = pairs.Pair("flat", "npz", "orbax", ("a", "b", "a"))
    kept = [pairs.Pair(tree, "npz", "orbax", ("a", "a", "a")) for tree in ("flat", "nested", "own")]
    assert not lost.kept
    assert not pairs.Pair("flat", "npz", "orbax", ("a", "a", "refused")).kept
    assert "| both |" in pairs.render(kept[:2])
    assert "| own |" in pairs.render(kept[2:])
    assert "orbax" not in pairs.render([lost])
