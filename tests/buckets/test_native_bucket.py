"""Checkpoints in buckets, loaded by their systems' own libraries: there, or from a temporary copy of a stated size."""

from __future__ import annotations

import tempfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import wherry
from tests.support.bucket_fixtures import on_both
from wherry.core import child
from wherry.errors import MismatchError, StorageError, UnsupportedError
from wherry.prove import native as subject

pytest_plugins = ("tests.support.warm_native",)
pytestmark = pytest.mark.usefixtures("forked_loaders")

NAMES = {"safetensors": "made.safetensors", "flax-msgpack": "made.msgpack", "npz": "made.npz"}
THERE = {"orbax": ("gs",), "dcp": ("gs", "s3")}


@pytest.fixture
def source(tmp_path):
    numpy = pytest.importorskip("safetensors.numpy", reason="safetensors is not installed")
    tensors = {"a": np.arange(12, dtype="f4").reshape(3, 4), "b": np.arange(5, dtype="i8")}
    numpy.save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    return tmp_path / "model.safetensors"


@pytest.fixture
def made(bucket, source):
    """Converts the source into the bucket; returns its URI."""

    def make(to):
        return wherry.convert(
            source, f"{bucket.uri}/{NAMES.get(to, to)}", to=to, family="none", lineage=False
        ).target.uri

    return make


@pytest.fixture
def passed(monkeypatch):
    """The environments of the children."""
    found = []
    real = child.run

    def run(*words, variables=None, **how):
        found.append(variables)
        return real(*words, variables=variables, **how)

    monkeypatch.setattr(child, "run", run)
    return found


def more(to):
    """A format whose library takes long to import."""
    return pytest.param(to, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    "to", ["dcp", "safetensors", *map(more, ("orbax", "huggingface", "flax-msgpack", "npz"))]
)
@on_both("gs")
def test_a_library_loads_from_a_bucket(bucket, made, passed, monkeypatch, to):
    for package in {"orbax": ["orbax.checkpoint"], "flax-msgpack": ["flax"], "npz": ["jax"]}.get(
        to, ["torch"]
    ):
        pytest.importorskip(package, reason=f"{package} is not installed")
    uri = made(to)
    monkeypatch.delenv("TENSORSTORE_GCS_HTTP_URL", raising=False)
    found = wherry.verify(uri, level="native")
    assert found.ok, found
    assert found.native.checked == 2
    [variables] = passed
    secrets = {name for name in variables if name.startswith(("AWS_", "GOOGLE_", "STORAGE_"))}
    if bucket.protocol in THERE.get(to, ()):
        assert found.native.evidence.endswith(f"; it reads {bucket.protocol}:// itself")
        assert secrets
        assert all(name.startswith("AWS_") == (bucket.protocol == "s3") for name in secrets), (
            "of that store only"
        )
    else:
        assert f"; it reads no {bucket.protocol}://: " in found.native.evidence
        assert found.native.evidence.endswith("B were copied to a temporary folder")
        assert not secrets
    assert not list(Path(tempfile.gettempdir()).glob("wherry-native-*"))


@pytest.mark.parametrize("to", ["dcp", "safetensors"])
@on_both("s3")
def test_an_altered_byte_is_found(bucket, made, to):
    pytest.importorskip("torch", reason="torch is not installed")
    uri = made(to)
    name = "dcp/__0_0.distcp" if to == "dcp" else NAMES[to]
    place = bucket.at(name)
    data = bytearray(place.read(0, 1 << 20))
    at = bytes(data).index(np.arange(12, dtype="f4").tobytes())
    data[at + 5] ^= 1
    bucket.put(name, bytes(data))
    found = wherry.verify(uri, level="native")
    assert (found.verdict, found.exit_code) in {("altered", 9), ("refused", 9)}
    assert len(found.failed) == 1


@pytest.mark.parametrize("bucket", ["gs"], indirect=True)
def test_a_copy_is_limited_and_must_fit(made, monkeypatch):
    uri = made("npz")
    monkeypatch.setenv("WHERRY_CHILD_DISK", "100")
    with pytest.raises(UnsupportedError, match="exceeds the limit of 100 B for a temporary copy") as caught:
        wherry.verify(uri, level="native")
    assert "export WHERRY_CHILD_DISK=" in caught.value.cure
    assert caught.value.exit_code == 4
    monkeypatch.delenv("WHERRY_CHILD_DISK")
    full = SimpleNamespace(free=5)
    monkeypatch.setattr(subject.shutil, "disk_usage", lambda _folder: full)
    with pytest.raises(StorageError, match=r"the disk is too small for a temporary copy: .* 5 B are free"):
        wherry.verify(uri, level="native")
    assert not list(Path(tempfile.gettempdir()).glob("wherry-native-*"))


@pytest.mark.parametrize("bucket", ["gs"], indirect=True)
def test_a_source_that_is_replaced_during_the_copy_is_refused(bucket, made, monkeypatch):
    uri = made("npz")
    real = subject.copy_files

    def copy(*words):
        real(*words)
        bucket.put("made.npz", b"another")

    monkeypatch.setattr(subject, "copy_files", copy)
    with pytest.raises(MismatchError, match="a file of the source was modified"):
        wherry.verify(uri, level="native")
