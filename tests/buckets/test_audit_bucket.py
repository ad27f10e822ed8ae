"""An audit and the report of what is lost in buckets."""

from __future__ import annotations

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.support.bucket_fixtures import on_both
from wherry.converter.convert import convert
from wherry.errors import UsageError
from wherry.ledger.record import record_sidecar
from wherry.prove import evidence
from wherry.prove.audit import audit
from wherry.prove.report import summary
from wherry.prove.verify import verify


@pytest.fixture
def made(bucket, tmp_path):
    save_file(
        {f"w{number}": np.full((64, 64), number, np.float32) for number in range(30)},
        tmp_path / "a.safetensors",
    )
    bucket.put("a.safetensors", (tmp_path / "a.safetensors").read_bytes())
    convert(f"{bucket.uri}/a.safetensors", f"{bucket.uri}/made", to="dcp")
    return f"{bucket.uri}/made"


def reads_of(bucket):
    """Requests for bytes of the two checkpoints' tensors."""
    found = [path for method, path in bucket.requests() if method == "GET"]
    names = ("a.safetensors", "__0_0.distcp")
    parts = {"gs": "alt=media", "s3": ""}[bucket.protocol]
    return [
        path
        for path in found
        if any(name in path for name in names) and parts in path and "prefix=" not in path
    ]


def levels(report):
    return {row.uri.rpartition("/")[2]: row.level for row in report.checkpoints}


@on_both("gs")
def test_what_was_verified_in_its_present_state_is_not_read(bucket, made):
    bucket.requests()
    assert levels(audit("all", level="digest")) == {"a.safetensors": "digest", "made": "digest"}
    whole = len(reads_of(bucket))
    again = audit("all", level="digest")
    assert again.ok
    assert levels(again) == {"a.safetensors": "unchanged", "made": "unchanged"}
    headers = len(reads_of(bucket))
    assert headers < whole, "headers are metadata"
    assert (again.counts["read"], again.counts["unchanged"]) == (0, 2)
    assert any("--deep" in text for name, text in summary(again) if name == "not read")
    audit("all", level="present")
    assert len(reads_of(bucket)) == headers, "no more is read than at level present"
    deep = audit("all", level="digest", deep=True)
    assert levels(deep) == {"a.safetensors": "digest", "made": "digest"}
    assert len(reads_of(bucket)) == whole


@on_both("s3")
def test_a_changed_object_of_the_same_size_is_found(bucket, made):
    assert audit("all", level="digest").ok
    place = bucket.at("made/__0_0.distcp")
    data = bytearray(place.read(0, 1 << 30))
    data[-200_000] ^= 1
    bucket.put("made/__0_0.distcp", bytes(data))
    report = audit("all", level="digest")
    assert not report.ok
    assert levels(report) == {"a.safetensors": "unchanged", "made": "digest"}
    data[-200_000] ^= 1
    bucket.put("made/__0_0.distcp", bytes(data))
    mended = audit("all", level="digest")
    assert mended.ok
    assert levels(mended)["made"] == "digest", (
        "a failure takes the state back: ETags of S3 return with the bytes"
    )


@on_both("gs")
def test_only_a_read_of_exactly_these_objects_counts(bucket, made):
    """Neither a conversion, nor a sighting, nor a verification of metadata, nor that of another state."""
    metadata = bucket.at("made/.metadata").read(0, 1 << 20)
    bucket.put("made/.metadata", metadata)
    record_sidecar(made)
    assert verify(made, level="present", record=True).ok
    assert levels(audit("all", level="digest", record=False)) == {"a.safetensors": "digest", "made": "digest"}
    assert verify(made, level="digest", record=True).full_read.state
    assert levels(audit("all", level="digest", record=False)) == {
        "a.safetensors": "digest",
        "made": "unchanged",
    }
    bucket.put("made/.metadata", metadata)
    expected = {"gs": "digest", "s3": "unchanged"}[bucket.protocol]  # a new generation, the same ETag
    assert levels(audit("all", level="digest", record=False))["made"] == expected


@on_both("s3")
def test_an_object_that_is_replaced_while_it_is_read_has_no_state(bucket, made, monkeypatch):
    real = evidence.hash_checkpoint

    def hashed(checkpoint, *words, **how):
        found = real(checkpoint, *words, **how)
        if checkpoint.uri == made:
            bucket.put("made/.metadata", bucket.at("made/.metadata").read(0, 1 << 20))
            bucket.put("made/__0_0.distcp", b"another")
        return found

    monkeypatch.setattr(evidence, "hash_checkpoint", hashed)
    assert verify(made, level="digest").full_read.state == ""


@on_both("gs")
def test_a_sample_reaches_what_was_not_read(bucket, made):
    assert verify(made, level="digest", record=True).ok
    first = audit("all", level="digest", sample="1")
    assert levels(first) == {"a.safetensors": "digest", "made": "unchanged"}


def test_deep_needs_the_level():
    with pytest.raises(UsageError, match="--deep requires level digest"):
        audit("all", deep=True)


@on_both("s3")
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


@on_both("gs")
def test_a_bucket_that_is_gone_is_a_finding(bucket, made, monkeypatch):
    store = bucket.at("x").store
    for name in ("a.safetensors", "made/.metadata", "made/__0_0.distcp", "made/wherry.json"):
        store.remove(f"{bucket.name}/{name}")
    store.call(bucket.name, "rmdir", bucket.name)
    monkeypatch.setattr("wherry.store.remote_store._answered", set())
    report = audit("all")
    assert not report.ok
    (gone,) = [one for one in report.findings if one.uri == made]
    assert "not found" in gone.what
    assert gone.cure
