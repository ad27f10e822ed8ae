"""`~` is the home folder in every path that a user states; a shell leaves it in `--config=~/x` and in quotes."""

from __future__ import annotations

import numpy as np
import pytest

import wherry
from tests.support.command import small, typed
from wherry.errors import UsageError


@pytest.fixture
def home(tmp_path, monkeypatch, own_home):
    (tmp_path / "home").mkdir()
    (tmp_path / "work").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "work")
    small(tmp_path / "home/a.safetensors")
    return tmp_path / "home"


def test_a_conversion_reads_and_writes_there(home):
    receipt = wherry.convert("~/a.safetensors", "~/out", to="orbax")
    assert (receipt.source.uri, receipt.target.uri) == (str(home / "a.safetensors"), str(home / "out"))
    assert wherry.verify("~/out", level="roundtrip", against="~/a.safetensors").ok
    assert not list((home.parent / "work").iterdir())


def test_a_request_for_other_processes_names_the_same_place(home, capfd):
    code, text = typed("convert '~/a.safetensors' '~/b' --to dcp --on processes:2", home, capfd)
    assert code == 0, text
    assert (home / "b").is_dir()


def test_an_export_writes_there(home):
    target = (
        wherry.export({"w": np.ones(3)}, "~/x.npz", to="npz", snapshot="disk", spool="~").result(60).target
    )
    assert target.uri == str(home / "x.npz")
    assert not list((home.parent / "work").iterdir())


def test_files_that_a_user_states_are_there(home, capfd):
    (home / "family.toml").write_text("name = 1")
    code, text = typed("layouts '--family-file=~/family.toml'", home, capfd)
    assert code == 2, text
    assert "not found" not in text
    assert typed("layouts '--family-file=~/nope.toml'", home, capfd)[0] == 3
    assert typed("promote models:/m '--policy=~/nope.toml'", home, capfd)[0] == 3


@pytest.mark.parametrize("system", ["lama", "orbax", "dcp", ""])
def test_a_system_that_does_not_exist_is_refused(home, system):
    with pytest.raises(UsageError, match=f"unknown system '{system}'"):
        wherry.export({"w": np.ones(3)}, "~/x.npz", to="npz", system=system)
    assert not (home / "x.npz").exists()
