"""stale: every reason is reported for the right checkpoint, with a cure that works."""

from __future__ import annotations

import json
import os
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from safetensors.numpy import save_file

from tests.support.lineage import kinds, run
from wherry.cli.lineage import lineage as lineage_commands
from wherry.ledger.record import open_ledger, record_event
from wherry.lineage import stale as lineage_stale
from wherry.lineage.stale import stale

pytest_plugins = ["tests.support.lineage"]  # its fixtures


def test_nothing_is_stale_right_after_the_conversion(chain):
    assert stale() == []
    assert run(lineage_commands, "stale")[0] == 0


def test_a_changed_source_wears_out_everything_below_it_and_the_cure_works(
    chain, safetensors_source, tmp_path
):
    save_file({"a": np.zeros((3, 4), np.float32), "b": np.ones(5, np.int32)}, safetensors_source)
    rows = stale()
    assert kinds(rows) == {
        "orbax": ["source-changed"],
        "last.npz": ["upstream-stale"],
        "other.safetensors": ["source-changed"],
    }
    assert (
        kinds(stale(chain.second.target.checkpoint_digest)) == {"last.npz": []}
        or kinds(stale(chain.second.target.uri)) == {}
    )
    [orbax] = [row for row in rows if row.format == "orbax"]
    words = shlex.split(orbax.cure or "")
    assert words[:2] == ["wherry", "convert"]
    shutil.rmtree(orbax.uri)
    from wherry.cli import cli

    done = CliRunner().invoke(cli, words[1:], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert "orbax" not in kinds(stale())
    sidecar = json.loads((tmp_path / "out" / "orbax" / "wherry.json").read_text())
    assert sidecar["receipt"]["options"]["compression"] == "zstd"
    code, output = run(lineage_commands, "stale", "--json")
    assert code == 9
    assert {row["uri"] for row in json.loads(output)["stale"]} == {
        chain.third.target.uri,
        chain.second.target.uri,
    }


def test_a_source_that_is_gone_has_a_cure_only_where_it_lies_elsewhere(chain, safetensors_source, tmp_path):
    safetensors_source.unlink()
    gone = {row.format: row for row in stale()}
    assert [reason.kind for reason in gone["orbax"].reasons] == ["source-gone"]
    assert gone["orbax"].cure is not None, "the same checkpoint was written to another place"
    assert chain.third.target.uri in gone["orbax"].cure
    assert "npz" not in gone, "what it was made of is there and as it was"
    Path(chain.third.target.uri).unlink()
    assert {row.cure for row in stale() if row.format == "orbax"} == {None}


def test_a_deleted_target_is_not_stale(chain, safetensors_source):
    with open_ledger() as ledger:
        record_event(ledger, "deletion", chain.first.target, {"reason": "keep_last", "by": "prune"})
    os.utime(safetensors_source, (1, 1))
    assert kinds(stale()) == {"other.safetensors": ["source-changed"]}


def test_other_rules_make_another_plan(chain, monkeypatch):
    real = lineage_stale._plan_now

    def changed(made, *rest):
        return "f" * 64 if made.format == "orbax" else real(made, *rest)

    monkeypatch.setattr(lineage_stale, "_plan_now", changed)
    assert kinds(stale()) == {"orbax": ["plan-changed"], "last.npz": ["upstream-stale"]}


ROUTE = """
[routes.run]
root = "{root}"
[[routes.run.targets]]
format = "orbax"
uri = "{root}/out"
options = {{ compression = "{compression}" }}
"""


@pytest.mark.parametrize(("compression", "expected"), [("zstd", {}), ("none", {"orbax": ["route-changed"]})])
def test_a_changed_route(chain, safetensors_source, tmp_path, compression, expected):
    file = tmp_path / "wherry.toml"
    file.write_text(ROUTE.format(root=safetensors_source.parent, compression=compression))
    found = stale(config=str(file))
    assert {name: reasons for name, reasons in kinds(found).items() if name == "orbax"} == expected
    for row in found:
        assert row.format != "orbax" or "compression=none" in (row.cure or "")
