"""Megatron's checkpoints become Hugging Face's bit by bit, and back; they are imitated by their layout."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import wherry
from tests.support import megatron
from tests.support.model_systems import LLAMA_CONFIG, llama_huggingface
from wherry.errors import (
    AmbiguousError,
    CorruptError,
    HostileError,
    IncompleteError,
    UnrepresentableError,
    UnsupportedError,
    UsageError,
    WherryError,
)

torch = pytest.importorskip("torch")
safetensors = pytest.importorskip("safetensors.numpy")


def model(folder):
    """The source of all checkpoints here, as Hugging Face stores it."""
    folder.mkdir()
    safetensors.save_file(
        {path[0]: one for path, one in llama_huggingface().items()}, folder / "model.safetensors"
    )
    (folder / "config.json").write_text(json.dumps(LLAMA_CONFIG))
    return folder


def back(source, target, **more):
    """What a checkpoint is as Hugging Face stores it."""
    receipt = wherry.convert(source, target, to="huggingface", lineage=False, **more)
    assert receipt.lossless
    return safetensors.load_file(target / "model.safetensors"), json.loads(
        (target / "config.json").read_text()
    )


def same(found):
    wanted = {path[0]: one for path, one in llama_huggingface().items()}
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)


@pytest.mark.parametrize("stacked", [True, False])
def test_a_step_becomes_hugging_faces_and_is_its_config(stacked, tmp_path):
    step = megatron.save(tmp_path / "run" / "iter_0000010", stacked=stacked)
    detection = wherry.detect(step)
    assert (detection.format, detection.step) == ("megatron", 10)
    found, config = back(step, tmp_path / "out")
    same(found)
    assert config["rms_norm_eps"] == 1e-5
    assert config["num_key_value_heads"] == LLAMA_CONFIG["num_key_value_heads"]
    assert config["rope_theta"] == 500000


def test_a_run_is_its_newest_step(tmp_path):
    megatron.save(tmp_path / "run" / "iter_0000010")
    (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text("10")
    assert wherry.detect(tmp_path / "run").step == 10
    same(back(tmp_path / "run", tmp_path / "out")[0])


@pytest.mark.parametrize(
    "name", ["layers.{}.mlp.w", "layers.0.mlp.experts.local_experts.{}.linear_fc1.weight"]
)
def test_a_layer_of_too_many_digits_is_another_tensor(name, tmp_path):
    step = megatron.save_ranks(tmp_path / "iter_0000010", 1, 1)
    path = step / "mp_rank_00" / "model_optim_rng.pt"
    state = torch.load(path, weights_only=False)
    state["model"][f"decoder.{name.format('9' * 5000)}"] = torch.zeros(2, 2)
    torch.save(state, path)
    assert wherry.detect(step).format == "megatron-ranks"
    with pytest.raises(WherryError):
        wherry.convert(step, tmp_path / "out", to="huggingface", lineage=False)


@pytest.mark.parametrize("form", [{}, {"stacked_layers": "false"}, {"norms": "apart"}])
def test_what_is_written_is_what_megatron_saves(form, tmp_path):
    import torch.distributed.checkpoint as dcp

    out = tmp_path / "iter_0000000"
    wherry.convert(model(tmp_path / "hf"), out, to="megatron", options=form, lineage=False)
    state = {
        name: torch.empty(one.size)
        for name, one in dcp.FileSystemReader(out).read_metadata().state_dict_metadata.items()
    }
    dcp.load(state, checkpoint_id=out, no_dist=True)
    wanted = megatron.whole(stacked=form.get("stacked_layers") != "false")
    names = (
        {"self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
         "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight"} if "norms" in form else {}
    )  # fmt: skip
    for old, new in names.items():
        wanted = {name.replace(old, new): one for name, one in wanted.items()}
    assert state.keys() == wanted.keys()
    for name, array in wanted.items():
        np.testing.assert_array_equal(state[name].numpy(), array, err_msg=name)
    args = vars(torch.load(out / "common.pt", weights_only=False)["args"])
    stated = {name: value for name, value in megatron.ARGS.items() if name in args}
    assert {name: args[name] for name in stated} == stated
    assert json.loads((out / "metadata.json").read_text())["sharded_backend"] == "torch_dist"
    same(back(out, tmp_path / "back")[0])


@pytest.mark.parametrize("ranks", [False, True])
def test_what_a_run_states_as_none_is_not_there(ranks, tmp_path):
    """Megatron's parser states every argument of every model: None are those of what a model does not have."""
    off = ("num_experts", "moe_router_group_topk", "spec", "window_size", "mtp_num_layers", "q_lora_rank")
    args = {
        **megatron.ARGS,
        **dict.fromkeys(off),
        "data_path": [None, "a", [], "b"],
        "langrl_env_config": {"x": None},
    }
    step = tmp_path / "iter_0000010"
    step = megatron.save_ranks(step, 1, 1, args) if ranks else megatron.save(step, args=args)
    same(back(step, tmp_path / "out")[0])
    wherry.convert(step, tmp_path / "copy", to="megatron", lineage=False)
    assert vars(torch.load(tmp_path / "copy" / "common.pt", weights_only=False)["args"]) == args


@pytest.mark.parametrize(("tensor", "pipeline"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_ranks_are_put_together(tensor, pipeline, tmp_path):
    step = megatron.save_ranks(tmp_path / "iter_0000010", tensor, pipeline)
    detection = wherry.detect(step)
    assert (detection.format, detection.step) == ("megatron-ranks", 10)
    same(back(step, tmp_path / "out")[0])


def test_one_rank_is_written(tmp_path):
    out = tmp_path / "iter_0000000"
    wherry.convert(model(tmp_path / "hf"), out, to="megatron-ranks", lineage=False)
    found = torch.load(out / "mp_rank_00" / "model_optim_rng.pt", weights_only=False)
    wanted = megatron.whole(stacked=False)
    assert found["model"].keys() == wanted.keys()
    for name, array in wanted.items():
        np.testing.assert_array_equal(found["model"][name].numpy(), array, err_msg=name)
    assert found["args"].num_query_groups == LLAMA_CONFIG["num_key_value_heads"]
    same(back(out, tmp_path / "back")[0])


def test_padding_of_the_vocabulary_is_left_out(tmp_path):
    whole = megatron.whole()
    padded = {
        name: torch.from_numpy(np.pad(whole[name], ((0, 4), (0, 0)), constant_values=7))
        for name in ("embedding.word_embeddings.weight", "output_layer.weight")
    }
    args = {**megatron.ARGS, "padded_vocab_size": megatron.VOCAB + 4}
    same(back(megatron.save(tmp_path / "iter_0000010", args=args, more=padded), tmp_path / "out")[0])


def test_moments_are_carried_and_copies_in_float32_left(tmp_path):
    whole = megatron.whole()
    more = {
        f"optimizer.state.{slot}.{name}": torch.from_numpy(array * factor)
        for slot, factor in (("exp_avg", 2), ("exp_avg_sq", 3), ("fp32_param", 1))
        for name, array in whole.items()
    }
    step = megatron.save(tmp_path / "iter_0000010", more=more)
    wherry.convert(step, tmp_path / "maxtext", to="maxtext", lineage=False)
    with wherry.open(tmp_path / "maxtext") as found:
        norm = found.read(("opt_state", "0", "mu", "params", "decoder", "decoder_norm", "scale"))
    np.testing.assert_array_equal(norm, 2 * whole["decoder.final_layernorm.weight"])


def test_the_config_must_be_stated_if_the_step_has_none(tmp_path):
    step = megatron.save(tmp_path / "iter_0000010", args={})
    with pytest.raises((UsageError, AmbiguousError)) as caught:
        back(step, tmp_path / "out", family="llama")
    assert "config" in str(caught.value.cure)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "value"),
    [("rotary_interleaved", True), ("normalization", "LayerNorm"), ("squared_relu", True), ("novel_switch", 1),
     ("qk_l2_norm", True), ("softmax_scale", 0.5), ("multi_latent_attention", True)],
)  # fmt: skip
def test_another_model_is_refused_by_name(name, value, tmp_path):
    step = megatron.save(tmp_path / "iter_0000010", args={**megatron.ARGS, name: value})
    with pytest.raises(UnrepresentableError, match=name):
        back(step, tmp_path / "out", family="llama")
    assert not (tmp_path / "out").exists()


def test_a_save_that_was_not_completed_is_refused(tmp_path):
    step = megatron.save(tmp_path / "iter_0000010")
    (step / "metadata.json").unlink()
    assert wherry.detect(step).verdict == "incomplete"
    with pytest.raises(IncompleteError, match=r"metadata\.json"):
        back(step, tmp_path / "out")


def test_another_version_is_refused(tmp_path):
    step = megatron.save(tmp_path / "iter_0000010")
    text = {"sharded_backend": "torch_dist", "sharded_backend_version": 2}
    (step / "metadata.json").write_text(json.dumps(text))
    with pytest.raises(UnsupportedError, match="version of torch_dist: 2"):
        back(step, tmp_path / "out")


def test_arguments_that_contradict_one_another_are_refused(tmp_path):
    step = megatron.save(tmp_path / "iter_0000010")
    (step / "megatron_args.json").write_text(json.dumps({**megatron.ARGS, "rotary_base": 1}))
    with pytest.raises(CorruptError, match="different arguments"):
        back(step, tmp_path / "out")


class Payload:
    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return (Path.touch, (self.mark,))


@pytest.mark.parametrize("ranks", [False, True])
def test_nothing_of_common_pt_is_executed(ranks, tmp_path):
    mark = tmp_path / "ran"
    args = {**megatron.ARGS, "evil": Payload(mark)}
    step = (
        megatron.save_ranks(tmp_path / "iter_0000010", 1, 1, args)
        if ranks
        else megatron.save(tmp_path / "iter_0000010", args=args)
    )
    with pytest.raises(HostileError):
        back(step, tmp_path / "out")
    assert not mark.exists()


def test_ranks_that_do_not_fit_are_refused(tmp_path):
    import shutil

    step = megatron.save_ranks(tmp_path / "iter_0000010", 2, 2)
    shutil.rmtree(step / "mp_rank_01_001")
    with pytest.raises(IncompleteError, match="rank 1 of pipeline stage 1"):
        back(step, tmp_path / "out")
    shutil.rmtree(step / "mp_rank_00_001")
    with pytest.raises(IncompleteError, match="pipeline_model_parallel_size is 2"):
        back(step, tmp_path / "out")
    (step / "mp_rank_00_001_001").mkdir()
    with pytest.raises(IncompleteError, match="mp_rank_00_001_001"):
        back(step, tmp_path / "out")


def test_a_parameter_of_which_the_division_is_not_known_is_refused(tmp_path):
    step = megatron.save_ranks(tmp_path / "iter_0000010", 2, 1)
    for rank in range(2):
        place = step / f"mp_rank_0{rank}" / "model_optim_rng.pt"
        said = torch.load(place, weights_only=False)
        said["model"]["decoder.layers.0.novel.weight"] = torch.zeros(2)
        torch.save(said, place)
    with pytest.raises(UnsupportedError, match=r"decoder\.layers\.0\.novel\.weight"):
        back(step, tmp_path / "out")


@pytest.mark.parametrize("text", ["{", "[]", ""])
def test_a_damaged_metadata_json_is_no_checkpoint_of_torch(tmp_path, text):
    step = megatron.save(tmp_path / "iter_0000010")
    (step / "metadata.json").write_text(text)
    found = wherry.detect(step)
    assert (found.format, found.verdict) == ("megatron", "corrupt")
    with pytest.raises(CorruptError, match=r"metadata\.json"):
        wherry.inspect(step)


def test_a_rotary_base_that_is_no_number_is_no_bug(tmp_path):
    """NaN is unequal to itself, so that the written config seemed to contradict a source that did not state it."""
    folder = megatron.save_ranks(tmp_path / "a", 2, 1, {**megatron.ARGS, "rotary_base": float("nan")})
    with pytest.raises(WherryError) as caught:
        wherry.plan(folder, tmp_path / "out", to="huggingface")
    assert caught.value.exit_code in (2, 7), caught.value
