"""Gemma 4: local layers stacked within blocks, global layers with heads of their own, and what MaxText cannot hold."""

from __future__ import annotations

import json

import numpy as np
import pytest

import wherry
from tests.support.maxtext_trees import tensors, to_maxtext
from tests.support.tiny_models import save_tiny
from wherry.errors import UnrepresentableError
from wherry.layout.expr import evaluate

pytest.importorskip("transformers")
pytest.importorskip("torch")


def require_back(source, there, tmp_path):
    """Bit-equal, but for the embedding, whose scale sqrt(32) rounds."""
    wherry.convert(there, tmp_path / "back", to="huggingface", lineage=False)
    wanted, found = tensors(source), tensors(tmp_path / "back")
    assert found.keys() == wanted.keys()
    table = "model.embed_tokens.weight"
    np.testing.assert_allclose(found.pop(table), wanted.pop(table), rtol=2**-22)
    assert all(np.array_equal(found[name], wanted[name]) for name in wanted)


def test_local_layers_are_stacked_within_their_block(tmp_path):
    source = save_tiny(tmp_path / "hf", "gemma4-experts", drawn=True, num_hidden_layers=12)
    config = to_maxtext(source, tmp_path / "out")
    assert config["model_name"] == "gemma4-26b"
    assert config["share_kv_projections"] is True
    assert (config["global_head_dim"], config["global_num_kv_heads"]) == (32, 1)
    wanted, found = tensors(source), tensors(tmp_path / "out")
    root = "params/params/decoder/scanned_blocks"
    for number in range(12):
        block, place = divmod(number, 6)
        up = wanted[f"model.layers.{number}.experts.gate_up_proj"][:, 24:].transpose(0, 2, 1)
        experts = "mlp/moe_block/MoeBlock_0/wi_1"
        there = (
            found[f"{root}/local_layers/{experts}"][:, block, place]
            if place < 5
            else found[f"{root}/global_layer/{experts}"][:, block]
        )
        np.testing.assert_array_equal(there, up)
    require_back(source, tmp_path / "out", tmp_path)


def test_a_dense_model_has_values_in_every_layer(tmp_path):
    source = save_tiny(tmp_path / "hf", "gemma4", drawn=True)
    config = to_maxtext(source, tmp_path / "out")
    assert config["model_name"] == "gemma4-31b"
    assert config["share_kv_projections"] is False
    require_back(source, tmp_path / "out", tmp_path)


def test_global_heads_as_released_configs_state_them(tmp_path):
    """They have two attributes where transformers 5 writes a table of single layers."""
    source = save_tiny(tmp_path / "hf", "gemma4-experts")
    file = source / "config.json"
    stated = json.loads(file.read_text())
    assert stated.pop("per_layer_config") == {"5": {"head_dim": 32, "num_key_value_heads": 1}}
    file.write_text(json.dumps({**stated, "global_head_dim": 32, "num_global_key_value_heads": 1}))
    config = to_maxtext(source, tmp_path / "out")
    assert (config["global_head_dim"], config["global_num_kv_heads"]) == (32, 1)


@pytest.mark.parametrize(("settings", "reason"), [
    ({"num_kv_shared_layers": 1, "num_hidden_layers": 12}, "the last layers have no keys and values of their own"),
    ({"num_hidden_layers": 8}, "local and global layers are not in blocks of six"),
    ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention is 'all' .* but maxtext always uses False"),
    ({"rms_norm_eps": 1e-5}, "(rms_norm_eps|norm_eps) is 1e-05 .* but maxtext always uses 1e-06"),
])  # fmt: skip
def test_what_maxtext_does_not_compute_is_refused_by_name(settings, reason, tmp_path):
    source = save_tiny(tmp_path / "hf", "gemma4", **settings)
    with pytest.raises(UnrepresentableError, match=reason):
        wherry.plan(source, tmp_path / "out", to="maxtext")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("overrides", [
    {"0": {"head_dim": 8}},
    {"1": {"head_dim": 8}, "3": {"head_dim": 16}},
    {"1": {"head_dim": 8}},
    {"1": {"head_dim": 8}, "2": {"head_dim": 8}, "3": {"head_dim": 8}},
])  # fmt: skip
def test_attributes_of_single_layers_are_those_of_all_global_ones(overrides):
    kinds = ["sliding_attention", "full_attention"] * 2
    expression = "override(overrides, kinds, 'full_attention', 'head_dim')"
    with pytest.raises(UnrepresentableError, match="unsupported attributes of single layers"):
        evaluate(expression, {"overrides": overrides, "kinds": kinds})
    same = {"1": {"head_dim": 8}, "3": {"head_dim": 8}}
    assert evaluate(expression, {"overrides": same, "kinds": kinds}) == 8
