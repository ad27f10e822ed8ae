"""README's quick start: both commands, in their order, in one fresh clone."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.infra import INFRA, ROOT

STEPS = ("lint", "format", "types")


def quick_start() -> list[str]:
    text = (ROOT / "README.md").read_text().partition("## Quick start")[2]
    block = re.search(r"```sh\n(.*?)```", text, re.DOTALL)
    assert block
    return [line.partition("#")[0].strip() for line in block[1].splitlines()]


def default_folder() -> str:
    found = re.search(r"default: (\.[\w-]+)/", (INFRA / "demo").read_text())
    assert found
    return found[1]


def test_the_demo_works_in_a_folder_that_is_no_module_and_no_staging_area() -> None:
    name = default_folder()
    assert not name.isidentifier()
    assert name.startswith("."), "pytest and pyright look into no hidden folder"
    assert not name.startswith(".wherry-"), "wherry would take it for a staging area"
    assert f"/{name}/" in (ROOT / ".gitignore").read_text().splitlines()


def test_ruff_says_the_same_of_a_clone_with_and_without_what_the_demo_leaves(tmp_path: Path) -> None:
    """A folder that is called like a module changes how ruff sorts the imports of that module."""
    for name in ("pyproject.toml", "infra"):
        place = ROOT / name
        (shutil.copytree if place.is_dir() else shutil.copy)(place, tmp_path / name)
    for room in ("tests", "wherry"):  # which infra imports: ruff sorts them as our own if they are there
        shutil.copytree(
            ROOT / room, tmp_path / room, ignore=shutil.ignore_patterns("__pycache__"), symlinks=True
        )
    (tmp_path / default_folder() / "runs").mkdir(parents=True)
    (tmp_path / default_folder() / "left.py").write_text("import os")
    done = subprocess.run(
        [sys.executable, "-m", "ruff", "check", "--no-cache", "."], cwd=tmp_path, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_both_commands_in_their_order_in_one_fresh_clone(tmp_path: Path) -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("this is no clone")
    clone, tools = tmp_path / "clone", tmp_path / "environment" / "bin"
    subprocess.run(["git", "clone", "-q", str(ROOT), str(clone)], check=True)
    tools.mkdir(parents=True)
    python = tools / "python"  # the environment of these tests, with the clone's wherry
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {
        **os.environ, "WHERRY_VENV": str(tools.parent), "PYTHONPATH": str(clone), "PATH": path,
    }  # fmt: skip
    demo, test = quick_start()
    assert (demo, test) == ("infra/demo", "infra/test")
    steps = [word for step in STEPS for word in ("--only", step)]
    for command in ([demo], [test, *steps, "--only", "tests", "--collect-only", "-q"]):
        done = subprocess.run(
            command, cwd=clone, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{command}: {done.stdout[-4000:]}\n{done.stderr[-2000:]}"
    left = subprocess.run(
        ["git", "status", "--porcelain"], cwd=clone, capture_output=True, text=True, check=True
    )
    assert left.stdout == ""
