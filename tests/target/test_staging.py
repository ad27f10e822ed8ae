"""A target appears whole or not at all, and never over something that is there; names that differ by case only."""

from __future__ import annotations

import errno
import os
import tempfile
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from safetensors.numpy import save_file

import wherry
from wherry.core.request import TargetRequest, convert_request
from wherry.core.steps import step_number
from wherry.errors import (
    MismatchError,
    NotFoundError,
    StorageError,
    TargetExistsError,
    UnsupportedError,
    UsageError,
    WherryError,
)
from wherry.store import folders
from wherry.store.folders import is_staging
from wherry.store.local_store import local_location, locate
from wherry.target import files
from wherry.target import staging as stagings
from wherry.target.clean import tidy
from wherry.target.copied_staging import CopiedStaging
from wherry.target.files import require_separate_names
from wherry.target.sinks import open_staging
from wherry.target.staging import JOURNAL, FileStaging
from wherry.workers.job import split

ID = "0123abcd"


class Cancelled(BaseException):
    """As Prefect's TerminationSignal: neither an Exception nor a KeyboardInterrupt."""


def fill(area):
    folder = Path(area.location.path)
    folder.mkdir()
    (folder / "a").write_text("1")


def test_commit_makes_the_folder_appear_and_leaves_no_staging(tmp_path):
    with FileStaging(locate(tmp_path / "deep/er/out"), ID) as area:
        fill(area)
        assert not (tmp_path / "deep/er/out").exists()
        area.commit()
    assert (tmp_path / "deep/er/out/a").read_text() == "1"
    assert os.listdir(tmp_path / "deep/er") == ["out"]


def test_without_a_commit_nothing_is_left_not_even_parents(tmp_path):
    with pytest.raises(RuntimeError), FileStaging(locate(tmp_path / "deep/er/out"), ID) as area:
        fill(area)
        raise RuntimeError
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("stop", [Cancelled, KeyboardInterrupt, SystemExit])
def test_a_stop_from_outside_leaves_the_area_and_its_journal(tmp_path, stop):
    with pytest.raises(stop), FileStaging(locate(tmp_path / "deep/out"), ID) as area:
        fill(area)
        (area.area / JOURNAL).write_text("")
        area.spill.mkdir()
        raise stop
    assert os.listdir(tmp_path / "deep") == [f".wherry-out.{ID}"], "it is given up: its name bears no token"
    assert sorted(os.listdir(tmp_path / "deep" / f".wherry-out.{ID}")) == [JOURNAL, "out"]
    with FileStaging(locate(tmp_path / "deep/out"), ID) as again:
        again.commit()
    assert (tmp_path / "deep/out/a").read_text() == "1"


def test_an_area_that_failed_before_the_stop_is_not_kept(tmp_path):
    with pytest.raises(Cancelled), FileStaging(locate(tmp_path / "out"), ID) as area:
        fill(area)
        area.failed(MismatchError("read-back differs"))
        raise Cancelled
    assert os.listdir(tmp_path) == []


def test_a_stop_while_an_area_is_opened_gives_the_lease_back(tmp_path, monkeypatch):
    def stop(*_):
        raise Cancelled

    with monkeypatch.context() as patch:
        patch.setattr(stagings, "open_area", stop)
        with pytest.raises(Cancelled), FileStaging(locate(tmp_path / "out"), ID):
            pytest.fail("it was opened")
    assert os.listdir(tmp_path) == []


def link_nothing(*_names, **_options):
    raise OSError(errno.EPERM, "no hard links")


@pytest.fixture(params=["renameat2", "links", "neither"])
def file_system(request, monkeypatch):
    """What the file system has to rename without replacing."""
    if request.param != "renameat2":
        monkeypatch.setattr(folders.ctypes, "CDLL", lambda *_args, **_options: object())
    if request.param == "neither":
        monkeypatch.setattr(os, "link", link_nothing)
    return request.param


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_a_file_system_without_links_has_commits_too(tmp_path, kind, file_system):
    target = tmp_path / "out"
    with FileStaging(locate(target), ID) as area:
        staged = Path(area.location.path)
        staged.mkdir() if kind == "folder" else staged.write_text("new")
        area.commit(sidecar=b"{}" if kind == "file" else None)
    assert target.is_dir() if kind == "folder" else target.read_text() == "new"
    assert sorted(os.listdir(tmp_path)) == (["out"] if kind == "folder" else ["out", "out.wherry.json"])


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_a_file_is_refused_where_a_commit_that_is_killed_leaves_it_empty(tmp_path, kind, file_system):
    """It is refused before its first byte, and nothing is left; see `folders._rename_file`."""
    refused = kind == "file" and file_system == "neither"
    area = FileStaging(locate(tmp_path / "deep" / "out"), ID, is_file=kind == "file")
    with pytest.raises(UnsupportedError, match="neither hard links") if refused else nullcontext(), area:
        assert os.listdir(area.location.path.rpartition("/")[0]) == []
    assert os.listdir(tmp_path) == []


def test_the_area_of_a_run_that_was_killed_before_its_check_is_refused_too(tmp_path, monkeypatch):
    with pytest.raises(Cancelled), FileStaging(locate(tmp_path / "out"), ID) as area:
        Path(area.location.path).write_text("data")
        raise Cancelled
    monkeypatch.setattr(folders.ctypes, "CDLL", lambda *_args, **_options: object())
    monkeypatch.setattr(os, "link", link_nothing)
    with pytest.raises(UnsupportedError), FileStaging(locate(tmp_path / "out"), ID, is_file=True):
        pytest.fail("it was opened")
    assert os.listdir(tmp_path) == [f".wherry-out.{ID}"]


@pytest.mark.parametrize("verb", ["convert", "fetch", "split"])
def test_every_verb_that_makes_a_file_refuses_it_there(tmp_path, monkeypatch, verb):
    source, home = tmp_path / "model.safetensors", tmp_path / "home"
    save_file({"w": np.arange(4, dtype=np.float32)}, str(source))
    home.mkdir()
    wherry.convert(str(source), str(tmp_path / "made.npz"), to="npz", lineage=False)
    request = convert_request(str(source), [TargetRequest(str(home / "out.npz"), "npz", {})], lineage=False)
    act = {
        "convert": lambda: wherry.convert(str(source), str(home / "out.npz"), to="npz", lineage=False),
        "fetch": lambda: wherry.fetch(str(tmp_path / "made.npz"), str(home / "out.npz")),
        "split": lambda: split(request, 1 << 20),
    }[verb]
    with monkeypatch.context() as patch:
        patch.setattr(folders.ctypes, "CDLL", lambda *_args, **_options: object())
        patch.setattr(os, "link", link_nothing)
        with pytest.raises(UnsupportedError, match="neither hard links"):
            act()
    assert os.listdir(home) == []
    act()


def test_whether_files_are_named_at_once_leaves_nothing(tmp_path, file_system, monkeypatch):
    probes = tmp_path / "first", tmp_path / "second"
    assert folders.names_files_at_once(*probes) == (file_system != "neither")
    assert os.listdir(tmp_path) == []
    if file_system != "renameat2":
        monkeypatch.setattr(os, "link", fail)
        with pytest.raises(OSError, match="the disk fails"):
            folders.names_files_at_once(*probes)
        assert os.listdir(tmp_path) == []


def fail(*_names, **_options):
    raise OSError(errno.EIO, "the disk fails")


def test_a_link_that_fails_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(folders.ctypes, "CDLL", lambda *_args, **_options: object())
    monkeypatch.setattr(os, "link", fail)
    with (
        pytest.raises(StorageError, match="the disk fails"),
        FileStaging(locate(tmp_path / "out"), ID) as area,
    ):
        Path(area.location.path).write_text("new")
        area.commit(sidecar=b"{}")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_commit_never_overwrites(tmp_path, kind, file_system):
    target = tmp_path / "out"
    with FileStaging(locate(target), ID) as area:
        staged = Path(area.location.path)
        staged.mkdir() if kind == "folder" else staged.write_text("new")
        target.mkdir() if kind == "folder" else target.write_text("old")
        (target / "previous" if kind == "folder" else target).write_text("old")
        with pytest.raises(TargetExistsError):
            area.commit(sidecar=b"{}" if kind == "file" else None)
    assert os.listdir(tmp_path) == ["out"]
    assert (target / "previous" if kind == "folder" else target).read_text() == "old"


def test_single_file_gets_its_sidecar_next_to_it(tmp_path):
    with FileStaging(locate(tmp_path / "m.safetensors"), ID) as area:
        Path(area.location.path).write_text("data")
        area.commit(sidecar=b"{}")
    assert sorted(os.listdir(tmp_path)) == ["m.safetensors", "m.safetensors.wherry.json"]


def test_the_staging_name_is_no_step_and_begins_with_a_dot():
    area = FileStaging(locate("/x/0000001000"), ID)
    name = area.location.parent.name
    assert is_staging(name)
    assert name.startswith(".wherry-0000001000.")
    assert step_number(name) is None


def test_a_store_of_objects_has_no_areas():
    with pytest.raises(UsageError, match="memory://"):
        FileStaging(locate("memory://bucket/run/out"), ID)


def test_staged_files_are_put_whole_with_the_commit_member_last(monkeypatch):
    target, order = locate("memory://bucket/run/out"), []
    store = type(target.store)
    real = store.put
    monkeypatch.setattr(
        store, "put", lambda self, path, *data, **how: (order.append(path), real(self, path, *data, **how))
    )
    members = ("none", "marker", "a")  # the first that exists comes last
    with CopiedStaging(target, {}, members) as area:
        fill(area)
        (Path(area.location.path) / "marker").write_text("done")
        area.commit()
    assert [path.removeprefix("bucket/run/") for path in order] == ["out/a", "out/marker"]
    assert target.join("a").read_whole(1) == b"1"
    with CopiedStaging(target, {}, members) as area:
        fill(area)
        with pytest.raises(TargetExistsError):
            area.commit()


def test_an_upload_that_fails_leaves_nothing_on_the_local_disk(tmp_path, monkeypatch, wherry_home):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    target = locate("memory://bucket/failed/out")
    monkeypatch.setattr(type(target.store), "put", Mock(side_effect=StorageError("no answer")))
    with pytest.raises(StorageError, match="no answer"), CopiedStaging(target, {}, ("a",)) as area:
        fill(area)
        assert len(os.listdir(tmp_path)) == len(list(wherry_home.glob("made/*"))) == 1
        area.commit()
    assert not target.exists()
    assert os.listdir(tmp_path) == []
    assert list(wherry_home.glob("made/*")) == []


def test_a_store_that_cannot_be_reached_leaves_no_temporary_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("WHERRY_HOME", str(tmp_path / "home"))
    with pytest.raises(WherryError), open_staging(locate("hf://nobody"), ID, {}, (), 0):
        pass
    assert [path.name for path in tmp_path.rglob("*wherry-*")] == []
    assert not list(tmp_path.glob("home/made/*"))


def test_a_parent_that_is_a_file_is_a_storage_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError), FileStaging(locate(tmp_path / "file/out"), ID):
        pass


def test_missing_files_are_not_found(tmp_path):
    with pytest.raises(NotFoundError):
        locate(tmp_path / "none").read_whole(1)


@pytest.mark.parametrize("step", ["keep the former one", "put ours", "sync"])
def test_a_sidecar_that_cannot_be_put_leaves_the_former_one(tmp_path, monkeypatch, step):
    """It belonged to a target that is gone."""
    target, sidecar = tmp_path / "m.bin", tmp_path / "m.bin.wherry.json"
    sidecar.write_text("former")
    rename, sync = os.rename, stagings.sync_folder

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

    with pytest.raises(StorageError), FileStaging(locate(target), ID) as area:
        Path(area.location.path).write_text("data")
        with monkeypatch.context() as patch:
            patch.setattr(os, "rename", renamed)
            patch.setattr(stagings, "sync_folder", synced)
            area.commit(sidecar=b"ours")
    assert sidecar.read_text() == "former"
    assert not target.exists()


@pytest.mark.parametrize("libc", [True, False], ids=["renameat2", "fallback"])
def test_a_stop_just_after_the_commit_leaves_the_sidecar(tmp_path, monkeypatch, libc):
    if not libc:
        monkeypatch.setattr(folders.ctypes, "CDLL", lambda *_args, **_options: object())
    target, real = tmp_path / "m.bin", stagings.rename_without_replacing
    unlink = os.unlink

    def stopped(path, **options):
        if not libc and str(path).endswith("/m.bin"):
            raise KeyboardInterrupt
        unlink(path, **options)

    def renamed(source, destination):
        real(source, destination)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), FileStaging(locate(target), ID, resume=False) as area:
        Path(area.location.path).write_text("data")
        with monkeypatch.context() as patch:
            patch.setattr(os, "unlink", stopped)
            patch.setattr(stagings, "rename_without_replacing", renamed)
            area.commit(sidecar=b"ours")
    assert target.read_text() == "data"
    assert (tmp_path / "m.bin.wherry.json").read_text() == "ours"


def test_an_area_that_no_run_can_take_up_is_not_kept(tmp_path):
    with pytest.raises(Cancelled), FileStaging(locate(tmp_path / "deep" / "out"), ID, resume=False) as area:
        fill(area)
        raise Cancelled
    assert os.listdir(tmp_path) == []


def test_a_rename_whose_answer_was_lost_is_the_commit(tmp_path, monkeypatch):
    """A file server can answer with an error, or that the name is taken, after it has renamed."""
    rename = stagings.rename_without_replacing
    for number, code in enumerate((errno.EIO, errno.EEXIST)):
        target = tmp_path / f"out{number}"

        def lose(source, place, code=code):
            rename(source, place)
            raise OSError(code, os.strerror(code))

        monkeypatch.setattr(stagings, "rename_without_replacing", lose)
        with FileStaging(locate(target), ID) as area:
            fill(area)
            area.commit()
        assert os.listdir(target) == ["a"]
    assert sorted(os.listdir(tmp_path)) == ["out0", "out1"]


def test_a_folder_that_cannot_be_listed_is_not_committed(tmp_path, monkeypatch):
    """What is in it would not be synced."""
    scan = os.scandir

    def fail(folder):
        if str(folder).endswith("/inner"):
            raise OSError(errno.EIO, "the disk fails")
        return scan(folder)

    with (
        pytest.raises(StorageError, match="the disk fails"),
        FileStaging(locate(tmp_path / "out"), ID) as area,
    ):
        fill(area)
        Path(area.location.path, "inner").mkdir()
        monkeypatch.setattr(os, "scandir", fail)
        area.commit()
    assert not (tmp_path / "out").exists()


def test_a_folder_that_cannot_be_tidied_is_an_error_of_the_storage(tmp_path, monkeypatch):
    monkeypatch.setattr(Path, "iterdir", Mock(side_effect=OSError(errno.EIO, "the disk fails")))
    with pytest.raises(StorageError, match="the disk fails"):
        tidy(locate(tmp_path / "out"))


def test_a_stop_whose_area_cannot_be_left_is_the_stop(tmp_path, monkeypatch):
    """The error of the storage is warned of: it says nothing of why the run ended."""
    failing = Mock(side_effect=OSError(errno.EIO, "the disk fails"))
    with (
        pytest.raises(KeyboardInterrupt),
        monkeypatch.context() as patch,
        FileStaging(locate(tmp_path / "out"), ID) as area,
    ):
        fill(area)
        patch.setattr(stagings, "remove_leftover", failing)
        raise KeyboardInterrupt
    assert os.listdir(tmp_path) == [f".wherry-out.{ID}"]
    with pytest.raises(MismatchError), FileStaging(locate(tmp_path / "out"), ID) as area:
        monkeypatch.setattr(stagings, "hide", Mock(side_effect=OSError(errno.EIO, "the disk fails")))
        raise MismatchError("it differs")


# Files of a target whose names differ only by case are refused where the file system does not tell them
# apart.


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
    assert files._folds_case(area / "100")
    assert not files._folds_case(area / "out" / "100")


def test_a_file_of_that_name_is_not_the_same_file(area):
    area.with_name(area.name.swapcase()).mkdir()
    assert not files._folds_case(area)


def test_a_store_of_objects_tells_them_apart(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_folds_case", lambda _folder: pytest.fail("it was looked for"))
    require_separate_names(locate(f"memory://names{tmp_path}/out"), ["a", "A"])


@pytest.fixture
def folding(monkeypatch):
    monkeypatch.setattr(files, "_folds_case", lambda _folder: True)


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
    monkeypatch.setattr(files, "_folds_case", lambda _folder: True)
    home = tmp_path / "home"
    home.mkdir()
    with pytest.raises(UnsupportedError, match="differ only by case"):
        COPIES[copy](str(tmp_path / "source"), str(home / "out"))
    assert list(home.iterdir()) == []
