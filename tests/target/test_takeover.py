"""Opening an area while others are at work around it: what vanishes is gone, what fails leaves no trace."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest

from wherry.errors import StorageError
from wherry.storage.folders import make_durable_folders
from wherry.storage.stores import locate
from wherry.target import area
from wherry.target.area import FormerArea
from wherry.target.file_staging import FileStaging

ID, OTHER = "0123abcd", "11111111"


def fail(*_arguments, **_options):
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def leave(parent, identity, token=""):
    """An area that an earlier run left, with the target `out` in it."""
    path = parent / f".wherry-out.{identity}{token}"
    path.mkdir(mode=0o700)
    (path / "out").write_text(identity)
    return path


@pytest.mark.parametrize(
    "gone",
    [
        FormerArea(Path(".wherry-out.00000000.draft")),
        FormerArea(Path(f".wherry-out.{OTHER}"), OTHER),
        FormerArea(Path(f".wherry-out.{ID}"), ID),
        FormerArea(Path(f".wherry-out.{ID}-89abcdef"), ID, "89abcdef"),
    ],
    ids=["draft of a lease", "of another conversion", "given up", "of a silent owner"],
)
def test_what_is_gone_when_it_is_looked_at_ends_no_run(tmp_path, monkeypatch, gone):
    real = area.left_for

    def left_for(parent, name):
        yield FormerArea(parent / gone.path, gone.identity, gone.token)
        yield from real(parent, name)

    monkeypatch.setattr(area, "left_for", left_for)
    with FileStaging(locate(tmp_path / "out"), ID) as staging:
        Path(staging.location.path).write_text("new")
        staging.commit()
    assert os.listdir(tmp_path) == ["out"]


def test_an_area_that_vanishes_while_it_is_taken_up_is_made_anew(tmp_path, monkeypatch):
    left, real = leave(tmp_path, ID), area.take_up

    def take_up(*arguments):
        shutil.rmtree(left)
        return real(*arguments)

    monkeypatch.setattr(area, "take_up", take_up)
    with FileStaging(locate(tmp_path / "out"), ID) as staging:
        assert os.listdir(staging.area) == []
    assert os.listdir(tmp_path) == []


def test_a_file_that_vanishes_while_an_area_is_looked_at_is_no_reason_against_it(tmp_path, monkeypatch):
    left, real = leave(tmp_path, ID), os.lstat
    (left / "log").write_text("")

    def lstat(path, **options):
        if str(path).endswith("log"):
            Path(path).unlink(missing_ok=True)
        return real(path, **options)

    monkeypatch.setattr(os, "lstat", lstat)
    assert area.distrust_reason(left) is None
    assert os.listdir(left) == ["out"]


def test_an_opening_that_fails_leaves_neither_area_nor_parents(tmp_path, monkeypatch):
    monkeypatch.setattr(area, "_discard", fail)
    monkeypatch.setattr(
        area, "left_for", lambda parent, _name: iter([FormerArea(parent / ".wherry-out.x.draft")])
    )
    with pytest.raises(StorageError), FileStaging(locate(tmp_path / "deep" / "out"), ID):
        pytest.fail("it was opened")
    assert os.listdir(tmp_path) == []


def test_what_is_discarded_makes_room_for_the_copy(tmp_path, monkeypatch):
    leave(tmp_path, ID, "-89abcdef")
    leave(tmp_path, OTHER)
    real, seen = area.copy_area, []

    def copy_area(former, new):
        seen.append(sorted(path.name for path in tmp_path.iterdir() if path not in (former, new)))
        real(former, new)

    monkeypatch.setattr(area, "copy_area", copy_area)
    with FileStaging(locate(tmp_path / "out"), ID) as staging:
        assert Path(staging.location.path).read_text() == ID
    assert seen == [[".wherry-out.lease"]]


def test_a_journal_without_its_data_does_not_win(tmp_path, monkeypatch):
    """A loss of power while an area was removed can leave its journal alone."""
    monkeypatch.setattr(area, "read_log", lambda path, _key: (path.read_text().split(), None))
    for token, lines in (("-89abcdef", "1 2 3"), ("-01234567", "1 2")):
        left = leave(tmp_path, ID, token)
        (left / area.JOURNAL).write_text(lines)
    (tmp_path / f".wherry-out.{ID}-89abcdef" / "out").unlink()
    with FileStaging(locate(tmp_path / "out"), ID) as staging:
        assert (staging.area / area.JOURNAL).read_text() == "1 2"
        assert Path(staging.location.path).read_text() == ID


def test_a_copy_is_durable_before_its_journal_and_before_the_original_goes(tmp_path, monkeypatch):
    left = leave(tmp_path, ID, "-89abcdef")
    (left / "out").unlink()
    (left / "out" / "d").mkdir(parents=True)
    (left / "out" / "d" / "0").write_text("data")
    (left / area.JOURNAL).write_text("line")
    synced, removed, fsync = [], [], os.fsync

    def note(descriptor):
        synced.append(Path(f"/proc/self/fd/{descriptor}").readlink())
        fsync(descriptor)

    real = area.set_aside

    def set_aside(path):
        removed.append((path, len(synced)))
        return real(path)

    monkeypatch.setattr(os, "fsync", note)
    monkeypatch.setattr(area, "set_aside", set_aside)
    with FileStaging(locate(tmp_path / "out"), ID) as staging:
        new = staging.area
        journal = synced.index(new / area.JOURNAL)
        assert {new, new / "out", new / "out" / "d"} <= set(synced[:journal])
        assert synced[journal + 1 :] == [new, tmp_path, tmp_path], (
            "the copy, and the new name of the original"
        )
        assert removed == [(tmp_path / f"{new.name}.former", len(synced) - 1)]


def test_what_cannot_be_cleared_ends_the_run(tmp_path, monkeypatch):
    """What stays of it would be committed with what is written next."""

    def rmtree(_path, ignore_errors=False):
        if not ignore_errors:
            fail()

    with FileStaging(locate(tmp_path / "out"), ID, {}) as staging:
        Path(staging.location.path).mkdir()
        with monkeypatch.context() as patch:
            patch.setattr(shutil, "rmtree", rmtree)
            with pytest.raises(StorageError):
                staging.journal()
        staging.journal()
        assert not Path(staging.location.path).exists()


def test_parents_that_another_run_removes_are_made_again(tmp_path, monkeypatch):
    """It had made them, has failed, and removes them: between two of ours."""
    real, struck = os.mkdir, []

    def mkdir(path, *arguments, **options):
        if not struck and str(path).endswith("er") and Path(path).parent.exists():
            struck.append(path)
            Path(path).parent.rmdir()
        return real(path, *arguments, **options)

    monkeypatch.setattr(os, "mkdir", mkdir)
    with FileStaging(locate(tmp_path / "deep" / "er" / "out"), ID) as staging:
        Path(staging.location.path).write_text("new")
        staging.commit()
    assert struck
    assert (tmp_path / "deep" / "er" / "out").read_text() == "new"


def test_no_staging_area_is_made_on_the_way_to_a_folder(tmp_path):
    with pytest.raises(FileNotFoundError):
        list(make_durable_folders(tmp_path / ".wherry-out.0123abcd-89abcdef" / "d"))
    assert list(make_durable_folders(tmp_path / "a" / "b")) == [tmp_path / "a", tmp_path / "a" / "b"]
    assert list(make_durable_folders(tmp_path / "a" / "b")) == []
