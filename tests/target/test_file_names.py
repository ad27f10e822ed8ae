"""Files of a target whose names differ only by case are refused where the file system does not tell them apart."""

from __future__ import annotations

import numpy as np
import pytest
from safetensors.numpy import save_file

import wherry
from wherry.errors import UnsupportedError
from wherry.storage.stores import local_location, locate
from wherry.target import file_names
from wherry.target.file_names import require_separate_names

ALIKE = [
    ["a", "A"],
    ["x/a", "y/a", "X/b"],
    ["ä", "A\u0308"],
    ["straße", "STRASSE"],
    ["k/v.safetensors", "k/V.safetensors"],
]
SEPARATE = [["a", "b"], ["a/x", "a/y", "a"], ["a/b", "ab"], ["a", "a"], []]


@pytest.fixture
def area(tmp_path):
    folder = tmp_path / ".wherry-out.aaaaaaaa-bbbbbbbb"
    folder.mkdir()
    return folder


def fold(area):
    """Let the file system find the area by its name in the other case."""
    area.with_name(area.name.swapcase()).symlink_to(area)


@pytest.mark.parametrize("names", ALIKE)
def test_names_that_differ_only_by_case_are_refused_where_case_is_folded(area, names):
    place = local_location(str(area / "out"))
    require_separate_names(place, names)
    fold(area)
    with pytest.raises(UnsupportedError, match="differ only by case") as failure:
        require_separate_names(place, names)
    assert all(name.rpartition("/")[2][:1] in str(failure.value) for name in names[:1])
    assert "--rename" in failure.value.cure


@pytest.mark.parametrize("names", SEPARATE)
def test_other_names_are_not(area, names):
    fold(area)
    require_separate_names(local_location(str(area / "out")), names)


def test_a_folder_without_letters_is_judged_by_the_one_around_it(area):
    fold(area)
    (area / "out").mkdir()
    (area / "out" / "100").mkdir()
    assert file_names._folds_case(area / "100")
    assert not file_names._folds_case(area / "out" / "100")


def test_a_file_of_that_name_is_not_the_same_file(area):
    area.with_name(area.name.swapcase()).mkdir()
    assert not file_names._folds_case(area)


def test_a_store_of_objects_tells_them_apart(tmp_path, monkeypatch):
    monkeypatch.setattr(file_names, "_folds_case", lambda _folder: pytest.fail("it was looked for"))
    require_separate_names(locate(f"memory://names{tmp_path}/out"), ["a", "A"])


@pytest.fixture
def folding(monkeypatch):
    monkeypatch.setattr(file_names, "_folds_case", lambda _folder: True)


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    save_file(
        {name: np.arange(4, dtype=np.float32) for name in ("a.w", "A.w")}, str(folder / "model.safetensors")
    )
    (folder / "config.json").write_text("{}")
    (folder / "merges.txt").write_text("1")
    return folder


@pytest.mark.parametrize("how", ["arrays", "companions"])
def test_nothing_is_left_of_a_conversion_that_is_refused(model, tmp_path, folding, how):
    if how == "companions":
        (model / "Merges.txt").write_text("2")
    to = {
        "arrays": {"to": "orbax", "options": {"ocdbt": False}},
        "companions": {"to": "hf", "family": "none"},
    }[how]
    home = tmp_path / "home"
    home.mkdir()
    with pytest.raises(UnsupportedError, match="differ only by case"):
        wherry.convert(str(model), str(home / "out"), lineage=False, **to)
    assert list(home.iterdir()) == []


def test_a_database_and_one_file_hold_such_key_paths(model, tmp_path, folding):
    for to in ({"to": "orbax"}, {"to": "safetensors"}):
        wherry.convert(str(model), str(tmp_path / to["to"]), lineage=False, **to)
        assert wherry.verify(str(tmp_path / to["to"]), level="digest").ok


COPIES = {"fetch": wherry.fetch, "rewrite": lambda *places: wherry.rewrite(*places, as_="box")}


@pytest.mark.parametrize("copy", COPIES)
def test_nothing_is_left_of_a_copy_that_is_refused(model, tmp_path, monkeypatch, copy):
    wherry.convert(str(model), str(tmp_path / "source"), to="orbax", options={"ocdbt": False}, lineage=False)
    monkeypatch.setattr(file_names, "_folds_case", lambda _folder: True)
    home = tmp_path / "home"
    home.mkdir()
    with pytest.raises(UnsupportedError, match="differ only by case"):
        COPIES[copy](str(tmp_path / "source"), str(home / "out"))
    assert list(home.iterdir()) == []
