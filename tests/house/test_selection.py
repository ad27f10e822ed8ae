"""The table of the default selection names functions that exist, and chooses the same cases whatever else is added."""

from __future__ import annotations

import ast

import pytest

from tests.support.house import ROOT
from tests.support.selection import beyond, selected_cases


def functions_of(file):
    """The functions of a file of tests, with the classes that they are in."""
    found = set()
    for node in ast.walk(ast.parse((ROOT / file).read_text())):
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}::{one.name}" for one in node.body if isinstance(one, ast.FunctionDef)}
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            found.add(node.name)
    return found


def test_every_function_of_the_table_is_there():
    for name, count in selected_cases().items():
        file, _, function = name.partition("::")
        assert (ROOT / file).is_file(), name
        assert function in functions_of(file), name
        assert count >= 0


def test_a_new_case_changes_the_choice_of_no_other():
    tests, selected = [f"t.py::test_a[{number}]" for number in range(20)], {"t.py::test_a": 5}
    chosen = {*tests} - beyond(tests, selected)
    assert len(chosen) == 5
    more = {*tests, "t.py::test_a[new]", "t.py::test_b[0]"}
    now = more - beyond(more, selected)
    assert "t.py::test_b[0]" in now
    assert len(now & chosen) >= 4


@pytest.mark.parametrize("count", [0, 1])
def test_a_function_without_cases_runs_or_does_not(count):
    assert beyond(["t.py::test_a"], {"t.py::test_a": count}) == ({"t.py::test_a"} if count == 0 else set())


def test_slow_tests_and_those_of_the_rest_differ(request):
    """The marker is set while tests are collected, for this run too."""
    for item in request.session.items:
        assert not (item.get_closest_marker("slow") and item.get_closest_marker("full"))
