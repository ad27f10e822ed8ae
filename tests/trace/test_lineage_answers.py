"""What the lineage answers: the same on every ledger, and what is stale."""

from __future__ import annotations

import json
import os
import shlex
import shutil
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from click.testing import CliRunner
from safetensors.numpy import save_file

import wherry
from tests.support.lineage import kinds, run
from wherry.cli.lineage import lineage as lineage_commands
from wherry.core.digest import digest_uri
from wherry.errors import NotFoundError
from wherry.ledger.record import open_ledger, record_event, record_registration
from wherry.trace import stale as lineage_stale
from wherry.trace.answers import impact, render_impact, render_why, why
from wherry.trace.stale import stale

pytest_plugins = ["tests.support.lineage"]

RESOLVE = import_module("wherry.ledger.resolve")  # the door has a verb of this name


def test_why_goes_up_to_the_first_known_source(chain):
    found = why(chain.second.target.uri)
    assert [(step.distance, step.edge.source) for step in found.steps] == [
        (1, chain.first.target.checkpoint_digest),
        (2, chain.first.source.checkpoint_digest),
    ]
    assert found.origins == (chain.first.source.checkpoint_digest,)
    assert found.steps[1].how["options"]["compression"] == "zstd"
    assert found.steps[1].how["software"]["wherry"] == wherry.__version__
    text = render_why(found)
    assert "compression=zstd" in text
    assert f"no known source: {chain.first.source.checkpoint_digest[:12]}" in text
    code, output = run(lineage_commands, "why", chain.second.target.uri, "--json")
    assert code == 0
    assert [step["distance"] for step in json.loads(output)["steps"]] == [1, 2]


def test_impact_names_versions_and_places_that_are_there(chain, safetensors_source):
    with open_ledger() as ledger:
        record_registration(ledger, chain.second.target, "https://models.example", "model", "3")
        record_event(ledger, "deletion", chain.first.target, {"reason": "keep_last", "by": "prune"})
    found = impact(safetensors_source)
    assert found.versions == ("model version 3 in https://models.example",)
    assert found.places == (chain.second.target.uri,), "the third is another place of the source itself"
    text = render_impact(found)
    assert f"{chain.first.target.uri} (missing since " in text
    assert "derived checkpoints: 2, places: 1" in text
    code, output = run(lineage_commands, "impact", safetensors_source)
    assert (code, output.strip()) == (0, text)


def test_a_round_trip_of_digests_ends(chain, safetensors_source, tmp_path):
    wherry.convert(chain.first.target.uri, tmp_path / "back.safetensors", to="safetensors")
    found = why(safetensors_source)
    assert found.origins == ()
    assert "the conversions form a cycle" in render_why(found)


def test_a_model_uri_is_answered_by_its_digest(chain, monkeypatch):
    digest = chain.second.target.checkpoint_digest
    assert why(digest_uri(digest)).root == digest
    monkeypatch.setattr(RESOLVE, "resolve_model", lambda text: SimpleNamespace(checkpoint_digest=digest))
    assert impact("models:/model@champion").root == digest

    def deleted(text):
        raise NotFoundError("the checkpoint was deleted", uri=text)

    row = SimpleNamespace(
        name="model", version="3", tags={"wherry.checkpoint_digest": digest}, aliases=("champion",)
    )
    monkeypatch.setattr(RESOLVE, "resolve_model", deleted)
    monkeypatch.setattr(
        "wherry.core.services.service", lambda name: SimpleNamespace(registered_versions=lambda *_uris: [row])
    )
    assert why("models:/model@champion").root == why("models:/model/3").root == digest
    with pytest.raises(NotFoundError, match="deleted"):
        why("models:/model@candidate")


def test_the_page(chain, tmp_path):
    code, output = run(lineage_commands, "show", chain.first.target.uri, "--html", tmp_path / "page.html")
    assert (code, output.strip()) == (0, str(tmp_path / "page.html"))
    assert chain.first.target.checkpoint_digest in (tmp_path / "page.html").read_text()


# stale: every reason is reported for the right checkpoint, with a cure that works.


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
