"""Families: what they declare, carry, and refuse by name."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

import wherry
from tests.support.families import LLAMA, SIZES, Made, carried, llama, made, opened, same, to_maxtext
from tests.support.tiny_models import save_tiny
from wherry.errors import AmbiguousError, IncompleteError, MismatchError, UnrepresentableError, UsageError
from wherry.families import (
    convert_layout,
    families,
    family_of_config,
    load_family,
    load_family_file,
    model_types,
    side_by_side,
    system_of_format,
    target_manifest,
    tree_family,
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
GATE = re.compile(
    r"(?<![a-z_])(gate_proj|w1|wi_0|gating_linear|ffn_gate|ffn_gate_exps|ffn_gate_shexp)(?=_E|\W|$)"
)
UP = re.compile(r"(?<![a-z_])(up_proj|w3|wi_1|value_linear|ffn_up|ffn_up_exps|ffn_up_shexp)(?=_E|\W|$)")
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


# Models whose layers are of several kinds: every layer of each kind is there, and no other.


pytest.importorskip("torch")
pytest.importorskip("transformers")


def edited(folder, label, edit):
    """A tiny model with other tensors."""
    from safetensors.torch import load_file, save_file

    file = save_tiny(folder / "hf", label) / "model.safetensors"
    tensors = load_file(file)
    edit(tensors)
    save_file(tensors, file, {"format": "pt"})
    return folder / "hf"


@pytest.mark.parametrize(
    ("label", "to", "more", "match"),
    [
        ("qwen3next", "maxtext", {"shared_expert_intermediate_size": 12}, "as wide as the others, 24, not 12"),
        ("qwen3next", "maxtext", {"num_hidden_layers": 5}, "the layers are not in blocks of four"),
        ("qwen3next", "maxtext", {"full_attention_interval": 2}, "the layers are not three with linear attention"),
        ("qwen3next", "maxtext", {"norm_topk_prob": False}, "norm_topk_prob is False in .* always uses True"),
        ("qwen3next", "megatron", {}, "megatron has no layout for family qwen3-next"),
        ("glm4moe", "megatron", {"num_experts_per_tok": 1}, "does not make the weight of a single expert 1"),
        ("deepseek-v3", "megatron", {"num_experts_per_tok": 1}, "does not make the weight of a single expert 1"),
        ("glm4moe", "maxtext", {}, "maxtext has no layout for family glm4-moe"),
        ("stablelm", "megatron", {"use_parallel_residual": True}, "parallel_residual is True .* always uses False"),
        ("gptneox", "penzai", {"layer_norm_eps": 1e-5}, "layer_norm_eps is 1e-05 .* but penzai always uses 1e-06"),
        ("gptneox", "penzai", {"tie_word_embeddings": True}, "it has an output layer of its own"),
        ("gptneox", "penzai", {"hidden_act": "silu"}, "it has no activation silu"),
        ("llama", "penzai", {"hidden_act": "gelu"}, "Penzai's feed-forward layers have no activation gelu"),
        ("t5", "t5x-orbax", {"relative_attention_num_buckets": 16}, "32 buckets of .* positions, this model has 16"),
        ("gptneox", "megatron", {}, "use_parallel_residual is True .* always uses False"),
        ("gptneox", "maxtext", {}, "maxtext has no layout for family gpt-neox"),
        ("gptneoxserial", "penzai", {}, "use_parallel_residual is False .* always uses True"),
        ("gptneoxserial", "megatron", {"hidden_act": "relu"}, "gelu or its approximation by tanh, not relu"),
        ("gptneoxserial", "megatron", {"attention_bias": False}, "the attention has no biases"),
        ("stablelm", "megatron", {"qk_layernorm": True}, "no layout for parameter key_norm of family stablelm"),
    ],
)  # fmt: skip
def test_what_a_system_cannot_hold_is_refused(label, to, more, match, tmp_path):
    save_tiny(tmp_path / "hf", label, **more)
    with pytest.raises(UnrepresentableError, match=match) as caught:
        wherry.plan(tmp_path / "hf", tmp_path / "out", to=to)
    assert caught.value.cure


def test_a_gpt_neox_as_it_was_released(tmp_path):
    """Its config spells rotary positions in attributes of its own, and its layers have what is computed anew."""
    import torch

    buffers = {"bias": torch.ones(1, 1, 64, 64, dtype=torch.uint8), "masked_bias": torch.tensor(-1e9),
               "rotary_emb.inv_freq": torch.ones(2)}  # fmt: skip
    computed = {
        f"gpt_neox.layers.{at}.attention.{name}": one.clone()
        for at in range(2)
        for name, one in buffers.items()
    }
    folder = edited(tmp_path, "gptneoxserial", lambda tensors: tensors.update(computed))
    config = json.loads((folder / "config.json").read_text())
    del config["rope_parameters"], config["attention_bias"]
    released = {"rotary_emb_base": 500, "rotary_pct": 0.5, "torch_dtype": "float16"}
    (folder / "config.json").write_text(json.dumps({**config, **released}))
    wherry.convert(folder, tmp_path / "there", to="megatron", lineage=False)
    args = json.loads((tmp_path / "there" / "megatron_args.json").read_text())
    assert (args["rotary_base"], args["rotary_percent"], args["bias_gelu_fusion"]) == (500, 0.5, False)
    wherry.convert(tmp_path / "there", tmp_path / "back", to="huggingface", lineage=False)
    again = json.loads((tmp_path / "back" / "config.json").read_text())
    assert (again["rotary_emb_base"], again["rotary_pct"], again["use_parallel_residual"]) == (
        500,
        0.5,
        False,
    )


DECAY = "model.layers.{}.linear_attn.A_log"


@pytest.mark.parametrize(
    ("gone", "copied", "error", "match"),
    [
        (DECAY.format(5), None, IncompleteError, "missing index 5 of linear_decay"),
        ("model.layers.7.self_attn.k_proj.weight", None, IncompleteError, "missing index 7 of full_key"),
        (
            None,
            DECAY.format(8),
            UnrepresentableError,
            "states 6 of linear_decay .* but the files have index 8",
        ),
        (None, DECAY.format(3), UnrepresentableError, "linear_decay .* has no index 3"),
    ],
    ids=["linear", "full", "beyond", "of-another-kind"],
)
def test_a_layer_of_a_cycle_that_is_missing_or_too_many_is_named(gone, copied, error, match, tmp_path):
    def edit(tensors):
        tensors.pop(gone, None)
        tensors.update({copied: tensors[DECAY.format(0)].clone()} if copied else {})

    folder = edited(tmp_path, "qwen3next", edit)
    with pytest.raises(error, match=match) as caught:
        wherry.plan(folder, tmp_path / "out", to="maxtext")
    assert "model.layers." in str(caught.value)


def test_layers_that_predict_further_tokens_stay_behind_with_the_reason(tmp_path):
    import torch

    folder = edited(
        tmp_path, "qwen3next", lambda tensors: tensors.update({"mtp.fc.weight": torch.ones(32, 64)})
    )
    planned = wherry.plan(folder, tmp_path / "out", to="maxtext")
    assert "mtp.fc.weight" not in str(list(planned.manifest.tensors))
    assert any("predict further tokens" in str(row) for row in planned.ignored)


# What a family does not know or cannot tell is refused, naming parameter, axis, both sources and the
# cure.


def refused(kind, match, tensors=None, **changes):
    begun, family, config = llama(**changes)
    if tensors:
        tensors(begun.tensors)
        begun = Made(begun.tensors)
    with pytest.raises(kind, match=match) as caught:
        to_maxtext(begun, family, config)
    assert caught.value.cure


def test_a_wrong_config_names_parameter_axis_and_both_sources():
    refused(
        MismatchError,
        r"axis ffn is 11 according to the config \(intermediate_size\).*but 10 according to",
        intermediate_size=11,
    )
    refused(
        IncompleteError,
        r"missing index 3 of .* which the config \(num_hidden_layers\) implies",
        num_hidden_layers=4,
    )
    refused(MismatchError, r"\w+: axis group × (qhead × )?half × pair is", head_dim=6)
    refused(UsageError, "not an integer", num_key_value_heads=3)
    refused(UsageError, "invalid size of axis embed: '12'", hidden_size="12")


def test_unknown_attributes_are_named():
    refused(UnrepresentableError, "unknown attributes in the config: surprise", surprise=1)
    refused(UnrepresentableError, "the attention has biases", attention_bias=True)


def test_tensors_that_do_not_fit_are_named():
    def without(path):
        return lambda tensors: tensors.pop((path,))

    def with_(path, shape):
        return lambda tensors: tensors.update({(path,): np.zeros(shape, "f4")})

    last = "model.layers.2.mlp.up_proj.weight"
    refused(IncompleteError, "missing index 1 of up", without("model.layers.1.mlp.up_proj.weight"))
    refused(IncompleteError, "missing index 2 of up", without(last))
    refused(
        IncompleteError, "missing tensor of parameter norm: model.norm.weight", without("model.norm.weight")
    )
    refused(
        UnrepresentableError,
        "does not belong to family llama.*surprise.weight",
        with_("surprise.weight", (3,)),
    )
    refused(UnrepresentableError, "q_proj.bias", with_("model.layers.0.self_attn.q_proj.bias", (3,)))
    refused(MismatchError, "down has shape", with_("model.layers.0.mlp.down_proj.weight", (3,)))
    refused(MismatchError, "down: axis", with_("model.layers.0.mlp.down_proj.weight", (12, 11)))
    refused(UnrepresentableError, "have index 3", with_("model.layers.3.input_layernorm.weight", (12,)))


def test_the_user_must_state_what_is_not_on_disk():
    family = load_family("llama")
    begun = made(
        family,
        "maxtext",
        {"scan_layers": "true", "param_scan_axis": "1", "rope": "interleaved", "query_scale": "folded"},
    )
    with pytest.raises(UsageError, match="rotary positions") as caught:
        convert_layout(begun.manifest, family, "maxtext", "huggingface")
    assert "--set rope=half (Llama 2" in caught.value.cure
    assert "--set rope=interleaved (Llama 3.1" in caught.value.cure
    with pytest.raises(UsageError, match="invalid value for option rope: 'sideways'"):
        convert_layout(begun.manifest, family, "maxtext", "huggingface", source_options={"rope": "sideways"})
    with pytest.raises(UsageError, match="unknown option 'ropes'"):
        convert_layout(begun.manifest, family, "maxtext", "huggingface", source_options={"ropes": "half"})
    with pytest.raises(UsageError, match="invalid form scan_layers=maybe"):
        convert_layout(begun.manifest, family, "maxtext", "maxtext", options={"scan_layers": "maybe"})
    for forms in ({"scan_layers": "maybe"}, {"param_scan_axis": "x"}, {"param_scan_axis": "7"}):
        with pytest.raises(UsageError, match=f"invalid form {next(iter(forms))}="):
            convert_layout(
                begun.manifest, family, "maxtext", "huggingface", source_options={"rope": "half", **forms}
            )
    scanned = convert_layout(begun.manifest, family, "maxtext", "maxtext", options={"scan_layers": "false"})
    assert not scanned.lossy  # the same words and rotary layout on both sides: nothing to ask for
    back = convert_layout(begun.manifest, family, "maxtext", "huggingface", options={"rope": "interleaved"})
    assert back.source.chosen["rope"] == "interleaved"


def test_sizes_that_shapes_do_not_decide_require_the_config():
    begun, family, _config = llama()
    with pytest.raises(AmbiguousError, match="cannot determine the size") as caught:
        to_maxtext(begun, family, None, options={"rope": "half"})
    assert "--config" in caught.value.cure


def test_an_ambiguous_scan_axis_is_never_guessed():
    family = load_family("llama")
    equal = {
        **SIZES,
        "layer": 4,
        "embed": 4,
        "group": 4,
        "qhead": 1,
        "half": 2,
        "pair": 2,
        "ffn": 4,
        "vocab": 4,
    }
    forms = {"scan_layers": "true", "param_scan_axis": "1", "rope": "interleaved", "query_scale": "folded"}
    begun = made(family, "maxtext", forms, sizes=equal)
    with pytest.raises(AmbiguousError, match="param_scan_axis=1; param_scan_axis=0") as caught:
        convert_layout(begun.manifest, family, "maxtext", "maxtext", options={"scan_layers": "false"})
    assert "param_scan_axis" in caught.value.cure
    stated = convert_layout(
        begun.manifest,
        family,
        "maxtext",
        "maxtext",
        source_options={"param_scan_axis": "0"},
        options={"scan_layers": "false"},
    )
    taken = carried(stated, begun.read).tensors[
        ("params", "params", "decoder", "layers_1", "mlp", "wo", "kernel")
    ]
    whole = begun.tensors[("params", "params", "decoder", "layers", "mlp", "wo", "kernel")]
    np.testing.assert_array_equal(taken, whole[1])


def test_a_target_that_cannot_hold_it():
    scaling = {"rope_type": "linear", "factor": 2.0}
    begun, family, config = llama(rope_parameters=scaling, hidden_act="silu")
    with pytest.raises(UnrepresentableError, match=r"rope_scaling is .*linear.* but lingua always uses"):
        convert_layout(begun.manifest, family, "huggingface", "lingua", config=config)
    with pytest.raises(
        UnrepresentableError, match="hidden_act is 'gelu' in the config, but lingua always uses 'silu'"
    ):
        convert_layout(
            begun.manifest, family, "huggingface", "lingua", config={**config, "hidden_act": "gelu"}
        )


def test_a_missing_moment_is_named():
    family = load_family("llama")
    slots = {"params": ("<model>@",), "mu": ("<state>@<dot>exp_avg",), "nu": ("<state>@<dot>exp_avg_sq",)}
    begun = made(family, "lingua", {"tree": "dcp"}, slots=slots)
    del begun.tensors[("optim.state.layers.1.attention.wq.weight.exp_avg",)]
    with pytest.raises(IncompleteError, match="missing index 1 of query"):
        convert_layout(Made(begun.tensors).manifest, family, "lingua", "huggingface", sizes=SIZES)


def test_a_checkpoint_without_parameters_is_of_no_family():
    """An empty file, and moments alone."""
    family = load_family("llama")
    slots = {"params": ("<model>@",), "mu": ("<state>@<dot>exp_avg",), "nu": ("<state>@<dot>exp_avg_sq",)}
    begun = made(family, "lingua", {"tree": "dcp"}, slots=slots)
    moments = {path: array for path, array in begun.tensors.items() if path[0].startswith("optim.")}
    assert moments
    for tensors in ({}, moments):
        with pytest.raises(UnrepresentableError, match=r"no tensor .* is a parameter of llama"):
            convert_layout(Made(tensors).manifest, family, "lingua", "huggingface", sizes=SIZES)


FAMILY = """
extends = "llama"
name = "custom"
about = "Llama with another name for its head"
[parameters]
gain = { axes = "layer embed", optional = true }
[systems.huggingface.layouts]
head = ["output.weight", "vocab embed"]
gain = ["model.layers.{layer}.gain", "embed"]
"""


def test_family_files(tmp_path):
    path = tmp_path / "custom.toml"
    path.write_text(FAMILY)
    family = load_family_file(str(path))
    begun = made(family, "huggingface", {})
    assert ("output.weight",) in begun.tensors
    with pytest.raises(UnrepresentableError, match="no layout for parameter gain"):
        convert_layout(begun.manifest, family, "huggingface", "lingua", config=LLAMA)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("name = ", "cannot read"),
        ("name = 'x'", "invalid family definition"),
        ("extends = 'nobody'", "unknown family"),
        (FAMILY + "[surprise]\na = 1", "unknown field surprise"),
        (FAMILY + "[systems.maxtext]\naccepts = [['tied', 'not {other}']]", "invalid reason 'not {other}'"),
        (FAMILY + "[systems.maxtext]\naccepts = [['tied', 'not {']]", "invalid reason 'not {'"),
        (FAMILY.replace('"embed"]\n', '"ffn"]\n'), "expected .* got"),
        (FAMILY.replace("gain = [", "loss = ["), "layout for unknown parameter 'loss'"),
        (
            FAMILY.replace("layer embed", "layer breadth").replace('"embed"]', '"breadth"]'),
            "undeclared axis breadth",
        ),
        (FAMILY.replace("{layer}.gain", "<floor>.gain"), "undefined macro <floor>"),
        (FAMILY.replace("{layer}.gain", "{layer.gain"), "brace"),
    ],
)
def test_bad_family_files(tmp_path, text, match):
    path = tmp_path / "bad.toml"
    path.write_text(text)
    begun, _family, config = llama()
    with pytest.raises(UsageError, match=match):
        to_maxtext(begun, load_family_file(str(path)), config)


def test_a_family_file_cannot_run_code():
    from wherry.layout.expr import evaluate

    for text in ("__import__('os').system('true')", "[1][0]", "2 ** 9999", "lambda: 1", "a.b()"):
        with pytest.raises(UsageError):
            evaluate(text, {"a": {"b": 1}})
    assert evaluate("a.__class__.__init__", {"a": {"b": 1}}) is None
    assert evaluate("a.b + 1", {"a": {"b": 1}}) == 2
    assert evaluate("a.c or 'x'", {"a": {"b": 1}}) == "x"
    assert evaluate("a / 2", {"a": None}) is None


# Any tree: layers stacked and taken apart by a pattern, without a family.


def tree(layers=3, **more):
    rng = np.random.default_rng(0)
    tensors = {("params", "norm", "scale"): rng.random(5, "f4"), ("step",): np.int32(7).reshape(())}
    for layer in range(layers):
        for root in ("params", "mu"):
            tensors[(root, f"layers_{layer}", "mlp", "kernel")] = rng.random((5, 4), "f4")
            tensors[(root, f"layers_{layer}", "norm.scale")] = rng.random(5, "f4")
            tensors[(root, f"layers_{layer}", "gain")] = rng.random((), "f4").reshape(())
    return Made({**tensors, **more})


def turned(begun, family, scan, **stated):
    projected = convert_layout(
        begun.manifest, family, "tree", "tree", options={"scan_layers": scan, **stated}
    )
    return carried(projected, begun.read)


@pytest.mark.parametrize("axis", ["0", "1"])
def test_there_and_back(axis):
    begun = tree()
    family = tree_family(begun.manifest, "layers", "layers_{layer}")
    there = turned(begun, family, "true", param_scan_axis=axis)
    stack = there.tensors["mu", "layers", "mlp", "kernel"]
    assert stack.shape == ((3, 5, 4) if axis == "0" else (5, 3, 4))
    np.testing.assert_array_equal(stack.take(1, int(axis)), begun.tensors["mu", "layers_1", "mlp", "kernel"])
    assert there.tensors["params", "layers", "gain"].shape == (3,)
    family = tree_family(there.manifest, "layers", "layers_{layer}")
    assert same(turned(there, family, "false").tensors, begun.tensors)


def test_the_maxtext_corpus_without_a_family():
    with opened("maxtext-llama31-l3-scan", "orbax") as checkpoint:
        kept = {path: spec for path, spec in checkpoint.manifest.tensors.items() if path[0] != "nnx_aux"}
        begun = Made({path: checkpoint.read(path) for path in kept})
    family = tree_family(begun.manifest, "layers", "layers_{layer}")
    there = turned(begun, family, "false")
    with opened("maxtext-llama31-l3-unscan", "orbax") as checkpoint:
        wanted = {
            path: one.shape for path, one in checkpoint.manifest.tensors.items() if path[0] != "nnx_aux"
        }
    assert {path: array.shape for path, array in there.tensors.items()} == wanted
    family = tree_family(there.manifest, "layers", "layers_{layer}")
    assert same(turned(there, family, "true").tensors, begun.tensors)


def test_refusals():
    begun = tree()
    for patterns in (
        ("layers", "layers"),
        ("layers", "layers_{other}"),
        ("", "layers_{layer}"),
        ("blocks", "block_{layer}"),
    ):
        with pytest.raises(UsageError):
            tree_family(begun.manifest, *patterns)
    with pytest.raises(UnrepresentableError, match="reserve"):
        tree_family(Made({("layers_0", "a{b}"): np.zeros(2)}).manifest, "layers", "layers_{layer}")
    lacking = dict(begun.tensors)
    del lacking["mu", "layers_1", "gain"]
    begun = Made(lacking)
    with pytest.raises(IncompleteError, match="missing index 1"):
        turned(begun, tree_family(begun.manifest, "layers", "layers_{layer}"), "true")


def test_the_scan_axis_of_a_square_stack_must_be_stated():
    begun = Made({("layers", "w"): np.zeros((4, 4), "f4")})
    family = tree_family(begun.manifest, "layers", "layers_{layer}")
    with pytest.raises(AmbiguousError, match="param_scan_axis"):
        turned(begun, family, "false")
