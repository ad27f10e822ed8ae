"""States and checkpoints of a GPU: exported from its memory, restored into it, and read from files that name it.

Every test skips where torch, or JAX, has no GPU.
"""

from __future__ import annotations

import numpy as np
import pytest

import wherry

torch = pytest.importorskip("torch", reason="torch is not installed")

from tests.support.libraries import loaded  # noqa: E402  needs torch
from tests.support.torch import as_bytes, every_dtype, same, save  # noqa: E402  needs torch

cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch has no GPU")


def on_gpu() -> dict:
    return {name: tensor.cuda() for name, tensor in every_dtype().items() if "complex32" not in name}


def model(seed: int):
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Linear(33, 17), torch.nn.BatchNorm1d(17), torch.nn.Linear(17, 5)
    ).cuda()


def trained(seed: int):
    """A model on the GPU and its optimizer after one step."""
    one = model(seed)
    optimizer = torch.optim.AdamW(one.parameters(), lr=0.25, fused=True)
    one(torch.ones(4, 33, device="cuda")).sum().backward()
    optimizer.step()
    return one, optimizer


@cuda
@pytest.mark.parametrize("to", ["dcp", "orbax", "safetensors", "torch-zip"])
def test_export_copies_from_the_gpu(tmp_path, to):
    one, _optimizer = trained(1)
    truth = {name: as_bytes(tensor) for name, tensor in one.state_dict().items()}
    options = {"join": "."} if to in ("safetensors", "torch-zip") else {}
    handle = wherry.export(one.state_dict(), tmp_path / "a.out", to=to, step=3, options=options)
    with torch.no_grad():
        for tensor in one.parameters():
            tensor.zero_()  # training goes on
    handle.result(60)
    found = {".".join(path): row[2] for path, row in loaded(to, tmp_path / "a.out").items()}
    assert found == truth


@cuda
def test_restore_fills_the_gpu_in_place(tmp_path):
    one, optimizer = trained(1)
    save({"model": one.state_dict(), "optim": optimizer.state_dict()}, tmp_path / "dcp")
    other, twin = trained(2)
    addresses = [tensor.data_ptr() for tensor in other.parameters()]
    wherry.restore(tmp_path / "dcp", into={"model": other, "optim": twin}, memory="1MiB")
    assert same(dict(other.state_dict()), dict(one.state_dict()))
    assert [tensor.data_ptr() for tensor in other.parameters()] == addresses
    assert all(tensor.is_cuda for tensor in other.parameters())
    moments = twin.state_dict()["state"][0]["exp_avg"]
    assert moments.is_cuda
    assert as_bytes(moments) == as_bytes(optimizer.state_dict()["state"][0]["exp_avg"])


@cuda
def test_every_dtype_into_tensors_of_the_gpu(tmp_path):
    tensors = on_gpu()
    torch.save(tensors, tmp_path / "a.pt")
    template = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    found = wherry.restore(tmp_path / "a.pt", into=template).state
    assert same(found, tensors)
    assert all(tensor.is_cuda for tensor in found.values())


@cuda
@pytest.mark.parametrize("zipped", [True, False])
def test_files_that_name_a_gpu_load_without_one_after_conversion(tmp_path, zipped):
    tensors = on_gpu()
    torch.save(tensors, tmp_path / "a.pt", _use_new_zipfile_serialization=zipped)
    assert wherry.verify(tmp_path / "a.pt", level="present").ok
    wherry.convert(tmp_path / "a.pt", tmp_path / "b.pt", to="torch-zip")
    found = torch.load(tmp_path / "b.pt", weights_only=True)
    assert not any(tensor.is_cuda for tensor in found.values())
    assert same(found, tensors)


@cuda
@pytest.mark.parametrize("to", ["dcp", "safetensors", "torch-zip"])
def test_native_verification_loads_onto_the_gpu(tmp_path, to):
    one, _optimizer = trained(1)
    torch.save(one.state_dict(), tmp_path / "a.pt")
    wherry.convert(tmp_path / "a.pt", tmp_path / "b.out", to=to)
    found = wherry.verify(tmp_path / "b.out", level="native")
    assert found.ok
    assert found.native.devices == f"torch {torch.__version__}, cuda"


def gpus_of_jax() -> list:
    jax = pytest.importorskip("jax", reason="JAX is not installed")
    try:
        return jax.devices("gpu")
    except RuntimeError:
        pytest.skip("JAX has no GPU")


def sharded(device, values: dict) -> dict:
    import jax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    mesh = Mesh(np.array([device]), ("data",))
    return {
        name: jax.device_put(array, NamedSharding(mesh, PartitionSpec("data")))
        for name, array in values.items()
    }


def arrays(seed: int) -> dict:
    import jax.numpy as jnp

    rng = np.random.default_rng(seed)
    kinds = {"kernel": jnp.float32, "half": jnp.bfloat16, "small": jnp.float8_e4m3fn, "count": jnp.int32}
    return {name: np.asarray(rng.normal(size=(32, 6)) * 4).astype(dtype) for name, dtype in kinds.items()}


@pytest.mark.parametrize("to", ["orbax", "dcp", "safetensors"])
def test_export_of_jax_arrays_from_the_gpu(tmp_path, to):
    [device, *_] = gpus_of_jax()
    truth = arrays(1)
    state = sharded(device, truth)
    wherry.export(state, tmp_path / "a.out", to=to, step=1).result(60)
    kept = [shard.data._npy_value for array in state.values() for shard in array.addressable_shards]
    assert kept == [None] * len(kept), "the host would hold a copy of the state"
    found = loaded(to, tmp_path / "a.out")
    assert {path[0]: row[2] for path, row in found.items()} == {
        name: array.tobytes() for name, array in truth.items()
    }


def test_orbax_of_the_gpu_to_safetensors_and_back_to_it(tmp_path):
    [device, *_] = gpus_of_jax()
    import orbax.checkpoint as ocp
    from safetensors.torch import load_file

    truth = arrays(2)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "orbax", sharded(device, truth))
        checkpointer.wait_until_finished()
    wherry.convert(tmp_path / "orbax", tmp_path / "a.safetensors", to="safetensors")
    found = load_file(tmp_path / "a.safetensors")
    assert {name: as_bytes(tensor) for name, tensor in found.items()} == {
        name: array.tobytes() for name, array in truth.items()
    }
    template = sharded(device, {name: np.zeros_like(array) for name, array in truth.items()})
    found = wherry.restore(tmp_path / "a.safetensors", into=template).state
    for name, array in truth.items():
        assert found[name].devices() == {device}
        assert np.asarray(found[name]).tobytes() == array.tobytes()


@cuda
def test_distributed_tensors_of_the_gpu(tmp_path, monkeypatch):
    import torch.distributed as dist
    from torch.distributed.checkpoint.state_dict import get_model_state_dict
    from torch.distributed.fsdp import fully_shard

    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        one, other = fully_shard(model(1)), fully_shard(model(2))
        truth = {name: as_bytes(tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor)
                 for name, tensor in get_model_state_dict(one).items()}  # fmt: skip
        wherry.export(get_model_state_dict(one), tmp_path / "dcp", to="dcp", step=1).result(60)
        assert {".".join(path): row[2] for path, row in loaded("dcp", tmp_path / "dcp").items()} == truth
        wherry.restore(tmp_path / "dcp", into=other)
        found = get_model_state_dict(other)
        assert {
            name: as_bytes(tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor)
            for name, tensor in found.items()
        } == truth
    finally:
        dist.destroy_process_group()
