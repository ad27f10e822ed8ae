"""transformers 5 has other names in memory than in its files: either form of a model gives the same in every system."""

from __future__ import annotations

import json

import pytest

import wherry
from tests.support.command import command
from tests.support.families import carried, same
from tests.support.tiny_models import MODELS, model_type, tiny_model
from wherry.families import convert_layout, family_of_config, load_family, load_family_file
from wherry.tree.memory_names import memory_name, memory_names

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


@pytest.mark.parametrize("label", MODELS)
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


def read(folder, family, target):
    with wherry.open(folder) as checkpoint:
        config = json.loads((folder / "config.json").read_text())
        there = convert_layout(checkpoint.manifest, family, "huggingface", target, config=config)
        return carried(there, checkpoint.read).tensors


def refusal(folder, family, target):
    """Why a target cannot hold the model; None if it can."""
    try:
        read(folder, family, target)
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
        wanted = read(tmp_path / "saved", family, target)
        assert same(read(tmp_path / "memory", family, target), wanted)


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
