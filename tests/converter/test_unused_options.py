"""What a user states of a conversion is used or refused: an option that changes nothing is a usage error.

The walk takes every option to pairs of formats, with two values. If both are accepted, one of them gives another plan:
other tensors, files or notes, or another record of how the tensors are laid out.
"""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import islice

import pytest

import wherry
from tests.support.command import command
from tests.support.made import dcp
from tests.support.tiny_models import tiny_model
from wherry.converter.plan import plan_target, plan_targets, require_used
from wherry.core.request import (
    PLAIN,
    ConvertRequest,
    LayoutRequest,
    SourceRequest,
    TargetRequest,
    convert_request,
)
from wherry.errors import MismatchError, UsageError, WherryError
from wherry.families import load_family
from wherry.formats.checkpoint import open_source
from wherry.formats.registry import find_target_format, formats
from wherry.storage.location import MOST_CONFIG
from wherry.tree.mapping import TREE_OPTIONS

SOURCES = ("hf", "maxtext", "orbax", "dcp")
SHARES = 8  # of the pairs of an option and a target; one of them is not slow
FAMILY = load_family("llama")
WRITTEN = [name for name, row in formats().items() if row.is_written]
# Two values of each option that has no choices of its own.
VALUES = {
    "--family": ("llama", "mistral"), "--dtype": ("bfloat16", "float16"),
    "boxed": ("true", "false"), "nnx": ("value", "raw_value"),
    "unnest": ("params", "model"), "nest": ("params", "model"),
    "rename": ("{a*} -> x/{a*}", "{a*} -> yy/{a*}"), "rules": ("embed:data", "embed:model"),
    "scan": ("layers_{l} -> layers:0", "layers_{l} -> layers:1"), "dequantize": ("bfloat16", "float32"),
    "quantize": ("fp8", "fp8-block"), "scales": ("a", "b"),
    "activation": ("silu", "gelu"), "norm_eps": ("0.001", "0.00025"), "rope_theta": ("77", "888888"),
    "rope_scaling": ("default", "llama3.1"), "sliding_window": ("0", "16"), "tied": ("true", "false"),
    "tied_logits": ("plain", "scaled"), "max_position": ("77", "88888"),
}  # fmt: skip
SIZES = ("1MB", "3MB")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A folder with a model of transformers, its MaxText step, its bare tree, another tree, and files to state."""
    home = tmp_path_factory.mktemp("stated")
    tiny_model("llama").save_pretrained(home / "hf")
    for to in ("maxtext", "orbax", "safetensors"):
        wherry.convert(home / "hf", home / to, to=to, lineage=False)
    dcp(home / "dcp")
    config = json.loads((home / "hf" / "config.json").read_text())
    (home / "same.json").write_text(json.dumps(config))
    rope = {**(config.get("rope_parameters") or {}), "rope_theta": 987654.0}
    other = {**config, "rms_norm_eps": 3.25e-05, "rope_theta": 987654.0, "rope_parameters": rope}
    (home / "other.json").write_text(json.dumps(other))
    for name in ("few", "many"):
        (home / name).mkdir()
        (home / name / "tokenizer.json").write_text(json.dumps({"model": name}))
        (home / f"{name}.toml").write_text(f'extends = "llama"\nname = "{name}"\n')
    return home


def values_of(home, to):
    """Every option that a target may be given, with two values."""
    systems = FAMILY.systems.values()
    choices = [*(pair for one in systems for pair in (*one.forms.items(), *one.conventions.items()))]
    own = find_target_format(to).options
    return {
        "--config": (home / "same.json", home / "other.json"),
        "--assets": (home / "few", home / "many"),
        "--family-file": (home / "few.toml", home / "many.toml"),
        **VALUES,
        **{name: one.choices[:2] for name, one in choices if len(one.choices) > 1},
        **{name: one.choices[:2] or (SIZES if name != "chunks" else ("64", "256")) for name, one in own.items()
           if not isinstance(one.default, bool)},
        **{name: ("true", "false") for name, one in own.items() if isinstance(one.default, bool)},
    }  # fmt: skip


def planned(checkpoint, to, name, value):
    """Everything that a plan decides, or None where it is refused."""
    layout = replace(PLAIN, **{name[2:].replace("-", "_"): str(value)}) if name.startswith("--") else PLAIN
    options = {} if name.startswith("--") else {name: value}
    target = TargetRequest("/nowhere/out", to, options, layout=layout)
    request = ConvertRequest(source=SourceRequest(checkpoint.uri), targets=(target,))
    try:
        seen, plan = plan_target(checkpoint, find_target_format(to), target, request)
        require_used(checkpoint.uri, request.targets, [plan.unused])
    except WherryError:
        return None
    companions = plan.manifest.companions
    files = {one.name: seen.reader.companion(one.name).read_whole(MOST_CONFIG) for one in companions}
    tensors = [
        (one.path, one.shape, one.dtype, one.axes, one.sharding) for one in plan.manifest.tensors.values()
    ]
    layout = plan.manifest.origin.get("layout", {})
    record = [layout.get(side, {}).get(name) for side in ("from", "to") for name in ("rope", "query_scale")]
    tree = (sorted(tensors, key=str), plan.pairs, plan.ignored, record, layout.get("family"))
    return repr((tree, files, plan.notes, dict(plan.options)))


def test_every_option_is_in_the_walk(model):
    assert {*TREE_OPTIONS} - {
        "axes",
        "split",
        "join",
    } <= VALUES.keys()  # a tree may have the form that they state
    assert {*FAMILY.facts} <= VALUES.keys()


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("share", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, SHARES))])
def test_an_option_changes_the_plan_or_is_refused(source, share, model):
    pairs = [(to, name, values) for to in WRITTEN for name, values in values_of(model, to).items()]
    at = (SOURCES.index(source) + share) % SHARES
    idle = []
    with open_source(SourceRequest(str(model / source))) as checkpoint:
        for to, name, values in islice(pairs, at, None, SHARES):
            plans = [planned(checkpoint, to, name, value) for value in values]
            idle += [(to, name)] if None not in plans and plans[0] == plans[1] else []
    assert not idle


@pytest.mark.parametrize(
    ("source", "to", "words", "reason"),
    [
        ("hf", "safetensors", ["--assets", "few"], "the tree is kept without a layout"),
        ("hf", "orbax", ["--config", "other.json"], "the tree is kept without a layout"),
        ("maxtext", "orbax", ["--config", "other.json"], "the tree is kept without a layout"),
        ("hf", "safetensors", ["--dtype", "bfloat16", "--assets", "few"], "safetensors holds none"),
        ("hf", "safetensors", ["--set", "rope_theta=7"], "safetensors holds none"),
        ("hf", "maxtext", ["--assets", "few", "--ignore", "companions"], "--ignore companions leaves out"),
        ("hf", "huggingface", ["--family", "none", "--family-file", "few.toml"], "without a layout"),
        (
            "maxtext",
            "orbax",
            ["--set", "scan=layers:1 -> layers_{n}", "--dtype", "float16"],
            "scan reads no family",
        ),
        ("hf", "maxtext", ["--family", "llama", "--family-file", "few.toml"], "declares family few"),
    ],
)
def test_the_command_refuses_what_nothing_reads(source, to, words, reason, model, tmp_path):
    files = {one.name: one for one in model.iterdir()}
    done = command(
        "plan", model / source, tmp_path / "out", "--to", to, *(files.get(one, one) for one in words)
    )
    assert done.returncode == 2, done.stdout + done.stderr
    assert reason in done.stderr
    assert "cure:" in done.stderr


def test_permissions_and_defaults_may_be_stated(model, tmp_path):
    options = {"scan_layers": "true", "ocdbt": "true"}
    assert wherry.plan(model / "hf", tmp_path / "out", to="maxtext", options=options, ignore=("others",))


def test_of_several_targets_one_must_use_an_option(model, tmp_path):
    targets = [TargetRequest(str(tmp_path / to), to) for to in ("maxtext", "orbax", "npz")]
    source, assets = model / "hf", str(model / "few")
    plan_targets(convert_request(source, targets, assets=assets))
    with pytest.raises(UsageError, match="--assets changes nothing"):
        plan_targets(convert_request(source, targets[1:], assets=assets))


@pytest.mark.parametrize("name", ["junk.json", "model.safetensors.index.json"])
@pytest.mark.parametrize(
    ("source", "to", "family"), [("hf", "maxtext", None), ("orbax", "huggingface", "none")]
)
def test_a_config_names_a_model(source, to, family, name, model, tmp_path):
    files = {
        "junk.json": {"a": 1},
        "model.safetensors.index.json": {"metadata": {}, "weight_map": {"w": "x"}},
    }
    (tmp_path / name).write_text(json.dumps(files[name]))
    with pytest.raises(UsageError, match="is not the config of a model"):
        plan(model / source, tmp_path / "out", to, config=str(tmp_path / name), family=family)


def plan(source, target, to, **layout):
    return wherry.plan(source, target, to=to, layout=LayoutRequest(**layout))


@pytest.mark.parametrize("to", ["maxtext", "huggingface", "penzai"])
def test_each_difference_of_a_config_is_a_warning(to, model, tmp_path):
    stated = str(model / "other.json")
    notes = " ".join(plan(model / "hf", tmp_path / "out", to, config=stated).notes)
    assert f"as stated in {stated}, instead of" in notes
    assert "987654.0" in notes
    assert "3.25e-05" in notes
    same = plan(model / "hf", tmp_path / "out", to, config=str(model / "same.json")).notes
    assert "as stated" not in " ".join(same)


def test_a_config_of_another_system_must_agree_with_the_source_s_own(model, tmp_path):
    """MaxText's own config stays the source's, so a config.json cannot replace what it states."""
    assert plan(model / "maxtext", tmp_path / "out", "penzai", config=str(model / "same.json"))
    with pytest.raises(MismatchError, match=r"other\.json: .* next to the source") as caught:
        plan(model / "maxtext", tmp_path / "out", "penzai", config=str(model / "other.json"))
    assert caught.value.exit_code == 9


def test_a_config_that_contradicts_the_record_is_refused(model, tmp_path):
    """The step was written with another base of its rotary positions, and its record says so."""
    stated = {"rope_theta": 5.0}
    wherry.convert(model / "hf", tmp_path / "step", to="maxtext", options=stated, lineage=False)
    config = model / "maxtext" / "items" / "assets" / "maxtext_config.yml"
    with pytest.raises(MismatchError, match="record of the source") as caught:
        plan(tmp_path / "step", tmp_path / "out", "huggingface", config=str(config))
    assert caught.value.exit_code == 9
