"""clean and the janitor: everything of dead runs, nothing of living ones, and nothing that is being read."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from safetensors.numpy import save_file

import wherry
from tests.support.command import small
from wherry.cli import cli
from wherry.config.config import load_config
from wherry.errors import StorageError
from wherry.nightly.doctor import diagnose
from wherry.nightly.night import run_night
from wherry.target import janitor
from wherry.target import lease as leases
from wherry.target.clean import clean
from wherry.target.janitor import in_use, is_in_use

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
    monkeypatch.setattr(leases, "EXPIRY_SECONDS", 0.1)
    full_while(monkeypatch, area.exists)
    assert [row.removed for row in clean(tmp_path)] == [True, True]
    assert os.listdir(tmp_path) == []


def test_on_a_full_disk_a_lease_that_changed_keeps_its_area(area, tmp_path, monkeypatch):
    full_while(monkeypatch, area.exists)
    after_judging(monkeypatch, lambda: (tmp_path / "successor").rename(tmp_path / ".wherry-out.lease"))
    (tmp_path / "successor").write_text("of another run")
    assert [row.removed for row in clean(tmp_path)] == [False]
    assert (area / "out").exists()


# Marks of what is being read: where they lie, what needs none, and that nothing removes what bears one.


def checkpoint(folder, run, step):
    place = folder / "runs" / run / f"checkpoint-{step}"
    place.mkdir(parents=True)
    save_file({"w": np.full((8, 4), step, np.float32)}, place / "model.safetensors")
    return place


def made(folder):
    """A checkpoint that wherry wrote, so that a mark is needed while it is read."""
    return wherry.convert(checkpoint(folder, "a", 1), folder / "made", to="orbax", lineage=False).target.uri


def test_in_use_is_seen_while_it_lasts(tmp_path, wherry_home):
    uri = made(tmp_path)
    before = sorted(tmp_path.iterdir())
    with in_use(uri), in_use(uri):
        assert is_in_use(uri)
        assert not is_in_use(f"{uri}.other")
        assert not is_in_use(str(tmp_path / "mad"))
    assert not is_in_use(uri)
    assert sorted(tmp_path.iterdir()) == before
    assert not (wherry_home / "in-use").exists()


def test_a_reader_of_an_item_keeps_its_whole_step(tmp_path, monkeypatch):
    from wherry.errors import TargetInUseError
    from wherry.nightly import removal

    step = tmp_path / "run" / "1"
    uri = wherry.convert(checkpoint(tmp_path, "a", 1), step / "items", to="orbax", lineage=False).target.uri
    reader, rename = in_use(uri), removal.rename_without_replacing

    def read_first(source, target):
        if source == step:
            reader.__enter__()
        rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(removal, "rename_without_replacing", read_first)
        with pytest.raises(TargetInUseError), removal.removing(str(step), uri, "orbax"):
            pytest.fail("it was taken away")
    assert is_in_use(uri), "it is back with its mark"
    assert [one.uri for one in wherry.discover(tmp_path / "run")] == [uri]
    reader.__exit__(None, None, None)
    with removal.removing(str(step), uri, "orbax"):
        pass
    assert not list((tmp_path / "run").iterdir())


def test_what_wherry_did_not_write_needs_no_mark(tmp_path, wherry_home):
    source = checkpoint(tmp_path, "a", 1)
    with in_use(str(source)):
        assert not is_in_use(str(source))
        assert [path.name for path in source.parent.iterdir()] == [source.name]
    assert not (wherry_home / "in-use").exists()


def test_a_mark_that_cannot_lie_next_to_its_source_is_in_the_home(tmp_path, monkeypatch, caplog, wherry_home):
    from wherry.target import janitor as module

    uri = made(tmp_path)
    monkeypatch.setattr(module, "_at_source", lambda _location: None)  # as on an object store
    with in_use(uri):
        assert is_in_use(uri)
        assert list((wherry_home / "in-use").iterdir())
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("WHERRY_HOME", str(tmp_path / "file" / "home"))
    with in_use(uri):
        assert "could not be marked as in use" in caplog.text


def test_a_dead_reader_does_not_hold(tmp_path):
    import subprocess
    import sys

    uri = made(tmp_path)
    script = f"import os; from wherry.target.janitor import in_use\nwith in_use({uri!r}): os._exit(0)"
    subprocess.run([sys.executable, "-c", script], check=True)
    assert list(tmp_path.glob(".wherry-made.*.reading")), "it was killed and left its mark"
    assert not is_in_use(uri)


@pytest.mark.parametrize("job", ["restore", "fetch"])
def test_what_a_restore_or_a_fetch_reads_is_in_use(tmp_path, job):
    uri = made(tmp_path)
    seen = []

    def look(_):
        seen.append(is_in_use(uri))

    if job == "fetch":
        wherry.fetch(uri, tmp_path / "copy", progress=look)
    else:
        wherry.restore(uri, into={"w": np.zeros((8, 4), np.float32)}, progress=look)
    assert any(seen)
    assert not is_in_use(uri)


# The janitor: what a process that has ended left outside of its targets goes, and what a living one uses
# stays.


KILLED = """
import os, sys
from pathlib import Path
from wherry.core.child import child_process
from wherry.target.janitor import in_use
from wherry.target.janitor import note
with child_process("this", purpose="a child"), in_use(sys.argv[1]):
    spool = Path(sys.argv[2])
    note(spool)
    spool.mkdir()
    (spool / "part-0").write_bytes(bytes(1000))
    os.kill(os.getpid(), 9)
"""


@pytest.fixture
def left(tmp_path, monkeypatch):
    """What a killed process left: a temporary folder, a mark next to its source, and a spool with a part."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setattr("tempfile.tempdir", None)
    source = tmp_path / "made.safetensors"
    wherry.convert(small(tmp_path / "source.safetensors"), source, to="safetensors")
    spool = tmp_path / "out" / ".wherry-x.01234567.spool"
    spool.parent.mkdir()
    done = subprocess.run([sys.executable, "-c", KILLED, str(source), str(spool)], check=False, timeout=120)
    assert done.returncode == -9

    def found():
        marks = [
            *tmp_path.glob(".wherry-*.reading"),
            *temporary.glob("wherry-child-*"),
            *spool.parent.glob("*"),
        ]
        return sorted(path.name.partition(".safetensors")[0][:12] for path in marks)

    assert found() == [".wherry-made", ".wherry-x.01", "wherry-child"]
    return found


def test_the_next_conversion_removes_it(left, tmp_path):
    assert [one.path.exists() for one in janitor.left_behind()] == [True] * 3
    wherry.convert(tmp_path / "source.safetensors", tmp_path / "b.npz", to="npz", options={"join": "."})
    assert left() == []
    assert janitor.left_behind() == []
    assert list((janitor.home() / "made").iterdir()) == []


def test_the_next_export_removes_it(left, tmp_path):
    wherry.export(
        {"w": np.zeros(3, np.float32)}, tmp_path / "e.npz", to="npz", options={"join": "."}
    ).result()
    assert left() == []


def test_a_night_removes_it_though_it_converts_nothing(left, tmp_path):
    (tmp_path / "runs").mkdir()
    (tmp_path / "wherry.toml").write_text(
        f'[routes.a]\nroot = "{tmp_path}/runs"\n[[routes.a.targets]]\nformat = "dcp"\nuri = "{tmp_path}/o/{{run}}"\n'
    )
    loaded = load_config(tmp_path / "wherry.toml")
    run_night(loaded, loaded.routes, dry_run=True)
    assert len(left()) == 3
    run_night(loaded, loaded.routes)
    assert left() == []


def test_clean_lists_and_removes_it_and_doctor_counts_it(left, tmp_path):
    [finding] = [one for one in diagnose() if one.name == "left behind"]
    assert finding.detail.startswith("3 leftovers of processes that have ended")
    empty = tmp_path / "empty"
    empty.mkdir()
    rows = json.loads(CliRunner().invoke(cli, ["clean", str(empty), "--dry-run", "--json"]).stdout)
    assert [row["removed"] for row in rows] == [False] * 3
    assert len(left()) == 3
    assert CliRunner().invoke(cli, ["clean", str(empty)]).exit_code == 0
    assert left() == []
    assert not [one for one in diagnose() if one.name == "left behind"]


def test_what_a_living_process_uses_stays(tmp_path):
    with janitor.temporary_folder("wherry-child-", tmp_path) as folder:
        assert janitor.tidy() == []
        assert Path(folder).is_dir()
    assert not Path(folder).exists()
    assert list((janitor.home() / "made").iterdir()) == []


def _record(path, **changes):
    janitor.note(path)
    [record] = (janitor.home() / "made").iterdir()
    record.write_text(json.dumps({**json.loads(record.read_text()), **changes}))


@pytest.mark.parametrize(
    ("changes", "goes"),
    [
        ({"process_start": 1}, True),  # another process has the number of the owner now
        ({"boot": "before", "pid_namespace": "before"}, True),  # the machine was started again
        ({"boot": "other", "pid_namespace": "other", "machine": "other"}, False),  # of another machine
        ({"host": "elsewhere", "process_start": 1}, False),
        ({"pid": "x", "process_start": 1}, False),  # no owner
    ],
    ids=str,
)
def test_an_owner_is_known_by_its_machine_its_boot_and_its_start(tmp_path, changes, goes):
    path = tmp_path / ".wherry-x.01234567.spool"
    path.mkdir()
    if not leases.this_machine():
        pytest.skip("this machine has no identifier")
    _record(path, **changes)
    assert len(janitor.tidy()) == goes
    assert path.exists() != goes


def test_a_record_that_names_what_wherry_does_not_make_removes_nothing(tmp_path):
    path = tmp_path / "precious"
    path.mkdir()
    _record(path, process_start=1)
    assert janitor.tidy() == []
    assert path.exists()


def test_a_home_that_cannot_be_written_costs_no_work(tmp_path, monkeypatch):
    (janitor.ensure_home() / "made").write_text("")
    with janitor.temporary_folder("wherry-child-", tmp_path) as folder:
        assert Path(folder).is_dir()
    assert not Path(folder).exists()
    assert janitor.tidy() == []
