"""Layers that are no multiple of a family's block: carried where the target can, else refused with the reason.

MaxText runs gpt-oss and OLMo 3 with layers one by one (`scan_layers=false`) whatever their number is; its scan takes
blocks. Its layer of Gemma 2 is a pair of layers.
"""

from __future__ import annotations

import pytest
import yaml

import wherry
from tests.support.command import typed
from tests.support.oracles import files, huggingface, judge, maxtext
from tests.support.oracles.cases import leaves_of
from tests.support.oracles.huggingface import TOKENS
from tests.support.tiny_models import save_tiny
from wherry.errors import UnrepresentableError

pytest.importorskip("transformers")
pytest.importorskip("orbax.checkpoint")

LAYERS = [("gpt-oss", 3), ("gpt-oss", 1), ("olmo3", 3), ("olmo3", 5)]


def saved(folder, label, layers):
    save_tiny(folder, label, drawn=True, num_hidden_layers=layers)
    return folder


@pytest.mark.parametrize(("label", "layers"), LAYERS)
def test_maxtext_computes_the_model_with_layers_one_by_one(label, layers, tmp_path, capfd):
    source = saved(tmp_path / "hf", label, layers)
    line = "convert HOME/hf HOME/there --to maxtext"
    code, text = typed(line, tmp_path, capfd)
    assert (code, "--set scan_layers=false" in text) == (7, True), text
    code, text = typed(f"{line} --set scan_layers=false", tmp_path, capfd)
    assert code == 0, text
    config = yaml.safe_load((tmp_path / "there/items/assets/maxtext_config.yml").read_text())
    assert config["base_num_decoder_layers"] == layers
    leaves = leaves_of(files.arrays("maxtext", tmp_path / "there"), config)
    found = maxtext.logits(leaves, config, TOKENS)
    leaves.require_all_taken()
    judge.require_equal(found, huggingface.logits(source))
    wherry.convert(tmp_path / "there", tmp_path / "back", to="huggingface")
    assert wherry.verify(tmp_path / "back", level="roundtrip", against=source).ok
    judge.require_equal(huggingface.logits(tmp_path / "back"), huggingface.logits(source))


@pytest.mark.parametrize("to", ["megatron", "torchtitan"])
def test_targets_without_blocks_take_any_number(to, tmp_path):
    source = saved(tmp_path / "hf", "gpt-oss", 3)
    wherry.convert(source, tmp_path / "there", to=to)
    wherry.convert(tmp_path / "there", tmp_path / "back", to="huggingface")
    judge.require_equal(huggingface.logits(tmp_path / "back"), huggingface.logits(source))


def test_a_layer_of_two_is_no_place_for_three(tmp_path):
    source = saved(tmp_path / "hf", "gemma2", 3)
    with pytest.raises(
        UnrepresentableError, match="its layer is a pair of layers, and the number of layers is odd"
    ):
        wherry.convert(source, tmp_path / "there", to="maxtext")
    wherry.convert(source, tmp_path / "narrow", to="huggingface", dtype="bf16")


def test_a_config_that_is_right_is_not_to_be_corrected(tmp_path):
    save_tiny(tmp_path / "hf", "gemma4", num_hidden_layers=7)
    with pytest.raises(UnrepresentableError) as caught:
        wherry.convert(tmp_path / "hf", tmp_path / "there", to="maxtext")
    assert "correct the config" not in str(caught.value)


def test_a_model_of_dense_layers_has_no_router(tmp_path):
    source = saved(tmp_path / "hf", "glm4moe", 1)
    with pytest.raises(UnrepresentableError, match="every layer of this model is dense") as caught:
        wherry.convert(source, tmp_path / "there", to="megatron")
    assert "megatron_args.json" not in str(caught.value)
