"""What Megatron's arguments of latent attention and of experts mean, and what transformers does not compute of them."""

from __future__ import annotations

import json
import math
from argparse import Namespace

import pytest

import wherry
from tests.support.oracles.huggingface import MODELS, save
from wherry.errors import UnrepresentableError

torch = pytest.importorskip("torch")
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
