"""What a family does not know or cannot tell is refused, naming parameter, axis, both sources and the cure."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.families import LLAMA, SIZES, Made, carried, llama, made, to_maxtext
from wherry.errors import (
    AmbiguousError,
    IncompleteError,
    MismatchError,
    UnrepresentableError,
    UsageError,
)
from wherry.families import convert_layout, load_family, load_family_file


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

    for text in (
        "__import__('os').system('true')",
        "[1][0]",
        "2 ** 9999",
        "lambda: 1",
        "a.b()",
    ):
        with pytest.raises(UsageError):
            evaluate(text, {"a": {"b": 1}})
    assert evaluate("a.__class__.__init__", {"a": {"b": 1}}) is None
    assert evaluate("a.b + 1", {"a": {"b": 1}}) == 2
    assert evaluate("a.c or 'x'", {"a": {"b": 1}}) == "x"
    assert evaluate("a / 2", {"a": None}) is None
