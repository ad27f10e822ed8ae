"""What a config states is read, checked, or of a class whose values cannot change an output; nothing is swallowed.

`systems/SYSTEM.toml` says it of each name, `tables/attributes_SYSTEM.toml` where the system's library reads it.
"""

from __future__ import annotations

import ast
import json
import re
import tomllib
from functools import cache
from pathlib import Path

import pytest

import wherry
from tests.support import megatron
from tests.support.maxtext_trees import to_maxtext
from tests.support.model_files import MAKERS
from tests.support.model_systems import LLAMA_CONFIG
from wherry.errors import UnrepresentableError
from wherry.families import families, load_family
from wherry.families.facts import known_attributes
from wherry.layout.expr import evaluate, names_in

FAMILIES = Path(wherry.__file__).parent / "families"
SYSTEMS = ("megatron", "maxtext", "huggingface")
CLASSES = {"record", "device", "data", "training", "tower"}
OF_FAMILIES = CLASSES | {"unread", "shown"}  # what the code of one model does not read, or its tensors show
# Of other libraries than the system's: unsloth, the code that came with DeepSeek's first models, transformers before 4.
OTHERS = {"unsloth_fixed", "unsloth_version", "aux_loss_alpha", "seq_aux", "output_past"}
# The program states no default, or one of a parser whose config has another.
WITHOUT_DEFAULT = {"modelopt_enabled", "rope_type"}


@cache
def rules(system):
    return tomllib.loads((FAMILIES / "systems" / f"{system}.toml").read_text())["config"]


@cache
def any_value(system):
    """Name → class, of the attributes whose values cannot change an output."""
    return {
        name: reason.partition(":")[0] for reason, names in rules(system)["ignored"].items() for name in names
    }


def default(system, name):
    """What the library uses if a config does not state the attribute; text of which Python makes no value is None."""
    text = known_attributes(system)[name][2]
    words = {"true": True, "false": False, "null": None, "list": [], "dict": {}}
    if text in words:
        return words[text]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return None


def read_of(system):
    """The attributes that the layouts of one family's system read."""
    config = system.config
    texts = [*config.sizes.values(), *config.facts.values(), *config.implied.values()]
    texts += [rule for rule, _reason in config.require]
    texts += [row.config for row in (*system.conventions.values(), *system.forms.values()) if row.config]
    return {name for text in texts for name in names_in(text)}


def known_to_a_family(system):
    """The attributes that a family's layouts read, check or ignore."""
    found = set()
    for family in map(load_family, families()):
        if system in family.systems:
            one = family.systems[system]
            found |= read_of(one) | {*one.config.usual, *one.config.ignored}
    return found


@pytest.mark.parametrize("system", SYSTEMS)
def test_each_name_is_one_of_the_library(system):
    names = {*any_value(system), *rules(system)["usual"]}
    assert not names - set(known_attributes(system)) - OTHERS
    assert not set(any_value(system)) & set(rules(system)["usual"])


@pytest.mark.parametrize("system", ["megatron", "maxtext"])
def test_each_name_of_the_library_is_declared(system):
    """A run's config states them all."""
    assert not set(known_attributes(system)) - known_to_a_family(system)


def test_each_ignored_name_has_a_class():
    for system in SYSTEMS:
        assert set(any_value(system).values()) <= CLASSES
    for family in map(load_family, families()):
        for one in family.systems.values():
            assert {reason.partition(":")[0] for reason in one.config.ignored.values()} <= OF_FAMILIES


# Read by the code of a class, but not of a model that the family has: what its rules require, or what no output needs.
READ_ELSEWHERE = {
    ("gemma4", "use_double_wide_mlp"): "num_kv_shared_layers == 0 is required",
    ("gemma4", "vocab_size_per_layer_input"): "hidden_size_per_layer_input == 0 is required",
    ("gemma4-small", "moe_intermediate_size"): "enable_moe_block == False is required",
    ("gemma4-small", "num_experts"): "enable_moe_block == False is required",
    ("gemma4-small", "top_k_experts"): "enable_moe_block == False is required",
    ("gpt2", "summary_first_dropout"): "by GPT2DoubleHeadsModel alone",
    ("gpt2", "summary_proj_to_labels"): "by GPT2DoubleHeadsModel alone",
    ("gpt2", "summary_use_proj"): "by GPT2DoubleHeadsModel alone",
    (
        "phi3",
        "original_max_position_embeddings",
    ): "where positions are scaled by lists of factors, as no other system does",
    ("qwen3-next", "intermediate_size"): "of dense layers, which its rules refuse",
}


def test_what_is_unread_is_not_in_the_code_of_the_model():
    """Of a family's own list; `tables/attributes_huggingface.toml` says where what every family ignores is read."""
    models = Path(pytest.importorskip("transformers").__file__).parent / "models"
    read = {}
    for family in map(load_family, families()):
        own = family.systems["huggingface"].config.ignored if "huggingface" in family.systems else {}
        unread = {name for name, reason in own.items() if reason.startswith("unread:")}
        for folder in sorted({models / kind.removesuffix("_text") for kind in family.model_types}):
            for file in folder.glob("modeling_*.py"):
                found = set(re.findall(r"\bconfig\.(\w+)", file.read_text())) & unread
                read |= {(family.name, name): file.name for name in found}
    assert read.keys() == READ_ELSEWHERE.keys()


@pytest.mark.parametrize("system", ["megatron", "maxtext"])
def test_the_only_supported_value_is_what_the_library_uses_by_default(system):
    """Other values, if there are any, are what an expression over the attribute itself says."""
    for name, value in rules(system)["usual"].items():
        stated = default(system, name)
        computed = isinstance(value, str) and names_in(value) - {"None"}
        usual = evaluate(value, {name: stated}) if isinstance(value, str) else value
        assert stated is None or computed or usual == stated or name in WITHOUT_DEFAULT, name


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """System → a checkpoint of it, and its config."""
    folder = tmp_path_factory.mktemp("attributes")
    model = MAKERS["llama"]["huggingface"](folder / "hf")
    return {
        "megatron": (megatron.save(folder / "iter_0000010"), megatron.ARGS),
        "maxtext": (
            MAKERS["llama"]["maxtext-scan"](folder / "maxtext"),
            to_maxtext(model, folder / "written"),
        ),
        "huggingface": (model, LLAMA_CONFIG),
    }


def plan(sources, system, stated, file, **options):
    """Plan a conversion of a model whose config also states these."""
    source, config = sources[system]
    file.write_text(json.dumps({**config, **stated}))
    target = "maxtext" if system == "huggingface" else "huggingface"
    return wherry.plan(
        source, file.with_name("target"), to=target, config=file, family="llama", lineage=False, **options
    )


def another(value):
    """A value that is not this one."""
    match value:
        case bool():
            return not value
        case int() | float():
            return value + 1
        case list():
            return ["another"]
        case _:
            return "another"


@pytest.mark.parametrize("system", SYSTEMS)
def test_another_value_than_the_supported_one_is_refused_by_name(system, sources, tmp_path):
    own, config = load_family("llama").system(system), sources[system][1]
    for name, value in own.config.usual.items():
        several = isinstance(value, str) and name in names_in(value)
        if several or name in {*read_of(own), *own.config.ignored}:
            continue
        usual = evaluate(value, config) if isinstance(value, str) else value
        with pytest.raises(UnrepresentableError) as caught:
            plan(sources, system, {name: another(usual)}, tmp_path / "config.json")
        assert name in caught.value.what, name


@pytest.mark.parametrize("system", SYSTEMS)
def test_any_value_of_the_other_classes_passes(system, sources, tmp_path):
    """Here all of them at once, with the supported value of each attribute that is checked."""
    config = sources[system][1]
    own = load_family("llama").system(system).config
    usual = {
        name: evaluate(value, config) if isinstance(value, str) else value
        for name, value in own.usual.items()
    }
    stated = {**dict.fromkeys(any_value(system), "another"), **usual}
    stated = {name: value for name, value in stated.items() if name not in config}
    left_out = {"base_config", "model_name", "save_pretrained"}  # they name another file
    stated = {name: value for name, value in stated.items() if name not in left_out}
    assert plan(sources, system, stated, tmp_path / "config.json").moves


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize("name", ["logits_soft_cap", "inference_mode_invented", "moe_invented"])
def test_an_invented_name_is_refused(system, name, sources, tmp_path):
    with pytest.raises(UnrepresentableError, match=name):
        plan(sources, system, {name: 30}, tmp_path / "config.json")


@pytest.mark.parametrize("name", ["use_mup", "logits_soft_cap"])
def test_the_refusal_names_it_without_a_stated_family(name, tmp_path):
    step = megatron.save(tmp_path / "iter_0000010", args={**megatron.ARGS, name: True})
    with pytest.raises(UnrepresentableError, match=name):
        wherry.plan(step, tmp_path / "target", to="huggingface", lineage=False)


@pytest.mark.parametrize("kind", ["sinkhorn", "quantile_balancing"])
def test_routing_that_is_no_softmax_of_the_best_is_refused(kind, sources, tmp_path):
    with pytest.raises(UnrepresentableError, match="moe_router_load_balancing_type"):
        plan(sources, "megatron", {"moe_router_load_balancing_type": kind}, tmp_path / "config.json")
    for same in ("aux_loss", "seq_aux_loss", "none", ["aux_loss", "seq_aux_loss"]):
        plan(sources, "megatron", {"moe_router_load_balancing_type": same}, tmp_path / "config.json")


@pytest.mark.parametrize("system", ["megatron", "maxtext"])
def test_a_config_with_every_default_of_the_library_passes(system, sources, tmp_path):
    """As a real run states them: its parser knows all of them."""
    config = sources[system][1]
    stated = {
        name: default(system, name) for name in known_attributes(system) if name not in {*config, "rope_type"}
    }
    stated |= {"encoder_num_layers": config.get("num_layers")} if system == "megatron" else {}
    assert plan(sources, system, stated, tmp_path / "config.json").moves


def test_a_log_of_maxtext_is_a_config(sources, tmp_path):
    """Values stand in it as Python prints them, and choices by their names."""
    source, config = sources["maxtext"]
    choices = {"decoder_block": "DecoderBlockType.LLAMA2", "rope_type": "RopeType.DEFAULT"}
    more = {
        "quantization": "QuantizationType.NONE",
        "emb_dim": config["base_emb_dim"],
        "lora": {"enable_lora": False},
    }
    more |= {
        "checkpoint_dir": "",
        "logical_axis_rules": (("vocab", ("tensor",)), ("kv", ())),
        "use_grpo": None,
    }
    log = tmp_path / "run.log"
    log.write_text("".join(
        f"I0706 16:49:36.949457 14011 pyconfig.py:559] Config param {name}: {value}\n"
        for name, value in {**config, **choices, **more}.items()
    ))  # fmt: skip
    planned = wherry.plan(
        source, tmp_path / "target", to="huggingface", config=log, family="llama", lineage=False
    )
    assert planned.moves
    log.write_text(log.read_text() + "Config param attn_logits_soft_cap: 30.0\n")
    with pytest.raises(UnrepresentableError, match="attn_logits_soft_cap"):
        wherry.plan(source, tmp_path / "target", to="huggingface", config=log, family="llama", lineage=False)
