"""DeepSpeed's universal checkpoints are read whole; the folders are imitated by the layout of `ds_to_universal.py`."""

from __future__ import annotations

import json

import numpy as np
import pytest

import wherry
from tests.support import universal, zero
from wherry.errors import CorruptError, HostileError, IncompleteError, UnsupportedError

torch = pytest.importorskip("torch")
STEP = universal.STEP


def read(uri):
    with wherry.open(uri) as checkpoint:
        assert checkpoint.detection.format == "deepspeed-universal"
        return {path[0]: checkpoint.read(path) for path in checkpoint.manifest.tensors}


def require_equal(found, wanted):
    assert set(found) == set(wanted)
    for name, tensor in wanted.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        np.testing.assert_array_equal(found[name], tensor)


@pytest.mark.parametrize("stage", [2, 3])
def test_parameters_and_moments_are_whole(stage, tmp_path):
    """After ZeRO 3 the files have vectors, and the model states of two ranks the shapes."""
    folder = universal.save(tmp_path / "run", stage, ranks=2)
    for uri in (folder, folder / STEP):
        require_equal(read(uri), universal.tensors(counted=stage != 3))
    found = wherry.detect(folder)
    assert (found.step, found.kind, found.format_version) == (10, "train-state", "universal")


def test_without_moments_they_are_parameters(tmp_path):
    folder = universal.save(tmp_path / "run", trained=False)
    require_equal(read(folder), universal.tensors(trained=False))
    assert wherry.detect(folder).kind == "params"


def test_a_count_may_be_a_number(tmp_path):
    folder = universal.save(tmp_path / "run", number=True)
    require_equal(read(folder), universal.tensors(counted=False))
    with wherry.open(folder) as checkpoint:
        assert checkpoint.manifest.values["optimizer.state.a.weight.step",] == 3


def test_buffers_frozen_parameters_and_second_names(tmp_path):
    frozen = torch.arange(6, dtype=torch.bfloat16).reshape(2, 3)
    folder = universal.save(
        tmp_path / "run", trained=False, module={"g.mean": np.arange(3)}, shared_params={"head": "a.weight"},
        frozen_param_shapes={"f.weight": frozen.shape}, frozen_param_fragments={"f.weight": frozen},
    )  # fmt: skip
    found, whole = read(folder), universal.tensors(trained=False)
    assert found.pop("f.weight").tobytes() == frozen.view(torch.uint8).numpy().tobytes()
    require_equal(found, {**whole, "g.mean": np.arange(3), "head": whole["a.weight"]})
    (row,) = [one for one in wherry.detect(folder).evidence if "a copy in float32" in one.seen]
    assert row.file == f"{STEP}/zero/g.mean"


def never_updated(folder, table):
    """The folder of one parameter as the script leaves it where no gradient came."""
    for file in ("exp_avg.pt", "exp_avg_sq.pt", "step.pt"):
        (folder / STEP / "zero" / "a.bias" / file).unlink()
    torch.save(table, folder / STEP / "zero" / "a.bias" / "fp32.pt")
    return folder


def test_a_parameter_that_was_never_updated_has_no_moments(tmp_path):
    whole = universal.tensors()
    value = torch.tensor(whole["a.bias"])
    folder = never_updated(universal.save(tmp_path / "run"), {"param": value})
    require_equal(
        read(folder),
        {name: one for name, one in whole.items() if not name.startswith("optimizer.state.a.bias")},
    )
    assert any("1 never updated" in row.seen for row in wherry.detect(folder).evidence)
    with pytest.raises(IncompleteError, match=r"moments of a\.bias are missing"):
        wherry.open(never_updated(universal.save(tmp_path / "lost"), {"param": value, "cat_dim": 0}))


def test_copies_of_what_several_ranks_have_are_refused(tmp_path):
    """DeepSpeed copies the part of the first rank as if it were the whole."""
    shapes = [dict(zero.SHAPES), dict(zero.SHAPES)]
    folder = universal.save(
        tmp_path / "run", shapes=shapes, module={"g.mean": np.arange(3.0)}, buffer_names=[]
    )
    with pytest.raises(UnsupportedError, match=r"g\.mean was not trained"):
        wherry.open(folder)


@pytest.mark.parametrize("shapes", [[(5, 3), (5, 4)], [(2, 7), (3, 7)], [(5, 7), (5, 7)]], ids=str)
def test_parts_of_tensor_parallel_ranks_were_joined(shapes, tmp_path):
    """Along either dimension, or all ranks have the whole."""
    whole = zero.parameters({"w": (5, 7)})
    folder = universal.save(tmp_path / "run", whole=whole, shapes=[{"w": shape} for shape in shapes])
    require_equal(read(folder), universal.tensors(whole))


def test_stages_of_a_pipeline_have_other_parameters(tmp_path):
    shapes = [{"a.weight": (5, 3), "a.bias": (7,)}, {"b.weight": (4, 2, 3), "c.weight": (11,)}]
    require_equal(read(universal.save(tmp_path / "run", shapes=shapes)), universal.tensors())


@pytest.mark.parametrize(("said", "rank"), [
    ({"vocab_tensor": True}, (8, 7)), ({"is_expert_param": True, "ep_num_experts": 5}, (1, 7)),
])  # fmt: skip
def test_a_vocabulary_is_cut_and_experts_are_gathered(said, rank, tmp_path):
    whole = zero.parameters({"w": (5, 7)})
    folder = universal.save(tmp_path / "run", whole=whole, said={"w": said}, shapes=[{"w": rank}])
    require_equal(read(folder), universal.tensors(whole))


def test_a_run_with_partitions_is_that_of_the_partitions(tmp_path):
    folder = zero.save(tmp_path / "run", 2, 1)
    universal.save(folder)
    found = wherry.detect(folder)
    assert (found.format, found.also) == ("deepspeed", ("deepspeed-universal",))
    assert wherry.detect(folder / STEP).format == "deepspeed-universal"


def test_it_converts_and_verifies_and_parameters_alone(tmp_path):
    folder = universal.save(tmp_path / "run", number=True)
    receipt = wherry.convert(folder, tmp_path / "all", to="orbax", lineage=False)
    assert receipt.verification == receipt.verification | {"level": "digest", "ok": True}
    assert {row["rule"] for row in receipt.ignored} == {"training state"}
    with wherry.open(tmp_path / "all") as written:
        require_equal(
            {path[0]: written.read(path) for path in written.manifest.tensors},
            universal.tensors(counted=False),
        )
    wherry.convert(folder, tmp_path / "params", to="safetensors", only="params", lineage=False)
    with wherry.open(tmp_path / "params") as written:
        found = {path[0]: written.read(path) for path in written.manifest.tensors}
    require_equal(found, universal.tensors(trained=False))


@pytest.mark.parametrize("lost", [
    "zero/a.weight/fp32.pt", "zero/b.weight/exp_avg_sq.pt", "zero/b.weight/step.pt", "zero/optimizer_state.pt",
    "mp_rank_00_model_states.pt",
])  # fmt: skip
def test_a_missing_file_is_named(lost, tmp_path):
    folder = universal.save(tmp_path / "run")
    (folder / STEP / lost).unlink()
    with pytest.raises(IncompleteError, match=lost.replace(".", r"\.")):
        wherry.open(folder)
    assert wherry.detect(folder).verdict == "incomplete"


def test_a_missing_parameter_or_rank_is_named(tmp_path):
    folder = universal.save(tmp_path / "run")
    for file in (folder / STEP / "zero" / "b.weight").iterdir():
        file.unlink()
    (folder / STEP / "zero" / "b.weight").rmdir()
    with pytest.raises(IncompleteError, match=r"zero/b\.weight/fp32\.pt"):
        wherry.open(folder)
    folder = universal.save(tmp_path / "other", 3, ranks=3)
    (folder / STEP / "zero_pp_rank_1_mp_rank_00_model_states.pt").unlink()
    with pytest.raises(IncompleteError, match="rank 1 is missing"):
        wherry.open(folder)
    folder = universal.save(tmp_path / "parts", shapes=[{"a.weight": (5, 3)}, dict(zero.SHAPES)])
    (folder / STEP / "mp_rank_00_model_states.pt").unlink()
    with pytest.raises(IncompleteError, match="mp_rank_00"):
        wherry.open(folder)


@pytest.mark.parametrize("shapes", [
    [{"w": (5, 8)}], [{"w": (5, 3)}, {"w": (5, 3)}], [{"w": (7, 5)}, {"w": (7, 5)}], [{"w": (5, 7, 1)}, {"w": (5, 7)}],
], ids=str)  # fmt: skip
def test_other_shapes_than_the_ranks_have_are_refused(shapes, tmp_path):
    folder = universal.save(tmp_path / "run", whole=zero.parameters({"w": (5, 7)}), shapes=shapes)
    with pytest.raises((CorruptError, UnsupportedError), match="w") as caught:
        wherry.open(folder)
    assert caught.value.path == "w"


def test_what_nothing_knows_is_refused_by_name(tmp_path):
    folder = universal.save(tmp_path / "run")
    state = folder / STEP / "zero" / "a.weight" / "momentum_buffer.pt"
    torch.save(torch.ones(3), state)
    with pytest.raises(UnsupportedError, match=r"momentum_buffer\.pt of a\.weight"):
        wherry.open(folder)
    state.unlink()
    (folder / STEP / "zero" / "more.pt").write_bytes(b"")
    with pytest.raises(UnsupportedError, match=r"zero/more\.pt"):
        wherry.open(folder)
    (folder / STEP / "zero" / "more.pt").unlink()
    (folder / STEP / "zero" / "x").mkdir()
    torch.save(torch.ones(3), folder / STEP / "zero" / "x" / "fp32.pt")
    with pytest.raises(CorruptError, match=r"zero/x is no parameter"):
        wherry.open(folder)


def test_moments_of_another_shape_are_corrupt(tmp_path):
    folder = universal.save(tmp_path / "run", said={"a.bias": {"vocab_tensor": True}})
    torch.save(
        {"param": torch.ones(5), "vocab_tensor": True}, folder / STEP / "zero" / "a.bias" / "exp_avg.pt"
    )
    with pytest.raises(CorruptError, match=r"exp_avg\.pt has the shape \[5\]"):
        wherry.open(folder)


@pytest.mark.parametrize("content", [{"other": 1}, 3, [1, 2]], ids=str)
def test_a_file_without_a_tensor_is_corrupt(content, tmp_path):
    folder = universal.save(tmp_path / "run")
    torch.save(content, folder / STEP / "zero" / "a.weight" / "exp_avg.pt")
    with pytest.raises(CorruptError, match="expected a tensor"):
        wherry.open(folder)


def test_pickles_are_inert(tmp_path):
    folder = universal.save(tmp_path / "run")
    torch.save({"param": torch.ones(5, 3), "more": print}, folder / STEP / "zero" / "a.weight" / "fp32.pt")
    with pytest.raises(HostileError, match="print"):
        wherry.open(folder)


def test_an_expanded_tensor_is_no_honest_one(tmp_path):
    """A file of a few bytes that claims a tensor of 4 GB, as a stride of 0 allows."""
    folder = universal.save(tmp_path / "run")
    huge = torch.ones(1).expand(1 << 30)
    torch.save({"param": huge}, folder / STEP / "zero" / "a.weight" / "fp32.pt")
    with pytest.raises(HostileError, match="claims"):
        wherry.open(folder)


@pytest.mark.parametrize("name", ["../other", "..", "/etc", ""])
def test_latest_names_a_folder_of_the_run(name, tmp_path):
    universal.save(tmp_path / "other")
    folder = universal.save(tmp_path / "run")
    (folder / "latest_universal").write_text(name)
    found = wherry.detect(folder)
    assert "other" not in json.dumps(found.to_json())


def test_a_folder_that_is_no_part_of_the_step_is_named(tmp_path):
    folder = universal.save(tmp_path / "run")
    (folder / STEP / "tmp").mkdir()
    found = wherry.detect(folder / STEP)
    assert any(row.file == "tmp" and "no part" in row.seen for row in found.evidence)
