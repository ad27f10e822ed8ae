"""A MaxText config that names a model means the values of that model's file, never silently those of base.yml."""

from __future__ import annotations

import json
import tomllib

import pytest

from tests.support.generations import ROOT
from wherry.errors import UnrepresentableError, UsageError
from wherry.families import families_of_system, load_family
from wherry.families.companions import config_file, config_system
from wherry.families.facts import tell
from wherry.view.overview import models_without_layouts

MODELS = tomllib.loads((ROOT / "wherry/families/tables/maxtext_models.toml").read_text(encoding="utf-8"))
NAMED = [name for rows in MODELS.values() for name, values in rows.items() if values]
BARE = {"base_config": "base.yml", "model_name": "deepseek3-671b"}


def read(folder, config, name="run.yml"):
    path = folder / name
    path.write_text(json.dumps(config))  # JSON is YAML too
    return config_file(str(path))


def facts(config, family):
    return tell(load_family(family).system("maxtext"), config).facts


@pytest.mark.parametrize("name", ["run.yml", "run.json"])
def test_a_bare_config_means_the_file_of_its_model(tmp_path, name):
    """By base.yml the routing would be softmax's, 1 expert for each token, unscaled, and positions unscaled."""
    config = read(tmp_path, BARE, name)
    family = load_family("deepseek")
    assert config_system(config, family.systems.values()) is family.system("maxtext")
    found = facts(config, "deepseek")
    assert (found["experts_per_token"], found["routing_score"], found["routed_scaling"]) == (
        8,
        "sigmoid",
        2.5,
    )
    assert found["rope_scaling"]["rope_type"] == "yarn"
    assert found["norm_eps"] == 1e-6


@pytest.mark.parametrize(("model", "family", "wanted"), [
    ("llama3.1-8b-Instruct", "llama", {"rope_theta": 500_000}),
    ("mistral-7b", "mistral", {"rope_theta": 1_000_000}),
    ("mixtral-8x7b", "mixtral", {"experts_per_token": 2}),
    ("qwen3-30b-a3b", "qwen", {"experts_per_token": 8, "norm_eps": 1e-6}),
    ("gemma4-26b", "gemma4", {"experts_per_token": 8, "final_softcap": 30.0, "rope_theta": 1_000_000}),
    ("gemma4-31b", "gemma4", {"experts_per_token": None, "sliding_window": 1024, "local_rope_theta": 10_000}),
    ("gemma4-e2b", "gemma4-small", {"final_softcap": 30.0, "sliding_window": 512, "rope_theta": 1_000_000}),
    ("gemma4-e4b", "gemma4-small", {"local_rope_theta": 10_000, "activation": "gelu_pytorch_tanh"}),
    ("llama4-17b-16e", "llama4", {"unrotated_every": 4, "norms_of_heads": True, "chunk_size": 8192}),
    ("llama4-17b-128e", "llama4", {"norms_of_heads": False, "rope_scaling": {"rope_type": "default"}}),
    ("gemma-2b", "gemma", {"activation": "gelu_pytorch_tanh"}),
    ("gemma2-9b", "gemma2", {"final_softcap": 30.0, "attention_softcap": 50.0, "sliding_window": 4096}),
    ("gemma3-27b", "gemma3", {"local_rope_theta": 10_000, "query_pre_attn_scalar": 5376 // 32}),
])  # fmt: skip
def test_every_family_s_models_are_known(tmp_path, model, family, wanted):
    found = facts(read(tmp_path, {"base_config": "base.yml", "model_name": model}), family)
    assert {name: found.get(name) for name in wanted} == wanted


def test_an_unknown_model_requires_its_own_file(tmp_path):
    with pytest.raises(UsageError, match=r"unknown model 'deepseek9'.*routed_score_func") as caught:
        read(tmp_path, {**BARE, "model_name": "deepseek9", "base_emb_dim": 32, "decoder_block": "deepseek"})
    assert "--config configs/models/deepseek9.yml" in caught.value.for_shell()
    whole = read(tmp_path, {**BARE, "decoder_block": "deepseek"})
    named = {
        **whole,
        "model_name": "deepseek9",
        **dict.fromkeys(("n_routing_groups", "topk_routing_group"), -1),
    }
    named |= {"use_indexer": False, "mhc_expansion_rate": 1, "beta_slow": 1}
    assert read(tmp_path, named) == named


def test_a_value_that_maxtext_would_replace_is_refused(tmp_path):
    changed = {**BARE, "rope_factor": 4}
    with pytest.raises(
        UsageError, match="rope_factor: 4, but the file of its model deepseek3-671b states 40"
    ):
        read(tmp_path, changed)
    overridden = read(tmp_path, {**changed, "override_model_config": True})
    assert facts(overridden, "deepseek")["rope_scaling"]["factor"] == 4
    whole = {**read(tmp_path, BARE), "rope_factor": 4}  # as MaxText logs it
    assert read(tmp_path, whole) == whole


def test_the_file_of_a_model_has_its_name_and_else_base_yml(tmp_path):
    found = read(tmp_path, {"decoder_block": "llama2", "base_emb_dim": 12}, "llama3.1-custom.yml")
    assert found["model_name"] == "llama3.1-custom"
    assert facts(found, "llama")["norm_eps"] == 1e-5


def test_other_systems_configs_and_the_default_model_are_unchanged(tmp_path):
    for config in (
        {"model_type": "llama", "model_name": "custom", "hidden_size": 12},
        {"base_config": "base.yml", "model_name": "default", "base_emb_dim": 12},
    ):
        assert read(tmp_path, config) == config


def holds(family, config):
    """Whether a family holds what a config of MaxText says; extents that are no integers are of another block."""
    try:
        return facts(config, family) is not None
    except (UnrepresentableError, UsageError):
        return False


@pytest.mark.parametrize("name", NAMED)
def test_every_model_is_held_by_a_family_or_named_with_a_reason(tmp_path, name):
    config = read(tmp_path, {"base_config": "base.yml", "model_name": name})
    holding = [family for family in families_of_system("maxtext") if holds(family, config)]
    assert bool(holding) != (name in models_without_layouts()), holding


def test_names_with_a_reason_are_no_others():
    files = {name for rows in MODELS.values() for name in rows}
    fileless = {"deepseek3-671b-lineage", "maxtext-omni-gemma3-qwen3", "qwen3.5-35b-fp8"}
    assert set(models_without_layouts()) <= files | fileless
