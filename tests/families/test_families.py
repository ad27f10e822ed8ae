"""Families: every direction between all systems is there and back exact, and everything unknown is refused by name."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

from tests.support.families import LLAMA, SIZES, Made, carried, llama, made, same, to_maxtext
from wherry.errors import (
    UnrepresentableError,
)
from wherry.families import (
    convert_layout,
    families,
    family_of_config,
    load_family,
    model_types,
    side_by_side,
    system_of_format,
    target_manifest,
)


def test_every_family_says_what_it_is():
    for name in families():
        family = load_family(name)
        table = side_by_side(family)
        assert set(table) == set(family.parameters)
        for parameter, systems in table.items():
            assert systems, parameter
        for system in family.systems.values():
            assert system.about
            assert system.formats


def test_model_types_and_formats():
    assert family_of_config({"model_type": "llama"}) == "llama"
    assert family_of_config({"model_type": "gemma3_text"}) == "gemma3"
    assert family_of_config({"model_type": "bert"}) == "bert"
    assert family_of_config({"model_type": "opt"}) is None
    llama = load_family("llama")
    assert system_of_format(llama, "lingua-consolidated").name == "lingua"
    assert system_of_format(llama, "t5x-legacy") is None


def test_model_types_are_known_without_reading_whole_families():
    for name in families():
        assert model_types(name) == load_family(name).model_types, name
    load_family.cache_clear()
    assert family_of_config({"model_type": "t5"}) == "t5"
    assert load_family.cache_info().misses == 1


def test_scan_axis_and_rotary_layout():
    begun, family, config = llama(rope_parameters={"rope_type": "llama3", "rope_theta": 1e4})
    made_ = carried(to_maxtext(begun, family, config), begun.read)
    query = begun.tensors[("model.layers.1.self_attn.q_proj.weight",)]
    heads = query.reshape(4, 2, 4, 12).transpose(3, 0, 2, 1).reshape(12, 4, 8)  # half and pair change places
    stored = made_.tensors[("params", "params", "decoder", "layers", "self_attention", "query", "kernel")]
    assert stored.shape == (12, 3, 4, 8)
    np.testing.assert_array_equal(stored[:, 1], heads * np.float32(1 / np.sqrt(8)))
    key = begun.tensors[("model.layers.2.self_attn.k_proj.weight",)]
    stored = made_.tensors[("params", "params", "decoder", "layers", "self_attention", "key", "kernel")]
    np.testing.assert_array_equal(
        stored[:, 2], key.reshape(2, 2, 4, 12).transpose(3, 0, 2, 1).reshape(12, 2, 8)
    )
    plain = carried(
        to_maxtext(begun, family, config, options={"scan_layers": False, "rope": "half"}), begun.read
    )
    stored = plain.tensors[("params", "params", "decoder", "layers_2", "self_attention", "key", "kernel")]
    np.testing.assert_array_equal(stored, key.T.reshape(12, 2, 8))


def test_lossy_is_known_before_any_byte_moves():
    family = load_family("llama")
    begun = made(family, "huggingface", {}, dtype="bfloat16")
    config = {**LLAMA, "hidden_size": 12}
    projected = to_maxtext(begun, family, config)
    assert {path[-2] for path in projected.lossy} == {"query"}
    assert not to_maxtext(begun, family, config, dtype="float32").lossy
    half = to_maxtext(begun, family, config, dtype="float16")
    assert set(half.lossy) == set(half.targets) - {("step",)}


def test_padded_vocabulary():
    begun, family, config = llama()
    padded = carried(to_maxtext(begun, family, config, pads={"vocab": 16}), begun.read)
    embedding = padded.tensors[("params", "params", "token_embedder", "embedding")]
    assert embedding.shape == (32, 12)
    assert not embedding[20:].any()
    conventions = {"rope": "half", "query_scale": "folded"}
    back = convert_layout(
        padded.manifest, family, "maxtext", "huggingface", source_options=conventions, sizes={"vocab": 20}
    )
    assert carried(back, padded.read).tensors[("lm_head.weight",)].shape == (20, 12)


def test_tied_embeddings():
    family = load_family("llama")
    begun = made(family, "huggingface", {}, without=["head"])
    config = {**LLAMA, "tie_word_embeddings": True}
    lingua = carried(
        convert_layout(begun.manifest, family, "huggingface", "lingua", config=config), begun.read
    )
    copy = lingua.tensors[("model.output.tied_module.weight",)]
    np.testing.assert_array_equal(copy, begun.tensors[("model.embed_tokens.weight",)])
    back = convert_layout(lingua.manifest, family, "lingua", "huggingface", sizes=SIZES)
    assert [row.rule for row in back.ignored] == ["tied head"]
    assert same(carried(back, lingua.read).tensors, begun.tensors)


def test_moments_follow_their_parameter():
    family = load_family("llama")
    slots = {"params": ("<model>@",), "mu": ("<state>@<dot>exp_avg",), "nu": ("<state>@<dot>exp_avg_sq",)}
    begun = made(family, "lingua", {"tree": "dcp"}, slots=slots)
    projected = convert_layout(
        begun.manifest, family, "lingua", "maxtext", options={"rope": "half"}, sizes=SIZES, dtype="float64"
    )
    there = carried(projected, begun.read)
    root = ("decoder", "layers", "self_attention", "query", "kernel")
    scale = np.float32(1 / np.sqrt(8))
    weights = there.tensors[("params", "params", *root)]
    first = there.tensors[("opt_state", "0", "mu", "params", *root)]
    second = there.tensors[("opt_state", "0", "nu", "params", *root)]
    name = "layers.0.attention.wq.weight"

    def turned(tensor):
        return begun.tensors[(tensor,)].reshape(4, 4, 2, 12).transpose(3, 0, 2, 1).reshape(12, 4, 8)

    np.testing.assert_allclose(weights[:, 0], turned(f"model.{name}") * scale, rtol=1e-6)
    np.testing.assert_allclose(first[:, 0], turned(f"optim.state.{name}.exp_avg") / scale, rtol=1e-6)
    np.testing.assert_allclose(second[:, 0], turned(f"optim.state.{name}.exp_avg_sq") / scale**2, rtol=1e-6)
    assert projected.empties == {("opt_state", "1"): "none"}
    only = convert_layout(begun.manifest, family, "lingua", "huggingface", sizes=SIZES)
    assert {row.rule for row in only.ignored} == {"only params"}
    assert len(only.ignored) == 2 * len(only.targets)


def test_one_tensor_alone_decides_the_scan_axis_where_others_cannot():
    family = load_family("llama")
    forms = {"scan_layers": "true", "param_scan_axis": "0", "rope": "interleaved", "query_scale": "folded"}
    sizes = {**SIZES, "layer": 12}  # norms of 12 layers and width 12 say nothing
    begun = made(family, "maxtext", forms, sizes=sizes)
    found = convert_layout(begun.manifest, family, "maxtext", "maxtext")
    assert found.source.chosen["param_scan_axis"] == "0"


def test_penzai_axes_go_by_name():
    family = load_family("llama")
    begun, _family, config = llama()
    there = carried(
        convert_layout(begun.manifest, family, "huggingface", "penzai", config=config), begun.read
    )
    name = ("transformer/blocks/attention/query.weights",)
    spec = there.manifest.tensors[name]
    assert spec.axes == ("blocks", "head_groups", "query_heads", "projection", "embedding")
    order = (4, 2, 0, 3, 1)
    turned = dict(there.tensors) | {name: np.ascontiguousarray(there.tensors[name].transpose(order))}
    axes = {path: one.axes for path, one in there.manifest.tensors.items()}
    axes[name] = tuple(spec.axes[place] for place in order)
    other = Made(turned, axes)
    back = convert_layout(other.manifest, family, "penzai", "huggingface")
    assert same(carried(back, other.read).tensors, begun.tensors)
    axes[name] = ("blocks", "head_groups", "query_heads", "surprise", "embedding")
    with pytest.raises(UnrepresentableError, match="surprise"):
        convert_layout(Made(turned, axes).manifest, family, "penzai", "huggingface")


@pytest.mark.parametrize(("group", "qhead"), [(4, 1), (1, 4)])
def test_penzai_leaves_out_axes_of_size_one(group, qhead):
    family = load_family("llama")
    sizes = {**SIZES, "group": group, "qhead": qhead}
    begun = made(family, "huggingface", {}, sizes=sizes)
    there = carried(convert_layout(begun.manifest, family, "huggingface", "penzai", sizes=sizes), begun.read)
    axes = there.manifest.tensors[("transformer/blocks/attention/query.weights",)].axes
    assert axes == ("blocks", "heads" if qhead == 1 else "query_heads", "projection", "embedding")
    back = convert_layout(there.manifest, family, "penzai", "huggingface")
    assert same(carried(back, there.read).tensors, begun.tensors)


def test_config_is_json_as_it_comes(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=12, num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_hidden_layers=3,
        intermediate_size=10, vocab_size=20, architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    begun, family, _config = llama()
    written = json.loads((tmp_path / "config.json").read_text())
    assert to_maxtext(begun, family, written).chosen == {
        "scan_layers": "true", "param_scan_axis": "1", "rope": "half", "query_scale": "folded",
    }  # fmt: skip


def test_the_target_s_tree_is_maxtext_s():
    begun, family, config = llama()
    projected = to_maxtext(begun, family, config)
    manifest = target_manifest(projected, begun.manifest)
    assert manifest.kind == "params"
    assert manifest.empties == {("opt_state",): "dict"}
    assert manifest.tensors[("step",)].dtype == "int32"
    assert projected.gather(("step",), (), begun.read) == 0
    assert manifest.origin["layout"]["to"] == {"system": "maxtext", **projected.chosen}


# What the code of each system calls the two halves of a gated feed-forward layer.
GATE = re.compile(r"(?<![a-z_])(gate_proj|w1|wi_0|gating_linear|ffn_gate|ffn_gate_exps)(?=_E|\W|$)")
UP = re.compile(r"(?<![a-z_])(up_proj|w3|wi_1|value_linear|ffn_up|ffn_up_exps)(?=_E|\W|$)")
BOTH = re.compile(r"gate_up_proj|linear_fc1|gating_einsum")  # one tensor of both
BOTH_CALLED_UP = {("phi3", "gguf")}  # which transformers' loader of GGUF judges


def test_the_norm_of_a_granite_depends_on_its_tie():
    """Two tensors that nothing has compared are taken for different, whatever the config says."""
    config = {
        "model_type": "granite", "vocab_size": 20, "hidden_size": 12, "num_hidden_layers": 3, "intermediate_size": 10,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "tie_word_embeddings": True,
        "embedding_multiplier": 12.0,
    }  # fmt: skip
    family = load_family("granite")
    path = ("decoder", "decoder_norm", "scale")
    for without, factor in ([], 1), (["head"], 12):
        begun = made(family, "huggingface", {}, without=without)
        found = convert_layout(begun.manifest, family, "huggingface", "maxtext", config=config)
        norm = carried(found, begun.read).tensors[("params", "params", *path)]
        np.testing.assert_allclose(norm * factor, begun.tensors[("model.norm.weight",)])


def test_gate_is_before_up_in_one_tensor():
    """As Phi-3's class and Megatron split them; the test below sees a name for both."""
    systems = {(name, own.name): own for name in families() for own in load_family(name).systems.values()}
    both = [
        (place, row.parameters)
        for place, own in systems.items()
        for row in own.layouts
        if BOTH.search(row.key) and len(row.parameters) > 1
    ]
    wanted = {("phi3", "huggingface"), ("llama", "megatron"), ("deepseek", "megatron")}
    assert wanted <= {place for place, _parameters in both}
    for place, (first, second) in both:
        names = first.removesuffix("_out"), second.removesuffix("_out")  # of an adapter
        assert (names[0][-4:], names[1][-2:]) == ("gate", "up"), place


def test_the_gate_is_what_each_system_calls_so():
    """No way there and back sees two weights of one shape in each other's place; a model computes other numbers."""
    for name in families():
        table = side_by_side(load_family(name))
        for gate in (parameter for parameter in table if parameter.split("_")[-1] == "gate"):
            up = next(one for one in (gate[:-4] + "gated_up", gate[:-4] + "up") if one in table)
            for parameter, own, other in ((gate, GATE, UP), (up, UP, GATE)):
                texts = (
                    text
                    for system, texts in table[parameter].items()
                    if (name, system) not in BOTH_CALLED_UP
                    for text in texts
                )
                for text in (text for text in texts if not BOTH.search(text)):
                    assert own.search(text), f"{name}: {parameter} is {text}"
                    assert not other.search(text), f"{name}: {parameter} is {text}"
