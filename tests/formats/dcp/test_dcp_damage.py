"""PyTorch DCP that is damaged, made to deceive, or went through zstd."""

from __future__ import annotations

import pickle
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import wherry
from tests.support.formats import assert_ends_well, canonical, expected, mutated, opened, place
from tests.support.torch import as_bytes, every_dtype, meta, save, torch
from wherry.errors import CorruptError, HostileError, IncompleteError, UnsupportedError
from wherry.integrations.containers.pickle.writer import PickleWriter
from wherry.integrations.formats.dcp.metadata import (
    FILESYSTEM_MODULE,
    METADATA_MODULE,
    StoredItem,
    StoredItems,
)
from wherry.mover.read import read_bytes
from wherry.testing.readers import check_reader

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

dcp = pytest.importorskip("torch.distributed.checkpoint")
metadata = pytest.importorskip("torch.distributed.checkpoint.metadata")
filesystem = pytest.importorskip("torch.distributed.checkpoint.filesystem")
format_utils = pytest.importorskip("torch.distributed.checkpoint.format_utils")


def with_meta(path, change) -> Path:
    """The same checkpoint with its metadata changed."""
    root = meta(path)
    change(root)
    (path / ".metadata").write_bytes(pickle.dumps(root))
    return path


def _hole(root):
    root.state_dict_metadata["a"].chunks = [
        metadata.ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([2, 3]))
    ]


def _overlap(root):
    root.state_dict_metadata["a"].chunks *= 2


def _outside(root):
    root.state_dict_metadata["a"].size = torch.Size([3, 3])


def _transformed(root):
    for info in root.storage_data.values():
        info.transform_descriptors = ["stream.zstd/1"]


def _other_transform(root):
    for info in root.storage_data.values():
        info.transform_descriptors = ["stream.rot13/1"]


def _other_dtype(root):
    properties = root.state_dict_metadata["a"].properties
    properties.dtype = torch.int32


def _unstored(root):
    root.storage_data.clear()


def _bomb(root):
    root.state_dict_metadata["a"].size = torch.Size([1 << 40, 3])
    chunk = metadata.ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([1 << 40, 3]))
    root.state_dict_metadata["a"].chunks = [chunk]


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (_hole, IncompleteError),
        (_overlap, CorruptError),
        (_outside, CorruptError),
        (_transformed, CorruptError),
        (_other_transform, UnsupportedError),
        (_other_dtype, CorruptError),
        (_unstored, IncompleteError),
        (_bomb, HostileError),
        (lambda root: setattr(root, "planner_data", {"a": Path("x")}), CorruptError),
        (lambda root: setattr(root, "planner_data", slice(1)), HostileError),
        (lambda root: setattr(root, "storage_data", 3), CorruptError),
    ],
)
def test_metadata_that_lies(tmp_path, change, error):
    path = with_meta(save({"a": torch.ones(4, 3)}, tmp_path / "a"), change)
    with pytest.raises(error):
        wherry.convert(path, tmp_path / "b", to="safetensors", lineage=False)
    assert not (tmp_path / "b").exists()


def test_a_missing_file_leaves_the_rest_readable(corpus, tmp_path):
    shutil.copytree(place("dcp-fsdp2-w2-fp32"), tmp_path / "a")
    (tmp_path / "a" / "__1_0.distcp").unlink()
    found = opened(tmp_path / "a", "dcp")
    absent = {piece.path for piece in found.reader.absent()}
    row = {tuple(one["path"]): one for one in expected("dcp-fsdp2-w2-fp32")["tensors"]}
    whole = [path for path in found.manifest.tensors if path not in absent]
    assert whole
    assert_as_expected_of(found, {path: row[path] for path in whole})
    with pytest.raises(IncompleteError, match="__1_0"):
        canonical(found, min(path for path in absent if path in found.manifest.tensors))


def assert_as_expected_of(found, rows):
    import hashlib

    for path, one in rows.items():
        assert hashlib.sha256(canonical(found, path)).hexdigest() == one["sha256"]


def test_an_offset_whose_hash_takes_for_ever(tmp_path):
    """A tuple of twice the tuple below, sixty times: it must not become a key."""
    save({"a": torch.ones(2)}, tmp_path / "a")
    out = PickleWriter()
    fields = {"fqn": lambda: out.value("a"), "offset": lambda: out.raw(b")" + b"2\x86" * 60)}
    info = {"relative_path": "__0_0.distcp", "offset": 0, "length": 1}
    stored = {name: lambda value=value: out.value(value) for name, value in info.items()}
    entry = [
        (
            lambda: out.state(METADATA_MODULE, "MetadataIndex", fields.items()),
            lambda: out.state(FILESYSTEM_MODULE, "_StorageInfo", stored.items()),
        )
    ]
    root = {"state_dict_metadata": lambda: out.value({}), "storage_data": lambda: out.mapping(entry)}
    out.state(METADATA_MODULE, "Metadata", root.items())
    (tmp_path / "a" / ".metadata").write_bytes(out.done())
    began = time.process_time()
    with pytest.raises(CorruptError, match="tuple of non-negative integers"):
        opened(tmp_path / "a", "dcp")
    assert time.process_time() - began < 5


@given(data=st.data())
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_mutated_checkpoints_never_crash(data, tmp_path):
    path = tmp_path / "a"
    if not path.exists():
        save({"w": torch.arange(6.0).reshape(2, 3).T, "n": {"x": torch.ones(2)}, "step": 3}, path)
        shutil.copytree(path, tmp_path / "kept")
    name = data.draw(st.sampled_from([".metadata", "__0_0.distcp"]))
    for file in (".metadata", "__0_0.distcp"):
        shutil.copy(tmp_path / "kept" / file, path / file)
    (path / name).write_bytes(mutated(data, (tmp_path / "kept" / name).read_bytes()))
    assert_ends_well(path, "dcp")


def test_chunks_of_one_tensor_have_one_number_of_axes():
    """Both begin where the tensor does, so only the number of axes tells their places apart."""
    items = StoredItems()
    items.put("w", (0,), StoredItem("file", 8, 4))
    assert items.get("w", (0,)) == StoredItem("file", 8, 4)
    assert items.get("w", (0, 0)) is None
    with pytest.raises(CorruptError, match="different number of axes"):
        items.put("w", (0, 0), StoredItem("file", 16, 4))
    items.put("w", (0,), StoredItem("another", 16, 4))
    assert (items.ends(), items.nbytes(1)) == ({"another": 20}, 4), "the last one counts, alone"


# PyTorch DCP whose items went through zstd, as torch 2.7 and later can write them.


extension = pytest.importorskip("torch.distributed.checkpoint._extension")


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
