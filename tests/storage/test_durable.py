"""Files that are replaced durably: whoever reads meanwhile has the old one or the new one, whole."""

from __future__ import annotations

import pytest

from wherry.storage.folders import replace_file


def test_a_reader_of_the_old_file_keeps_it_whole(tmp_path):
    place = tmp_path / "a.json"
    place.write_text("the old contents")
    with place.open() as reading:
        replace_file(place, b"new")
        assert reading.read() == "the old contents"
    assert place.read_text() == "new"
    assert [one.name for one in tmp_path.iterdir()] == ["a.json"]


def test_what_fails_leaves_the_old_file_and_no_draft(tmp_path):
    place = tmp_path / "a.json"
    place.mkdir()
    with pytest.raises(OSError, match="directory"):
        replace_file(place, b"new")
    assert place.is_dir()
    assert [one.name for one in tmp_path.iterdir()] == ["a.json"]


def test_the_mode_is_that_of_the_new_file_from_its_first_moment(tmp_path):
    place = tmp_path / "a.json"
    replace_file(place, b"new", mode=0o600)
    assert place.stat().st_mode & 0o777 == 0o600
