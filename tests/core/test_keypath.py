"""Key paths print without loss, and names that meet are refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wherry.core.keypath import joined_names, parse, render
from wherry.errors import UnrepresentableError, UsageError

paths = st.lists(st.text(alphabet="ab/~.2 é", max_size=4), max_size=4).map(tuple)


@given(paths)
def test_printed_form_is_read_back(path):
    assert parse(render(path)) == path


@given(paths, paths)
def test_different_paths_never_print_alike(one, other):
    assert (render(one) == render(other)) == (one == other)


@pytest.mark.parametrize("text", ["a~", "a~3", "~x/b"])
def test_text_that_is_no_printed_path_is_refused(text):
    with pytest.raises(UsageError, match="invalid key path"):
        parse(text)


def test_colliding_names_are_refused_and_both_are_named():
    with pytest.raises(UnrepresentableError, match=r"a\.b and a/b would both be stored as 'a\.b'"):
        joined_names([("a.b",), ("a", "b")], ".".join, "out")
    assert joined_names([("a", "b"), ("c",)], ".".join, "out") == {"a.b": ("a", "b"), "c": ("c",)}
