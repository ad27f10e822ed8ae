"""Targets in several layouts: the source is read once, and each target is as if it had been made alone."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from safetensors.numpy import load_file

import wherry
from tests.support.tiny_models import save_tiny
from wherry.converter.convert import convert_all
from wherry.core.request import TargetRequest, convert_request
from wherry.errors import TargetInUseError, UnrepresentableError, WherryError
from wherry.store.local_store import locate
from wherry.store.memory import MemoryStore
from wherry.target.lease import lease_of
from wherry.transform.view import ChangeLayout

# Target → options; the first two are in the layout of a Hugging Face source, orbax in that of MaxText.
TARGETS = {
    "dcp": {},
    "safetensors": {},
    "maxtext": {},
    "gguf": {"type": "f16", "tokenizer": "none"},
}
OF_CHUNKS = ("hf", "orbax", "gguf")
SIZES = {"vocab_size": 6000, "hidden_size": 64, "intermediate_size": 96}  # the embeddings have 1.5 MB


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("source") / "model", "llama", drawn=True, **SIZES)


@pytest.fixture(scope="module")
def nbytes(model):
    return sum(array.nbytes for array in load_file(model / "model.safetensors").values())


@pytest.fixture(scope="module")
def sources(model, tmp_path_factory):
    """The model as files on this machine, as compressed chunks, and in a bucket."""
    folder = tmp_path_factory.mktemp("stored")
    wherry.convert(model, folder / "maxtext", to="maxtext", lineage=False)
    bucket = locate(f"memory://bucket{folder}/model")
    for path in model.iterdir():
        bucket.join(path.name).put(path.read_bytes())
    return {"files": str(model), "chunks": str(folder / "maxtext"), "bucket": bucket.uri}


def request(source, folder, targets=tuple(TARGETS), **more):
    wanted = [TargetRequest(str(Path(folder) / f"{to}.{to}"), to, TARGETS.get(to, {})) for to in targets]
    return convert_request(str(source), wanted, lineage=False, **more)


def contents(path):
    """Name → bytes of the files of a target, whose sidecar has times."""
    path = Path(path)
    files = [path] if path.is_file() else [one for one in path.rglob("*") if one.is_file()]
    return {str(one.relative_to(path)): one.read_bytes() for one in files if one.name != "wherry.json"}


@pytest.mark.parametrize("kind", ["files", "chunks", "bucket"])
def test_each_target_is_as_if_it_had_been_made_alone(sources, tmp_path, kind):
    targets = OF_CHUNKS if kind == "chunks" else tuple(TARGETS)
    group = convert_all(request(sources[kind], tmp_path / "together", targets))
    for to, receipt in zip(targets, group.receipts, strict=True):
        [alone] = convert_all(request(sources[kind], tmp_path / "alone", [to])).receipts
        assert receipt.target.checkpoint_digest == alone.target.checkpoint_digest, to
        assert receipt.source == alone.source, to
        assert receipt.verification["ok"], to
        assert (receipt.losses, receipt.bytes_read) == (alone.losses, alone.bytes_read), to
        if to in ("safetensors", "dcp", "hf"):
            assert contents(receipt.target.uri) == contents(alone.target.uri), to
        assert wherry.verify(receipt.target.uri, level="digest").ok
    again = convert_all(request(sources[kind], tmp_path / "together", targets))
    assert all(receipt.already for receipt in again.receipts)


def test_a_bucket_is_read_once(sources, nbytes, tmp_path, monkeypatch):
    read, plain = [], MemoryStore.read

    def count(store, path, start, stop):
        if path.endswith(".safetensors"):
            read.append(stop - start)
        return plain(store, path, start, stop)

    monkeypatch.setattr(MemoryStore, "read", count)
    group = convert_all(request(sources["bucket"], tmp_path))
    assert group.to_json()["bytes_read"] == nbytes
    assert nbytes <= sum(read) < 1.05 * nbytes


def test_the_group_counts_each_reading(model, nbytes, tmp_path):
    """A target whose objects are sent in parts needs the source in its own order."""
    sent = TargetRequest(f"memory://bucket{tmp_path}/sent", "dcp")
    local = request(model, tmp_path)
    group = convert_all(convert_request(str(model), [*local.targets, sent], lineage=False))
    assert group.to_json()["bytes_read"] == 2 * nbytes
    assert {receipt.bytes_read for receipt in group.receipts} == {nbytes}


def test_an_error_of_a_layout_fails_its_targets_alone(model, tmp_path, monkeypatch):
    real = ChangeLayout.compute

    def fail(transform, spec, *arguments):
        if spec.path[0].startswith("blk"):
            raise UnrepresentableError("this cannot be computed", path=spec.name)
        real(transform, spec, *arguments)

    monkeypatch.setattr(ChangeLayout, "compute", fail)
    with pytest.raises(WherryError, match="this cannot be computed") as failed:
        convert_all(request(model, tmp_path))
    assert sorted(receipt.target.format for receipt in failed.value.committed.values()) == [
        "dcp",
        "maxtext",
        "safetensors",
    ]
    monkeypatch.undo()
    receipts = convert_all(request(model, tmp_path)).receipts
    assert [receipt.already for receipt in receipts] == [to != "gguf" for to in TARGETS]


def test_a_target_that_is_in_use_keeps_no_other_from_being_made(model, tmp_path):
    held = lease_of(locate(str(tmp_path / "maxtext.maxtext")))
    with held, pytest.raises(TargetInUseError) as refused:
        convert_all(request(model, tmp_path))
    made = [receipt.target.format for receipt in refused.value.committed.values()]
    assert sorted(made) == ["dcp", "gguf", "safetensors"]
    assert sorted(path.name for path in tmp_path.iterdir() if path.suffix) == [
        "dcp.dcp",
        "gguf.gguf",
        "gguf.gguf.wherry.json",
        "safetensors.safetensors",
        "safetensors.safetensors.wherry.json",
    ]


@pytest.mark.parametrize("again", [tuple(TARGETS), ("maxtext",), ("gguf", "dcp")])
def test_an_interrupted_pass_is_taken_up_by_any_of_its_targets(sources, tmp_path, monkeypatch, again):
    monkeypatch.setattr("wherry.mover.output._GROUP_BYTES", 1)

    def interrupt(progress):
        if progress.stage == "convert" and progress.done > progress.total / 2:
            raise KeyboardInterrupt

    monkeypatch.setattr("wherry.core.progress._INTERVAL", 0)
    with pytest.raises(KeyboardInterrupt):
        convert_all(request(sources["files"], tmp_path), progress=interrupt)
    assert not any(path.suffix for path in tmp_path.iterdir() if not path.name.startswith("."))
    group = convert_all(request(sources["files"], tmp_path, again))
    assert sum(receipt.resumed_bytes for receipt in group.receipts) > 0
    for to, receipt in zip(again, group.receipts, strict=True):
        [alone] = convert_all(request(sources["files"], tmp_path / "alone", [to])).receipts
        assert receipt.target.checkpoint_digest == alone.target.checkpoint_digest, to
        assert wherry.verify(receipt.target.uri, level="digest").ok
    convert_all(request(sources["files"], tmp_path))
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]
