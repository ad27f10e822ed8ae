"""Gemma 4 E2B and E4B: embeddings of single layers, keys and values of earlier ones, and what MaxText cannot hold."""

from __future__ import annotations

import json

import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file, save_file

import wherry
from tests.support.maxtext_trees import tensors, to_maxtext
from tests.support.tiny_models import save_tiny
from wherry.core.request import LayoutRequest
from wherry.errors import IncompleteError, UnrepresentableError
from wherry.families import family_of_config

pytest.importorskip("transformers")
pytest.importorskip("torch")
LAYERS = "params/params/decoder/layers_"


def stated(folder):
    return json.loads((folder / "config.json").read_text())


def state(folder, **changes):
    (folder / "config.json").write_text(json.dumps({**stated(folder), **changes}))


@pytest.mark.parametrize(
    ("label", "layers", "owners", "wide"), [("gemma4-e2b", 15, 10, 2), ("gemma4-e4b", 12, 6, 1)]
)
def test_there_and_back(tmp_path, label, layers, owners, wide):
    """Bit-equal, but for the embedding, whose scale sqrt(32) rounds."""
    source = save_tiny(tmp_path / "hf", label, drawn=True)
    config = to_maxtext(source, tmp_path / "there")
    assert (config["model_name"], config["use_double_wide_mlp"]) == (label, wide == 2)
    assert (config["num_kv_shared_layers"], config["scan_layers"]) == (layers - owners, False)
    found = tensors(tmp_path / "there")
    with_keys = {number for number in range(layers) if f"{LAYERS}{number}/self_attention/key/kernel" in found}
    assert with_keys == set(range(owners))
    widths = [found[f"{LAYERS}{number}/mlp/wi_0/kernel"].shape for number in range(layers)]
    assert widths == [(32, 48)] * owners + [(32, 48 * wide)] * (layers - owners)
    wherry.convert(tmp_path / "there", tmp_path / "back", to="huggingface", lineage=False)
    wanted, back = tensors(source), tensors(tmp_path / "back")
    assert back.keys() == wanted.keys()
    table = "model.embed_tokens.weight"
    np.testing.assert_allclose(back.pop(table), wanted.pop(table), rtol=2**-22)
    assert all(np.array_equal(back[name], wanted[name]) for name in wanted)
    for name in ("per_layer_config", "layer_types", "num_kv_shared_layers", "use_double_wide_mlp"):
        assert stated(tmp_path / "back").get(name) == stated(source)[name] or name == "per_layer_config"


def test_heads_are_those_of_the_layer_s_kind(tmp_path):
    source = save_tiny(tmp_path / "hf", "gemma4-e2b", drawn=True)
    to_maxtext(source, tmp_path / "there")
    wanted, found = tensors(source), tensors(tmp_path / "there")
    for number in range(15):
        width = 32 if number % 5 == 4 else 16
        query = (
            wanted[f"model.layers.{number}.self_attn.q_proj.weight"].reshape(4, width, 32).transpose(2, 0, 1)
        )
        np.testing.assert_array_equal(found[f"{LAYERS}{number}/self_attention/query/kernel"], query)


def test_keys_and_values_that_released_files_have_and_no_layer_uses(tmp_path):
    """transformers does not load them either: they belong to layers that use those of an earlier one."""
    source = save_tiny(tmp_path / "hf", "gemma4-e2b")
    whole = load_file(source / "model.safetensors")
    own = [f"model.layers.9.self_attn.{part}.weight" for part in ("k_proj", "v_proj", "k_norm")]
    unused = {name.replace("layers.9.", "layers.14."): whole[name] + 1 for name in own}
    save_file({**whole, **unused}, source / "model.safetensors", {"format": "pt"})
    plan = wherry.plan(source, tmp_path / "there", to="maxtext")
    ignored = {entry.path[0]: entry for entry in plan.ignored}
    assert set(unused) <= set(ignored)
    for name in unused:
        assert ignored[name].reason == "keys and values of a layer that uses those of an earlier one"
    to_maxtext(source, tmp_path / "there")
    wherry.convert(tmp_path / "there", tmp_path / "back", to="huggingface", lineage=False)
    assert tensors(tmp_path / "back").keys() == whole.keys()


def test_a_layer_s_own_keys_are_never_left_out(tmp_path):
    source = save_tiny(tmp_path / "hf", "gemma4-e2b")
    plan = wherry.plan(source, tmp_path / "there", to="maxtext")
    assert not [entry for entry in plan.ignored if "self_attn" in entry.path[0]]
    whole = load_file(source / "model.safetensors")
    whole.pop("model.layers.9.self_attn.k_proj.weight")
    save_file(whole, source / "model.safetensors", {"format": "pt"})
    with pytest.raises(IncompleteError, match="global_key"):
        wherry.plan(source, tmp_path / "there", to="maxtext")


def test_a_model_type_of_two_families():
    kind = {"model_type": "gemma4_text"}
    assert family_of_config(kind) == "gemma4-small"  # what transformers takes for an absent attribute
    assert family_of_config({**kind, "hidden_size_per_layer_input": 0}) == "gemma4"
    classed = {"architectures": ["Gemma4ForCausalLM"]}
    assert family_of_config({**classed, "hidden_size_per_layer_input": 0}) == "gemma4"
    assert family_of_config({**classed, "hidden_size_per_layer_input": 8}) == "gemma4-small"
    whole = {"model_type": "gemma4", "text_config": {"hidden_size_per_layer_input": 256}}
    assert family_of_config(whole) == "gemma4-small"
    assert (
        family_of_config({"model_type": "gemma4", "text_config": {"hidden_size_per_layer_input": 0}})
        == "gemma4"
    )


@pytest.mark.parametrize(("settings", "reason"), [
    ({"num_kv_shared_layers": 1}, "the layers without keys and values of their own are not whole cycles"),
    ({"layer_types": ["sliding_attention", "full_attention"] * 6}, "not in cycles of five or six"),
    ({"attention_k_eq_v": True, "num_kv_shared_layers": 0}, "the values of global layers are their keys"),
    ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention is 'all' .* but maxtext always uses False"),
    ({"hidden_activation": "silu"}, "hidden_activation is 'silu' .* but maxtext always uses 'gelu_pytorch_tanh'"),
    ({"rms_norm_eps": 1e-5}, "(rms_norm_eps|norm_eps) is 1e-05 .* but maxtext always uses 1e-06"),
])  # fmt: skip
def test_what_maxtext_does_not_compute_is_refused_by_name(settings, reason, tmp_path):
    source = save_tiny(tmp_path / "hf", "gemma4-e4b", **settings)
    with pytest.raises(UnrepresentableError, match=reason):
        wherry.plan(source, tmp_path / "out", to="maxtext")
    assert not (tmp_path / "out").exists()


def test_the_other_family_refuses_what_it_does_not_hold(tmp_path):
    small, large = save_tiny(tmp_path / "small", "gemma4-e4b"), save_tiny(tmp_path / "large", "gemma4")
    for source, family, reason in (
        (small, "gemma4", "the layers have embeddings of their own, as those of E2B and E4B"),
        (large, "gemma4-small", "the layers have no embeddings of their own, as those of 26B and 31B"),
    ):
        with pytest.raises(UnrepresentableError, match=reason):
            wherry.plan(source, tmp_path / "out", to="maxtext", layout=LayoutRequest(family=family))


@pytest.mark.parametrize(("changes", "reason"), [
    ({"model_name": "gemma4-e2b"}, "the layers are not whole cycles of five for gemma4-e2b"),
    ({"model_name": "custom"}, "only if the model's name begins with gemma4"),
    ({"scan_layers": True}, "MaxText does not scan these layers"),
    ({"mlp_activations": ["silu", "linear"]}, "the gate of a layer's own embedding has the activation"),
])  # fmt: skip
def test_a_maxtext_config_of_another_model_is_refused_by_name(changes, reason, tmp_path):
    source = save_tiny(tmp_path / "hf", "gemma4-e4b")
    config = {**to_maxtext(source, tmp_path / "there"), **changes}
    (tmp_path / "run.yml").write_text(yaml.safe_dump(config))
    layout = LayoutRequest(family="gemma4-small", config=str(tmp_path / "run.yml"))
    with pytest.raises(UnrepresentableError, match=reason):
        wherry.plan(tmp_path / "there", tmp_path / "back", to="huggingface", layout=layout)


def test_without_shared_keys_every_layer_has_its_own(tmp_path):
    source = save_tiny(tmp_path / "hf", "gemma4-e4b", drawn=True, num_kv_shared_layers=0)
    config = to_maxtext(source, tmp_path / "there")
    assert (config["num_kv_shared_layers"], config["use_double_wide_mlp"]) == (0, False)
    wherry.convert(tmp_path / "there", tmp_path / "back", to="huggingface", lineage=False)
    assert tensors(tmp_path / "back").keys() == tensors(source).keys()
