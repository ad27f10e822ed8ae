"""transformers computes from Gemma's own release, as wherry converts it, what its library's definition computes."""

from __future__ import annotations

import json

import pytest

import wherry
from tests.support.command import command
from tests.support.oracles import deepmind, huggingface, judge
from tests.support.oracles.cases import DEEPMIND, DEEPMIND_DOCUMENTED
from tests.support.oracles.huggingface import MODELS, TOKENS
from tests.support.oracles.leaves import Invented
from wherry.core.request import LayoutRequest
from wherry.errors import MismatchError, UnrepresentableError

pytest.importorskip("transformers")
pytest.importorskip("orbax.checkpoint")


def released(folder, config, tree="flat"):
    """A checkpoint of the release, and the logits of its model."""
    invented = Invented()
    expected = deepmind.logits(invented, config, TOKENS)
    return deepmind.save(folder, invented.arrays, tree), expected


@pytest.mark.parametrize("tree", ["flat", "nested", "split"])
@pytest.mark.parametrize("label", DEEPMIND)
def test_transformers_computes_what_the_release_computed(label, tree, tmp_path):
    model, config = DEEPMIND[label]
    source, expected = released(tmp_path / "release", config, tree)
    stated = tmp_path / "config.json"
    of_model = json.loads((judge.source(model) / "config.json").read_text())
    stated.write_text(json.dumps({**of_model, "num_key_value_heads": config["num_kv_heads"]}))
    layout = LayoutRequest(family=MODELS[model].family, config=str(stated))
    wherry.convert(source, tmp_path / "out", to="huggingface", layout=layout, lineage=False)
    judge.require_equal(huggingface.logits(tmp_path / "out"), expected)


@pytest.mark.parametrize("label", DEEPMIND_DOCUMENTED)
def test_what_no_config_states_is_what_the_library_has_for_the_model(label, tmp_path):
    family, config = DEEPMIND_DOCUMENTED[label]
    source, expected = released(tmp_path / "release", config)
    receipt = wherry.convert(
        source, tmp_path / "out", to="huggingface", layout=LayoutRequest(family=family), lineage=False
    )
    judge.require_equal(huggingface.logits(tmp_path / "out"), expected)
    assert any("documented values" in one for one in receipt.warnings) == (family != "gemma")


def test_the_user_must_state_the_facts_of_a_model_that_was_not_released(tmp_path):
    _model, config = DEEPMIND["gemma2"]
    source, _expected = released(tmp_path / "release", config)
    words = ("convert", source, tmp_path / "out", "--to", "huggingface", "--family", "gemma2")
    refused = command(*words)
    assert refused.returncode == 2
    assert "query_pre_attn_scalar (number" in refused.stderr
    done = command(*words, "--set", "query_pre_attn_scalar=16")
    assert done.returncode == 0, done.stderr


def test_layers_of_a_remainder_require_the_config(tmp_path):
    _model, config = DEEPMIND["gemma3"]
    source, _expected = released(tmp_path / "release", config)
    with pytest.raises(UnrepresentableError, match="the sizes do not decide") as refused:
        wherry.convert(
            source, tmp_path / "out", to="huggingface", layout=LayoutRequest(family="gemma3"), lineage=False
        )
    assert "config" in str(refused.value.cure)


def test_a_config_of_another_model_is_refused(tmp_path):
    _model, config = DEEPMIND["gemma"]
    source, _expected = released(tmp_path / "release", config)
    stated = json.loads((judge.source("gemma") / "config.json").read_text())
    for change, error in (
        ({"model_type": "gemma2"}, UnrepresentableError),
        ({"hidden_act": "silu"}, UnrepresentableError),
        ({"intermediate_size": 52}, MismatchError),
    ):
        (tmp_path / "config.json").write_text(json.dumps({**stated, **change}))
        layout = LayoutRequest(family="gemma", config=str(tmp_path / "config.json"))
        with pytest.raises(error):
            wherry.convert(source, tmp_path / "out", to="huggingface", layout=layout, lineage=False)


def test_entries_beyond_the_vocabulary_are_padding(tmp_path):
    """As released: 256128 rows, of which the model of transformers has 256000."""
    _model, config = DEEPMIND["gemma"]
    source, expected = released(tmp_path / "release", {**config, "num_embed": 64})
    layout = LayoutRequest(family="gemma", config=str(judge.source("gemma") / "config.json"))
    receipt = wherry.convert(source, tmp_path / "out", to="huggingface", layout=layout, lineage=False)
    judge.require_equal(huggingface.logits(tmp_path / "out"), expected[..., :60])
    assert any("the last 4 are padding" in one for one in receipt.warnings)


@pytest.mark.parametrize("tree", ["flat", "nested"])
def test_a_container_keeps_the_layout_of_the_release(tree, tmp_path):
    """With another element type: the names, and which axis of the gate comes first, are the source's."""
    _model, config = DEEPMIND["gemma-transposed"]
    source, _expected = released(tmp_path / "release", config, tree)
    layout = LayoutRequest(family="gemma", dtype="bfloat16")
    wherry.convert(source, tmp_path / "out", to="orbax", layout=layout, lineage=False)
    with wherry.open(source) as before, wherry.open(tmp_path / "out") as after:
        shapes = [
            {path: spec.shape for path, spec in one.manifest.tensors.items()} for one in (before, after)
        ]
    assert shapes[0] == shapes[1]


def test_images_are_left_behind_by_name(tmp_path):
    _model, config = DEEPMIND["gemma3"]
    invented = Invented()
    deepmind.logits(invented, config, TOKENS)
    tower = {
        "vision_encoder/siglip_encoder/Transformer/encoderblock_0/LayerNorm_0/scale": invented("a", 8),
        "embedder/mm_soft_embedding_norm/scale": invented("b", 8),
        "embedder/mm_input_projection/w": invented("c", 8, 64),
    }
    whole = {name: one for name, one in invented.arrays.items() if name not in "abc"}
    source = deepmind.save(
        tmp_path / "release", {**whole, **{name: one.astype("f4") for name, one in tower.items()}}, "nested"
    )
    config_file = judge.source("gemma3") / "config.json"
    words = (
        "convert",
        source,
        tmp_path / "out",
        "--to",
        "huggingface",
        "--family",
        "gemma3",
        "--config",
        config_file,
    )
    refused = command(*words)
    assert refused.returncode == 7
    assert "vision tower" in refused.stderr
    done = command(*words, "--ignore", "others")
    assert done.returncode == 0, done.stderr


def test_adapters_of_the_library_are_refused_by_name(tmp_path):
    _model, config = DEEPMIND["gemma"]
    invented = Invented()
    deepmind.logits(invented, config, TOKENS)
    lora = {
        "layer_0/attn/_LoRAEinsum_0/lora/a": invented("a", 64, 4).astype("f4"),
        "layer_0/attn/_LoRAEinsum_0/lora/b": invented("b", 4, 4, 16).astype("f4"),
    }
    whole = {name: one for name, one in invented.arrays.items() if name not in "ab"}
    source = deepmind.save(tmp_path / "release", {**whole, **lora}, "nested")
    refused = command("convert", source, tmp_path / "out", "--to", "huggingface", "--family", "gemma")
    assert refused.returncode == 7
    assert "LoRA" in refused.stderr
