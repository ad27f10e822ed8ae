"""Llama 4: cycles of layers, experts in every layer or in every second one, and what MaxText cannot hold."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

import wherry
from tests.support.maxtext_trees import tensors, to_maxtext
from tests.support.tiny_models import save_tiny
from wherry.core.request import LayoutRequest
from wherry.errors import IncompleteError, UnrepresentableError
from wherry.layout.expr import evaluate

pytest.importorskip("transformers")
pytest.importorskip("torch")

SCANNED, UNSCANNED = {"scan_layers": "true"}, {"scan_layers": "false"}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "original_max_position_embeddings": 8192}


@pytest.fixture(scope="module")
def maverick(tmp_path_factory):
    """Experts in every second layer of four."""
    return save_tiny(tmp_path_factory.mktemp("maverick") / "hf", "llama4", drawn=True)


def require_back(source, there, tmp_path, layout=None):
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
    require_back(maverick, tmp_path / "out", tmp_path)


def test_patterns_that_begin_anew_after_no_part_of_the_layers_make_one_cycle(tmp_path):
    source = save_tiny(tmp_path / "hf", "llama4", num_hidden_layers=6)
    assert to_maxtext(source, tmp_path / "out", SCANNED)["inhomogeneous_layer_cycle_interval"] == 6
    require_back(source, tmp_path / "out", tmp_path)


def test_positions_may_turn_in_every_layer(tmp_path):
    source = save_tiny(tmp_path / "hf", "llama4", no_rope_layers=[1] * 4)
    config = to_maxtext(source, tmp_path / "out", SCANNED)
    assert config["nope_layer_interval"] == -1
    assert config["inhomogeneous_layer_cycle_interval"] == 2
    require_back(source, tmp_path / "out", tmp_path)


def test_layers_that_are_not_scanned_have_no_cycle(maverick, tmp_path):
    """MaxText then reads both patterns from the layer's number; base.yml has a cycle of 1."""
    config = to_maxtext(maverick, tmp_path / "out", UNSCANNED)
    run = tmp_path / "run.yml"
    run.write_text(json.dumps({**config, "inhomogeneous_layer_cycle_interval": 1}))
    (tmp_path / "out" / "wherry.json").unlink()
    (tmp_path / "out" / "items" / "assets" / "maxtext_config.yml").unlink()
    layout = LayoutRequest(family="llama4", config=str(run))
    require_back(maverick, tmp_path / "out", tmp_path, layout)


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
def test_what_maxtext_does_not_compute_is_refused_by_name(settings, reason, tmp_path):
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
