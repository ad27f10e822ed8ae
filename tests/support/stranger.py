"""What a new contributor has: the examples of docs/develop.md, and a copy of the tree."""

from __future__ import annotations

import shutil

import pytest

from tests.support.readme import PAGES, ROOT, code, section

ROOMS = ("wherry", "integrations", "tasks", "flows")


def examples(heading, language):
    """The code of a language below a heading of docs/develop.md."""
    return code(section(heading, PAGES["develop"]), language)


@pytest.fixture
def tree(tmp_path):
    """A copy of the tree, as a clone would be."""
    copy = tmp_path / "tree"
    ignore = shutil.ignore_patterns("__pycache__")
    for name in (*ROOMS, "docs", "infra"):
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=ignore)
    files = (
        "pyproject.toml",
        "README.md",
        "tests/golden/attributes.json",
        "tests/golden/damage.json",
        "tests/golden/judged.json",
    )  # what the generated pages are made of
    for path in (*ROOT.glob("tests/support/hooks_*.py"), *map(ROOT.joinpath, files)):
        (copy / path.relative_to(ROOT)).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy / path.relative_to(ROOT))
    return copy
