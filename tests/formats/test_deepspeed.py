"""DeepSpeed: ZeRO folders and universal checkpoints, whole or lying, and files of one rank."""

from __future__ import annotations

import json
import subprocess
import time
import tracemalloc

import numpy as np
import pytest
from safetensors.numpy import save_file

import wherry
from tests.support import universal, zero
from tests.support.generations import old_python
from wherry.errors import CorruptError, HostileError, IncompleteError, UnsupportedError

torch = pytest.importorskip("torch")


def read(uri):
    with wherry.open(uri) as checkpoint:
        assert checkpoint.detection.format == "deepspeed"
        return {path[0]: checkpoint.read(path) for path in checkpoint.manifest.tensors}


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_every_stage_gives_whole_tensors(stage, ranks, tmp_path):
    """Sizes that no number of ranks divides: parameters lie in several partitions, and are padded."""
    folder, whole = zero.save(tmp_path / "run", stage, ranks), zero.parameters()
    for uri in (folder, folder / "global_step10"):
        found = read(uri)
        assert set(found) == set(whole)
        for name, tensor in whole.items():
            np.testing.assert_array_equal(found[name], tensor)
    detection = wherry.detect(folder)
    assert detection.step == 10
    assert detection.kind == "params"


@pytest.mark.parametrize("stage", [2, 3])
def test_frozen_shared_and_buffers(stage, tmp_path):
    frozen = {"f.weight": np.arange(10, dtype="f4").reshape(2, 5)}
    buffers = {"g.mean": np.arange(3, dtype="f4")}
    folder = zero.save(
        tmp_path / "run", stage, 3, frozen=frozen, shared={"head.weight": "a.weight"}, buffers=buffers
    )
    found = read(folder)
    np.testing.assert_array_equal(found["f.weight"], frozen["f.weight"])
    np.testing.assert_array_equal(found["g.mean"], buffers["g.mean"])
    np.testing.assert_array_equal(found["head.weight"], zero.parameters()["a.weight"])


def test_zero_1_lists_no_frozen_parameters_and_they_are_read(tmp_path):
    """Only the state of the module has them there; zero_to_fp32.py loses them."""
    others = {"f.weight": np.arange(10, dtype="f2").reshape(2, 5)}
    found = read(zero.save(tmp_path / "run", 1, 2, others=others))
    assert found["f.weight"].dtype == np.float16
    np.testing.assert_array_equal(found["f.weight"], others["f.weight"])


def test_it_converts_and_verifies(tmp_path):
    folder = zero.save(tmp_path / "run", 3, 2)
    receipt = wherry.convert(folder, tmp_path / "out", to="huggingface", family="none")
    assert receipt.verification == receipt.verification | {"level": "digest", "ok": True}
    with wherry.open(tmp_path / "out") as written:
        for name, tensor in zero.parameters().items():
            np.testing.assert_array_equal(written.read((name,)), tensor)
    assert {row["rule"] for row in receipt.ignored} == {"training state"}


def test_objects_of_deepspeed_are_opaque_and_others_refused(tmp_path):
    assert read(zero.save(tmp_path / "run", 2, 2, scaler=True))
    folder = zero.save(tmp_path / "other", 2, 1)
    file = folder / "global_step10" / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    state = torch.load(file, weights_only=False)
    torch.save({**state, "more": print}, file)
    with pytest.raises(HostileError):
        wherry.open(folder)


def test_a_rank_that_is_missing_is_named(tmp_path):
    folder = zero.save(tmp_path / "run", 2, 3)
    (folder / "global_step10" / "zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(IncompleteError, match="rank 1 is missing"):
        wherry.open(folder)
    (folder / "global_step10" / "zero_pp_rank_2_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(IncompleteError, match="1 of the files of 3 ranks"):
        wherry.open(folder)


@pytest.mark.parametrize("stage", [2, 3])
def test_partitions_of_another_size_are_corrupt(stage, tmp_path):
    folder = zero.save(tmp_path / "run", stage, 2, groups=(("a.weight", "a.bias", "b.weight"),))
    file = folder / "global_step10" / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    state = torch.load(file, weights_only=True)
    key = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"
    state["optimizer_state_dict"][key][0] = torch.zeros(3)
    torch.save(state, file)
    with pytest.raises(CorruptError, match=r"need .* bytes of a vector"):
        wherry.open(folder)


def test_tensor_parallel_ranks_and_other_stages_are_refused(tmp_path):
    folder = zero.save(tmp_path / "run", 2, 1)
    step = folder / "global_step10"
    (step / "zero_pp_rank_0_mp_rank_01_optim_states.pt").write_bytes(b"")
    with pytest.raises(UnsupportedError, match=r"mp_rank_01.* is of tensor parallelism"):
        wherry.open(folder)
    with pytest.raises(UnsupportedError, match="stage 7"):
        wherry.open(zero.save(tmp_path / "other", 7, 1))


def test_weights_next_to_the_folder_come_first(tmp_path):
    """A trainer's folder with whole weights is that of the weights."""
    from safetensors.numpy import save_file

    folder = zero.save(tmp_path / "run", 2, 1)
    save_file(zero.parameters(), folder / "model.safetensors", metadata={"format": "pt"})
    assert wherry.detect(folder).format == "huggingface"


# What DeepSpeed's own script makes of a folder.
SCRIPT = """
import sys
import numpy as np
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint as whole
np.savez(sys.argv[2], **{name: tensor.detach().numpy() for name, tensor in whole(sys.argv[1]).items()})
"""


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeed_s_own_script_gives_the_same(stage, tmp_path):
    python = old_python("deepspeed")
    more = {
        "frozen": {"f.weight": np.arange(10, dtype="f4").reshape(2, 5)},
        "shared": {"head.weight": "a.weight"},
    }
    folder = zero.save(tmp_path / "run", stage, 3, buffers={"g": np.arange(3, dtype="f4")}, **more)
    words = [str(python), "-c", SCRIPT, str(folder), str(tmp_path / "wanted.npz")]
    done = subprocess.run(words, capture_output=True, text=True, check=False, env={"PATH": "/usr/bin:/bin"})
    assert done.returncode == 0, done.stderr[-2000:]
    wanted, found = np.load(tmp_path / "wanted.npz"), read(folder)
    assert set(found) == set(wanted.files)
    for name in wanted.files:
        assert wanted[name].dtype == np.float32
        np.testing.assert_array_equal(found[name], wanted[name])


# ZeRO folders whose tables, names of files or vectors lie: each is an error that names what is wrong.


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
    from wherry.store.local_store import locate

    opened = []
    monkeypatch.setattr(universal, "open_ranks", lambda _folder, rows: opened.append([*rows]))
    names = [f"mp_rank_{rank:02d}_model_states.pt" for rank in range(20_000)]
    began = time.process_time()
    universal._models(locate(tmp_path), [*reversed(names)])
    assert time.process_time() - began < 5
    assert opened == [[(0, name)] for name in names]


# DeepSpeed's universal checkpoints are read whole; the folders are imitated by the layout of
# `ds_to_universal.py`.


STEP = universal.STEP


def read_of_universal(uri):
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
        require_equal(read_of_universal(uri), universal.tensors(counted=stage != 3))
    found = wherry.detect(folder)
    assert (found.step, found.kind, found.format_version) == (10, "train-state", "universal")


def test_without_moments_they_are_parameters(tmp_path):
    folder = universal.save(tmp_path / "run", trained=False)
    require_equal(read_of_universal(folder), universal.tensors(trained=False))
    assert wherry.detect(folder).kind == "params"


def test_a_count_may_be_a_number(tmp_path):
    folder = universal.save(tmp_path / "run", number=True)
    require_equal(read_of_universal(folder), universal.tensors(counted=False))
    with wherry.open(folder) as checkpoint:
        assert checkpoint.manifest.values["optimizer.state.a.weight.step",] == 3


def test_buffers_frozen_parameters_and_second_names(tmp_path):
    frozen = torch.arange(6, dtype=torch.bfloat16).reshape(2, 3)
    folder = universal.save(
        tmp_path / "run", trained=False, module={"g.mean": np.arange(3)}, shared_params={"head": "a.weight"},
        frozen_param_shapes={"f.weight": frozen.shape}, frozen_param_fragments={"f.weight": frozen},
    )  # fmt: skip
    found, whole = read_of_universal(folder), universal.tensors(trained=False)
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
        read_of_universal(folder),
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
    require_equal(read_of_universal(folder), universal.tensors(whole))


def test_stages_of_a_pipeline_have_other_parameters(tmp_path):
    shapes = [{"a.weight": (5, 3), "a.bias": (7,)}, {"b.weight": (4, 2, 3), "c.weight": (11,)}]
    require_equal(read_of_universal(universal.save(tmp_path / "run", shapes=shapes)), universal.tensors())


@pytest.mark.parametrize(("said", "rank"), [
    ({"vocab_tensor": True}, (8, 7)), ({"is_expert_param": True, "ep_num_experts": 5}, (1, 7)),
])  # fmt: skip
def test_a_vocabulary_is_cut_and_experts_are_gathered(said, rank, tmp_path):
    whole = zero.parameters({"w": (5, 7)})
    folder = universal.save(tmp_path / "run", whole=whole, said={"w": said}, shapes=[{"w": rank}])
    require_equal(read_of_universal(folder), universal.tensors(whole))


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


# Files of one rank are no checkpoints of their own: nanotron, layers of a DeepSpeed pipeline.


def nanotron(run):
    folder = run / "10/model/model/decoder/0/pp_block/attn/qkv_proj"
    folder.mkdir(parents=True)
    (run / "10/checkpoint_metadata.json").write_text(json.dumps({"version": "1.4"}))
    (run / "10/model_config.json").write_text("{}")
    (run / "latest.txt").write_text("10")
    for rank in range(2):
        name = f"model_weight_pp-rank-0-of-1_tp-rank-{rank}-of-2.safetensors"
        save_file({"data": np.ones((48, 32), np.float32)}, folder / name)
    return run / "10", folder / name


def layers(run):
    folder = run / "global_step10"
    folder.mkdir(parents=True)
    (run / "latest").write_text("global_step10")
    for layer in (0, 2):
        (folder / f"layer_{layer:02d}-model_00-model_states.pt").write_bytes(b"PK\x03\x04")
    return folder, folder / "layer_00-model_00-model_states.pt"


@pytest.mark.parametrize(
    ("make", "words", "way"),
    [(nanotron, "nanotron", "convert_nanotron_to_hf.py"),
     (layers, "pipeline layers", "convert_neox_to_hf.py")],
)  # fmt: skip
def test_it_is_named_and_no_file_of_it_is_a_checkpoint(tmp_path, make, words, way):
    step, file = make(tmp_path / "run")
    skipped = []
    assert list(wherry.discover(tmp_path, on_skip=skipped.append)) == []
    found = wherry.detect(step)
    assert found.verdict == "unsupported"
    assert words in found.reason
    assert way in found.cure
    assert wherry.detect(file).verdict == "unsupported"
    with pytest.raises(UnsupportedError):
        wherry.convert(step, tmp_path / "never", to="orbax")
    assert make is layers or any(words in one.reason for one in skipped)


def test_a_part_is_read_where_its_format_is_chosen(tmp_path):
    _, file = nanotron(tmp_path / "run")
    assert wherry.detect(file, format="safetensors").verdict == "ok"
