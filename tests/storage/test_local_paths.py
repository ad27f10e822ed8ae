"""A local path is made absolute, and the name of its entry is its last part, as pathlib says."""

from __future__ import annotations

import os
from itertools import product
from pathlib import Path

import pytest

from wherry.storage.stores import local_location

PARTS = ("", ".", "..", "a", ".a", "a.", "...", ".\n", " ")
PATHS = [first + "/".join(parts) for first in ("", "/") for parts in product(PARTS, repeat=3)]


@pytest.mark.parametrize("root", ["", "/", "//", "///", "./"])
def test_paths_are_absolute_as_pathlib_says(root, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    paths = [root + path for path in PATHS]
    assert [local_location(path).path for path in paths] == [str(Path(path).absolute()) for path in paths]


def test_an_entry_has_the_last_part_of_its_path_as_its_name(tmp_path):
    (tmp_path / "a" / "b.c").mkdir(parents=True)
    paths = [str(tmp_path / "a"), str(tmp_path / "a" / "b.c"), "/", f"{tmp_path}/a/.."]
    store = local_location(str(tmp_path)).store
    assert [store.stat(path).name for path in (*paths, f"{tmp_path}/a/")] == [
        *(Path(path).name for path in paths),
        "a",
    ]
    assert store.stat(os.fspath(tmp_path / "missing")) is None
