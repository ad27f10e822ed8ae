"""Whether a path exists is not decided by an error of the storage."""

import errno
import os

import pytest

from wherry.storage.folders import is_there


def test_a_link_to_nothing_and_a_file_below_a_file(tmp_path):
    (tmp_path / "link").symlink_to("nothing")
    (tmp_path / "file").touch()
    assert is_there(tmp_path / "link")
    assert is_there(tmp_path / "file")
    assert not is_there(tmp_path / "none")
    assert not is_there(tmp_path / "file" / "x")


def test_an_error_of_the_storage_is_not_taken_for_absence(tmp_path, monkeypatch):
    def fail(_path):
        raise OSError(errno.EIO, "the disk does not answer")

    monkeypatch.setattr(os, "lstat", fail)
    with pytest.raises(OSError, match="does not answer"):
        is_there(tmp_path)
