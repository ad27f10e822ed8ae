"""Which tests `infra/test` runs by default; the others have the marker `full`.

`tests/selection.toml` names functions whose cases do not all run by default, with how many do. Cases are chosen by a
hash of their names: a new case changes the choice of no other.
"""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Iterable
from pathlib import Path

import pytest

TABLE = Path(__file__).resolve().parents[1] / "selection.toml"


def selected_cases() -> dict[str, int]:
    """Function → how many of its cases run by default, for functions of which not all do."""
    table = tomllib.loads(TABLE.read_text(encoding="utf-8"))
    return {f"{file}::{name}": count for file, rows in table.items() for name, count in rows.items()}


def function_of(test: str) -> str:
    """The function of a test, without its case."""
    return test.partition("[")[0]


def beyond(tests: Iterable[str], selected: dict[str, int]) -> set[str]:
    """The tests that do not run by default.

    Args:
        tests: all tests, each with its case.
        selected: function → how many of its cases run by default; all, if it is not named.
    """
    cases: dict[str, list[str]] = {}
    for test in tests:
        if function_of(test) in selected:
            cases.setdefault(function_of(test), []).append(test)
    return {test for name, found in cases.items() for test in sorted(found, key=_order)[selected[name] :]}


def mark_full(items: Iterable[pytest.Item]) -> None:
    """Give the marker `full` to the tests that do not run by default; slow ones have a marker of their own."""
    own = {item.nodeid: item for item in items if item.get_closest_marker("slow") is None}
    for test in beyond(own, selected_cases()):
        own[test].add_marker(pytest.mark.full)


def _order(test: str) -> bytes:
    return hashlib.sha256(test.encode()).digest()
