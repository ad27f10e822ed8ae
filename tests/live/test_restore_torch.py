"""PyTorch modules, state dicts and DTensors filled from checkpoints, through another system's layout too."""

from __future__ import annotations

import numpy as np
import pytest

import wherry
from wherry.errors import MismatchError, UnsupportedError

torch = pytest.importorskip("torch", reason="torch is not installed")

from tests.support.tiny_models import tiny_model  # noqa: E402
from tests.support.torch import DTYPES, as_bytes, every_dtype, same  # noqa: E402  needs torch


class Tied(torch.nn.Module):
    def __init__(self, *, seed=0):
        torch.manual_seed(seed)
        super().__init__()
        self.embed = torch.nn.Embedding(7, 4)
        self.norm = torch.nn.BatchNorm1d(4)
        self.head = torch.nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight


def test_every_dtype_into_a_state_dict(tmp_path):
    tensors = {name: tensor for name, tensor in every_dtype().items() if "complex32" not in name}
    torch.save(tensors, tmp_path / "a.pt")
    template = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    found = wherry.restore(tmp_path / "a.pt", into=template).state
    assert same(found, tensors)
    assert all(found[name] is template[name] for name in template)
    assert len(DTYPES) > 10


def test_a_module_is_filled_in_place_and_stays_tied(tmp_path):
    one, other = Tied(seed=1), Tied(seed=2)
    one.norm.num_batches_tracked += 3
    torch.save(one.state_dict(), tmp_path / "a.pt")
    assert wherry.restore(tmp_path / "a.pt", into=other, memory="1MiB").state is other
    assert same(dict(other.state_dict()), dict(one.state_dict()))
    assert other.head.weight is other.embed.weight
    assert other.norm.weight.requires_grad


def test_a_module_without_memory_gets_it_and_stays_tied(tmp_path):
    one = Tied(seed=1)
    torch.save(
        {name: value for name, value in one.state_dict().items() if name != "head.weight"}, tmp_path / "a.pt"
    )
    with torch.device("meta"):
        other = Tied()
    wherry.restore(tmp_path / "a.pt", into=other)
    assert same(dict(other.state_dict()), dict(one.state_dict()))
    assert other.head.weight is other.embed.weight


def test_two_tensors_for_one_are_refused_where_they_differ(tmp_path):
    state = {name: value.clone() for name, value in Tied(seed=1).state_dict().items()}
    state["head.weight"] += 1
    torch.save(state, tmp_path / "a.pt")
    with pytest.raises(MismatchError, match=r"tied to embed\.weight in the template, but the two differ"):
        wherry.restore(tmp_path / "a.pt", into=Tied())


def test_nested_state_with_optimizer(tmp_path):
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.25)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optim": optimizer.state_dict(), "step": 9}, tmp_path / "a.pt")
    again = torch.nn.Linear(3, 2)
    other = torch.optim.AdamW(again.parameters(), lr=0.5)
    again(torch.zeros(1, 3)).sum().backward()
    other.step()
    found = wherry.restore(tmp_path / "a.pt", into={"model": again, "optim": other, "step": 0}).state
    assert found["step"] == 9
    assert other.param_groups[0]["lr"] == 0.25
    assert same(dict(again.state_dict()), dict(model.state_dict()))
    restored, saved = other.state_dict()["state"][0], optimizer.state_dict()["state"][0]
    assert all(as_bytes(restored[name]) == as_bytes(saved[name]) for name in saved)


@pytest.fixture
def group(tmp_path):
    from torch import distributed

    distributed.init_process_group(
        "gloo", store=distributed.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1
    )
    yield distributed
    distributed.destroy_process_group()


def test_dtensors_of_one_process(tmp_path, group):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("data", "model"))
    full = torch.arange(24.0).reshape(6, 4)
    torch.save({"w": full}, tmp_path / "a.pt")
    template = {"w": distribute_tensor(torch.zeros(6, 4), mesh, [Shard(0), Shard(1)])}
    found = wherry.restore(tmp_path / "a.pt", into=template).state["w"]
    assert torch.equal(found.full_tensor(), full)
    from wherry.integrations.live.trees import flatten

    leaf = next(flatten(template))
    assert leaf.sharding.mesh == (("data", 1), ("model", 1))
    assert leaf.sharding.spec == ("data", "model")
    partial = {"w": type(found).from_local(torch.zeros(6, 4), mesh, [Replicate(), Partial()])}
    with pytest.raises(UnsupportedError, match="unsupported DTensor placement"):
        wherry.restore(tmp_path / "a.pt", into=partial)


def test_the_parts_of_ranks_are_those_of_torch():
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset as torch_box

    from wherry.integrations.live.torch_arrays import local_box

    class Mesh:
        def __init__(self, sizes, ranks):
            self.sizes, self.ranks = sizes, ranks

        def get_local_rank(self, number):
            return self.ranks[number]

        def size(self, number):
            return self.sizes[number]

    class Tensor:
        def __init__(self, shape, mesh, placements):
            self.shape, self.ndim = shape, len(shape)
            self.device_mesh, self.placements = mesh, placements

    for shape in ((7, 5), (8, 3), (2, 9)):
        for placements in ([Shard(0), Shard(0)], [Shard(1), Replicate()], [Shard(1), Shard(0)]):
            for first in range(3):
                for second in range(2):
                    starts, extents = local_box(Tensor(shape, Mesh((3, 2), (first, second)), placements))
                    sizes, offsets = torch_box(shape, (3, 2), [first, second], placements)
                    assert extents == tuple(sizes)
                    assert 0 in extents or starts == tuple(offsets)


def test_a_model_of_transformers_from_another_system(tmp_path):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    model = tiny_model("llama-head-dim")  # whose scale of attention is exact
    model.save_pretrained(tmp_path / "hf")
    wherry.convert(tmp_path / "hf", tmp_path / "maxtext", to="maxtext", lineage=False)
    torch.manual_seed(1)
    other = transformers.LlamaForCausalLM(model.config)
    found = wherry.restore(tmp_path / "maxtext", into=other, to="huggingface", only="params")
    assert same(dict(found.state.state_dict()), dict(model.state_dict()))
    again = {name: np.zeros(tensor.shape, "f4") for name, tensor in model.state_dict().items()}
    with pytest.raises(wherry.WherryError, match="another system"):
        wherry.restore(tmp_path / "maxtext", into=again)
