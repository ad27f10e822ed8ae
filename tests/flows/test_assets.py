"""Prefect assets: keys that Prefect takes, and the events of a conversion on a real (temporary) server."""

from __future__ import annotations

import logging
import time

import pytest

pytest.importorskip("prefect", reason="prefect is not installed")

from prefect import flow
from prefect.client.orchestration import get_client

from wherry.core.receipt import CheckpointRef, Receipt
from wherry.tasks import assets
from wherry.tasks.assets import asset_events, asset_key, asset_of

DIGEST = "d" * 64


def receipt(source, target):
    ends = [
        CheckpointRef(uri, "orbax", None, DIGEST, "w" * 64, "f", "params", 7, 2) for uri in (source, target)
    ]
    return Receipt(*ends, plan_digest="p" * 64, seconds=1.0, bytes_written=4).to_json()


@pytest.mark.parametrize(
    ("uri", "key"),
    [
        ("/runs/a/7", "file:///runs/a/7"),
        ("GS://bucket/run/7", "gs://bucket/run/7"),
        ("live://host/run@9", "live://host/run@9"),
        ("s3://user:secret@bucket/a?token=secret", "s3://bucket/a"),
        ("/a b/{run}%/=[1]#?", "file:///a=20b/=7Brun=7D=25/=3D=5B1=5D=23=3F"),
        ("/naïve/模型", "file:///na=C3=AFve/=E6=A8=A1=E5=9E=8B"),
    ],
)
def test_keys_are_uris_that_prefect_takes(uri, key):
    assert asset_key(uri) == key
    assert asset_of({"uri": uri, "format": "orbax", "kind": "params", "tensors": 2}).key == key


def test_long_places_keep_keys_of_their_own():
    one, two = (asset_key(f"/{'folder/' * 100}{end}") for end in "ab")
    assert one != two
    assert len(one) <= 512
    asset_of({"uri": f"/{'folder/' * 100}a", "format": "orbax", "kind": "params", "tensors": 2})


def test_what_prefect_does_not_take_is_logged(monkeypatch, caplog):
    def refuse(*_, **__):
        raise ConnectionError("the server is gone")

    monkeypatch.setattr(assets, "add_asset_metadata", refuse)
    monkeypatch.setattr(assets, "materialize", lambda *_, **__: lambda function: function)
    with caplog.at_level(logging.WARNING, "wherry"):
        asset_events(receipt("/a", "/b"))
    assert "could not record the asset in Prefect: the server is gone" in caplog.text


@pytest.mark.server
def test_a_conversion_is_a_materialization_with_its_source(server, tmp_path):
    @flow(name="assets")
    def record():
        asset_events(receipt(str(tmp_path / "source"), str(tmp_path / "target")))

    record()
    event = _event("prefect.asset.materialization.succeeded", f"file://{tmp_path}/target")
    assert event["resource"]["prefect.resource.id"] == f"file://{tmp_path}/target"
    related = {row["prefect.resource.id"]: row["prefect.resource.role"] for row in event["related"]}
    assert related[f"file://{tmp_path}/source"] == "asset"
    assert related["wherry"] == "asset-materialized-by"
    assert event["payload"]["checkpoint_digest"] == DIGEST
    assert event["payload"]["lossless"] is True


def _event(name, resource):
    """The first event of that name about a resource; the server stores events a moment later."""
    wanted = {"event": {"name": [name]}, "resource": {"id": [resource]}}
    with get_client(sync_client=True) as client:
        for _ in range(100):
            answer = client._client.post("/events/filter", json={"filter": wanted})
            found = answer.json()["events"]
            if found:
                return found[0]
            time.sleep(0.2)
    raise AssertionError(f"no event {name} about {resource}")
