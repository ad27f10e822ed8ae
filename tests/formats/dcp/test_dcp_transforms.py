"""PyTorch DCP whose items went through zstd, as torch 2.7 and later can write them."""

from __future__ import annotations

import numpy as np
import pytest

import wherry
from tests.support.formats import canonical, opened
from tests.support.torch import as_bytes, every_dtype, meta, torch
from wherry.errors import CorruptError, HostileError
from wherry.mover.read import read_bytes
from wherry.testing.readers import check_reader

dcp = pytest.importorskip("torch.distributed.checkpoint")
extension = pytest.importorskip("torch.distributed.checkpoint._extension")
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def save_zstd(state, path):
    from torch.distributed.checkpoint.filesystem import FileSystemWriter

    writer = FileSystemWriter(str(path), _extensions=[extension.ZStandard()])
    dcp.save(state, storage_writer=writer, no_dist=True)
    stored = meta(path).storage_data.values()
    assert all(one.transform_descriptors == ["stream.zstd/1"] for one in stored)
    return path


def test_every_tensor_and_object(tmp_path):
    base = torch.randn(6, 8)
    tensors = every_dtype() | {"turned": base.T, "cut": base[1:4, 2:6]}
    found = opened(save_zstd({**tensors, "step": 5, "pair": (torch.ones(3), 4)}, tmp_path / "a"), "dcp")
    for name, tensor in tensors.items():
        spec = found.manifest.tensors[name,]
        assert canonical(found, (name,)) == as_bytes(tensor), name
        assert read_bytes(found.reader, spec) == as_bytes(tensor)
        assert found.reader.access(spec).extents in (None, ())
    assert found.manifest.step == 5
    assert canonical(found, ("pair", "0")) == as_bytes(torch.ones(3))
    check_reader(found, regions=2)


@pytest.mark.parametrize("to", ["dcp", "safetensors"])
def test_converted_it_is_plain(tmp_path, to):
    state = {"a": torch.randn(300, 70), "b": torch.zeros(9, dtype=torch.int64)}
    receipt = wherry.convert(save_zstd(state, tmp_path / "a"), tmp_path / "b", to=to, lineage=False)
    assert receipt.source.weights_digest == receipt.target.weights_digest


def test_a_large_chunk_is_decoded_piece_by_piece(tmp_path):
    """As its bytes come, since 40 MB do not fit a quarter of the budget."""
    state = {"a": torch.arange(10 << 20, dtype=torch.float32).reshape(1 << 10, -1)}
    path = save_zstd(state, tmp_path / "a")
    found = opened(path, "dcp")
    spec = found.manifest.tensors["a",]
    decoder = found.reader.access(spec).decoder
    assert spec.chunks == spec.shape
    assert decoder.memory(spec.whole) < spec.nbytes
    (block,) = decoder.decode(spec.whole)
    assert b"".join(bytes(piece) for piece in block.pieces) == as_bytes(state["a"])
    plan = wherry.plan(path, tmp_path / "b", to="safetensors", memory="64MiB")
    assert plan.spilled == frozenset()
    assert (
        plan.peak_memory <= (64 + 64) << 20
    )  # base and budget, inclusive: with 16 cores or more it is their sum
    receipt = wherry.convert(path, tmp_path / "b", to="safetensors", memory="64MiB", lineage=False)
    assert receipt.source.weights_digest == receipt.target.weights_digest


def test_a_bomb_ends_early(tmp_path):
    import zstandard

    path = save_zstd({"a": torch.ones(4)}, tmp_path / "a")
    bomb = zstandard.ZstdCompressor(level=19).compress(bytes(200 << 20))
    length = next(iter(meta(path).storage_data.values())).length
    assert len(bomb) < 20_000
    (path / "__0_0.distcp").write_bytes(bomb)
    root = meta(path)
    for info in root.storage_data.values():
        info.length = len(bomb)
    import pickle

    (path / ".metadata").write_bytes(pickle.dumps(root))
    assert length != len(bomb)
    with pytest.raises(HostileError, match=r"decompressed item .* exceeds the limit of"):
        canonical(opened(path, "dcp"), ("a",))


def test_a_flipped_bit_in_a_frame(tmp_path):
    path = save_zstd({"a": torch.from_numpy(np.random.default_rng(0).standard_normal(5000))}, tmp_path / "a")
    data = bytearray((path / "__0_0.distcp").read_bytes())
    data[len(data) // 2] ^= 1
    (path / "__0_0.distcp").write_bytes(data)
    with pytest.raises(CorruptError):
        canonical(opened(path, "dcp"), ("a",))
