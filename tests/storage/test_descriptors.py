"""Descriptors: what is in use stays open, and nothing stays open after the end."""

from __future__ import annotations

import os

import pytest

from wherry.storage import open_file
from wherry.storage.open_file import Descriptors


@pytest.fixture
def files(tmp_path):
    for number in range(6):
        (tmp_path / str(number)).write_bytes(b"%d" % number)
    return Descriptors(lambda number: os.open(tmp_path / str(number), os.O_RDONLY))


def is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def test_what_is_in_use_is_closed_when_its_block_ends(files):
    with files.using(0) as idle:
        pass
    with files.using(1) as outer:
        with files.using(1) as inner:
            files.close()
            assert not is_open(idle)
            assert os.pread(inner, 1, 0) == b"1"
        assert inner == outer
        assert os.pread(outer, 1, 0) == b"1"
    assert not is_open(outer)


def test_what_is_opened_after_the_end_does_not_stay(files):
    files.close()
    with files.using(2) as late:
        assert os.pread(late, 1, 0) == b"2"
    assert not is_open(late)


def test_the_one_that_was_used_longest_ago_makes_room(files, monkeypatch):
    monkeypatch.setattr(open_file, "MOST_OPEN", 2)
    with files.using(0) as busy:
        for number in (1, 2):
            with files.using(number):
                pass
        assert set(files._open) == {0, 2}
        assert os.pread(busy, 1, 0) == b"0"
    files.close()
    assert not is_open(busy)
