"""Names of models in configs, and names of tensors in memory."""

from __future__ import annotations

import json
import tomllib

import pytest

import wherry
from tests.support.command import command
from tests.support.families import carried, same
from tests.support.generations import ROOT
from tests.support.tiny_models import MODELS as MODELS_OF_NAMES
from tests.support.tiny_models import model_type, tiny_model
from wherry.errors import UnrepresentableError, UsageError
from wherry.families import (
    convert_layout,
    families_of_system,
    family_of_config,
    load_family,
    load_family_file,
)
from wherry.families.companions import config_file, config_system
from wherry.families.facts import tell
from wherry.layout.memory_names import memory_name, memory_names
from wherry.transform.overview import models_without_layouts

MODELS = tomllib.loads((ROOT / "wherry/families/tables/maxtext_models.toml").read_text(encoding="utf-8"))
NAMED = [name for rows in MODELS.values() for name, values in rows.items() if values]
BARE = {"base_config": "base.yml", "model_name": "deepseek3-671b"}


def read(folder, config, name="run.yml"):
    path = folder / name
    path.write_text(json.dumps(config))  # JSON is YAML too
    return config_file(str(path))


def facts(config, family):
    return tell(load_family(family).system("maxtext"), config).facts


@pytest.mark.parametrize("name", ["run.yml", "run.json"])
def test_a_bare_config_means_the_file_of_its_model(tmp_path, name):
    """By base.yml the routing would be softmax's, 1 expert for each token, unscaled, and positions unscaled."""
    config = read(tmp_path, BARE, name)
    family = load_family("deepseek")
    assert config_system(config, family.systems.values()) is family.system("maxtext")
    found = facts(config, "deepseek")
    assert (found["experts_per_token"], found["routing_score"], found["routed_scaling"]) == (
        8,
        "sigmoid",
        2.5,
    )
    assert found["rope_scaling"]["rope_type"] == "yarn"
    assert found["norm_eps"] == 1e-6


@pytest.mark.parametrize(("model", "family", "wanted"), [
    ("llama3.1-8b-Instruct", "llama", {"rope_theta": 500_000}),
    ("mistral-7b", "mistral", {"rope_theta": 1_000_000}),
    ("mixtral-8x7b", "mixtral", {"experts_per_token": 2}),
    ("qwen3-30b-a3b", "qwen", {"experts_per_token": 8, "norm_eps": 1e-6}),
    ("gemma4-26b", "gemma4", {"experts_per_token": 8, "final_softcap": 30.0, "rope_theta": 1_000_000}),
    ("gemma4-31b", "gemma4", {"experts_per_token": None, "sliding_window": 1024, "local_rope_theta": 10_000}),
    ("gemma4-e2b", "gemma4-small", {"final_softcap": 30.0, "sliding_window": 512, "rope_theta": 1_000_000}),
    ("gemma4-e4b", "gemma4-small", {"local_rope_theta": 10_000, "activation": "gelu_pytorch_tanh"}),
    ("llama4-17b-16e", "llama4", {"unrotated_every": 4, "norms_of_heads": True, "chunk_size": 8192}),
    ("llama4-17b-128e", "llama4", {"norms_of_heads": False, "rope_scaling": {"rope_type": "default"}}),
    ("gemma-2b", "gemma", {"activation": "gelu_pytorch_tanh"}),
    ("gemma2-9b", "gemma2", {"final_softcap": 30.0, "attention_softcap": 50.0, "sliding_window": 4096}),
    ("gemma3-27b", "gemma3", {"local_rope_theta": 10_000, "query_pre_attn_scalar": 5376 // 32}),
])  # fmt: skip
def test_every_family_s_models_are_known(tmp_path, model, family, wanted):
    found = facts(read(tmp_path, {"base_config": "base.yml", "model_name": model}), family)
    assert {name: found.get(name) for name in wanted} == wanted


def test_an_unknown_model_requires_its_own_file(tmp_path):
    with pytest.raises(UsageError, match=r"unknown model 'deepseek9'.*routed_score_func") as caught:
        read(tmp_path, {**BARE, "model_name": "deepseek9", "base_emb_dim": 32, "decoder_block": "deepseek"})
    assert "--config configs/models/deepseek9.yml" in caught.value.for_shell()
    whole = read(tmp_path, {**BARE, "decoder_block": "deepseek"})
    named = {
        **whole,
        "model_name": "deepseek9",
        **dict.fromkeys(("n_routing_groups", "topk_routing_group"), -1),
    }
    named |= {"use_indexer": False, "mhc_expansion_rate": 1, "beta_slow": 1}
    assert read(tmp_path, named) == named


def test_a_value_that_maxtext_would_replace_is_refused(tmp_path):
    changed = {**BARE, "rope_factor": 4}
    with pytest.raises(
        UsageError, match="rope_factor: 4, but the file of its model deepseek3-671b states 40"
    ):
        read(tmp_path, changed)
    overridden = read(tmp_path, {**changed, "override_model_config": True})
    assert facts(overridden, "deepseek")["rope_scaling"]["factor"] == 4
    whole = {**read(tmp_path, BARE), "rope_factor": 4}  # as MaxText logs it
    assert read(tmp_path, whole) == whole


def test_the_file_of_a_model_has_its_name_and_else_base_yml(tmp_path):
    found = read(tmp_path, {"decoder_block": "llama2", "base_emb_dim": 12}, "llama3.1-custom.yml")
    assert found["model_name"] == "llama3.1-custom"
    assert facts(found, "llama")["norm_eps"] == 1e-5


def test_other_systems_configs_and_the_default_model_are_unchanged(tmp_path):
    for config in (
        {"model_type": "llama", "model_name": "custom", "hidden_size": 12},
        {"base_config": "base.yml", "model_name": "default", "base_emb_dim": 12},
    ):
        assert read(tmp_path, config) == config


def holds(family, config):
    """Whether a family holds what a config of MaxText says; extents that are no integers are of another block."""
    try:
        return facts(config, family) is not None
    except (UnrepresentableError, UsageError):
        return False


@pytest.mark.parametrize("name", NAMED)
def test_every_model_is_held_by_a_family_or_named_with_a_reason(tmp_path, name):
    config = read(tmp_path, {"base_config": "base.yml", "model_name": name})
    holding = [family for family in families_of_system("maxtext") if holds(family, config)]
    assert bool(holding) != (name in models_without_layouts()), holding


def test_names_with_a_reason_are_no_others():
    files = {name for rows in MODELS.values() for name in rows}
    fileless = {"deepseek3-671b-lineage", "maxtext-omni-gemma3-qwen3", "qwen3.5-35b-fp8"}
    assert set(models_without_layouts()) <= files | fileless


# transformers 5 has other names in memory than in its files: either form of a model gives the same in
# every system.


transformers = pytest.importorskip("transformers")
torch = pytest.importorskip("torch")
safetensors = pytest.importorskip("safetensors.torch")

# Models whose names in memory differ, with what every system of their families needs.
DIFFERENT = ("mixtral", "qwen3-moe", "deepseek-v3", "deepseek-v3.2", "deepseek-v3-no-dense", "qwen2moe", "qwen3next",
             "gptneox", "gptneoxserial", "glm4moe", "glm4moe-air")  # fmt: skip
FAMILIES = {"mixtral": "mixtral", "qwen3-moe": "qwen", "deepseek-v3": "deepseek", "gptneox": "gpt-neox"}
MORE = {"qwen3-moe": {"num_experts_per_tok": 2}}  # it has four of them

VISION = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 16, "patch_size": 4,
    "intermediate_size": 24,
}  # fmt: skip
TEXT = {
    "vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
    "intermediate_size": 24, "head_dim": 8,
}  # fmt: skip
TOWER = {"text_config": TEXT, "vision_config": VISION}
ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
SIGHT = {"depth": 1, "embed_dim": 16, "hidden_size": 16, "num_heads": 2, "patch_size": 2, "intermediate_size": 24,
         "out_hidden_size": 16, "fullatt_block_indexes": [0]}  # fmt: skip
QWEN_VL = {"text_config": {**TEXT, "rope_parameters": ROPE}, "vision_config": SIGHT}

# Class → settings of its config, of the models of the table that no family of wherry declares.
CLASSES = {
    "ViTForImageClassification": VISION,
    "DeiTForImageClassification": VISION,
    "BeitForImageClassification": VISION,
    "IJepaForImageClassification": VISION,
    "ViTMAEForPreTraining": {
        **VISION, "decoder_hidden_size": 16, "decoder_num_hidden_layers": 1, "decoder_num_attention_heads": 2,
        "decoder_intermediate_size": 24,
    },
    "VivitForVideoClassification": {**VISION, "patch_size": None, "num_frames": 4, "tubelet_size": [2, 4, 4]},
    "ASTForAudioClassification": {**VISION, "image_size": None, "num_mel_bins": 16, "max_length": 32},
    "Dinov2ForImageClassification": VISION,
    "Dinov2WithRegistersForImageClassification": VISION,
    "SwinForImageClassification": {
        "image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2], "window_size": 2,
    },
    "Gemma3ForConditionalGeneration": TOWER,
    "LlavaForConditionalGeneration": TOWER,
    "Mistral3ForConditionalGeneration": TOWER,
    "Qwen2VLForConditionalGeneration": QWEN_VL,
    "Qwen2_5_VLForConditionalGeneration": QWEN_VL,
}  # fmt: skip


def vision_model(name):
    """A tiny model of a class."""
    kind = getattr(transformers, name)
    torch.manual_seed(0)
    settings = {key: value for key, value in CLASSES[name].items() if value is not None}
    return kind(kind.config_class(**settings))


def published(model, folder):
    """The names and shapes of a model's tensors in its files."""
    model.save_pretrained(folder)
    tensors = safetensors.load_file(folder / "model.safetensors")
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


@pytest.mark.parametrize("label", MODELS_OF_NAMES)
def test_the_models_with_other_names_in_memory_are_those_of_the_table(label, tmp_path):
    model = tiny_model(label)
    tied = set(model.all_tied_weights_keys)
    saved = set(published(model, tmp_path / "saved")) - tied
    assert (saved != set(model.state_dict()) - tied) == (label in DIFFERENT)


@pytest.mark.parametrize("name", CLASSES)
def test_the_table_names_modules_as_transformers_does(name, tmp_path):
    model = vision_model(name)
    kind, tied = model.config.model_type, set(model.all_tied_weights_keys)
    saved, memory = set(published(model, tmp_path / "saved")) - tied, set(model.state_dict()) - tied
    assert saved != memory
    assert {memory_name(kind, one) for one in saved} - tied == memory
    assert {memory_name(kind, one) for one in memory} == memory


def test_every_row_of_the_table_is_compared_with_a_model():
    kinds = {vision_model(name).config.model_type for name in CLASSES}
    kinds |= {tiny_model(label).config.model_type for label in DIFFERENT}
    assert kinds >= set(memory_names()) - {"deepseek_v2"}  # which is as deepseek_v3


def pairs():
    for label in DIFFERENT:
        family = load_family(family_of_config({"model_type": model_type(label)}))
        for target in family.systems:
            yield pytest.param(label, target, id=f"{label}-{target}")


def read_of_names(folder, family, target):
    with wherry.open(folder) as checkpoint:
        config = json.loads((folder / "config.json").read_text())
        there = convert_layout(checkpoint.manifest, family, "huggingface", target, config=config)
        return carried(there, checkpoint.read).tensors


def refusal(folder, family, target):
    """Why a target cannot hold the model; None if it can."""
    try:
        read_of_names(folder, family, target)
    except wherry.WherryError as error:
        return error.what.replace(str(folder), "")
    return None


@pytest.mark.parametrize(("label", "target"), list(pairs()))
def test_either_form_gives_the_same_in_every_system(label, target, tmp_path):
    model = tiny_model(label, drawn=True)
    model.save_pretrained(tmp_path / "saved")
    family = load_family(family_of_config(json.loads((tmp_path / "saved" / "config.json").read_text())))
    model.save_pretrained(tmp_path / "memory", save_original_format=False)
    reasons = [refusal(tmp_path / name, family, target) for name in ("saved", "memory")]
    assert reasons[0] == reasons[1]
    if reasons[0] is None:
        wanted = read_of_names(tmp_path / "saved", family, target)
        assert same(read_of_names(tmp_path / "memory", family, target), wanted)


def test_a_family_file_that_renames_one_of_the_merged_rows_has_no_row_in_memory_of_them(tmp_path):
    file = tmp_path / "custom.toml"
    file.write_text(
        'extends = "qwen"\nname = "custom"\n[systems.huggingface.layouts]\n'
        'expert_up = ["model.layers.{layer}.mlp.experts.{expert}.other.weight", "expert_ffn embed"]\n'
    )
    rows = load_family_file(str(file)).system("huggingface").layouts
    assert [row.parameters for row in rows if row.key.startswith("<memory>")] == [("expert_down",)]


@pytest.mark.parametrize("label", FAMILIES)
@pytest.mark.parametrize("container", ["folder", "pt"])
def test_a_state_in_memory_becomes_a_folder_that_transformers_loads(label, container, tmp_path):
    model = tiny_model(label, drawn=True, **MORE.get(label, {})).eval()
    source, config = tmp_path / "source", tmp_path / "config"
    model.config.save_pretrained(config)
    if container == "pt":
        source = tmp_path / "state.pt"
        torch.save(model.state_dict(), source)
    else:
        model.save_pretrained(source, save_original_format=False)
    done = command(
        "convert", source, tmp_path / "out", "--to", "huggingface", "--family", FAMILIES[label],
        "--config", config / "config.json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    model.save_pretrained(tmp_path / "saved")
    wanted = safetensors.load_file(tmp_path / "saved" / "model.safetensors")
    found = safetensors.load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    again, info = type(model).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values())
    tokens = torch.arange(12)[None]
    assert torch.equal(again.eval()(tokens).logits, model(tokens).logits)


def test_a_target_has_the_names_in_memory_if_the_user_asks(tmp_path):
    model = tiny_model("qwen3-moe", drawn=True)
    model.save_pretrained(tmp_path / "saved")
    done = command(
        "convert", tmp_path / "saved", tmp_path / "out", "--to", "huggingface", "--set", "names=memory"
    )
    assert done.returncode == 0, done.stderr
    found = safetensors.load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == model.state_dict().keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in model.state_dict().items())
