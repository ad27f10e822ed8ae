"""Rewrites within a bucket: the store copies what does not change, and the new metadata appears last."""

from __future__ import annotations

import numpy as np
import pytest
from safetensors.numpy import save_file

import wherry
from tests.support.bucket_fixtures import on_both
from tests.support.object_stores import leftover_names
from wherry.errors import CorruptError, MismatchError, TargetExistsError, UnsupportedError
from wherry.ledger.record import open_ledger
from wherry.store.local_store import locate
from wherry.target.upload_run import UploadRun

VALUES = np.arange(96 << 10, dtype=np.float32).reshape(96, 1024)


@pytest.fixture
def made(bucket, tmp_path):
    """A DCP checkpoint in the bucket, whose rewrite changes `.metadata` alone."""
    save_file({"a": VALUES, "b": np.ones(5, np.int32)}, tmp_path / "model.safetensors")
    done = wherry.convert(
        tmp_path / "model.safetensors", f"{bucket.uri}/made", to="dcp", options={"for_torch": "2.3"}
    )
    return done.target.uri


def rewritten(made, **how):
    return wherry.rewrite(made, f"{made}-new", as_="for-torch=default", **how)


def names(uri):
    return sorted(entry.name for entry in locate(uri).walk())


@on_both("gs")
def test_unchanged_objects_are_copied_by_the_store(bucket, made):
    bucket.requests()
    done = rewritten(made)
    assert done.ways == {"store": locate(made).join("__0_0.distcp").stat().size}
    sent = [path for method, path in bucket.requests() if method in ("PUT", "POST") and "distcp" in path]
    assert any("/compose?" in path or "partNumber=" in path for path in sent), sent
    assert done.receipt.lineage == "recorded"
    assert done.receipt.source.weights_digest == done.receipt.target.weights_digest
    assert names(f"{made}-new") == [".metadata", "__0_0.distcp", "wherry.json"]
    assert leftover_names(f"{made}-new") == [f"made/{name}" for name in names(made)], (
        "no lease and no staging"
    )
    found = wherry.verify(f"{made}-new", level="roundtrip", against=made)
    assert found.ok, found
    assert locate(f"{made}-new/.metadata").read(0, 1 << 20) != locate(f"{made}/.metadata").read(0, 1 << 20)
    with open_ledger() as ledger:
        assert ledger
    bucket.requests()
    assert rewritten(made).receipt.already
    assert not [path for method, path in bucket.requests() if method in ("PUT", "POST")]
    with pytest.raises(TargetExistsError):
        rewritten(made, if_exists="fail")


@on_both("s3")
def test_without_a_proof_no_byte_of_a_tensor_is_read(bucket, made):
    bucket.requests()
    rewritten(made, verify="none")
    reads = {"gs": "alt=media", "s3": ".distcp"}[bucket.protocol]
    paths = [
        path for method, path in bucket.requests() if method == "GET" and "distcp" in path and reads in path
    ]
    assert not [path for path in paths if "uploadId" not in path and "prefix" not in path]
    assert wherry.verify(f"{made}-new", level="roundtrip", against=made).ok


@pytest.mark.parametrize("bucket", ["gs"], indirect=True)
def test_a_copy_with_other_bytes_is_not_committed(bucket, made, monkeypatch):
    real = UploadRun.copy

    def copy(self, path, source, mark):
        real(self, path, source, mark)
        place = locate(f"gs://{path}")
        data = bytearray(place.read(0, 1 << 20))
        data[len(data) // 2] ^= 1
        place.put(bytes(data))

    monkeypatch.setattr(UploadRun, "copy", copy)
    with pytest.raises((MismatchError, CorruptError)):
        rewritten(made)
    assert ".metadata" not in names(f"{made}-new")


@pytest.mark.parametrize("bucket", ["gs"], indirect=True)
def test_a_source_that_is_replaced_is_refused(bucket, made, monkeypatch):
    real = UploadRun.copy

    def copy(self, path, source, mark):
        bucket.put("made/__0_0.distcp", b"another")
        real(self, path, source, mark)

    monkeypatch.setattr(UploadRun, "copy", copy)
    with pytest.raises(MismatchError, match=r"modified|changed or removed"):
        rewritten(made, verify="none")
    assert not locate(f"{made}-new").exists()


@pytest.mark.parametrize("bucket", ["gs"], indirect=True)
def test_what_a_rewrite_cannot_do_there(bucket, made, tmp_path):
    with pytest.raises(UnsupportedError, match="within one file system or one bucket"):
        wherry.rewrite(made, tmp_path / "local", as_="for-torch=default")
    with pytest.raises(UnsupportedError, match="within one file system or one bucket"):
        wherry.rewrite(made, "gs://another/new", as_="for-torch=default")
    with pytest.raises(UnsupportedError, match="not replaced in place"):
        wherry.rewrite(made, as_="for-torch=default", in_place=True)
    save_file({"a": VALUES}, tmp_path / "a.safetensors")
    item = wherry.convert(tmp_path / "a.safetensors", f"{bucket.uri}/item", to="orbax").target.uri
    with pytest.raises(UnsupportedError, match="linked anew only on a local file system") as caught:
        wherry.rewrite(item, f"{item}-boxed", as_="box")
    assert "wherry fetch" in caught.value.cure
    assert not locate(f"{item}-boxed").exists()


@pytest.mark.parametrize("bucket", ["gs"], indirect=True)
def test_a_save_that_lacks_its_commit_is_committed_next_to_it(bucket, tmp_path):
    save_file({"a": VALUES}, tmp_path / "a.safetensors")
    item = wherry.convert(tmp_path / "a.safetensors", tmp_path / "item", to="orbax", lineage=False).target.uri
    for file in sorted(one for one in (tmp_path / "item").rglob("*") if one.is_file()):
        if file.name not in ("commit_success.txt", "wherry.json"):
            bucket.put(f"run/item/{file.relative_to(item)}", file.read_bytes())
    done = wherry.rewrite(f"{bucket.uri}/run/item", f"{bucket.uri}/run/whole", as_="commit")
    assert done.ways["store"] > VALUES.nbytes
    assert wherry.verify(f"{bucket.uri}/run/whole", level="roundtrip", against=item).ok
