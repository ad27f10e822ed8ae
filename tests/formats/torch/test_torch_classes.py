"""Tensors of harmless kinds in a file of torch.save: read, or refused with the name of the class and a way."""

from __future__ import annotations

import numpy as np
import pytest

import wherry
from tests.support.command import typed
from wherry.errors import HostileError, UnsupportedError

torch = pytest.importorskip("torch")


class Sub(torch.Tensor):
    """A subclass that adds nothing."""


NAME = f"{Sub.__module__}.Sub"


def saved(tmp_path, value, *, legacy=False):
    file = tmp_path / "a.pt"
    torch.save({"w": value}, file, _use_new_zipfile_serialization=not legacy)
    return file


def with_attribute(value):
    tensor = torch.arange(6.0).reshape(2, 3)
    tensor.note = value
    return tensor


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize(
    "value",
    [
        with_attribute("hello"), with_attribute({"a": [1, 2.0, None]}),
        torch.nn.Buffer(torch.arange(6.0).reshape(2, 3)),
        torch.nn.Parameter(with_attribute(1)),
        torch.nn.Buffer(torch.arange(12.0).reshape(2, 6)[:, :3], persistent=False),
    ],
    ids=["attribute", "nested", "buffer", "parameter", "view"],
)  # fmt: skip
def test_a_dense_tensor_with_attributes_is_read(tmp_path, value, legacy):
    with wherry.open(saved(tmp_path, value, legacy=legacy)) as checkpoint:
        np.testing.assert_array_equal(checkpoint.read(("w",)), value.detach().numpy())


@pytest.mark.parametrize("legacy", [False, True])
def test_a_subclass_is_named_and_the_cure_reads_its_tensor(tmp_path, capfd, legacy):
    tensor = torch.arange(6.0).reshape(2, 3)
    file = saved(tmp_path, tensor.as_subclass(Sub), legacy=legacy)
    assert wherry.detect(file).verdict == "unsupported"
    with pytest.raises(UnsupportedError, match=r"unsupported class of a tensor") as caught:
        wherry.convert(file, tmp_path / "never", to="orbax")
    assert NAME in caught.value.what
    assert f"--allow-opaque {NAME}" in (caught.value.cure or "")
    assert (
        typed(f"convert {file} {tmp_path / 'out'} --to orbax --allow-opaque {NAME}", tmp_path, capfd)[0] == 0
    )
    with wherry.open(tmp_path / "out") as checkpoint:
        np.testing.assert_array_equal(checkpoint.read(("w",)), tensor.numpy())


def test_an_attribute_that_is_a_tensor_is_not_lost(tmp_path):
    with pytest.raises(UnsupportedError, match="attribute note is a tensor"):
        wherry.convert(saved(tmp_path, with_attribute([torch.ones(2)])), tmp_path / "never", to="orbax")


def test_a_class_of_the_interpreter_is_still_hostile(tmp_path):
    """Where a subclass is expected, another global than a class of tensors is refused as everywhere."""
    import zipfile

    file = saved(tmp_path, torch.ones(3).as_subclass(Sub))
    with zipfile.ZipFile(file) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for name, data in members.items():
            archive.writestr(name, data.replace(f"c{Sub.__module__}\nSub\n".encode(), b"cposix\nsystem\n"))
    with pytest.raises(HostileError):
        wherry.convert(file, tmp_path / "never", to="orbax")


@pytest.mark.parametrize("legacy", [False, True])
def test_a_tuple_as_a_key_names_file_and_key(tmp_path, legacy):
    file = tmp_path / "keys.pt"
    torch.save({0: torch.ones(2), (1, "a"): torch.ones(3)}, file, _use_new_zipfile_serialization=not legacy)
    with pytest.raises(UnsupportedError) as caught:
        wherry.convert(file, tmp_path / "never", to="orbax")
    assert "(1, 'a')" in caught.value.what
    assert caught.value.uri == str(file)


def test_a_sharded_tensor_is_named_with_a_way(tmp_path):
    import torch.distributed as dist
    from torch.distributed._shard import sharded_tensor
    from torch.distributed._shard.metadata import ShardMetadata

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        value = torch.ones(4, 2)
        shard = sharded_tensor.Shard(value, ShardMetadata([0, 0], [4, 2], "rank:0/cpu"))
        file = saved(tmp_path, sharded_tensor.init_from_local_shards([shard], 4, 2))
    finally:
        dist.destroy_process_group()
    with pytest.raises(UnsupportedError, match="ShardedTensor") as caught:
        wherry.convert(file, tmp_path / "never", to="orbax")
    assert "FULL_STATE_DICT" in (caught.value.cure or "")
