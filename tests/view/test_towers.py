"""Models with images: tensors outside the text model keep their names, and are left out only on request."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import yaml

import wherry
from tests.support.oracles import files, judge, maxtext
from tests.support.oracles.cases import MODEL_NAMES, leaves_of
from tests.support.oracles.huggingface import MODELS, TOKENS, logits
from wherry.core.request import LayoutRequest
from wherry.errors import UnrepresentableError

transformers = pytest.importorskip("transformers")
torch = pytest.importorskip("torch")

_EYE = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
        "patch_size": 14}  # fmt: skip
_TEXT = {"vocab_size": 160, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2,
         "intermediate_size": 48, "num_hidden_layers": 2, "max_position_embeddings": 64, "bos_token_id": 1,
         "eos_token_id": 2}  # fmt: skip
_GEMMA4_EYE = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
               "num_key_value_heads": 2, "head_dim": 8, "patch_size": 4, "position_embedding_size": 16}  # fmt: skip
# The tower of Llama 4 folds four patches into one, and gives its projector what it has.
_LLAMA4_EYE = {**_EYE, "intermediate_size": 64, "vision_output_dim": 8, "projector_input_dim": 8, "image_size": 8,
               "patch_size": 4, "projector_output_dim": 8, "pixel_shuffle_ratio": 0.5}  # fmt: skip
# Class → the arguments of its config, and how the names of the tensors outside the text model begin.
CLASSES = {
    "Gemma3": ({"text_config": MODELS["gemma3"].settings, "vision_config": _EYE, "mm_tokens_per_image": 4},
               ("vision_tower.", "multi_modal_projector.")),
    "Gemma4": ({"text_config": MODELS["gemma4"].settings, "vision_config": _GEMMA4_EYE, "audio_config": None},
               ("model.vision_tower.", "model.embed_vision.")),
    "Llama4": ({"text_config": MODELS["llama4-scout"].settings, "vision_config": _LLAMA4_EYE},
               ("vision_model.", "multi_modal_projector.")),
    "Qwen2VL": (
        {"text_config": _TEXT,
         "vision_config": {"depth": 1, "embed_dim": 16, "hidden_size": 32, "num_heads": 2}},
        ("visual.",),
    ),
}  # fmt: skip

# Classes of which MaxText has the text model.
TEXTS = {"Gemma3": "gemma3", "Gemma4": "gemma4", "Llama4": "llama4-scout"}


@pytest.fixture(scope="module", params=list(CLASSES))
def saved(request, tmp_path_factory):
    """A tiny random model of a class with images, as it saves itself."""
    return save(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module", params=list(TEXTS))
def text(request, tmp_path_factory):
    """The same of those of which MaxText has the text model, and the class."""
    return save(request.param, tmp_path_factory.mktemp(request.param)), request.param


def save(name: str, folder: Path) -> Path:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**CLASSES[name][0])
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.15)
    model.save_pretrained(folder)
    return folder


def tensors(folder: Path) -> dict[str, np.ndarray]:
    with wherry.open(folder) as checkpoint:
        return {"/".join(path): checkpoint.read(path) for path in checkpoint.manifest.tensors}


def outside_text(found: dict[str, np.ndarray], name: str) -> dict[str, np.ndarray]:
    return {key: one for key, one in found.items() if key.startswith(CLASSES[name][1])}


def require_same(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> None:
    assert found.keys() == wanted.keys()
    assert all(
        np.array_equal(found[key], wanted[key]) and found[key].dtype == wanted[key].dtype for key in wanted
    )


@pytest.mark.parametrize("to", ["huggingface", "dcp", "torch-zip", "safetensors", "orbax"])
def test_every_tensor_arrives_under_its_name(saved, to, tmp_path):
    wherry.convert(saved, tmp_path / "out", to=to, lineage=False)
    require_same(tensors(tmp_path / "out"), tensors(saved))


def test_a_layout_within_the_system_carries_the_towers(text, tmp_path):
    """With a data type the text model is laid out, the towers stay; transformers finds every weight."""
    source, name = text
    layout = LayoutRequest(dtype="bfloat16")
    wherry.convert(source, tmp_path / "out", to="huggingface", layout=layout, lineage=False)
    wanted, found = tensors(source), tensors(tmp_path / "out")
    assert found.keys() == wanted.keys()
    assert len(outside_text(wanted, name)) > 15
    require_same(outside_text(found, name), outside_text(wanted, name))
    assert {found[key].dtype.name for key in found.keys() - outside_text(found, name).keys()} == {"bfloat16"}
    logits(tmp_path / "out")


def test_a_system_without_towers_gets_the_text_model_only_on_request(text, tmp_path):
    with pytest.raises(UnrepresentableError, match=r"left out: .*\d+ vision tower weights") as caught:
        wherry.convert(text[0], tmp_path / "out", to="maxtext", lineage=False)
    assert "--ignore others" in caught.value.cure
    assert "projector weight" in caught.value.what
    assert not (tmp_path / "out").exists()


def test_maxtext_computes_from_the_text_model_what_transformers_computed(text, tmp_path):
    (source, name), target = text, tmp_path / "out"
    plan = wherry.plan(source, target, to="maxtext", ignore=["others"])
    left = {one.name for one in plan.ignored if one.weights}
    assert left == outside_text(tensors(source), name).keys()
    wherry.convert(source, target, to="maxtext", ignore=["others"], lineage=False)
    config = yaml.safe_load((target / "items" / "assets" / "maxtext_config.yml").read_text())
    leaves = leaves_of(files.arrays("maxtext", target), config)
    found = maxtext.logits(leaves, {**MODEL_NAMES.get(TEXTS[name], {}), **config}, TOKENS)
    judge.require_equal(found, logits(source))
