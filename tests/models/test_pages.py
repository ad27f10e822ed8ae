"""What MLflow's pages tell a person: numbers of the run, its source, links, and what an audit found."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import wherry
from tests.support.registry import converted, flip_a_bit
from wherry.ledger.record import open_ledger, record_verification
from wherry.models.register import facts_of
from wherry.store.local_store import locate
from wherry.store.sidecar import read_sidecar

pytest.importorskip("mlflow")

from wherry.integrations.mlflow.marks import mark_version  # needs mlflow

pytestmark = pytest.mark.usefixtures("own_home")
PAGE = "http://127.0.0.1:4200/runs/flow-run/7"


def test_a_run_has_the_parameters_and_metrics_of_the_conversion(receipt, client, name):
    wherry.register(receipt, name)
    version = client.get_model_version(name, "1")
    run = client.get_run(version.run_id)
    assert run.data.params == {
        "format": "orbax",
        "format_version": receipt.target.format_version,
        "kind": "params",
        "dtype": "float64, int32",
        "source_format": "safetensors",
        **{f"options.{key}": json.dumps(value).strip('"') for key, value in receipt.options.items()},
    }
    assert run.data.metrics == {
        "bytes": 116.0,
        "tensors": 2.0,
        "parameters": 17.0,
        "seconds": receipt.seconds,
        "bytes_written": float(receipt.bytes_written),
        "max_error": 0.0,
    }
    model = client.get_logged_model(version.tags["wherry.logged_model"])
    assert {one.key: one.value for one in model.metrics} == run.data.metrics, "on the page of the model too"


def test_the_source_is_a_dataset_of_the_run(receipt, client, name):
    wherry.register(receipt, name)
    run = client.get_run(client.get_model_version(name, "1").run_id)
    [used] = run.inputs.dataset_inputs
    assert used.dataset.name == "source.safetensors"
    assert receipt.source.checkpoint_digest.endswith(used.dataset.digest) is False
    assert used.dataset.digest in receipt.source.checkpoint_digest
    assert json.loads(used.dataset.source) == {
        "uri": receipt.source.uri,
        "checkpoint_digest": receipt.source.checkpoint_digest,
    }
    assert [(tag.key, tag.value) for tag in used.tags] == [("mlflow.data.context", "source")]


def test_a_merge_has_each_parent_as_a_dataset(client, name, tmp_path):
    for number, one in enumerate("ab"):
        save_file({"w": np.full(4, number, "f4")}, tmp_path / f"{one}.safetensors")
    sources = [f"{tmp_path / one}.safetensors*0.5" for one in "ab"]
    receipt = wherry.merge(sources, tmp_path / "sum", to="orbax")
    wherry.register(receipt, name)
    run = client.get_run(client.get_model_version(name, "1").run_id)
    assert sorted(one.dataset.name for one in run.inputs.dataset_inputs) == ["a.safetensors", "b.safetensors"]


def test_what_was_verified_is_a_tag_and_pages_are_linked(receipt, client, name, monkeypatch):
    monkeypatch.setenv("WHERRY_LINEAGE_URL", "https://wherry.example/")
    assert wherry.verify(receipt.target.uri, level="digest", record=True).ok
    wherry.register(receipt, name, run_page=PAGE)
    version = client.get_model_version(name, "1")
    assert version.tags["wherry.verified"].startswith("digest: ok, 20")
    digest = receipt.target.checkpoint_digest
    lineage = f"https://wherry.example/lineage/{digest}#{digest}"
    assert (version.tags["wherry.prefect_run"], version.tags["wherry.lineage_page"]) == (PAGE, lineage)
    assert f"[Prefect flow run](<{PAGE}>)" in version.description
    assert f"](<{lineage}>)" in version.description
    run = client.get_run(version.run_id)
    assert run.data.tags["mlflow.note.content"] == version.description


def test_without_another_verification_it_is_that_of_the_conversion(receipt, client, name):
    wherry.register(receipt, name)
    tags = client.get_model_version(name, "1").tags
    assert tags["wherry.verified"] == f"digest: ok, {receipt.finished[:16].replace('T', ' ')} UTC"
    assert "wherry.prefect_run" not in tags
    assert "wherry.lineage_page" not in tags  # nobody else reaches an address of this machine


def test_a_lossy_conversion_has_an_error_only_if_it_was_measured_against_its_source(receipt):
    sidecar = read_sidecar(locate(receipt.target.uri))
    lossy = replace(sidecar, receipt=replace(receipt, lossless=False))
    outcome = {
        "level": "roundtrip",
        "verdict": "ok",
        "ok": True,
        "lossy": {"error": 0.01},
        "against": "/elsewhere",
    }
    with open_ledger() as ledger:
        assert facts_of(ledger, sidecar).max_error == 0
        assert facts_of(ledger, replace(sidecar, receipt=None)).max_error is None
        assert facts_of(ledger, lossy).max_error is None
        record_verification(ledger, receipt.target, outcome)
        assert facts_of(ledger, lossy).max_error is None
        record_verification(ledger, receipt.target, {**outcome, "against": receipt.source.uri})
        assert facts_of(ledger, lossy).max_error == 0.01


def test_an_audit_marks_what_is_altered_and_the_next_what_is_whole(client, name, tmp_path):
    receipt = converted(tmp_path)
    wherry.register(receipt, name)
    client.update_model_version(name, "1", client.get_model_version(name, "1").description + "\n\nOurs.")
    before = client.get_model_version(name, "1")
    file = flip_a_bit(Path(receipt.target.uri))
    assert not wherry.audit("registered", level="digest").ok
    first = client.get_model_version(name, "1")
    assert first.tags["wherry.altered"].startswith("altered: ")
    assert receipt.target.uri in first.tags["wherry.altered"]
    line, rest = first.description.split("\n\n", 1)
    assert line.startswith("> **Altered:** altered: ")
    assert rest == before.description
    assert first.tags["wherry.verified"] == before.tags["wherry.verified"], "it was not verified again"
    assert not wherry.audit("registered", level="digest").ok
    assert client.get_model_version(name, "1").tags["wherry.altered"] == first.tags["wherry.altered"]
    assert not wherry.audit("registered").ok, "the damage stays known"
    assert "wherry.altered" in client.get_model_version(name, "1").tags

    flip_a_bit(file.parent)
    assert wherry.audit([receipt.target.uri], level="digest").ok
    assert "wherry.altered" in client.get_model_version(name, "1").tags, "its other place was not looked at"
    assert wherry.audit([tmp_path], level="digest").ok
    after = client.get_model_version(name, "1")
    assert "wherry.altered" not in after.tags
    assert after.description == before.description
    assert after.tags["wherry.verified"].startswith("digest: ok, ")


def test_an_audit_that_records_nothing_or_looks_back_marks_nothing(client, name, tmp_path):
    receipt = converted(tmp_path)
    wherry.register(receipt, name)
    flip_a_bit(Path(receipt.target.uri))
    assert not wherry.audit("registered", level="digest", record=False).ok
    assert not wherry.audit("registered", level="digest", as_of="2199-01-01").ok
    assert "wherry.altered" not in client.get_model_version(name, "1").tags


def test_a_registry_that_cannot_be_written_is_a_warning(client, name, tmp_path, monkeypatch):
    from wherry.errors import StorageError
    from wherry.integrations import mlflow

    receipt = converted(tmp_path)
    wherry.register(receipt, name)

    def refuse(*_, **__):
        raise StorageError("read only")

    monkeypatch.setattr(mlflow, "mark_version", refuse)
    report = wherry.audit([receipt.target.uri], level="digest")
    assert report.ok
    assert [(one.severity, one.what) for one in report.findings if one.kind == "registration-unmarked"] == [
        ("warning", f"{name} version 1: its tags could not be updated: read only")
    ]


def test_a_name_does_not_leave_the_line_of_a_description(client, name, tmp_path):
    wherry.register(converted(tmp_path), name)
    stores = {"tracking_uri": client.tracking_uri, "registry_uri": client.tracking_uri}
    mark_version(name, "1", altered="altered: `x`\n\n# <b>**w**", verified="", **stores)
    line, _, rest = client.get_model_version(name, "1").description.partition("\n")
    assert line == r"> **Altered:** altered: \`x\`\\n\\n\# \<b\>\*\*w\*\*"
    assert rest.startswith("\nCheckpoint in format")
