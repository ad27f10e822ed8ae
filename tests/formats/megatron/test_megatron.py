"""Megatron's checkpoints, of all ranks and of experts, become Hugging Face's bit by bit, and back."""

from __future__ import annotations

import json
import math
import re
import shutil
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest

import wherry
from tests.support import megatron
from tests.support.model_systems import LLAMA_CONFIG, llama_huggingface
from tests.support.oracles.huggingface import MODELS, save
from tests.support.tiny_models import save_tiny
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


# What Megatron's arguments of latent attention and of experts mean, and what transformers does not
# compute of them.


transformers = pytest.importorskip("transformers")
load_file = pytest.importorskip("safetensors.torch").load_file

YARN = {
    "rope_type": "yarn", "rotary_scaling_factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 32.0,
    "beta_slow": 1.0,
}  # fmt: skip
ONE = 0.1 * math.log(4) + 1  # what a scale of 1 multiplies by, see megatron.core's `_yarn_get_mscale`
HALF = 0.05 * math.log(4) + 1


OWN = ("common.pt", "wherry.json", "megatron_args.json", "config.json")


@pytest.fixture(scope="module")
def step(tmp_path_factory):
    """A DeepSeek-V3 as a checkpoint of Megatron."""
    folder = tmp_path_factory.mktemp("latent")
    save("deepseek-v3-pairs", folder / "hf")
    wherry.convert(folder / "hf", folder / "step", to="megatron", lineage=False)
    return folder / "step"


def config_of(step, more, out):
    """The config that transformers gets if Megatron's arguments are others too."""
    said = torch.load(step / "common.pt", weights_only=False)
    args = Namespace(**{**vars(said["args"]), **more})
    copy = out / "step"
    copy.mkdir(parents=True)
    for file in (one for one in step.iterdir() if one.name not in OWN):
        (copy / file.name).hardlink_to(file)
    torch.save({**said, "args": args}, copy / "common.pt")
    wherry.convert(copy, out / "out", to="huggingface", family="deepseek", lineage=False)
    return json.loads((out / "out" / "config.json").read_text())


@pytest.mark.parametrize(
    ("scales", "wanted"),
    [
        ({}, (ONE, 0)),  # Megatron's defaults: 1 and 0
        ({"mscale": 1.0, "mscale_all_dim": 1.0}, (1.0, 1.0)),
        ({"mscale": 0.5, "mscale_all_dim": 1.0}, (HALF / ONE, 1.0)),
        ({"mscale": 0.5, "mscale_all_dim": 0.0}, (HALF, 0)),
        ({"mscale": 0.0, "mscale_all_dim": 0.0}, (1.0, 0)),
        ({"mscale": 0.0, "mscale_all_dim": 1.0}, (1 / ONE, 1.0)),
    ],
)
def test_the_scale_of_yarn_is_megatron_s(scales, wanted, step, tmp_path):
    config = config_of(step, {**YARN, **scales}, tmp_path)
    rope = config.get("rope_scaling") or config["rope_parameters"]
    assert (rope["attention_factor"], rope["mscale_all_dim"]) == pytest.approx(wanted)


@pytest.mark.parametrize(
    ("more", "wanted"),
    [
        ({}, (4, 2, 4, True)),
        ({"moe_router_group_topk": None}, (1, 1, 4, True)),
        ({"moe_router_group_topk": 4}, (1, 1, 4, True)),
        ({"moe_router_group_topk": None, "moe_router_topk": 1}, (1, 1, 1, False)),
    ],
)
def test_groups_of_experts_are_megatron_s(more, wanted, step, tmp_path):
    found = config_of(step, more, tmp_path)
    names = ("n_group", "topk_group", "num_experts_per_tok", "norm_topk_prob")
    assert tuple(found[name] for name in names) == wanted


@pytest.mark.parametrize(
    ("more", "match"),
    [
        ({"mscale_all_dim": 1.0}, "scaled by mscale_all_dim"),
        ({"moe_router_topk": 6}, "a group of experts is scored by"),
        ({"moe_router_topk": 2}, "a group of experts is scored by"),
        ({"norm_epsilon": 1e-5}, "always uses 1e-06"),
    ],
)
def test_what_transformers_does_not_compute_is_refused(more, match, step, tmp_path):
    with pytest.raises(UnrepresentableError, match=match):
        config_of(step, more, tmp_path)


def test_weights_that_sum_to_1_are_refused_for_v2(tmp_path):
    """Transformers reads `norm_topk_prob` of a DeepSeek-V2 and does not use it."""
    save("deepseek-v2", tmp_path / "hf")
    wherry.convert(tmp_path / "hf", tmp_path / "step", to="megatron", lineage=False)
    with pytest.raises(UnrepresentableError, match="never makes the weights"):
        config_of(tmp_path / "step", {"moe_router_pre_softmax": False}, tmp_path / "read")
    config = tmp_path / "hf" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "norm_topk_prob": True}))
    with pytest.raises(UnrepresentableError, match="sum to 1"):
        wherry.convert(tmp_path / "hf", tmp_path / "other", to="megatron", lineage=False)


def test_a_model_without_experts_has_no_weights_that_sum_to_1(tmp_path):
    """Its arguments have defaults for them, which say nothing of what it computes."""
    settings = {**MODELS["deepseek-v2"].settings, "num_hidden_layers": 1, "first_k_dense_replace": 1}
    transformers.DeepseekV2ForCausalLM(transformers.DeepseekV2Config(**settings)).save_pretrained(
        tmp_path / "hf"
    )
    wherry.convert(tmp_path / "hf", tmp_path / "step", to="megatron", lineage=False)
    wherry.convert(tmp_path / "step", tmp_path / "back", to="huggingface", family="deepseek", lineage=False)
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("hf", "back"))
    assert before.keys() == after.keys()
    assert all(before[name].equal(after[name]) for name in before)


# Expert-parallel ranks of Megatron's older checkpoints are put together; they are imitated, cut from a
# model.


pytest.importorskip("transformers")
FILE = "model_optim_rng.pt"
EXPERT = re.compile(r"(.+\.mlp\.experts)\.local_experts\.(\d+)\.(.+)\.(weight)")
LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The file of one rank of a model with experts, as a table."""
    folder = tmp_path_factory.mktemp("moe")
    save_tiny(folder / "hf", "qwen3-moe")
    wherry.convert(folder / "hf", folder / "one", to="megatron-ranks", lineage=False)
    return torch.load(folder / "one" / "mp_rank_00" / FILE, weights_only=False)


def save_ranks(whole, step, experts=2, pipeline=1, grouped=False, **said):
    """A folder for each expert-parallel rank and pipeline stage, named as `get_checkpoint_name` does."""
    model = whole["model"]
    sizes = {"expert_model_parallel_size": experts, "pipeline_model_parallel_size": pipeline}
    args = type(whole["args"])(**{**vars(whole["args"]), **sizes, **said})
    numbers = [int(match[1]) for name in model if (match := LAYER.fullmatch(name))]
    layers = (max(numbers) + 1) // pipeline
    each = len({match[2] for name in model if (match := EXPERT.fullmatch(name))}) // experts
    for stage in range(pipeline):
        for rank in range(experts):
            rows = {
                local(name, layers, each, grouped): tensor
                for name, tensor in model.items()
                if stage_of(name, layers, pipeline) == stage and rank_of(name, each) in (None, rank)
            }
            name = "mp_rank_00" + (f"_{stage:03d}" if pipeline > 1 else "")
            name += f"_{rank:03d}" if experts > 1 else ""
            (step / name).mkdir(parents=True)
            torch.save({**whole, "args": args, "model": rows}, step / name / FILE)
    return step


def stage_of(name, layers, pipeline):
    layer = LAYER.fullmatch(name)
    return int(layer[1]) // layers if layer else 0 if name.startswith("embedding") else pipeline - 1


def rank_of(name, each):
    """The rank that has an expert; None for what all ranks have."""
    expert = EXPERT.fullmatch(name)
    return int(expert[2]) // each if expert else None


def local(name, layers, each, grouped):
    """The name that a parameter has in the file of its rank."""
    expert, layer = EXPERT.fullmatch(name), LAYER.fullmatch(name)
    if expert:
        number = int(expert[2]) % each
        grouped_name = f"{expert[1]}.{expert[3]}.{expert[4]}{number}"
        name = grouped_name if grouped else f"{expert[1]}.local_experts.{number}.{expert[3]}.{expert[4]}"
    return re.sub(r"layers\.\d+", f"layers.{int(layer[1]) % layers}", name, count=1) if layer else name


def read(step):
    with wherry.open(step) as checkpoint:
        assert checkpoint.detection.format == "megatron-ranks"
        return {path[0]: checkpoint.read(path).tobytes() for path in checkpoint.manifest.tensors}


def raw(tensor):
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize(("experts", "pipeline"), [(1, 1), (2, 1), (2, 2)])
def test_ranks_are_put_together_experts(whole, experts, pipeline, grouped, tmp_path):
    step = save_ranks(whole, tmp_path / "iter_0000010", experts, pipeline, grouped)
    assert read(step) == {name: raw(tensor) for name, tensor in whole["model"].items()}


def test_it_becomes_the_model_that_it_was_made_of(whole, tmp_path):
    step = save_ranks(whole, tmp_path / "iter_0000010", grouped=True)
    save_tiny(tmp_path / "hf", "qwen3-moe")
    wherry.convert(step, tmp_path / "out", to="huggingface", family="qwen", lineage=False)
    with wherry.open(tmp_path / "hf") as wanted, wherry.open(tmp_path / "out") as found:
        assert set(found.manifest.tensors) == set(wanted.manifest.tensors)
        assert all(
            found.read(path).tobytes() == wanted.read(path).tobytes() for path in wanted.manifest.tensors
        )


def test_a_missing_rank_is_named(whole, tmp_path):
    step = save_ranks(whole, tmp_path / "iter_0000010", pipeline=2)
    shutil.rmtree(step / "mp_rank_00_000_001")
    with pytest.raises(IncompleteError, match="expert-parallel rank 1 of pipeline stage 0"):
        wherry.open(step)
    step = save_ranks(whole, tmp_path / "iter_0000020")
    shutil.rmtree(step / "mp_rank_00_001")
    with pytest.raises(IncompleteError, match="expert_model_parallel_size is 2"):
        wherry.open(step)


def changed(step, name, change):
    file = step / name / FILE
    said = torch.load(file, weights_only=False)
    change(said["model"])
    torch.save(said, file)


def test_ranks_with_other_parameters_are_corrupt(whole, tmp_path):
    step = save_ranks(whole, tmp_path / "iter_0000010")
    changed(
        step, "mp_rank_00_001", lambda model: model.pop(next(name for name in model if ".experts." in name))
    )
    with pytest.raises(CorruptError, match="expert-parallel ranks have different"):
        wherry.open(step)
    step = save_ranks(whole, tmp_path / "iter_0000020")
    changed(
        step, "mp_rank_00_001", lambda model: model.update({"decoder.final_layernorm.weight": torch.ones(3)})
    )
    with pytest.raises(CorruptError, match="expert-parallel ranks have different"):
        wherry.open(step)


def test_experts_in_one_tensor_are_refused(whole, tmp_path):
    """No name tells which experts a rank has: the first rank's would be taken for all."""
    step = save_ranks(whole, tmp_path / "iter_0000010")
    for rank in range(2):
        more = {"decoder.layers.0.mlp.experts.weight1": torch.ones(3)}
        changed(step, f"mp_rank_00_00{rank}", lambda model, more=more: model.update(more))
    with pytest.raises(UnsupportedError, match=r"mlp\.experts\.weight1"):
        wherry.open(step)


def test_experts_that_are_divided_otherwise_are_refused(whole, tmp_path):
    step = save_ranks(whole, tmp_path / "iter_0000010", num_experts=4, expert_tensor_parallel_size=2)
    with pytest.raises(UnsupportedError, match="expert_tensor_parallel_size is 2"):
        wherry.open(step)


@pytest.mark.parametrize("label", ["mixtral", "qwen3-moe", "gpt-oss"])
def test_one_expert_of_weight_one_is_refused(label, tmp_path):
    """Megatron-Core raises "Please use --moe-router-pre-softmax when topk is 1", which gives the expert its score."""
    save_tiny(tmp_path / "hf", label, num_experts_per_tok=1)
    with pytest.raises(UnrepresentableError, match="does not make the weight of a single expert 1"):
        wherry.plan(tmp_path / "hf", tmp_path / "step", to="megatron")


def test_one_expert_of_its_own_score_is_written(tmp_path):
    save_tiny(tmp_path / "hf", "qwen3-moe", num_experts_per_tok=1, norm_topk_prob=False)
    wherry.convert(tmp_path / "hf", tmp_path / "step", to="megatron", lineage=False)
    args = torch.load(tmp_path / "step" / "common.pt", weights_only=False)["args"]
    assert (args.moe_router_topk, args.moe_router_pre_softmax) == (1, True)


@pytest.mark.parametrize("label", ["stablelm", "gptneoxserial"])
def test_an_odd_number_of_rotary_elements_is_refused(label, tmp_path):
    """transformers turns a quarter of 12 elements, Megatron-Core an even number of them."""
    save_tiny(tmp_path / "hf", label, hidden_size=36, num_attention_heads=3, rope_parameters={
        "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25,
    })  # fmt: skip
    with pytest.raises(UnrepresentableError, match="an even number of a head's elements"):
        wherry.plan(tmp_path / "hf", tmp_path / "step", to="megatron")
