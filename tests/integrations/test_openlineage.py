"""OpenLineage: events keep to the published specification and say what the statement says."""

from __future__ import annotations

import inspect
import json
import os
import pkgutil
import shutil
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import wherry
from wherry.core.receipt import CheckpointRef
from wherry.errors import UsageError
from wherry.integrations import openlineage
from wherry.integrations.openlineage.datasets import describe_dataset, place_identifier
from wherry.ledger.record import open_ledger, record_event, record_registration, record_verification
from wherry.ledger.statements import statements


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "source.safetensors"
    save_file(
        {"model.a": np.arange(12, dtype=np.float32).reshape(3, 4), "model.b": np.ones(5, np.int32)}, path
    )
    return path


@pytest.fixture
def converted(source, tmp_path):
    return wherry.convert(source, tmp_path / "orbax", to="orbax", options={"split": "."})


def all_events():
    with open_ledger() as ledger:
        return [event for statement in statements(ledger) for event in openlineage.events(statement)]


def everything(converted):
    """One event at least of every kind that there is."""
    subject = converted.target
    failed = {
        "tensors": {"checked": 2, "failed": [{"path": "model/a", "reason": "leaf 0 differs", "leaf": 0}]}
    }
    with open_ledger() as ledger:
        record_verification(ledger, subject, {"level": "digest", "verdict": "ok", "ok": True})
        record_verification(ledger, subject, {"level": "digest", "verdict": "altered", "ok": False, **failed})
        record_registration(ledger, subject, "http://mlflow", "model", "1")
        record_event(
            ledger, "promotion", subject, {"name": "model", "version": "1", "registry": "http://mlflow"}
        )
        record_event(ledger, "rollback", subject, {"name": "model"})
        body = {
            "checkpoint_digest": subject.checkpoint_digest,
            "uri": subject.uri,
            "reason": "old",
            "by": "me",
        }
        record_event(ledger, "deletion", subject, body)
        record_event(ledger, "note", None, {"text": "of nobody's interest"})
    return all_events()


def test_a_conversion_is_a_run_with_both_ends(converted):
    start, complete = all_events()
    assert (start["eventType"], complete["eventType"]) == ("START", "COMPLETE")
    assert start["run"] == complete["run"]
    assert (start["eventTime"], complete["eventTime"]) == (converted.started, converted.finished)
    [source], [target] = complete["inputs"], complete["outputs"]
    assert (source["namespace"], source["name"]) == ("file", converted.source.uri)
    assert (target["namespace"], target["name"]) == ("file", converted.target.uri)
    assert target["facets"]["version"]["datasetVersion"] == converted.target.checkpoint_digest
    assert target["facets"]["storage"]["fileFormat"] == "orbax"
    assert target["outputFacets"]["outputStatistics"]["size"] == 68
    assert [row["name"] for row in target["facets"]["schema"]["fields"]] == ["model/a", "model/b"]
    assert target["facets"]["schema"]["fields"][0]["type"] == "float32[3,4]"
    assert target["facets"]["wherry_checkpoint"]["weightsDigest"] == converted.target.weights_digest
    assert "schema" not in source["facets"], "it has no manifest of its own"
    [field] = target["facets"]["columnLineage"]["fields"]["model/a"]["inputFields"]
    assert field["field"] == "model.a"
    assert (field["namespace"], field["name"]) == (source["namespace"], source["name"])
    assert complete["run"]["facets"]["wherry_statement"]["planDigest"] == converted.plan_digest
    assert all_events() == [start, complete], "the same statement gives the same events"


def test_key_paths_that_stay_need_no_lineage_of_tensors(source, tmp_path):
    wherry.convert(source, tmp_path / "orbax", to="orbax")
    facets = all_events()[1]["outputs"][0]["facets"]
    assert "columnLineage" not in facets
    assert "schema" in facets


def test_renamed_tensors_are_traced(source, tmp_path):
    renaming = {"rename": "model.{x} -> net.{x}"}
    wherry.convert(source, tmp_path / "orbax", to="orbax", options=renaming)
    fields = all_events()[1]["outputs"][0]["facets"]["columnLineage"]["fields"]
    assert {name: row["inputFields"][0]["field"] for name, row in fields.items()} == {
        "net.a": "model.a",
        "net.b": "model.b",
    }


def test_a_deleted_target_is_reported_without_its_manifest(converted):
    shutil.rmtree(converted.target.uri)
    facets = all_events()[1]["outputs"][0]["facets"]
    assert "schema" not in facets
    assert facets["version"]["datasetVersion"] == converted.target.checkpoint_digest


def test_every_kind_of_statement(converted):
    events = everything(converted)
    assert [(event["job"]["name"], event["eventType"]) for event in events] == [
        ("convert safetensors to orbax", "START"),
        ("convert safetensors to orbax", "COMPLETE"),
        ("verify digest", "COMPLETE"),
        ("verify digest", "FAIL"),
        ("register model", "COMPLETE"),
        ("promote model", "COMPLETE"),
        ("rollback model", "COMPLETE"),
        ("prune", "COMPLETE"),
    ]
    assert events[3]["run"]["facets"]["errorMessage"]["message"].endswith("model/a: leaf 0 differs")
    assert events[4]["outputs"] == [{"namespace": "http://mlflow", "name": "models:/model/1"}]
    assert events[7]["outputs"][0]["facets"]["lifecycleStateChange"]["lifecycleStateChange"] == "DROP"
    assert all(event["inputs"] or event["outputs"] for event in events)


def failed_conversion(tmp_path, monkeypatch):
    file = tmp_path / "failures.jsonl"
    monkeypatch.setenv("WHERRY_OPENLINEAGE", str(file))
    with pytest.raises(wherry.WherryError):
        wherry.convert(tmp_path / "nothing", tmp_path / "target", to="orbax")
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_a_conversion_that_failed_is_a_failed_run(tmp_path, monkeypatch):
    start, fail = failed_conversion(tmp_path, monkeypatch)
    assert (start["eventType"], fail["eventType"]) == ("START", "FAIL")
    assert start["run"]["runId"] == fail["run"]["runId"]
    assert "file or folder not found" in fail["run"]["facets"]["errorMessage"]["message"]


@pytest.mark.parametrize(
    ("uri", "namespace", "name"),
    [
        ("/a/b", "file", "/a/b"),
        ("memory://bucket/a/b", "memory://bucket", "a/b"),
        ("odd://place/x", "odd", "place/x"),
    ],
)
def test_places_are_named_as_the_specification_says(uri, namespace, name):
    assert place_identifier(uri) == {"namespace": namespace, "name": name}


def generated_classes():
    """The classes that the project generates from its schemas, by the URL of the schema."""
    package = pytest.importorskip(
        "openlineage.client.generated", reason="openlineage-python is not installed"
    )
    found = {}
    for module in pkgutil.iter_modules(package.__path__):
        for _name, kind in inspect.getmembers(
            import_module(f"{package.__name__}.{module.name}"), inspect.isclass
        ):
            if hasattr(kind, "_get_schema"):
                found[kind._get_schema()] = kind
    return found


def facets_of(event):
    yield from event["run"]["facets"].values()
    yield from event["job"].get("facets", {}).values()
    for dataset in (*event["inputs"], *event["outputs"]):
        yield from dataset.get("facets", {}).values()
        yield from dataset.get("outputFacets", {}).values()


def test_facets_are_what_the_projects_own_classes_take(converted, tmp_path, monkeypatch):
    kinds = generated_classes()
    seen = set()
    for event in (*everything(converted), *failed_conversion(tmp_path, monkeypatch)):
        assert event["schemaURL"] in kinds
        for facet in facets_of(event):
            kind = kinds[facet["_schemaURL"]]
            fields = {name: value for name, value in facet.items() if not name.startswith("_")}
            if kind.__name__ not in ("RunFacet", "JobFacet", "DatasetFacet"):
                kind(**fields, producer=facet["_producer"])  # refuses unknown and missing fields
            seen.add(kind.__name__)
    assert len(seen) == 12


def test_events_validate_against_the_published_schema(converted, tmp_path, monkeypatch):
    """The schemas stay with their project; LINEAGE_SPEC names the folder `spec` of a copy of it."""
    folder = Path(os.environ.get("LINEAGE_SPEC", ""))
    if not (folder / "OpenLineage.json").is_file():
        pytest.skip("LINEAGE_SPEC does not name the folder `spec` of the OpenLineage project")
    jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed")
    from referencing import Registry, Resource

    files = [folder / "OpenLineage.json", *sorted((folder / "facets").glob("*.json"))]
    schemas = [json.loads(file.read_text()) for file in files]
    known = Registry().with_resources([(one["$id"], Resource.from_contents(one)) for one in schemas])

    def validate(value, url):
        check = jsonschema.Draft202012Validator(
            {"$ref": url}, registry=known, format_checker=jsonschema.FormatChecker()
        )
        check.validate(value)

    for event in (*everything(converted), *failed_conversion(tmp_path, monkeypatch)):
        validate(event, event["schemaURL"])
        for facet in facets_of(event):
            validate(facet, facet["_schemaURL"])


def test_a_destination_that_makes_no_sense_is_refused():
    with pytest.raises(UsageError, match="a file or an http"):
        openlineage.projection("ftp://somewhere")
    with pytest.raises(UsageError, match="user or password") as failure:
        openlineage.projection("https://user:secret@host/path")
    assert "secret" not in str(failure.value)


def test_large_schemas_are_left_out(converted, monkeypatch):
    monkeypatch.setattr("wherry.integrations.openlineage.datasets.MOST_FIELDS", 1)
    assert "schema" not in all_events()[1]["outputs"][0]["facets"]


def test_a_dataset_needs_no_more_than_a_reference():
    reference = CheckpointRef("/x", "orbax", None, "d" * 64, "w" * 64, "f")
    assert describe_dataset(reference, {})["facets"]["symlinks"]["identifiers"][0]["name"] == "d" * 64
