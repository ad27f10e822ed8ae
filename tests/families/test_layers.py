"""Layers that are odd, rules that hold for some, and the roots around them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import yaml

import wherry
from tests.support.command import typed
from tests.support.families import SIZES, Made, llama, made
from tests.support.oracles import files, huggingface, judge, maxtext
from tests.support.oracles.cases import leaves_of
from tests.support.oracles.huggingface import TOKENS
from tests.support.tiny_models import save_tiny
from wherry.errors import UnrepresentableError, UsageError
from wherry.families import (
    convert_layout,
    families,
    family_of_config,
    load_family,
    load_family_file,
    source_tree,
)
from wherry.families.templates import form_choices
from wherry.layout.tree_reading import read_tree

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


# Rules of ignored tensors that hold for some layers, and families of one model type.


RULE = '["model.layers.*.self_attn.{name}", "a leftover", "{when}"]'


def with_rule(folder, *rules):
    file = folder / "custom.toml"
    file.write_text(
        'extends = "llama"\nname = "custom"\nabout = "custom"\n[systems.huggingface]\nignore = ['
        + ", ".join(rules)
        + "]\n"
    )
    return load_family_file(str(file))


def left_out(family, *names, config=None):
    begun, _family, own_config = llama()
    made = Made({**begun.tensors, **{(name,): np.ones(3, "f4") for name in names}})
    return {
        entry.path[0]: entry.rule
        for entry in convert_layout(
            made.manifest, family, "huggingface", "maxtext", config=config or own_config
        ).ignored
    }


def test_a_rule_reads_the_number_in_a_key_path(tmp_path):
    family = with_rule(tmp_path, RULE.format(name="*.extra", when="index > num_hidden_layers - 2"))
    name = "model.layers.2.self_attn.q_proj.extra"
    assert left_out(family, name) == {name: "huggingface: model.layers.*.self_attn.*.extra"}
    with pytest.raises(UnrepresentableError, match=r"model\.layers\.1\.self_attn\.q_proj\.extra"):
        left_out(family, name, "model.layers.1.self_attn.q_proj.extra")


def test_the_first_rule_that_holds_is_named(tmp_path):
    family = with_rule(
        tmp_path,
        RULE.format(name="extra", when="index == 0"),
        RULE.format(name="*", when="num_hidden_layers == 4"),
        '["**.self_attn.extra", "another", "index == 1"]',
        RULE.format(name="ext*", when="index == 1"),
    )
    first, second = "model.layers.0.self_attn.extra", "model.layers.1.self_attn.extra"
    assert left_out(family, first, second) == {
        first: "huggingface: model.layers.*.self_attn.extra",
        second: "huggingface: model.layers.*.self_attn.ext*",  # `**` stands for no number
    }


def test_what_stands_for_no_number_has_no_index(tmp_path):
    family = with_rule(tmp_path, RULE.format(name="extra", when="index > 0"))
    with pytest.raises(UnrepresentableError, match="last"):
        left_out(family, "model.layers.last.self_attn.extra")


def test_families_of_one_model_type_have_distinctions():
    """One alone may have none, and of several each has one, so that a config is never that of the first in the list."""
    by_type = {}
    for name in families():
        for kind in load_family(name).model_types:
            by_type.setdefault(kind, []).append(load_family(name).distinction)
    assert by_type["gemma4_text"] == ["hidden_size_per_layer_input == 0", "hidden_size_per_layer_input > 0"]
    assert all(None not in rules for rules in by_type.values() if len(rules) > 1)
    assert family_of_config({"model_type": "gemma4_text", "hidden_size_per_layer_input": None}) is None


def test_a_distinction_needs_the_system_whose_config_it_reads(tmp_path):
    file = tmp_path / "custom.toml"
    file.write_text(
        'extends = "gpt3"\nname = "custom"\nabout = "custom"\nmodel_types = ["x"]\ndistinction = "a == 1"\n'
    )
    with pytest.raises(UsageError, match="distinction reads a Hugging Face config"):
        load_family_file(str(file))


# The roots of a JAX system: a family sees the system's own names in every form in which trainers save a
# tree.


WRAPPED = ("params", "params")
# What stands in place of `params/params`, and what is below every leaf: MaxText's NNX forms, and its bare trees.
FORMS = {
    "model": (("model",), ("value",)),
    "base": (("base",), ("value",)),
    "no root": ((), ("value",)),
    "item": (("model_params",), ("value",)),
    "one root": (("params",), ()),
    "bare": ((), ()),
    "flax 0.8": (("model",), ("raw_value",)),
}
HELD = [name for name in families() if {"maxtext", "huggingface"} <= load_family(name).systems.keys()]


def checkpoint(family):
    """A MaxText checkpoint of a family, in the first forms for which sizes of tests make one."""
    system = family.system("maxtext")
    conventions = {name: one.usual for name, one in system.conventions.items()}
    forms = next(form_choices(system, {}))
    sizes = {**dict.fromkeys(family.axes, 2), **SIZES}
    return made(family, "maxtext", {**forms, **conventions}, sizes=sizes).manifest


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", HELD)
def test_a_family_of_maxtext_is_seen_in_every_form(name, form):
    family, (root, end) = load_family(name), FORMS[form]
    plain = checkpoint(family)
    inside = {path for path in plain.tensors if path[:2] == WRAPPED}
    names = {path: (*root, *path[2:], *end) for path in inside}
    tensors = {names[path]: replace(plain.tensors[path], path=names[path]) for path in inside}
    manifest = replace(plain, tensors=tensors, kind="other", values={}, empties={}, lists=frozenset())
    found = source_tree(family, "orbax", manifest, read_tree(manifest))
    assert found is not None
    assert (found.system.name, found.unknown) == ("maxtext", 0)
    assert {found.tree.name(new) for new in tensors} == inside
    assert bool(found.tree.removed) == (
        form not in ("bare", "one root")
    )  # which has a part of MaxText's own root
