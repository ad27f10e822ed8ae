"""ZeRO folders whose tables, names of files or vectors lie: each is an error that names what is wrong."""

from __future__ import annotations

import time
import tracemalloc

import numpy as np
import pytest

import wherry
from tests.support import zero
from wherry.errors import CorruptError, IncompleteError, UnsupportedError

torch = pytest.importorskip("torch")

MODEL, OPTIMIZER = "mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"
SHAPES = (3, [3], {"a.weight": [2, 2]}, [{"a.weight": 3}], [{"a.weight": ["x"]}], [{"a.weight": [[2, 2]]}],
          [{"a.weight": [float("nan"), 2]}], [{"a.weight": [float("inf")]}], [{"a.weight": [2.0]}],
          [{"a.weight": [True]}], [{"a.weight": [-1, -4]}], [{"a.weight": {"b": {"c": 1}}}])  # fmt: skip
FROZEN = (3, "x", {"f": 3}, {"f": ["q"]}, {"f": {"g": {"h": 1}}}, {"f": [-10]}, {"f": [10.0]}, {"f": [1]},
          {"f": [2, 6]}, {"f": [3, 5]})  # fmt: skip
SHARED = (3, {"x": {"y": "a.weight"}}, {"x": ["a.weight"]}, {"x": 3})


@pytest.fixture
def step(tmp_path):
    whole = {"f": np.arange(10, dtype="f4").reshape(2, 5)}
    return zero.save(tmp_path / "run", 2, 1, frozen=whole) / "global_step10"


def change(file, **more):
    torch.save({**torch.load(file, weights_only=False), **more}, file)


@pytest.mark.parametrize(
    ("table", "lie"),
    [
        *(("param_shapes", one) for one in SHAPES),
        *(("frozen_param_shapes", one) for one in FROZEN),
        *(("shared_params", one) for one in SHARED),
    ],
    ids=repr,
)
def test_a_table_that_lies_is_corrupt(table, lie, step):
    change(step / MODEL, **{table: lie})
    for level in ("present", "digest"):
        assert wherry.verify(step, level=level).verdict == "corrupt"
    with pytest.raises(CorruptError):
        wherry.open(step)


def test_a_frozen_parameter_has_all_its_elements(step):
    change(step / MODEL, frozen_param_shapes={"f": [9]})
    with pytest.raises(CorruptError, match=r"f of shape .9. has a part of 10 elements"):
        wherry.open(step)


def test_a_vector_without_parameters_is_corrupt(step):
    """Three elements are more than the vector is padded with."""
    state = torch.load(step / OPTIMIZER, weights_only=False)
    vectors = state["optimizer_state_dict"]["single_partition_of_fp32_groups"]
    vectors[0] = torch.cat([vectors[0], torch.zeros(3)])
    torch.save(state, step / OPTIMIZER)
    with pytest.raises(CorruptError, match=r"need .* bytes of a vector"):
        wherry.open(step)


def test_a_group_without_a_vector_is_corrupt(step):
    state = torch.load(step / OPTIMIZER, weights_only=False)
    state["optimizer_state_dict"]["single_partition_of_fp32_groups"].pop()
    torch.save(state, step / OPTIMIZER)
    with pytest.raises(CorruptError, match="no vector of the parameters of group 1"):
        wherry.open(step)


@pytest.mark.parametrize("rank", [2, 99_999_999, 999_999_999])
def test_the_number_in_a_name_takes_no_memory(rank, step):
    tracemalloc.start()
    (step / OPTIMIZER).rename(step / OPTIMIZER.replace("rank_0_", f"rank_{rank}_"))
    with pytest.raises(IncompleteError, match="rank 0 is missing"):
        wherry.open(step)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 32 << 20


def test_a_number_of_many_digits_is_none(step):
    (step / OPTIMIZER.replace("rank_0_", f"rank_{'9' * 100}_")).touch()
    with pytest.raises(UnsupportedError, match="is of tensor parallelism"):
        wherry.open(step)


def test_a_rank_has_one_file(step):
    (step / f"bf16_{OPTIMIZER}").write_bytes((step / OPTIMIZER).read_bytes())
    with pytest.raises(CorruptError, match="rank 0 has two files"):
        wherry.open(step)


def test_many_ranks_of_a_universal_checkpoint_are_grouped_once(tmp_path, monkeypatch):
    from wherry.integrations.formats.deepspeed import universal
    from wherry.storage.stores import locate

    opened = []
    monkeypatch.setattr(universal, "open_ranks", lambda _folder, rows: opened.append([*rows]))
    names = [f"mp_rank_{rank:02d}_model_states.pt" for rank in range(20_000)]
    began = time.process_time()
    universal._models(locate(tmp_path), [*reversed(names)])
    assert time.process_time() - began < 5
    assert opened == [[(0, name)] for name in names]
