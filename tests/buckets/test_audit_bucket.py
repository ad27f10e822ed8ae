"""An audit and the report of what is lost in buckets."""

from __future__ import annotations

import numpy as np
import pytest
from safetensors.numpy import save_file

from wherry.auditor.audit import audit
from wherry.converter.convert import convert


@pytest.fixture
def made(bucket, tmp_path):
    save_file(
        {f"w{number}": np.full((64, 64), number, np.float32) for number in range(30)},
        tmp_path / "a.safetensors",
    )
    bucket.put("a.safetensors", (tmp_path / "a.safetensors").read_bytes())
    convert(f"{bucket.uri}/a.safetensors", f"{bucket.uri}/made", to="dcp")
    return f"{bucket.uri}/made"


def test_bytes_are_read_by_range(bucket, made):
    bucket.requests()
    assert audit("all", level="digest").ok
    reads = [path for method, path in bucket.requests() if method == "GET" and "prefix=" not in path]
    assert len(reads) < 60, "of 60 tensors"
    place = bucket.at("made/__0_0.distcp")
    data = bytearray(place.read(0, 1 << 30))
    data[-200_000] ^= 1
    bucket.put("made/__0_0.distcp", bytes(data))
    found = audit("all", level="digest")
    assert not found.ok
    assert {"altered", "corrupt"} & {one.kind for one in found.findings}


def test_a_bucket_that_is_gone_is_a_finding(bucket, made, monkeypatch):
    store = bucket.at("x").store
    for name in ("a.safetensors", "made/.metadata", "made/__0_0.distcp", "made/wherry.json"):
        store.remove(f"{bucket.name}/{name}")
    store.call(bucket.name, "rmdir", bucket.name)
    monkeypatch.setattr("wherry.storage.fsspec_store._answered", set())
    report = audit("all")
    assert not report.ok
    (gone,) = [one for one in report.findings if one.uri == made]
    assert "not found" in gone.what
    assert gone.cure
