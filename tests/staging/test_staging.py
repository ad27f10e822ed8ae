"""A target appears whole or not at all, and never over something that is there."""

import errno
import os
import tempfile
from pathlib import Path
from unittest.mock import Mock

import pytest

from wherry.core.steps import step_number
from wherry.errors import (
    MismatchError,
    NotFoundError,
    StorageError,
    TargetExistsError,
    UsageError,
    WherryError,
)
from wherry.objects.memory import MemoryObjects
from wherry.staging import staging
from wherry.staging.copied_staging import open_staging
from wherry.staging.object_staging import ObjectStaging
from wherry.staging.staging import Staging
from wherry.storage import renames
from wherry.storage.folders import is_staging
from wherry.storage.stores import locate

ID = "0123abcd"


class Cancelled(BaseException):
    """As Prefect's TerminationSignal: neither an Exception nor a KeyboardInterrupt."""


def fill(area):
    folder = Path(area.location.path)
    folder.mkdir()
    (folder / "a").write_text("1")


def test_commit_makes_the_folder_appear_and_leaves_no_staging(tmp_path):
    with Staging(locate(tmp_path / "deep/er/out"), ID) as area:
        fill(area)
        assert not (tmp_path / "deep/er/out").exists()
        area.commit()
    assert (tmp_path / "deep/er/out/a").read_text() == "1"
    assert os.listdir(tmp_path / "deep/er") == ["out"]


def test_without_a_commit_nothing_is_left_not_even_parents(tmp_path):
    with pytest.raises(RuntimeError), Staging(locate(tmp_path / "deep/er/out"), ID) as area:
        fill(area)
        raise RuntimeError
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("stop", [Cancelled, KeyboardInterrupt, SystemExit])
def test_a_stop_from_outside_leaves_the_area_and_its_journal(tmp_path, stop):
    with pytest.raises(stop), Staging(locate(tmp_path / "deep/out"), ID) as area:
        fill(area)
        area.journal.write_text("")
        area.spill.mkdir()
        raise stop
    assert os.listdir(tmp_path / "deep") == [f".wherry-out.{ID}"], "it is given up: its name bears no token"
    assert sorted(os.listdir(tmp_path / "deep" / f".wherry-out.{ID}")) == [area.journal.name, "out"]
    with Staging(locate(tmp_path / "deep/out"), ID) as again:
        again.commit()
    assert (tmp_path / "deep/out/a").read_text() == "1"


def test_an_area_that_failed_before_the_stop_is_not_kept(tmp_path):
    with pytest.raises(Cancelled), Staging(locate(tmp_path / "out"), ID) as area:
        fill(area)
        area.failed(MismatchError("read-back differs"))
        raise Cancelled
    assert os.listdir(tmp_path) == []


def test_a_stop_while_an_area_is_opened_gives_the_lease_back(tmp_path, monkeypatch):
    def stop(*_):
        raise Cancelled

    with monkeypatch.context() as patch:
        patch.setattr(staging, "open_area", stop)
        with pytest.raises(Cancelled), Staging(locate(tmp_path / "out"), ID):
            pytest.fail("it was opened")
    assert os.listdir(tmp_path) == []


def link_nothing(*_names, **_options):
    raise OSError(errno.EPERM, "no hard links")


@pytest.fixture(params=["renameat2", "links", "neither"])
def file_system(request, monkeypatch):
    """What the file system has to rename without replacing."""
    if request.param != "renameat2":
        monkeypatch.setattr(renames.ctypes, "CDLL", lambda *_args, **_options: object())
    if request.param == "neither":
        monkeypatch.setattr(os, "link", link_nothing)
    return request.param


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_a_file_system_without_links_has_commits_too(tmp_path, kind, file_system):
    target = tmp_path / "out"
    with Staging(locate(target), ID) as area:
        staged = Path(area.location.path)
        staged.mkdir() if kind == "folder" else staged.write_text("new")
        area.commit(beside=b"{}" if kind == "file" else None)
    assert target.is_dir() if kind == "folder" else target.read_text() == "new"
    assert sorted(os.listdir(tmp_path)) == (["out"] if kind == "folder" else ["out", "out.wherry.json"])


def test_a_link_that_fails_is_an_error(tmp_path, monkeypatch):
    def fail(*_names, **_options):
        raise OSError(errno.EIO, "the disk fails")

    monkeypatch.setattr(renames.ctypes, "CDLL", lambda *_args, **_options: object())
    monkeypatch.setattr(os, "link", fail)
    with pytest.raises(StorageError, match="the disk fails"), Staging(locate(tmp_path / "out"), ID) as area:
        Path(area.location.path).write_text("new")
        area.commit(beside=b"{}")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_commit_never_overwrites(tmp_path, kind, file_system):
    target = tmp_path / "out"
    with Staging(locate(target), ID) as area:
        staged = Path(area.location.path)
        staged.mkdir() if kind == "folder" else staged.write_text("new")
        target.mkdir() if kind == "folder" else target.write_text("old")
        (target / "theirs" if kind == "folder" else target).write_text("old")
        with pytest.raises(TargetExistsError):
            area.commit(beside=b"{}" if kind == "file" else None)
    assert os.listdir(tmp_path) == ["out"]
    assert (target / "theirs" if kind == "folder" else target).read_text() == "old"


def test_single_file_gets_its_sidecar_beside_it(tmp_path):
    with Staging(locate(tmp_path / "m.safetensors"), ID) as area:
        Path(area.location.path).write_text("data")
        area.commit(beside=b"{}")
    assert sorted(os.listdir(tmp_path)) == ["m.safetensors", "m.safetensors.wherry.json"]


def test_the_staging_name_is_no_step_and_begins_with_a_dot():
    area = Staging(locate("/x/0000001000"), ID)
    name = area.location.parent.name
    assert is_staging(name)
    assert name.startswith(".wherry-0000001000.")
    assert step_number(name) is None


def test_a_store_of_objects_has_no_areas():
    with pytest.raises(UsageError, match="memory://"):
        Staging(locate("memory://bucket/run/out"), ID)


def test_staged_files_are_uploaded_with_the_commit_member_last(monkeypatch):
    target, order = locate("memory://bucket/run/out"), []
    for name in ("put_object", "copy_object"):
        real = getattr(MemoryObjects, name)

        def seen(self, *args, real=real, name=name, **kwargs):
            order.append(args[0] if name == "put_object" else args[2])
            return real(self, *args, **kwargs)

        monkeypatch.setattr(MemoryObjects, name, seen)
    members = ("none", "marker", "a")  # the first that exists comes last
    with open_staging(target, ID, members) as area:
        fill(area)
        (Path(area.location.path) / "marker").write_text("done")
        area.commit()
    names = [path.removeprefix("bucket/run/") for path in order]
    # That store copies an object by putting it.
    assert [name for name in names if not name.startswith(".wherry-")] == [
        "out/a",
        "out/a",
        "out/marker",
        "out/marker",
    ]
    assert target.join("a").read_whole(1) == b"1"
    with pytest.raises(TargetExistsError), open_staging(target, ID, members) as area:
        fill(area)


def test_a_store_that_cannot_be_asked_leaves_no_temporary_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("WHERRY_HOME", str(tmp_path / "home"))
    for name in ("hf://nobody", "memory://bucket/run/out"):
        monkeypatch.setattr(ObjectStaging, "__init__", Mock(side_effect=StorageError("no login")))
        with pytest.raises(WherryError), open_staging(locate(name), ID, ()):
            pass
    assert [path.name for path in tmp_path.rglob("*wherry-*")] == []
    assert not list(tmp_path.glob("home/made/*"))


def test_a_parent_that_is_a_file_is_a_storage_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError), Staging(locate(tmp_path / "file/out"), ID):
        pass


def test_missing_files_are_not_found(tmp_path):
    with pytest.raises(NotFoundError):
        locate(tmp_path / "none").read_whole(1)


@pytest.mark.parametrize("step", ["keep the former one", "put ours", "sync"])
def test_a_sidecar_that_cannot_be_put_leaves_the_former_one(tmp_path, monkeypatch, step):
    """It belonged to a target that is gone."""
    target, sidecar = tmp_path / "m.bin", tmp_path / "m.bin.wherry.json"
    sidecar.write_text("former")
    rename, sync = os.rename, staging.sync_folder

    def renamed(source, destination, **options):
        struck = (
            str(source) == str(sidecar) if step == "keep the former one" else str(destination) == str(sidecar)
        )
        if step != "sync" and struck:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        rename(source, destination, **options)

    def synced(folder):
        if step == "sync":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        sync(folder)

    with pytest.raises(StorageError), Staging(locate(target), ID) as area:
        Path(area.location.path).write_text("data")
        with monkeypatch.context() as patch:
            patch.setattr(os, "rename", renamed)
            patch.setattr(staging, "sync_folder", synced)
            area.commit(beside=b"ours")
    assert sidecar.read_text() == "former"
    assert not target.exists()


@pytest.mark.parametrize("libc", [True, False], ids=["renameat2", "fallback"])
def test_a_stop_just_after_the_commit_leaves_the_sidecar(tmp_path, monkeypatch, libc):
    if not libc:
        monkeypatch.setattr(renames.ctypes, "CDLL", lambda *_args, **_options: object())
    target, real = tmp_path / "m.bin", staging.rename_without_replacing
    unlink = os.unlink

    def stopped(path, **options):
        if not libc and str(path).endswith("/m.bin"):
            raise KeyboardInterrupt
        unlink(path, **options)

    def renamed(source, destination):
        real(source, destination)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), Staging(locate(target), ID, resume=False) as area:
        Path(area.location.path).write_text("data")
        with monkeypatch.context() as patch:
            patch.setattr(os, "unlink", stopped)
            patch.setattr(staging, "rename_without_replacing", renamed)
            area.commit(beside=b"ours")
    assert target.read_text() == "data"
    assert (tmp_path / "m.bin.wherry.json").read_text() == "ours"


def test_an_area_that_no_run_can_take_up_is_not_kept(tmp_path):
    with pytest.raises(Cancelled), Staging(locate(tmp_path / "deep" / "out"), ID, resume=False) as area:
        fill(area)
        raise Cancelled
    assert os.listdir(tmp_path) == []
