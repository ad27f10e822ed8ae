"""why and impact, from real conversions."""

from __future__ import annotations

import json
from importlib import import_module
from types import SimpleNamespace

import pytest

import wherry
from tests.support.lineage import run
from wherry.cli.lineage import lineage as lineage_commands
from wherry.core.algorithms import digest_uri
from wherry.errors import NotFoundError
from wherry.ledger.record import open_ledger, record_event, record_registration
from wherry.lineage.answers import impact, render_impact, render_why, why

pytest_plugins = ["tests.support.lineage"]  # its fixtures


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
