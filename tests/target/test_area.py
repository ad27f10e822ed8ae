"""Staging areas: what is taken up was made by this user alone, and failures leave no trace."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import wherry
from tests.support.crash import WRITTEN, convert, options_of
from wherry.errors import StorageError, TargetInUseError
from wherry.store.folders import make_durable_folders, make_folders, remove
from wherry.store.local_store import locate
from wherry.target import lease as leases
from wherry.target import staging as stagings
from wherry.target.clean import clean
from wherry.target.staging import FileStaging, FormerArea

pytest_plugins = ["tests.support.crash_fixtures"]

ID = "0123abcd"


class Cancelled(BaseException):
    """As Prefect's TerminationSignal."""


@pytest.fixture
def model(tmp_path):
    """Eight tensors of 400 kB."""
    path = tmp_path / "model.safetensors"
    tensors = {f"layer.{n}": np.full((100, 1000), n, np.float32) for n in range(8)}
    save_file(tensors, path)
    return path


def interrupt(model, target, monkeypatch, **options):
    """Convert until half is recorded; the area that is left."""

    def report(progress):
        if progress.stage == "convert" and progress.done * 2 >= progress.total:
            raise Cancelled

    with monkeypatch.context() as patch:
        patch.setattr("wherry.core.progress._INTERVAL", 0)
        with pytest.raises(Cancelled):
            convert_slowly(model, target, progress=report, **options)
    (left,) = target.parent.glob(".wherry-*")
    assert left.stat().st_mode & 0o777 == 0o700
    return left


def convert_slowly(model, target, **options):
    from wherry.testing import faults

    with faults.small_steps():
        return wherry.convert(model, target, to="safetensors", lineage=False, **options)


def assert_right(target, model):
    found, expected = load_file(target), load_file(model)
    assert found.keys() == expected.keys()
    assert all(np.array_equal(found[name], array) for name, array in expected.items())
    assert sorted(os.listdir(target.parent)) == [target.name, f"{target.name}.wherry.json"]


@pytest.fixture
def target(tmp_path):
    (tmp_path / "out").mkdir()
    return tmp_path / "out" / "m.safetensors"


def spoil(left, target):
    """Alter staged bytes that the journal calls done."""
    staged = left / target.name
    staged.write_bytes(staged.read_bytes()[:-3_000_000] + b"\xff" * 3_000_000)


def test_what_this_user_left_is_taken_up(model, target, monkeypatch):
    left = interrupt(model, target, monkeypatch)
    inode = left.stat().st_ino
    seen = []
    with monkeypatch.context() as patch:
        patch.setattr("wherry.core.progress._INTERVAL", 0)
        receipt = convert_slowly(
            model,
            target,
            progress=lambda _: seen.extend(p.stat().st_ino for p in target.parent.glob(".wherry-*-*")),
        )
    assert receipt.resumed_bytes > 0
    assert inode in seen, "an area that was given up is renamed, not copied"
    assert_right(target, model)


@pytest.mark.parametrize("verify", ["digest", "none"])
@pytest.mark.parametrize("how", ["another key", "opened", "link inside", "second name inside", "fifo inside"])
def test_what_others_may_have_prepared_is_not_believed(model, target, monkeypatch, verify, how, tmp_path):
    left = interrupt(model, target, monkeypatch, verify=verify)
    spoil(left, target)
    foreign = tmp_path / "foreign"
    foreign.write_bytes((left / target.name).read_bytes())
    before = foreign.read_bytes()
    if how == "another key":
        monkeypatch.setenv("WHERRY_KEY", "a key of another user")
    elif how == "opened":
        left.chmod(0o750)
    elif how == "fifo inside":
        os.mkfifo(left / "pipe")
    else:
        (left / target.name).unlink()
        if how == "link inside":
            (left / target.name).symlink_to(foreign)
        else:
            os.link(foreign, left / target.name)
    receipt = convert_slowly(model, target, verify=verify)
    assert receipt.resumed_bytes == 0
    assert receipt.note
    assert ("key" if how == "another key" else "was not reused") in receipt.note
    assert_right(target, model)
    assert foreign.read_bytes() == before


def test_a_link_in_the_place_of_an_area_is_removed_and_not_followed(model, target, monkeypatch, tmp_path):
    left = interrupt(model, target, monkeypatch)
    elsewhere = tmp_path / "elsewhere"
    left.rename(elsewhere)
    left.symlink_to(elsewhere)
    receipt = convert_slowly(model, target)
    assert receipt.resumed_bytes == 0
    assert "it is not a folder" in receipt.note
    assert_right(target, model)
    assert (elsewhere / target.name).exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("what", ["area", "file"])
def test_the_area_of_another_user_is_not_taken_up(model, target, monkeypatch, what):
    left = interrupt(model, target, monkeypatch)
    os.chown(left if what == "area" else left / target.name, 65534, -1)
    receipt = convert_slowly(model, target)
    assert receipt.resumed_bytes == 0
    assert "belongs to another user" in receipt.note
    if what == "area":
        assert (left / target.name).exists(), "it is not ours to remove"
        remove(left)
    assert_right(target, model)


def test_a_fetch_follows_no_link_of_a_prepared_area(model, tmp_path, monkeypatch):
    """A fetch has no journal: it goes on with the files that it finds."""
    wherry.convert(model, tmp_path / "made" / "m.safetensors", to="safetensors", lineage=False)
    (tmp_path / "copy").mkdir()
    victim = tmp_path / "victim"
    victim.write_text("precious")
    real, planted = FileStaging._open, []

    def plant(self):
        left = self._released
        left.mkdir(mode=0o700)
        (left / self.target.name).symlink_to(victim)
        planted.append(left)
        real(self)

    monkeypatch.setattr(FileStaging, "_open", plant)
    wherry.fetch(tmp_path / "made" / "m.safetensors", tmp_path / "copy" / "m.safetensors")
    assert planted
    assert victim.read_text() == "precious"
    assert_right(tmp_path / "copy" / "m.safetensors", model)


def staged(tmp_path, **more):
    """An area with files and a journal, whose owner does not leave in order."""
    held = FileStaging(locate(tmp_path / "out"), ID, **more).__enter__()
    inner = Path(held.location.path)
    (inner / "d").mkdir(parents=True)
    (inner / "d" / "0").write_bytes(b"0" * 10)
    (inner / "chunks.wherry-log").write_text("log")
    held.spill.mkdir()
    return held


def inodes(folder):
    return {path.stat().st_ino for path in folder.rglob("*") if path.is_file()}


def test_of_an_owner_that_may_still_write_the_files_are_copied(tmp_path, monkeypatch):
    first = staged(tmp_path)
    inner = Path(first.location.path)
    with (inner / "d" / "0").open("r+b") as late:
        monkeypatch.setattr(leases, "verdict_of_process", lambda _owner: None)
        monkeypatch.setattr(leases, "EXPIRY_SECONDS", 0.1)
        monkeypatch.setattr(first._lease, "_over", first._lease._over.set() or first._lease._over)
        before = inodes(inner)
        with FileStaging(locate(tmp_path / "out"), ID) as second:
            assert not inner.parent.exists(), "no path of the former owner leads anywhere"
            assert [path.name for path in tmp_path.glob(".wherry-out.*-*")] == [second.area.name]
            assert not inodes(Path(second.location.path)) & before
            second.commit()
            late.write(b"late")
            late.flush()
            os.ftruncate(late.fileno(), 3)
        assert (tmp_path / "out" / "d" / "0").read_bytes() == b"0" * 10
    with pytest.raises(TargetInUseError, match="another run took over"):
        first.commit()
    first.__exit__(None, None, None)
    assert os.listdir(tmp_path) == ["out"]
    assert (tmp_path / "out" / "chunks.wherry-log").read_text() == "log"


def test_logs_are_copied_before_the_data_that_they_speak_of(tmp_path, monkeypatch):
    former, new, copied = tmp_path / "former", tmp_path / "new", []
    (former / "x").mkdir(parents=True)
    new.mkdir()
    for name in ("a", "x/chunks.wherry-log", "x/z", stagings.JOURNAL):
        (former / name).write_text(name)
    real = stagings.copy_written

    def copy(source, target):
        copied.append(source.name)
        (former / stagings.JOURNAL).write_text("appended meanwhile")
        real(source, target)

    monkeypatch.setattr(stagings, "copy_written", copy)
    stagings.copy_area(former, new)
    assert copied[0] == "chunks.wherry-log"
    assert sorted(copied[1:]) == ["a", "z"]
    assert (new / stagings.JOURNAL).read_text() == stagings.JOURNAL


def test_a_copy_without_a_folder_that_cannot_be_listed_fails(tmp_path, monkeypatch):
    """The journal of the copy would name what is missing in it."""
    (tmp_path / "former" / "out").mkdir(parents=True)
    (tmp_path / "new").mkdir()
    scan = os.scandir

    def fail(folder):
        if str(folder).endswith("/out"):
            raise OSError(errno.EIO, "the disk fails")
        return scan(folder)

    monkeypatch.setattr(os, "scandir", fail)
    with pytest.raises(OSError, match="the disk fails"):
        stagings.copy_area(tmp_path / "former", tmp_path / "new")


def test_a_copy_leaves_holes_and_keeps_the_size(tmp_path):
    from wherry.store.copy import copy_written

    source = tmp_path / "source"
    with source.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, 64 << 20)
        os.pwrite(file.fileno(), b"begin", 0)
        os.pwrite(file.fileno(), b"end", (32 << 20) + 7)
    copy_written(source, tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == source.read_bytes()
    assert (tmp_path / "copy").stat().st_blocks * 512 < 1 << 20
    with pytest.raises(FileExistsError):
        copy_written(source, tmp_path / "copy")


def test_a_takeover_that_fails_loses_no_progress(model, target, monkeypatch):
    left = interrupt(model, target, monkeypatch)
    left.rename(f"{left}-89abcdef")  # as if its owner had not ended in order

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(stagings, "copy_written", full)
        with pytest.raises(StorageError, match="No space left"):
            convert_slowly(model, target)
    assert convert_slowly(model, target).resumed_bytes > 0
    assert_right(target, model)


def test_an_area_has_its_last_name_durably_before_anything_in_it_is_removed(tmp_path, monkeypatch):
    """Else a loss of power leaves an area with a journal that names what is gone."""
    left, calls = tmp_path / f".wherry-out.{ID}", []
    left.mkdir()
    (left / "out").write_text("data")
    fsync, unlink = os.fsync, os.unlink

    def synced(descriptor):
        calls.append(("sync", Path(f"/proc/self/fd/{descriptor}").readlink()))
        fsync(descriptor)

    def removed(path, **options):
        calls.append(("remove", path))
        unlink(path, **options)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "unlink", removed)
    remove(stagings.set_aside(left))
    assert calls[0] == ("sync", tmp_path)
    assert {what for what, _path in calls[1:]} == {"remove"}


def test_no_folder_is_made_where_an_area_was(tmp_path):
    gone = tmp_path / ".wherry-out.0123abcd-89abcdef"
    for place in (gone, gone / "out", gone / "out" / "d"):
        with pytest.raises(FileNotFoundError):
            make_folders(place)
    assert os.listdir(tmp_path) == []
    make_folders(tmp_path / "a" / "b")
    make_folders(tmp_path / "a" / "b")
    gone.mkdir()
    make_folders(gone / "out" / "d")
    assert (gone / "out" / "d").is_dir()


@pytest.mark.parametrize("umask", [0o002, 0o027, 0o077], ids=oct)
@pytest.mark.parametrize("to", WRITTEN)
def test_a_target_has_the_modes_of_the_umask(sources, tmp_path, to, umask):
    source = sources[to]
    before = os.umask(umask)
    try:
        wherry.convert(
            source, tmp_path / "out" / to, to=to, family="none", options=options_of(to), lineage=False
        )
    finally:
        os.umask(before)
    for path in (tmp_path / "out").rglob("*"):
        expected = (0o777 if path.is_dir() else 0o666) & ~umask
        assert stat.S_IMODE(path.stat().st_mode) == expected, path


def test_an_area_is_made_exclusively(tmp_path, monkeypatch):
    with FileStaging(locate(tmp_path / "out"), ID) as held:
        status = held.area.stat()
        assert stat.S_IMODE(status.st_mode) == 0o700
    token = "89abcdef"
    monkeypatch.setattr("wherry.target.lease.secrets.token_hex", lambda _: token)
    planted = tmp_path / f".wherry-out.{ID}-{token}"
    planted.symlink_to(tmp_path)
    with pytest.raises(StorageError), FileStaging(locate(tmp_path / "out"), ID):
        pytest.fail("it wrote through a link")


def test_an_area_that_was_replaced_is_not_committed(tmp_path):
    with (
        pytest.raises(StorageError, match="the staging area was replaced"),
        FileStaging(locate(tmp_path / "out"), ID) as held,
    ):
        area = held.area
        area.rename(tmp_path / "moved")
        (area / "out").mkdir(parents=True)
        held.commit()
    assert not (tmp_path / "out").exists()


def test_a_sidecar_of_a_lost_run_never_lies_next_to_the_target_of_another(tmp_path, monkeypatch):
    """Without locks: the lease is taken over between the look at it and the sidecar."""

    def refuse(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("wherry.target.lease.fcntl.flock", refuse)
    target = tmp_path / "m.bin"
    real, second = stagings.rename_without_replacing, []
    first = FileStaging(locate(target), ID).__enter__()
    Path(first.location.path).write_text("data")

    def interleave(source, place):
        if not second:
            second.append(FileStaging(locate(target), ID))
            with monkeypatch.context() as patch:
                patch.setattr(leases, "verdict_of_process", lambda _owner: None)
                patch.setattr(leases, "EXPIRY_SECONDS", 0.1)
                first._lease._over.set()
                with second[0] as held:
                    held.commit(sidecar=b"second")
        real(source, place)

    monkeypatch.setattr(stagings, "rename_without_replacing", interleave)
    with pytest.raises(TargetInUseError, match="took over"):
        first.commit(sidecar=b"first")
    first.__exit__(None, None, None)
    assert sorted(os.listdir(tmp_path)) == ["m.bin", "m.bin.wherry.json"]
    assert (tmp_path / "m.bin.wherry.json").read_bytes() == b"second"


def test_a_time_in_2099_keeps_no_area_from_being_cleaned(tmp_path):
    left = tmp_path / ".wherry-out.0123abcd-89abcdef"
    left.mkdir()
    (tmp_path / ".wherry-out.lease").write_text("[]")
    for path in (left, tmp_path / ".wherry-out.lease"):
        os.utime(path, (time.time() + 75 * 365 * 86400,) * 2)
    leases.EXPIRY_SECONDS, before = 0.1, leases.EXPIRY_SECONDS
    try:
        assert {row.removed for row in clean(tmp_path)} == {True}
    finally:
        leases.EXPIRY_SECONDS = before
    assert os.listdir(tmp_path) == []


def test_an_area_cleaned_away_while_its_owner_was_stopped_ends_it_with_8(
    sources, children, tmp_path, monkeypatch
):
    from dataclasses import replace

    from tests.support.crash import order

    target = tmp_path / "out" / "huggingface"
    wanted = replace(order(sources["huggingface"], target, "huggingface"), act="stop", number=40, expiry=0.3)
    stopped = children.run(wanted)
    assert stopped.stopped
    monkeypatch.setattr(leases, "EXPIRY_SECONDS", 0.3)
    rows = clean(tmp_path, min_age=0)
    assert rows
    assert {row.removed for row in rows} == {True}
    assert os.listdir(target.parent) == []
    outcome = children.resume(stopped)
    assert outcome.error["exit_code"] == 8
    assert os.listdir(target.parent) == []
    assert convert(sources["huggingface"], target)["already"] is False


@pytest.mark.parametrize(("code", "outcome"), [(errno.EIO, OSError), (errno.ENOENT, None)])
def test_a_folder_of_an_area_that_cannot_be_listed_is_not_trusted(code, outcome, tmp_path, monkeypatch):
    """What could not be examined is an error of the storage; what its owner removed meanwhile is not."""
    (tmp_path / "area" / "inner").mkdir(parents=True, mode=0o700)
    (tmp_path / "area").chmod(0o700)
    scandir = os.scandir

    def failing(path):
        if str(path).endswith("inner"):
            raise OSError(code, os.strerror(code), str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", failing)
    if outcome is None:
        assert stagings.distrust_reason(tmp_path / "area") is None
    else:
        with pytest.raises(outcome, match="Input/output"):
            stagings.distrust_reason(tmp_path / "area")


# Opening an area while others are at work around it: what vanishes is gone, what fails leaves no trace.


ID_OF_TAKEOVER, OTHER = "0123abcd", "11111111"


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
        FormerArea(Path(f".wherry-out.{ID_OF_TAKEOVER}"), ID_OF_TAKEOVER),
        FormerArea(Path(f".wherry-out.{ID_OF_TAKEOVER}-89abcdef"), ID_OF_TAKEOVER, "89abcdef"),
    ],
    ids=["draft of a lease", "of another conversion", "given up", "of a silent owner"],
)
def test_what_is_gone_when_it_is_looked_at_ends_no_run(tmp_path, monkeypatch, gone):
    real = stagings.left_for

    def left_for(parent, name):
        yield FormerArea(parent / gone.path, gone.identity, gone.token)
        yield from real(parent, name)

    monkeypatch.setattr(stagings, "left_for", left_for)
    with FileStaging(locate(tmp_path / "out"), ID_OF_TAKEOVER) as staging:
        Path(staging.location.path).write_text("new")
        staging.commit()
    assert os.listdir(tmp_path) == ["out"]


def test_an_area_that_vanishes_while_it_is_taken_up_is_made_anew(tmp_path, monkeypatch):
    left, real = leave(tmp_path, ID_OF_TAKEOVER), stagings.take_up

    def take_up(*arguments):
        shutil.rmtree(left)
        return real(*arguments)

    monkeypatch.setattr(stagings, "take_up", take_up)
    with FileStaging(locate(tmp_path / "out"), ID_OF_TAKEOVER) as staging:
        assert os.listdir(staging.area) == []
    assert os.listdir(tmp_path) == []


def test_a_file_that_vanishes_while_an_area_is_looked_at_is_no_reason_against_it(tmp_path, monkeypatch):
    left, real = leave(tmp_path, ID_OF_TAKEOVER), os.lstat
    (left / "log").write_text("")

    def lstat(path, **options):
        if str(path).endswith("log"):
            Path(path).unlink(missing_ok=True)
        return real(path, **options)

    monkeypatch.setattr(os, "lstat", lstat)
    assert stagings.distrust_reason(left) is None
    assert os.listdir(left) == ["out"]


def test_an_opening_that_fails_leaves_neither_area_nor_parents(tmp_path, monkeypatch):
    monkeypatch.setattr(stagings, "_discard", fail)
    monkeypatch.setattr(
        stagings, "left_for", lambda parent, _name: iter([FormerArea(parent / ".wherry-out.x.draft")])
    )
    with pytest.raises(StorageError), FileStaging(locate(tmp_path / "deep" / "out"), ID_OF_TAKEOVER):
        pytest.fail("it was opened")
    assert os.listdir(tmp_path) == []


def test_what_is_discarded_makes_room_for_the_copy(tmp_path, monkeypatch):
    leave(tmp_path, ID_OF_TAKEOVER, "-89abcdef")
    leave(tmp_path, OTHER)
    real, seen = stagings.copy_area, []

    def copy_area(former, new):
        seen.append(sorted(path.name for path in tmp_path.iterdir() if path not in (former, new)))
        real(former, new)

    monkeypatch.setattr(stagings, "copy_area", copy_area)
    with FileStaging(locate(tmp_path / "out"), ID_OF_TAKEOVER) as staging:
        assert Path(staging.location.path).read_text() == ID_OF_TAKEOVER
    assert seen == [[".wherry-out.lease"]]


def test_a_journal_without_its_data_does_not_win(tmp_path, monkeypatch):
    """A loss of power while an area was removed can leave its journal alone."""
    monkeypatch.setattr(stagings, "read_log", lambda path, _key: (path.read_text().split(), None))
    for token, lines in (("-89abcdef", "1 2 3"), ("-01234567", "1 2")):
        left = leave(tmp_path, ID_OF_TAKEOVER, token)
        (left / stagings.JOURNAL).write_text(lines)
    (tmp_path / f".wherry-out.{ID_OF_TAKEOVER}-89abcdef" / "out").unlink()
    with FileStaging(locate(tmp_path / "out"), ID_OF_TAKEOVER) as staging:
        assert (staging.area / stagings.JOURNAL).read_text() == "1 2"
        assert Path(staging.location.path).read_text() == ID_OF_TAKEOVER


def test_a_copy_is_durable_before_its_journal_and_before_the_original_goes(tmp_path, monkeypatch):
    left = leave(tmp_path, ID_OF_TAKEOVER, "-89abcdef")
    (left / "out").unlink()
    (left / "out" / "d").mkdir(parents=True)
    (left / "out" / "d" / "0").write_text("data")
    (left / stagings.JOURNAL).write_text("line")
    synced, removed, fsync = [], [], os.fsync

    def note(descriptor):
        synced.append(Path(f"/proc/self/fd/{descriptor}").readlink())
        fsync(descriptor)

    real = stagings.set_aside

    def set_aside(path):
        removed.append((path, len(synced)))
        return real(path)

    monkeypatch.setattr(os, "fsync", note)
    monkeypatch.setattr(stagings, "set_aside", set_aside)
    with FileStaging(locate(tmp_path / "out"), ID_OF_TAKEOVER) as staging:
        new = staging.area
        journal = synced.index(new / stagings.JOURNAL)
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

    with FileStaging(locate(tmp_path / "out"), ID_OF_TAKEOVER, {}) as staging:
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
    with FileStaging(locate(tmp_path / "deep" / "er" / "out"), ID_OF_TAKEOVER) as staging:
        Path(staging.location.path).write_text("new")
        staging.commit()
    assert struck
    assert (tmp_path / "deep" / "er" / "out").read_text() == "new"


def test_no_staging_area_is_made_on_the_way_to_a_folder(tmp_path):
    with pytest.raises(FileNotFoundError):
        list(make_durable_folders(tmp_path / ".wherry-out.0123abcd-89abcdef" / "d"))
    assert list(make_durable_folders(tmp_path / "a" / "b")) == [tmp_path / "a", tmp_path / "a" / "b"]
    assert list(make_durable_folders(tmp_path / "a" / "b")) == []
