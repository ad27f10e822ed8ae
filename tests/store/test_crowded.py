"""Folders with more entries than a checkpoint can have are refused by name, and end neither a walk nor an audit."""

from __future__ import annotations

import fsspec
import numpy as np
import pytest
from safetensors.numpy import save_file

import wherry
from wherry.errors import CrowdedFolderError
from wherry.store import local_store as stores
from wherry.store.local_store import locate
from wherry.store.object_view import view_of_store


@pytest.fixture(autouse=True)
def few(monkeypatch):
    monkeypatch.setattr(stores, "MOST_ENTRIES", 12)


@pytest.fixture
def run(tmp_path):
    """A model next to a folder of data that holds too many files."""
    (tmp_path / "run" / "model").mkdir(parents=True)
    save_file({"w": np.arange(4.0)}, tmp_path / "run" / "model" / "model.safetensors")
    fill(tmp_path / "run" / "data", 13)
    return tmp_path / "run"


def fill(folder, count):
    folder.mkdir(exist_ok=True)
    for number in range(count):
        (folder / f"{number}.bin").write_bytes(b"")


def test_the_limit_itself_is_allowed(tmp_path):
    fill(tmp_path / "data", 12)
    assert len(locate(tmp_path / "data").entries()) == 12


def test_a_crowded_folder_is_refused_by_name(run):
    with pytest.raises(CrowdedFolderError, match="the folder data has more than 12 entries") as refusal:
        locate(run / "data").entries()
    assert refusal.value.uri == str(run / "data")
    found = wherry.detect(run / "data")
    assert (found.verdict, found.reason) == ("unsupported", "the folder data has more than 12 entries")
    assert "WHERRY_LIMITS=4" in found.cure


def test_the_refused_entries_are_not_kept(run):
    with pytest.raises(CrowdedFolderError) as refusal:
        locate(run / "data").entries()
    assert all(not frame.frame.f_locals.get("rows") for frame in refusal.traceback)


def test_the_user_raises_the_limit(run, monkeypatch):
    monkeypatch.setenv("WHERRY_LIMITS", "4")
    assert len(locate(run / "data").entries()) == 13


def test_a_crowd_next_to_a_named_file_is_no_part_of_it(run):
    path = run / "data" / "model.safetensors"
    save_file({"w": np.arange(4.0)}, path)
    assert wherry.detect(path).verdict == "ok"


def test_a_crowd_next_to_a_checkpoint_ends_nothing(run):
    passed = []
    assert [found.uri for found in wherry.discover(run, on_skip=passed.append)] == [str(run / "model")]
    assert [(one.uri, one.reason) for one in passed] == [
        (str(run / "data"), "the folder data has more than 12 entries")
    ]
    assert str(run / "model") in (wherry.detect(run).cure or "")


def test_a_walk_finds_no_step_in_a_crowd(run):
    save_file({"w": np.arange(4.0)}, run / "data" / "model.safetensors")
    (run / "data" / "below").mkdir()
    save_file({"w": np.arange(4.0)}, run / "data" / "below" / "model.safetensors")
    assert [found.uri for found in wherry.discover(run)] == [str(run / "model")]


def test_an_audit_lists_a_crowd_as_one_unknown_folder(run, wherry_home):
    report = wherry.audit([str(run)], record=False)
    unknown = [one.uri for one in report.findings if one.kind == "unknown-file"]
    assert unknown == [str(run / "data")]


def test_a_crowd_in_a_bucket_is_refused(tmp_path):
    files = fsspec.filesystem("memory")
    for number in range(13):
        files.pipe(f"/{tmp_path.name}/data/{number}.bin", b"x")
    place = view_of_store(locate(f"memory://{tmp_path.name}/data"))
    try:
        with pytest.raises(CrowdedFolderError, match="the folder data has more than 12 entries"):
            place.entries()
    finally:
        files.rm(f"/{tmp_path.name}", recursive=True)


@pytest.mark.parametrize("name", ["0", "checkpoint_0"])
def test_data_in_a_step_of_orbax_is_no_item(run, name):
    (run / name).mkdir()
    fill(run / name / "data", 13)
    assert wherry.detect(run / name).verdict in ("not-a-checkpoint", "incomplete")


def test_one_detection_lists_a_folder_once(tmp_path, monkeypatch):
    fill(tmp_path / "data", 3)
    listed = []
    real = stores.LocalStore.entries
    monkeypatch.setattr(
        stores.LocalStore, "entries", lambda store, path: listed.append(path) or real(store, path)
    )
    assert wherry.detect(tmp_path / "data").verdict == "not-a-checkpoint"
    assert listed == [str(tmp_path / "data")]
