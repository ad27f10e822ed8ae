"""Pieces of safetensors that torch's HuggingFaceStorageWriter saves from every rank."""

from __future__ import annotations

import json
import time

import numpy as np
import pytest

import wherry
from tests.support.formats import assert_as_expected, canonical, expected, opened, place
from tests.support.ranks import two_ranks
from wherry.errors import CorruptError, HostileError, IncompleteError
from wherry.testing.readers import check_reader

torch = pytest.importorskip("torch")
pytest.importorskip("torch.distributed.checkpoint.hf_storage")
safetensors = pytest.importorskip("safetensors.numpy")

WHOLE = np.arange(9 * 6, dtype="f4").reshape(9, 6)


@pytest.fixture(scope="module")
def pieces(tmp_path_factory):
    """Row and column sharding and a replicated tensor by two processes; returned read only."""
    folder = tmp_path_factory.mktemp("hf")
    script = """
        from torch.distributed.checkpoint import HuggingFaceStorageWriter
        whole = torch.arange(54, dtype=torch.float32).reshape(9, 6)
        place = {"rows": Shard(0), "columns": Shard(1), "same": Replicate()}
        state = {name: distribute_tensor(whole, mesh, [one]) for name, one in place.items()}
        writer = HuggingFaceStorageWriter(f"{folder}/a", save_distributed=True)
        dcp.save(state, storage_writer=writer)
    """
    two_ranks(script, folder)
    return folder / "a"


def test_pieces_make_up_tensors(pieces):
    detection = wherry.detect(pieces)
    assert (detection.format, detection.verdict) == ("dcp-safetensors", "ok")
    assert "huggingface" in detection.also
    assert any("inferred" in one.seen for one in detection.evidence)
    found = opened(pieces, "dcp-safetensors")
    for name, extents in {"rows": 2, "columns": None, "same": 1}.items():
        spec = found.manifest.tensors[name,]
        assert (spec.shape, canonical(found, spec.path)) == ((9, 6), WHOLE.tobytes())
        raw = found.reader.access(spec).extents
        assert (raw and len(raw)) == extents
    check_reader(found, regions=3)


def test_pieces_become_an_ordinary_folder(pieces, tmp_path):
    receipt = wherry.convert(pieces, tmp_path / "b", to="hf", family="none", lineage=False)
    assert receipt.source.weights_digest == receipt.target.weights_digest
    written = safetensors.load_file(tmp_path / "b" / "model.safetensors")
    assert all(np.array_equal(tensor, WHOLE) for tensor in written.values())


def shard(path, rank, tensors, offsets):
    path.mkdir(exist_ok=True)
    info = {name: {"saved_offsets": list(offset)} for name, offset in offsets.items()}
    metadata = {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(info)}
    file = path / f"shard-{rank:05d}-model-00001-of-00001.safetensors"
    safetensors.save_file(tensors, file, metadata=metadata)


def test_a_missing_piece_is_never_zeros(tmp_path):
    for rank in range(3):
        rows = np.ascontiguousarray(WHOLE[3 * rank : 3 * rank + 3])
        shard(tmp_path / "a", rank + 1, {"w": rows}, {"w": (3 * rank, 0)})
    assert wherry.detect(tmp_path / "a").verdict == "ok"
    (tmp_path / "a" / "shard-00002-model-00001-of-00001.safetensors").unlink()
    found = wherry.detect(tmp_path / "a")
    assert found.verdict == "incomplete"
    assert "3:6" in (found.reason or "")
    assert any("rank 2" in one.seen for one in found.evidence)
    with pytest.raises(IncompleteError):
        canonical(opened(tmp_path / "a", "dcp-safetensors"), ("w",))


def test_a_piece_that_is_a_link_to_nothing_is_named(tmp_path):
    for rank in range(2):
        rows = np.ascontiguousarray(WHOLE[3 * rank : 3 * rank + 3])
        shard(tmp_path / "a", rank + 1, {"w": rows}, {"w": (3 * rank, 0)})
    lost = tmp_path / "a" / "shard-00002-model-00001-of-00001.safetensors"
    lost.unlink()
    lost.symlink_to("nowhere")
    found = wherry.detect(tmp_path / "a")
    assert (found.verdict, found.reason) == ("incomplete", f"broken link: {lost.name}")


@pytest.mark.parametrize(
    "second",
    [({"w": WHOLE.astype("f8")}, {"w": (9, 0)}), ({"w": WHOLE}, {"w": (9,)}), ({"w": WHOLE}, {"w": (4, 0)})],
)
def test_pieces_that_contradict_each_other(tmp_path, second):
    shard(tmp_path / "a", 1, {"w": WHOLE}, {"w": (0, 0)})
    shard(tmp_path / "a", 2, *second)
    assert wherry.detect(tmp_path / "a").verdict == "corrupt"
    with pytest.raises(CorruptError):
        wherry.convert(tmp_path / "a", tmp_path / "b", to="hf", lineage=False)


def test_consolidated_by_torch_is_a_hugging_face_folder(corpus):
    row = expected("hf-dcp-writer-consolidated")
    assert_as_expected(opened(place("hf-dcp-writer-consolidated"), "huggingface"), row)
    assert wherry.detect(place("hf-dcp-writer-consolidated")).format == "huggingface"


def test_many_pieces_of_a_tensor_are_collected_in_linear_time():
    from wherry.integrations.containers.safetensors.header import HeaderEntry
    from wherry.integrations.formats.dcp import shards
    from wherry.integrations.formats.dcp.metadata import Chunk
    from wherry.storage.stores import locate

    found, count, where = {}, 100_000, locate("/tmp")
    began = time.process_time()
    for at in range(count):
        shards._add(found, HeaderEntry("a", "U8", (1,), 0, 1), Chunk((at,), (1,)), where)
    assert time.process_time() - began < 5
    assert (found["a"].shape, len(found["a"].chunks)) == ([count], count)


def test_pieces_are_limited(tmp_path, monkeypatch):
    from wherry.integrations.formats.dcp import shards

    monkeypatch.setattr(shards, "MOST_CHUNKS", 3)
    for at in range(4):
        stated = {"DCP_SHARDING_INFO": json.dumps({"a": {"saved_offsets": [at]}})}
        name = f"shard-{at + 1:05d}-model-00001-of-00001.safetensors"
        safetensors.save_file({"a": np.ones(1, "u1")}, tmp_path / name, metadata=stated)
        if at == 2:
            assert wherry.detect(tmp_path).verdict == "ok"
    with pytest.raises(HostileError, match="limit of 3 pieces"):
        wherry.open(tmp_path)
