"""`wherry plan --workers`: egress and requests are those of the workers, which `cost` is computed from."""

from __future__ import annotations

import json

import fsspec
import pytest
from safetensors.numpy import save_file

from tests.support.families import LLAMA, SIZES, made
from tests.support.worker_pools import SeparatePool
from wherry import kernels
from wherry.converter.convert import convert_all
from wherry.converter.plan import plan_targets
from wherry.core.request import TargetRequest, convert_request
from wherry.families import load_family
from wherry.store.remote_store import FsspecStore
from wherry.workers.commit import commit
from wherry.workers.estimate import plan_for_workers
from wherry.workers.job import split
from wherry.workers.work import carry_with_pool

UNIT = 1_000_000
# Target format → its options. The second is made of a view, whose source is also read for its own digests.
CASES = {"hf": {"max_shard_size": "1MB"}, "maxtext": {"data_file_size": "1MB"}}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A Llama of 8 MB."""
    folder = tmp_path_factory.mktemp("llama") / "model"
    folder.mkdir()
    sizes = {**SIZES, "embed": 256, "ffn": 512, "layer": 4, "pair": 8, "vocab": 1000}  # heads of 16
    tensors = made(load_family("llama"), "huggingface", {}, sizes=sizes).tensors
    save_file({path[0]: array for path, array in tensors.items()}, folder / "model.safetensors")
    config = {**LLAMA, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "vocab_size": 1000,
              "head_dim": 16}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def place(model, tmp_path):
    """A folder of a store in memory, with the model."""
    fsspec.filesystem("memory").put(str(model), f"/bucket{tmp_path}/model", recursive=True)
    return f"memory://bucket{tmp_path}"


@pytest.fixture
def read(monkeypatch):
    """Bytes that were read, by the folder in which their files lie: `model` or `out`."""
    found = {"model": 0, "out": 0}
    real = FsspecStore.read

    def counted(self, path, start, stop):
        data = real(self, path, start, stop)
        found["model" if "/model/" in path else "out"] += len(data)
        return data

    monkeypatch.setattr(FsspecStore, "read", counted)
    return found


def requested(place, to, **more):
    targets = [TargetRequest(f"{place}/out", to, CASES[to])]
    return convert_request(f"{place}/model", targets, lineage=False, ignore=("companions",), **more)


def joined(plan):
    """Both lie in one bucket."""
    [one] = plan.traffic.stores
    return one


@pytest.mark.parametrize("to", CASES)
def test_the_egress_of_workers_is_what_they_read(place, read, to):
    plan, shared = plan_for_workers(requested(place, to), 4, UNIT)
    assert len(shared.units) > 3
    read.update(model=0, out=0)
    job = split(requested(place, to), UNIT)
    list(carry_with_pool(job, SeparatePool("abcd")))
    commit(job.uri)
    assert joined(plan).egress == pytest.approx(read["model"] + read["out"], rel=0.15)


def test_units_that_read_more_than_their_own_bytes_cost_more(place):
    """A leaf that ends in another unit is read by both, which a plan for one process does not say."""
    shared, _units = plan_for_workers(requested(place, "hf"), 4, UNIT)
    alone = plan_targets(requested(place, "hf"))[0]
    assert joined(shared).egress > joined(alone).egress
    assert joined(shared).reads > joined(alone).reads


@pytest.mark.parametrize("compiled", [True, False])
def test_the_source_of_a_view_is_read_for_its_own_digests_too_where_there_are_no_kernels(
    place, read, compiled, monkeypatch
):
    if not compiled:
        monkeypatch.setattr("wherry.kernels.load", lambda: None)
    elif kernels.load() is None:
        pytest.skip("no C compiler")
    plan = plan_targets(requested(place, "maxtext"))[0]
    read.update(model=0, out=0)
    convert_all(requested(place, "maxtext"))
    assert joined(plan).egress == pytest.approx((2 if compiled else 3) * plan.nbytes_in, rel=0.01)
    assert joined(plan).egress == pytest.approx(read["model"] + read["out"], rel=0.15)


def test_requests_count_the_records_of_workers(place):
    request = requested(place, "hf", verify="none")
    plan, shared = plan_for_workers(request, 4, UNIT)
    alone = plan_targets(request)[0]
    assert joined(plan).writes == joined(alone).writes + 2 * len(shared.units)
    assert shared.requests == sum((joined(plan).reads, joined(plan).writes, joined(plan).lists))
