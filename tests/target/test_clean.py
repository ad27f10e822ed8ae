"""clean while others are at work: what vanishes ends nothing, what changed stays, and a full disk can be freed."""

from __future__ import annotations

import errno
import os
import time
from importlib import import_module
from pathlib import Path

import pytest
from click.testing import CliRunner

from wherry.cli import cli
from wherry.errors import StorageError
from wherry.target import lease_watch
from wherry.target.clean import clean

module = import_module("wherry.target.leftovers")


@pytest.fixture
def area(tmp_path):
    """An area of a run that was killed yesterday."""
    path = tmp_path / ".wherry-out.0123abcd"
    path.mkdir()
    (path / "out").write_text("data")
    age(path, path / "out")
    return path


def age(*paths):
    for path in paths:
        os.utime(path, (time.time() - 86400,) * 2)


def after_judging(monkeypatch, act):
    """Another run does something once the leases have been judged."""
    real = module.judge_all

    def judge(watches):
        found = real(watches)
        act()
        return found

    monkeypatch.setattr(module, "judge_all", judge)


@pytest.mark.parametrize("name", [".wherry-notes", ".wherry-notes.0123abcd", ".wherry-out.backup"])
def test_what_another_program_made_stays(tmp_path, name):
    folder = tmp_path / name
    folder.mkdir()
    (folder / "diary.txt").write_text("private")
    age(folder / "diary.txt", folder)
    assert CliRunner().invoke(cli, ["clean", str(tmp_path)]).exit_code == 0
    assert (folder / "diary.txt").read_text() == "private"


@pytest.mark.parametrize("name", ["out", "out.0123abcd", "out.draft"])
def test_what_is_left_of_a_removal_is_removed(tmp_path, name):
    """A folder that was being removed has only the target in it, once its journal is gone."""
    draft = tmp_path / f".wherry-{name}.89abcdef.draft"
    (draft / name / "inner").mkdir(parents=True)
    age(draft / name / "inner", draft / name, draft)
    (row,) = clean(tmp_path)
    assert row.removed
    assert os.listdir(tmp_path) == []


def test_an_area_that_was_taken_up_and_given_back_meanwhile_stays(area, tmp_path, monkeypatch):
    after_judging(monkeypatch, lambda: (area / "out").write_text("more data"))
    (row,) = clean(tmp_path)
    assert (row.removed, row.reason) == (False, "a run has just used it")
    assert (area / "out").read_text() == "more data"


def test_an_area_that_was_taken_up_meanwhile_is_gone(area, tmp_path, monkeypatch):
    taken = tmp_path / f"{area.name}-89abcdef"
    after_judging(monkeypatch, lambda: area.rename(taken))
    assert clean(tmp_path) == []
    assert (taken / "out").read_text() == "data"


@pytest.mark.parametrize("what", ["area", "file", "folder"])
def test_what_vanishes_while_it_is_looked_at_keeps_nothing_else(area, tmp_path, monkeypatch, what):
    gone = {
        "area": tmp_path / ".wherry-a.0123abcd",
        "file": area / "a-spill",
        "folder": tmp_path / "a-folder",
    }[what]
    gone.write_text("") if what == "file" else gone.mkdir()
    age(area, gone)

    def vanishing(real):
        def call(path, *arguments, **options):
            if path == gone and gone.exists():
                gone.unlink() if what == "file" else gone.rmdir()
            return real(path, *arguments, **options)

        return call

    name = "iterdir" if what == "folder" else "lstat"
    monkeypatch.setattr(Path, name, vanishing(getattr(Path, name)))
    # An area of which a file vanishes is being used.
    assert [(row.uri, row.removed) for row in clean(tmp_path)] == [(str(area), what != "file")]
    assert all(row.removed for row in clean(tmp_path))
    assert os.listdir(tmp_path) == []


def test_no_run_resumes_an_area_whose_removal_ended_halfway(area, tmp_path, monkeypatch):
    real = os.unlink

    def fail(path, **options):
        if str(path).endswith("out"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(path, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", fail)
        with pytest.raises(StorageError):
            clean(tmp_path)
    assert not area.exists()
    assert [name.rpartition(".")[2] for name in os.listdir(tmp_path)] == ["draft"]
    assert [row.removed for row in clean(tmp_path)] == [True]


def full_while(monkeypatch, condition):
    """A disk on which no file can be made while a condition lasts."""
    real = os.open

    def opened(path, flags, *arguments, **options):
        if flags & os.O_CREAT and condition():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(path, flags, *arguments, **options)

    monkeypatch.setattr(os, "open", opened)


def test_a_full_disk_is_freed_without_a_lease(area, tmp_path, monkeypatch):
    (tmp_path / ".wherry-out.lease").write_text("of a run that is gone")
    age(tmp_path / ".wherry-out.lease")
    monkeypatch.setattr(lease_watch, "EXPIRY_SECONDS", 0.1)
    full_while(monkeypatch, area.exists)
    assert [row.removed for row in clean(tmp_path)] == [True, True]
    assert os.listdir(tmp_path) == []


def test_on_a_full_disk_a_lease_that_changed_keeps_its_area(area, tmp_path, monkeypatch):
    full_while(monkeypatch, area.exists)
    after_judging(monkeypatch, lambda: (tmp_path / "successor").rename(tmp_path / ".wherry-out.lease"))
    (tmp_path / "successor").write_text("of another run")
    assert [row.removed for row in clean(tmp_path)] == [False]
    assert (area / "out").exists()
