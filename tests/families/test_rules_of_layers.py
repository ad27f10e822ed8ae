"""Rules of ignored tensors that hold for some layers, and families of one model type."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.families import Made, llama
from wherry.errors import UnrepresentableError, UsageError
from wherry.families import convert_layout, families, family_of_config, load_family, load_family_file

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
