"""Gemma 4 and Llama 4: layers of several kinds, in blocks and cycles, and what MaxText cannot hold."""

from __future__ import annotations

import json
import math

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


# Gemma 4 E2B and E4B: embeddings of single layers, keys and values of earlier ones, and what MaxText
# cannot hold.


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
def test_what_maxtext_does_not_compute_is_refused_by_name_small(settings, reason, tmp_path):
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


# Llama 4: cycles of layers, experts in every layer or in every second one, and what MaxText cannot hold.


pytest.importorskip("transformers")
pytest.importorskip("torch")

SCANNED, UNSCANNED = {"scan_layers": "true"}, {"scan_layers": "false"}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "original_max_position_embeddings": 8192}


@pytest.fixture(scope="module")
def maverick(tmp_path_factory):
    """Experts in every second layer of four."""
    return save_tiny(tmp_path_factory.mktemp("maverick") / "hf", "llama4", drawn=True)


def require_back_of_llama4(source, there, tmp_path, layout=None):
    layout = layout or LayoutRequest()
    wherry.convert(there, tmp_path / "back", to="huggingface", layout=layout, lineage=False)
    wanted, found = tensors(source), tensors(tmp_path / "back")
    assert found.keys() == wanted.keys()
    assert all(np.array_equal(found[name], wanted[name]) for name in wanted)


def test_each_layer_lies_in_its_place_of_the_cycle(maverick, tmp_path):
    config = to_maxtext(maverick, tmp_path / "out", SCANNED)
    cycle = {name: config[name] for name in ("interleave_moe_layer_step", "nope_layer_interval")}
    assert cycle == {"interleave_moe_layer_step": 2, "nope_layer_interval": 4}
    assert config["inhomogeneous_layer_cycle_interval"] == 4
    wanted, found = tensors(maverick), tensors(tmp_path / "out")
    root = "params/params/decoder/layers"
    for number in (0, 2):
        dense = wanted[f"model.layers.{number}.feed_forward.up_proj.weight"]
        np.testing.assert_array_equal(found[f"{root}/layers_{number}/mlp/wi_1/kernel"][:, 0], dense.T)
    for number in (1, 3):
        experts = found[f"{root}/layers_{number}/Llama4MoEBlock_0/MoeBlock_0/wi_1"]
        both = wanted[f"model.layers.{number}.feed_forward.experts.gate_up_proj"]
        np.testing.assert_array_equal(experts[:, 0], np.split(both, 2, axis=2)[1])
    require_back_of_llama4(maverick, tmp_path / "out", tmp_path)


def test_patterns_that_begin_anew_after_no_part_of_the_layers_make_one_cycle(tmp_path):
    source = save_tiny(tmp_path / "hf", "llama4", num_hidden_layers=6)
    assert to_maxtext(source, tmp_path / "out", SCANNED)["inhomogeneous_layer_cycle_interval"] == 6
    require_back_of_llama4(source, tmp_path / "out", tmp_path)


def test_positions_may_turn_in_every_layer(tmp_path):
    source = save_tiny(tmp_path / "hf", "llama4", no_rope_layers=[1] * 4)
    config = to_maxtext(source, tmp_path / "out", SCANNED)
    assert config["nope_layer_interval"] == -1
    assert config["inhomogeneous_layer_cycle_interval"] == 2
    require_back_of_llama4(source, tmp_path / "out", tmp_path)


def test_layers_that_are_not_scanned_have_no_cycle(maverick, tmp_path):
    """MaxText then reads both patterns from the layer's number; base.yml has a cycle of 1."""
    config = to_maxtext(maverick, tmp_path / "out", UNSCANNED)
    run = tmp_path / "run.yml"
    run.write_text(json.dumps({**config, "inhomogeneous_layer_cycle_interval": 1}))
    (tmp_path / "out" / "wherry.json").unlink()
    (tmp_path / "out" / "items" / "assets" / "maxtext_config.yml").unlink()
    layout = LayoutRequest(family="llama4", config=str(run))
    require_back_of_llama4(maverick, tmp_path / "out", tmp_path, layout)


def test_a_cycle_that_ends_within_a_pattern_is_refused(maverick, tmp_path):
    config = to_maxtext(maverick, tmp_path / "out", SCANNED)
    run = tmp_path / "run.yml"
    run.write_text(json.dumps({**config, "inhomogeneous_layer_cycle_interval": 2}))
    layout = LayoutRequest(family="llama4", config=str(run))
    with pytest.raises(
        UnrepresentableError, match="a cycle of layers ends between two layers of one pattern"
    ):
        wherry.plan(tmp_path / "out", tmp_path / "back", to="huggingface", layout=layout)


@pytest.mark.parametrize(("settings", "reason"), [
    ({"num_experts_per_tok": 2}, "it sends a token to one expert, not to 2"),
    ({"floor_scale": 16}, "its scores grow by 0.1 from one multiple of 8192 positions to the next, not as .*16"),
    ({"layer_types": ["full_attention"] * 4}, "layer_types is .* but maxtext always uses"),
    ({"no_rope_layers": [0, 1, 1, 1]}, "unsupported layers without rotary positions: layers .0. of 4"),
    ({"moe_layers": [0, 1]}, "unsupported layers with experts: layers .0, 1. of 4"),
    ({"interleave_moe_layer_step": 4}, "fewer than every second layer have experts"),
    # As Scout is released.
    ({"rope_parameters": {**LLAMA3, "factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 1.0}},
     "rope_scaling.*16"),
])  # fmt: skip
def test_what_maxtext_does_not_compute_is_refused_by_name_llama4(settings, reason, tmp_path):
    source = save_tiny(tmp_path / "hf", "llama4", **settings)
    with pytest.raises(UnrepresentableError, match=reason):
        wherry.plan(source, tmp_path / "out", to="maxtext")
    assert not (tmp_path / "out").exists()


def test_a_layer_without_its_router_is_named(maverick, tmp_path):
    from safetensors.numpy import load_file, save_file

    held = load_file(maverick / "model.safetensors")
    del held["model.layers.1.feed_forward.router.weight"]
    (tmp_path / "hf").mkdir()
    save_file(held, tmp_path / "hf" / "model.safetensors", {"format": "pt"})
    (tmp_path / "hf" / "config.json").write_text((maverick / "config.json").read_text())
    with pytest.raises(IncompleteError, match="missing index 1 of router"):
        wherry.plan(tmp_path / "hf", tmp_path / "out", to="maxtext")


@pytest.mark.parametrize(("expression", "wanted"), [
    ("expert_step([1, 3], 4)", 2),
    ("expert_step([0, 1, 2], 3)", 1),
    ("expert_step(moe_layers, 4)", None),
    ("unrotated_step([1, 1, 1, 0, 1, 1], 6)", 4),
    ("unrotated_step([1, 1], 2)", 0),
    ("chunked([1, 0])", ["chunked_attention", "full_attention"]),
])  # fmt: skip
def test_patterns_of_layers(expression, wanted):
    assert evaluate(expression, {}) == wanted


@pytest.mark.parametrize(
    ("layers", "first", "second"), [(48, 2, 4), (48, 1, 4), (6, 2, 4), (12, 2, 3), (4, 1, 0)]
)
def test_a_cycle_is_the_least_that_both_patterns_and_the_layers_divide_into(layers, first, second):
    cycle = evaluate(f"layer_cycle({layers}, {first}, {second})", {})
    least = next(n for n in range(1, layers + 1) if (n % first, n % (second or 1)) == (0, 0) or n == layers)
    assert cycle == (least if layers % least == 0 else layers)
    assert math.gcd(layers, cycle) == cycle


@pytest.mark.parametrize(
    "expression", ["expert_step([], 4)", "expert_step([1], 3)", "unrotated_step([1, 1], 3)"]
)
def test_patterns_that_no_system_has(expression):
    with pytest.raises(UnrepresentableError):
        evaluate(expression, {})
