"""What exists: listings of checkpoints, and the storage that they use."""

from __future__ import annotations

import io
import json
import re
import shutil
import sys
from datetime import UTC, datetime, timedelta

import numpy as np
import pytest
from click.testing import CliRunner
from safetensors.numpy import save_file

import wherry
from tests.support.ledger import conversion, digest, filled, postgres, url
from tests.support.tiny_models import save_tiny
from wherry.cli import cli
from wherry.core.units import short
from wherry.errors import UsageError
from wherry.ledger.record import open_ledger, record_conversion
from wherry.nightly.night import run_night
from wherry.nightly.routes import load_config
from wherry.trace.catalog import listing, usage

__all__ = ["postgres", "url"]


@pytest.fixture
def ledger(url, monkeypatch):
    """A ledger with rows of every kind, and one conversion between layouts."""
    monkeypatch.setenv("WHERRY_LEDGER", url)
    filled(url)
    with open_ledger(url) as opened:
        record_conversion(opened, conversion("llama/7", "exported/llama", family="llama"))


def names(**which):
    return [one.uri.removeprefix("/checkpoints/") for one in listing(**which)]


@pytest.mark.usefixtures("ledger")
def test_every_place_that_was_not_deleted_is_one_entry():
    assert names() == ["a", "b", "c", "exported/llama", "llama/7", "/elsewhere"]
    assert names(deleted=True) == ["a", "b", "c", "d", "exported/llama", "llama/7", "/elsewhere"]
    gone = {one.uri: one.gone for one in listing(deleted=True)}
    assert [uri for uri, time in gone.items() if time] == ["/checkpoints/d"]


@pytest.mark.usefixtures("ledger")
def test_an_entry_has_the_versions_and_the_last_verification():
    (entry,) = (one for one in listing() if one.uri == "/checkpoints/b")
    assert (entry.checkpoint_digest, entry.versions, entry.verified) == (
        digest("b"), ("model version 1",), "digest: ok",
    )  # fmt: skip
    assert entry.verified_at > "2026"


@pytest.mark.usefixtures("ledger")
def test_filters_narrow_the_list_by_whole_names():
    assert names(below="/checkpoints/exported") == ["exported/llama"]
    assert names(below="/checkpoints/exp") == []
    assert names(family="llama") == ["exported/llama", "llama/7"]
    assert names(model="model") == ["b", "c"]
    assert names(model="mod") == []
    assert names(format="orbax") == names()
    with pytest.raises(UsageError, match="unknown format 'orbx'"):
        names(format="orbx")


def test_a_conversion_between_layouts_states_the_family_of_both_ends(tmp_path):
    source = save_tiny(tmp_path / "source", "llama")
    wherry.convert(source, tmp_path / "maxtext", to="maxtext", options={"scan_layers": True})
    wherry.convert(source, tmp_path / "copy", to="dcp")
    found = {one.uri: one.family for one in listing(str(tmp_path))}
    assert found == {
        str(tmp_path / "source"): "llama",
        str(tmp_path / "maxtext"): "llama",
        str(tmp_path / "copy"): "",
    }


@pytest.mark.usefixtures("ledger")
def test_the_command_prints_a_table_or_json():
    rows = CliRunner().invoke(cli, ["ls", "/checkpoints/b"]).output
    assert "model version 1" in rows
    data = json.loads(CliRunner().invoke(cli, ["ls", "--family", "llama", "--json"]).output)
    assert [one["uri"] for one in data["checkpoints"]] == [
        "/checkpoints/exported/llama",
        "/checkpoints/llama/7",
    ]
    assert "no matching checkpoints in the ledger" in CliRunner().invoke(cli, ["ls", "/nowhere"]).output


class Terminal(io.StringIO):
    """A terminal that keeps what is written to it."""

    def isatty(self):
        """It is one."""
        return True


def listed(monkeypatch, columns):
    """The lines of `wherry ls` on a terminal of so many columns, without heading."""
    shown = Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", str(columns))
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", shown)
        cli.main(["ls"], standalone_mode=False)
    text = re.sub(r"\x1b\[[0-9;]*m", "", shown.getvalue())
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    assert max(map(len, lines)) <= columns, text
    return lines[2:]


@pytest.mark.parametrize("columns", [60, 80, 200])
def test_each_row_is_known_by_its_path_and_digest_however_narrow_the_terminal(columns, tmp_path, monkeypatch):
    source = save_tiny(
        tmp_path / "runs-of-the-platform-team" / "a-model-with-a-long-name" / "source", "llama"
    )
    for step in (1000, 2000):
        wherry.convert(source, tmp_path / "converted-every-night" / f"step-{step}" / "orbax", to="orbax")
    found = listing()
    lines = listed(monkeypatch, columns)
    text = "".join(lines)
    assert all(short(one.checkpoint_digest).rpartition(":")[2] in text for one in found)
    assert "blake3" not in text
    if columns < 200:
        assert len(set(lines)) == len(lines)
        assert all(len(line.split()) >= 2 for line in lines if "…" in line)
        assert any("1000/orbax" in line for line in lines)
        assert any("2000/orbax" in line for line in lines)


def test_rows_that_would_look_alike_keep_their_whole_path(tmp_path, monkeypatch):
    source = save_tiny(tmp_path / "source", "llama")
    ends = ["a" * 60, "b" * 60]
    for name in ends:
        wherry.convert(source, tmp_path / name / ("same" * 15), to="orbax")
    text = "".join(line.split()[0] for line in listed(monkeypatch, 60))
    assert all(name in text for name in ends)


def test_what_a_conversion_read_back_counts_as_verified(tmp_path):
    source = save_tiny(tmp_path / "source", "llama")
    for name, to, how in (
        ("read", "orbax", "digest"),
        ("unread", "dcp", "none"),
        ("later", "flax", "digest"),
    ):
        wherry.convert(source, tmp_path / name, to=to, verify=how)
    wherry.verify(tmp_path / "later", level="present", record=True)
    for how in ("digest", "none"):  # the last conversion there is not read back
        shutil.rmtree(tmp_path / "again", ignore_errors=True)
        wherry.convert(source, tmp_path / "again", to="dcp", verify=how)
    found = {one.uri.rpartition("/")[2]: one.verified for one in listing()}
    assert found == {"source": "", "read": "read-back: ok", "unread": "", "later": "present: ok", "again": ""}


# wherry du: bytes by run, format and age, and what prune would remove.


CONFIG = """
[routes.r]
root = "runs"
select = "all"
min_age = 0

[[routes.r.targets]]
format = "npz"
uri = "out/{run}/{step}.npz"

[routes.r.retention]
keep_last = 1
"""
NBYTES = 128


@pytest.fixture(scope="module")
def night(tmp_path_factory):
    """Two runs of two steps each, converted; of each run one result is to be kept."""
    folder = tmp_path_factory.mktemp("usage")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{folder / 'none' / 'mlflow.db'}")
        patch.setenv("WHERRY_LEDGER", f"sqlite:///{folder / 'ledger.db'}")
        for run, step in (("a", 1), ("a", 2), ("b", 1), ("b", 2)):
            place = folder / "runs" / run / f"checkpoint-{step}"
            place.mkdir(parents=True)
            save_file({"w": np.full((8, 4), step, np.float32)}, place / "model.safetensors")
            (place / "trainer_state.json").write_text(json.dumps({"global_step": step}))
        (folder / "wherry.toml").write_text(CONFIG)
        loaded = load_config(folder / "wherry.toml")
        assert dict(run_night(loaded, loaded.routes).counts) == {"converted": 4}
        yield folder


def test_a_run_is_the_folder_of_its_steps(night):
    found = {row.group.removeprefix(str(night)): row for row in usage()}
    assert sorted(found) == ["/out/a", "/out/b", "/runs/a", "/runs/b"]
    assert {(row.checkpoints, row.nbytes, row.prunable) for row in found.values()} == {(2, 2 * NBYTES, 0)}


def test_retention_says_what_prune_would_remove(night):
    routes = load_config(night / "wherry.toml").routes
    found = {row.group.removeprefix(str(night)): row.prunable for row in usage(routes=routes)}
    assert found == {"/out/a": NBYTES, "/out/b": NBYTES, "/runs/a": 0, "/runs/b": 0}
    assert len(list((night / "out").rglob("*.npz"))) == 4


def test_groups_are_formats_families_and_ages(night):
    assert {(row.group, row.checkpoints) for row in usage(by="format")} == {("npz", 4), ("huggingface", 4)}
    assert [(row.group, row.checkpoints) for row in usage(by="family")] == [("unknown", 8)]
    later = datetime.now(UTC) + timedelta(days=20)
    assert [row.group for row in usage(by="age")] == ["up to a day"]
    assert [row.group for row in usage(by="age", now=later)] == ["up to 30 days"]
    assert [row.nbytes for row in usage(str(night / "out"), by="age")] == [4 * NBYTES]
    with pytest.raises(UsageError, match="cannot group by 'colour'"):
        usage(by="colour")


def test_the_command_prints_a_table_or_json_usage(night):
    said = CliRunner().invoke(cli, ["du", "--config", str(night / "wherry.toml")]).output
    assert "prune would remove" in said
    assert said.splitlines()[-1] == "1.0 kB in 8 checkpoints"
    data = json.loads(CliRunner().invoke(cli, ["du", "--by", "format", "--json"]).output)
    assert [row["nbytes"] for row in data["groups"]] == [4 * NBYTES, 4 * NBYTES]
