"""wherry du: bytes by run, format and age, and what prune would remove."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta

import numpy as np
import pytest
from click.testing import CliRunner
from safetensors.numpy import save_file

from wherry.catalog.entries import usage
from wherry.cli import cli
from wherry.errors import UsageError
from wherry.routes.night import run_night
from wherry.routes.routes import load_config

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


def test_the_command_prints_a_table_or_json(night):
    said = CliRunner().invoke(cli, ["du", "--config", str(night / "wherry.toml")]).output
    assert "prune would remove" in said
    assert said.splitlines()[-1] == "1.0 kB in 8 checkpoints"
    data = json.loads(CliRunner().invoke(cli, ["du", "--by", "format", "--json"]).output)
    assert [row["nbytes"] for row in data["groups"]] == [4 * NBYTES, 4 * NBYTES]
