"""Credentials in the parameters of a run are named in its log, never shown: Prefect stored them before wherry ran."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest

pytest.importorskip("prefect")

from wherry.flows.audit import AuditSpec
from wherry.flows.convert_spec import ConvertSpec
from wherry.tasks.credentials import credentials_in
from wherry.tasks.ending import ending

SPEC = {"source": "s3://me:hunter2@store/runs", "target": "/out", "to": "orbax"}


@pytest.mark.parametrize(
    ("parameters", "names"),
    [
        (
            {"spec": ConvertSpec(**SPEC, meta={"token": "hunter2", "note": "x"})},
            ["spec.source", "spec.meta.token"],
        ),
        ({"spec": {"roots": ["/a", "https://host/k?X-Amz-Signature=hunter2"]}}, ["spec.roots[1]"]),
        ({"spec": AuditSpec(key="/keys/release.pub", roots=("gs://bucket/a",), sample="10%")}, []),
        ({"spec": {"tags": {"tokens": "2e12", "team": "a"}}, "n": 3, "none": None}, []),
        ({"uri": "https://host/k?sig=hunter2&se=2026"}, ["uri"]),
    ],
)
def test_the_parameter_is_named(parameters, names):
    found = list(credentials_in(parameters))
    assert found == names
    assert "hunter2" not in str(found)


@pytest.mark.parametrize(("host", "said"), [("me:hunter2@store", True), ("store", False)])
def test_the_log_of_the_run_names_it_and_the_cure(caplog, monkeypatch, host, said):
    run = SimpleNamespace(parameters={"spec": {"source": f"s3://{host}/runs"}}, ui_url=None, id=None)
    monkeypatch.setattr("wherry.tasks.ending.flow_run", run)
    caplog.set_level(logging.WARNING)
    with ending("convert-checkpoint", "Conversion", only_failures=True):
        pass
    lines = [one.getMessage() for one in caplog.records if "contains a credential" in one.getMessage()]
    assert bool(lines) is said
    assert "hunter2" not in caplog.text
    if said:
        assert lines[0].startswith(
            "the parameter spec.source contains a credential, which Prefect has stored"
        )
        assert "environment of the worker" in lines[0]
