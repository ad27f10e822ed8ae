"""The list of mutants is good: each entry still applies, names tests that exist, and every room has one."""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import os
import subprocess
import sys
from collections import Counter
from functools import cache
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

import pytest

from tests.support.infra import INFRA, ROOT

LEAST = 100
SCRIPT = INFRA / "mutants"


def _loaded() -> Any:
    """The script, which finds its neighbours as it does when it is started."""
    sys.path.insert(0, str(INFRA))
    try:
        loader = SourceFileLoader("infra_mutants", str(SCRIPT))
        spec = importlib.util.spec_from_loader(loader.name, loader)
        assert spec is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[loader.name] = module  # dataclasses look there
        loader.exec_module(module)
    finally:
        sys.path.remove(str(INFRA))
    return module


script = _loaded()
MUTANTS = script.mutants()
TESTS = {test for one in MUTANTS for test in one.tests}


def names(folder: str) -> set[str]:
    """Folders and modules of a room, without its links and `__init__`."""
    found = {path.name.removesuffix(".py") for path in (ROOT / folder).iterdir() if not path.is_symlink()}
    return {name for name in found if not name.startswith("__") and "." not in name}


def changed_in(folder: str) -> set[str]:
    """The same of what entries change."""
    depth = folder.count("/") + 1
    files = [one.file.split("/") for one in MUTANTS if one.file.startswith(f"{folder}/")]
    return {parts[depth].removesuffix(".py") for parts in files}


@pytest.mark.parametrize("folder", ["wherry", "integrations/containers", "integrations/formats"])
def test_every_room_and_every_format_has_one(folder: str) -> None:
    lacking = names(folder) - changed_in(folder)
    assert not lacking


def test_there_are_enough_and_none_is_there_twice() -> None:
    assert len(MUTANTS) >= LEAST
    twice = [
        what for what, count in Counter((one.file, one.old, one.new) for one in MUTANTS).items() if count > 1
    ]
    assert not twice
    assert {"tasks", "integrations"} <= {one.file.split("/")[0] for one in MUTANTS}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda one: one.name)
def test_it_still_applies_and_says_why(mutant: Any) -> None:
    assert script.fault(mutant, ROOT) is None
    assert mutant.tests
    assert mutant.why.endswith(".")
    if mutant.file.endswith(".py"):
        ast.parse((ROOT / mutant.file).read_text().replace(mutant.old, mutant.new))


@pytest.mark.parametrize("test", sorted(TESTS))
def test_the_tests_that_it_names_exist(test: str) -> None:
    file, _, name = test.partition("::")
    path = ROOT / file
    assert path.exists()
    assert not name or name.partition("[")[0] in functions(path)


@cache
def functions(path: Path) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}


def test_an_entry_that_no_longer_applies_is_named(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text("a = 1\nb = 1\n")
    entry = script.Mutant("x-1", "one.py", "= 1", "= 2", "why", ("tests",))
    assert script.fault(entry, tmp_path) == "the old text occurs 2 times in one.py; expected 1"
    assert (
        script.fault(dataclasses.replace(entry, old="c ="), tmp_path)
        == "the old text occurs 0 times in one.py; expected 1"
    )
    assert script.fault(dataclasses.replace(entry, file="two.py"), tmp_path) == "file not found: two.py"
    assert (
        script.fault(dataclasses.replace(entry, old="a = 1", new="a = 1"), tmp_path)
        == "the new text equals the old text"
    )
    assert script.fault(dataclasses.replace(entry, old="a = 1"), tmp_path) is None


@pytest.mark.parametrize(
    ("code", "said", "outcome"),
    [
        (0, "3 passed in 1s", "passed"),
        (0, "3 skipped in 1s", "skipped"),
        (5, "no tests ran", "skipped"),
        (1, "1 failed", "failed"),
        (4, "ERROR: not found", "pytest ended with exit code 4: ERROR: not found"),
    ],
)
def test_how_pytest_ends(code: int, said: str, outcome: str) -> None:
    assert sys.modules["copies"].classify_outcome(code, said) == outcome


def test_the_exit_code_says_whether_enough_is_found() -> None:
    one = script.Mutant("x-1", "one.py", "a", "b", "why", ("tests",))
    found, survived = script.Result(one, "found"), script.Result(one, "survived")
    assert script.report([found] * 95 + [survived] * 5, as_json=False) == 0
    assert script.report([found] * 94 + [survived] * 6, as_json=True) == 1
    assert (
        script.report([found] * 99 + [script.Result(one, "the old text occurs 0 times")], as_json=False) == 1
    )


def test_the_command_lists_the_entries_and_makes_nothing(tmp_path: Path) -> None:
    environment = {**os.environ, "WHERRY_VENV": str(tmp_path / "venv")}
    command = [str(SCRIPT), "--list", "--only", "core"]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert len(done.stdout.splitlines()) == sum(one.name.startswith("core-") for one in MUTANTS)
    assert list(tmp_path.iterdir()) == []
    wrong = subprocess.run([*command, "--only", "nothing"], check=False, capture_output=True, text=True)
    assert (wrong.returncode, wrong.stdout) == (1, "")
    assert "unknown entry nothing" in wrong.stderr


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_the_tests_find_what_is_broken() -> None:
    """With the interpreter that runs this test: no environment is made."""
    with script.workplace() as folder:
        results = list(script.Check(Path(sys.executable), folder, 1, 300).results(MUTANTS))
    assert script.report(results, as_json=False) == 0
