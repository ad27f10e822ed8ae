"""The janitor: what a process that has ended left outside of its targets goes, and what a living one uses stays."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import wherry
from tests.support.command import small
from wherry.cli import cli
from wherry.config.config import load_config
from wherry.routes.night import run_night
from wherry.target import janitor, lease_watch
from wherry.watch.doctor import diagnose

KILLED = """
import os, sys
from pathlib import Path
from wherry.runtime.child import child_process
from wherry.target.in_use import in_use
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
    if not lease_watch.this_machine():
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
