"""Every pair of formats that hold the same tree: there and back keeps the weights digest, and README shows it."""

from __future__ import annotations

import pytest

from tests.infra_support import ROOT, load
from wherry.registry import find_format


@pytest.fixture(scope="module")
def pairs():
    with pytest.MonkeyPatch.context() as patch:
        yield load("pairs", patch)


@pytest.fixture(scope="module")
def measured(pairs, tmp_path_factory):
    return pairs.measure(tmp_path_factory.mktemp("pairs"))


def test_every_pair_keeps_the_weights_digest(measured):
    assert [pair for pair in measured if not pair.kept] == []


def test_only_formats_of_one_family_refuse_a_tree_that_their_row_holds(pairs, measured):
    own_names = {"lingua", "lingua-consolidated"}  # they hold Lingua's parameters only
    for tree, depth in (("flat", 1), ("nested", 3)):
        holds = {
            name
            for name in pairs.written()
            if name not in own_names and (find_format(name).holds.depth or depth) >= depth
        }
        seen = {(pair.source, pair.target) for pair in measured if pair.tree == tree}
        assert seen == {(one, other) for one in holds for other in holds if one != other}


def test_readme_shows_it(pairs, measured):
    block = (
        (ROOT / "README.md")
        .read_text()
        .partition("<!-- pairs:start -->")[2]
        .partition("<!-- pairs:end -->")[0]
    )
    assert block.strip() == pairs.render(measured).strip(), "run infra/pairs.py"


def test_a_digest_that_changed_is_not_in_the_table(pairs):
    lost = pairs.Pair("flat", "npz", "orbax", ("a", "b", "a"))
    kept = [pairs.Pair(tree, "npz", "orbax", ("a", "a", "a")) for tree in ("flat", "nested")]
    assert not lost.kept
    assert "both" in pairs.render(kept)
    assert "orbax" not in pairs.render([lost])
