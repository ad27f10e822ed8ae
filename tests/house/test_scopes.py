"""How tests are spread over workers: files stay whole, flows share a server, and the list of long ones is no dead
letter."""

from __future__ import annotations

import gc
import os
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support import memory_files, workers
from tests.support.house import ROOT
from tests.support.workers import LONG, TOGETHER, rank, scope_of


def test_a_file_stays_whole_and_flows_stay_together():
    assert scope_of("tests/core/test_digest.py::test_one[a::b]") == "tests/core/test_digest.py"
    assert scope_of("tests/flows/test_flow.py::test_one") == scope_of("tests/flows/test_assets.py::test_two")


def test_what_is_long_begins_first():
    assert rank("tests/crash/test_fencing.py") < rank("tests/flows/") < rank("tests/core/test_digest.py")


def test_the_rooms_that_changed_begin_before_what_is_long(monkeypatch):
    tests = (
        "tests/core/test_digest.py::test_a",
        "tests/crash/test_fencing.py::test_b",
        "tests/text/test_toml.py::c",
    )
    items = [SimpleNamespace(nodeid=test) for test in tests]
    monkeypatch.setenv(workers.FIRST, "text core")
    workers.pytest_collection_modifyitems(items)
    assert [item.nodeid for item in items] == [tests[0], tests[2], tests[1]]


@pytest.mark.parametrize(("end", "skipped"), [("0", True), ("9e12", False), (None, False)])
def test_after_the_end_of_the_time_no_test_begins(monkeypatch, end, skipped):
    monkeypatch.delenv(workers.END, raising=False)
    if end is not None:
        monkeypatch.setenv(workers.END, end)
    with pytest.raises(pytest.skip.Exception, match="is over") if skipped else nullcontext():
        workers.pytest_runtest_setup(None)


def test_every_long_one_is_there():
    names = {path.stem for path in (ROOT / "tests").rglob("test_*.py")}
    assert set(LONG) <= names | {folder.rstrip("/").rpartition("/")[2] for folder in TOGETHER}
    assert all((ROOT / folder).is_dir() for folder in TOGETHER)


class Config:
    """What the plugin asks of pytest's configuration."""

    def __init__(self, markexpr, basetemp=None):
        self.option = SimpleNamespace(markexpr=markexpr, basetemp=basetemp)
        self.cleanups = []
        self.add_cleanup = self.cleanups.append


def test_folders_lie_in_memory_but_for_the_slow_tests(monkeypatch, tmp_path):
    monkeypatch.setattr(workers, "memory_folder", lambda _least: tmp_path)
    monkeypatch.setattr(memory_files, "memory_folder", lambda: tmp_path)
    for kept in (Config(""), Config("slow"), Config("not slow", "/chosen")):
        before = kept.option.basetemp
        workers.pytest_configure(kept)
        assert (kept.option.basetemp, kept.cleanups) == (before, [])
    quick = Config("not slow and not full")
    workers.pytest_configure(quick)
    assert Path(quick.option.basetemp).parents[1] == tmp_path
    assert quick.cleanups
    for clean in quick.cleanups:
        clean()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("why", ["no room", "no programs"])
def test_folders_lie_on_a_disk_where_memory_cannot_serve(monkeypatch, tmp_path, why):
    monkeypatch.setattr(workers, "memory_folder", lambda _least: None if why == "no room" else tmp_path)
    monkeypatch.setattr(os, "statvfs", lambda _path: SimpleNamespace(f_flag=os.ST_NOEXEC))
    quick = Config("not slow")
    workers.pytest_configure(quick)
    assert quick.option.basetemp is None


def test_what_was_collected_is_no_garbage_to_search():
    assert gc.isenabled()
    assert gc.get_freeze_count() > 1000


def test_libraries_compute_with_one_thread():
    assert {os.environ[f"{name}_NUM_THREADS"] for name in ("OMP", "MKL", "OPENBLAS")} == {"1"}
