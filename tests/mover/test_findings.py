"""What a comparison of digests says: which tensor, why, and which leaf of it."""

from __future__ import annotations

from wherry.core.algorithms import BLAKE3
from wherry.mover.hashing import Failure, Hashes, compare

FOUND = Hashes(BLAKE3, {("a",): "1", ("b", "c"): "2"}, {("a",): (b"x", b"y"), ("b", "c"): (b"x",)})


def test_equal_digests_are_no_finding():
    assert compare(FOUND, FOUND.digests, FOUND.leaves) == []


def test_a_tensor_that_is_gone_is_named():
    assert compare(FOUND, {**FOUND.digests, ("d",): "3"}, {}) == [Failure("d", "missing tensor")]


def test_the_first_leaf_that_differs_is_named_where_both_sides_know_their_leaves():
    expected = {("a",): "9", ("b", "c"): "2"}
    [known] = compare(FOUND, expected, {("a",): (b"x", b"z")})
    assert (known.path, known.leaf) == ("a", 1)
    assert known.reason == "digest mismatch: expected 9, got 1 (first difference in leaf 1)"
    assert [one.leaf for one in compare(FOUND, expected, {})] == [None]
    assert [one.leaf for one in compare(FOUND, expected, {("a",): (b"x",)})] == [None]
