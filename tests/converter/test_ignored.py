"""Everything of a source that a target does not get is named, and options that nothing uses are refused."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import islice

import numpy as np
import orbax.checkpoint as ocp
import orbax.checkpoint.experimental.v1 as ocp1
import pytest
import torch
from click.testing import CliRunner
from safetensors.numpy import save_file

import wherry
from tests.support.command import command
from tests.support.corpus import place
from tests.support.huggingface import training_arguments
from tests.support.made import dcp
from tests.support.registry import model_folder
from tests.support.tiny_models import tiny_model
from wherry.cli import cli
from wherry.config.config import load_config
from wherry.converter.plan import plan_target, plan_targets, require_used
from wherry.core.account import IgnoredEntry, fold_entries
from wherry.core.keypath import render
from wherry.core.request import (
    PLAIN,
    ConvertRequest,
    LayoutRequest,
    SourceRequest,
    TargetRequest,
    convert_request,
)
from wherry.errors import MismatchError, UnrepresentableError, UsageError, WherryError
from wherry.families import load_family
from wherry.formats.checkpoint import open_source
from wherry.formats.registry import find_target_format, formats
from wherry.layout.mapping import TREE_OPTIONS
from wherry.store.location import MOST_CONFIG

STATE_FILES = {
    "optimizer.pt": "optimizer state",
    "optimizer_1.bin": "optimizer state",
    "scheduler.pt": "state of the learning rate schedule",
    "scaler.pt": "state of the gradient scaler",
    "training_args.bin": "arguments of the trainer",
    "rng_state_0.pth": "random states",
    "random_states_0.pkl": "random states",
}
WEIGHTS = {
    "pytorch_model.bin": "weights in another form",
    "model.fp16.safetensors": "weights, variant fp16",
    "adapter_model.safetensors": "weights of an adapter",
    "original/consolidated.00.pth": "weights in the publisher's own form",
    "onnx/model.onnx": "weights in an ONNX model",
    "global_step10/mp_rank_00_model_states.pt": "a folder with DeepSpeed shards of weights and optimizer state",
    "reward/model.safetensors": "a folder with other weights",
    "a/b/c/model.safetensors": "a folder with other weights",
}


def said(path):
    """The files that `detect` names as not converted."""
    return {seen.file: seen.seen for seen in wherry.detect(path).evidence if "not converted" in seen.seen}


def named(rows):
    return {row["path"]: row["what"] for row in rows}


def run(*words):
    return CliRunner().invoke(cli, [str(word) for word in words])


@pytest.fixture
def trainer(tmp_path, monkeypatch):
    """A checkpoint of Hugging Face's Trainer, saved by torch with the calls of transformers 5 and accelerate."""
    path = model_folder(tmp_path / "checkpoint-10")
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([weight])
    weight.sum().backward()
    optimizer.step()
    random = {"cpu": torch.random.get_rng_state(), "numpy": np.random.get_state()}  # noqa: NPY002  as Trainer saves it
    contents = {
        "optimizer.pt": optimizer.state_dict(),
        "optimizer_1.bin": optimizer.state_dict(),
        "scheduler.pt": torch.optim.lr_scheduler.ConstantLR(optimizer).state_dict(),
        "scaler.pt": torch.amp.GradScaler("cpu").state_dict(),
        "training_args.bin": training_arguments(monkeypatch),
        "rng_state_0.pth": random,
        "random_states_0.pkl": random,
    }
    for name, content in contents.items():
        torch.save(content, path / name)
    (path / "trainer_state.json").write_text('{"global_step": 10}')
    return path


def test_the_state_of_a_trainer_is_named_everywhere_and_needs_no_option(trainer, tmp_path):
    assert set(said(trainer)) == set(STATE_FILES)
    plan = wherry.plan(trainer, tmp_path / "out", to="hf").to_json()
    assert named(plan["ignored"]) == STATE_FILES
    assert {row["rule"] for row in plan["ignored"]} == {"training state"}
    assert all("not part of the weights" in row["reason"] for row in plan["ignored"])
    for verb in ("plan", "convert"):
        text = run(verb, trainer, tmp_path / "out", "--to", "hf").stdout
        for name, what in STATE_FILES.items():
            assert f"  ignored {name} ({what}) by rule training state: the state of a trainer" in text
    receipt = wherry.convert(trainer, tmp_path / "out", to="hf")
    assert receipt.already
    assert receipt.ignored == plan["ignored"]
    assert json.loads((tmp_path / "out" / "wherry.json").read_text())["receipt"]["ignored"] == plan["ignored"]
    assert not set(STATE_FILES) & {path.name for path in (tmp_path / "out").iterdir()}


def test_the_json_of_convert_names_it_too(trainer, tmp_path):
    done = run("convert", trainer, tmp_path / "out", "--to", "orbax", "--json")
    assert named(json.loads(done.stdout)["ignored"]) == STATE_FILES


def test_a_receipt_without_ignored_entries_is_as_before(tmp_path):
    receipt = wherry.convert(model_folder(tmp_path / "model"), tmp_path / "out", to="hf")
    assert receipt.ignored == []
    assert "ignored" not in receipt.to_json()


@pytest.mark.parametrize("name", WEIGHTS)
def test_weights_stay_behind_only_on_request(name, tmp_path):
    path = model_folder(tmp_path / "model")
    (path / name).parent.mkdir(parents=True, exist_ok=True)
    save_file({"w": np.ones(3, "f4")}, path / name)
    with pytest.raises(UnrepresentableError) as error:
        wherry.plan(path, tmp_path / "out", to="orbax")
    [(entry, what)] = named(
        wherry.plan(path, tmp_path / "out", to="orbax", ignore=("others",)).to_json()["ignored"]
    ).items()
    assert (name.startswith(entry), what) == (True, WEIGHTS[name])
    assert f"weights next to the converted ones would be left out: {entry} ({what})" in str(error.value)
    assert error.value.cure == 'pass --ignore others to leave them out (in a route: ignore = ["others"])'
    assert list(said(path)) == [entry]
    assert run("convert", path, tmp_path / "out", "--to", "orbax").exception.exit_code == 7
    assert not (tmp_path / "out").exists()
    done = run("convert", path, tmp_path / "out", "--to", "orbax", "--ignore", "others")
    assert f"  ignored {entry} ({what}) by rule others: " in done.stdout
    assert (tmp_path / "out").exists()


def test_a_step_below_a_model_is_a_checkpoint_of_its_own(tmp_path):
    path = model_folder(tmp_path / "model")
    model_folder(path / "checkpoint-5")
    [row] = wherry.plan(path, tmp_path / "out", to="orbax").to_json()["ignored"]
    assert row == {
        "path": "checkpoint-5", "rule": "files", "what": "a step of the run", "reason": "it is a checkpoint of its own",
    }  # fmt: skip


def test_many_files_of_weights_are_counted(tmp_path):
    path = model_folder(tmp_path / "model")
    for number in range(5):
        save_file({"w": np.ones(3, "f4")}, path / f"old{number}.safetensors")
    with pytest.raises(UnrepresentableError, match=r"old0\.safetensors .*old2\.safetensors .* and 2 more"):
        wherry.plan(path, tmp_path / "out", to="orbax")


def test_a_route_says_so(tmp_path):
    path = model_folder(tmp_path / "models" / "m")
    save_file({"w": np.ones(3, "f4")}, path / "pytorch_model.bin")
    text = f"""
        [routes.night]
        root = "{tmp_path}/models"
        min_age = "0s"
        IGNORE
        [[routes.night.targets]]
        format = "orbax"
        uri = "{tmp_path}/out/{{name}}"
    """
    for word in ("", 'ignore = ["others"]'):
        (tmp_path / "wherry.toml").write_text(text.replace("IGNORE", word))
        [route] = load_config(tmp_path / "wherry.toml").routes
        done = run("nightly", "--config", tmp_path / "wherry.toml", "--json")
        assert (route.ignore, (tmp_path / "out" / "m").exists()) == (
            ("others",) if word else (),
            bool(word),
        ), done


@pytest.fixture
def step(tmp_path):
    """A step of Orbax's CheckpointManager with parameters, their average, an optimizer and JSON."""
    items = {
        "params": ocp.args.StandardSave({"w": np.ones(3)}), "ema": ocp.args.StandardSave({"w": np.ones(3)}),
        "opt_state": ocp.args.StandardSave({"mu": np.ones(3)}), "extra": ocp.args.JsonSave({"a": 1}),
        "moments": ocp.args.StandardSave({"inner": {"mu": np.ones(3), "nu": np.ones(3)}}),
    }  # fmt: skip
    with ocp.CheckpointManager(tmp_path / "run", item_names=tuple(items)) as manager:
        manager.save(3, args=ocp.args.Composite(**items))
        manager.wait_until_finished()
    return tmp_path / "run" / "3"


@pytest.mark.parametrize("uri", [".", ".."])
def test_the_other_items_of_a_step(step, uri, tmp_path):
    assert set(said(step / uri)) == {"../ema", "../extra", "../moments", "../opt_state"}
    with pytest.raises(UnrepresentableError, match=r"left out: \.\./ema \(an item with arrays\) \("):
        wherry.plan(step / uri, tmp_path / "out", to="orbax")
    ignored = wherry.plan(step / uri, tmp_path / "out", to="orbax", ignore=("others",)).to_json()["ignored"]
    assert {row["path"]: row["rule"] for row in ignored} == {
        "../ema": "items", "../extra": "items", "../moments": "training state", "../opt_state": "training state",
    }  # fmt: skip


def test_an_item_that_is_the_source_leaves_nothing_out(step, tmp_path):
    """The other items of the step are named; they are no part of the source."""
    receipt = wherry.convert(step / "params", tmp_path / "out", to="orbax")
    rows = {row["path"]: row["reason"] for row in receipt.ignored}
    assert set(rows) == {"../ema", "../extra", "../moments", "../opt_state"}
    assert set(rows.values()) == {"it is not part of the source, which is one item of the step"}
    text = run("plan", step / "params", tmp_path / "text", "--to", "safetensors").stdout
    assert "ignored ../ema (an item with arrays) by rule items: it is not part of the source" in text
    [row] = [row for row in wherry.plan(step, tmp_path / "no", to="orbax", item="params").ignored
             if row.name == "../ema"]  # fmt: skip
    assert row.reason == "one item of a step is converted"


def test_who_names_an_item_says_that_the_others_stay(step, tmp_path):
    receipt = wherry.convert(step, tmp_path / "out", to="safetensors", item="ema")
    assert [row["path"] for row in receipt.ignored][:2] == ["../extra", "../moments"]
    assert {"path": "../params", "rule": "items", "what": "an item with arrays",
            "reason": "one item of a step is converted"} in receipt.ignored  # fmt: skip


def test_an_item_that_is_named_says_nothing_of_other_weights(tmp_path):
    path = model_folder(tmp_path / "pipeline" / "unet")
    save_file({"w": np.ones(3, "f4")}, path / "pytorch_model.bin")
    with pytest.raises(UnrepresentableError, match=r"pytorch_model\.bin"):
        wherry.plan(tmp_path / "pipeline", tmp_path / "out", to="orbax", item="unet")


def test_the_checkpointables_of_the_v1_api(tmp_path):
    ocp1.save_checkpointables(
        tmp_path / "ckpt", {"state": {"w": np.ones(3)}, "ema": {"w": np.ones(3)}, "config": {"a": np.ones(1)}}
    )
    assert set(said(tmp_path / "ckpt")) == {"../ema", "../config"}
    with pytest.raises(UnrepresentableError, match=r"\.\./ema \(a checkpointable with arrays\)"):
        wherry.plan(tmp_path / "ckpt", tmp_path / "out", to="orbax")


def test_an_item_of_strings_is_listed_and_blocks_nothing(tmp_path):
    """Keras saves its `model_config` so: an item with a tree, but without arrays."""
    state = {
        "trainable_variables": {"kernel": np.ones(3)},
        "optimizer_variables": {"adam": {"m": np.ones(3)}},
    }
    items = {"pytree": ocp.args.PyTreeSave(state), "model_config": ocp.args.PyTreeSave({"config": "{}"})}
    with ocp.CheckpointManager(tmp_path / "run", item_names=tuple(items)) as manager:
        manager.save(1, args=ocp.args.Composite(**items))
        manager.wait_until_finished()
    plan = wherry.plan(tmp_path / "run", tmp_path / "out", to="orbax", only="params")
    assert [render(path) for path in plan.manifest.tensors] == ["trainable_variables/kernel"]
    assert {row["path"]: row["what"] for row in plan.to_json()["ignored"]}[
        "../model_config"
    ] == "an item without arrays"


def test_a_checkpoint_next_to_a_checkpoint_is_none_of_its_items(tmp_path):
    with ocp.StandardCheckpointer() as checkpointer:
        for name in ("params", "state"):
            checkpointer.save(tmp_path / "2024" / name, {"w": np.ones(3)})
    assert said(tmp_path / "2024" / "params") == {}


def test_many_entries_of_one_node_are_one_row():
    rows = [IgnoredEntry(("opt", "mu", f"{n}"), "only params", "not a parameter") for n in range(9)]
    rows += [IgnoredEntry((f"optim.state.{n}",), "only params", "not a parameter") for n in range(9)]
    rows += [IgnoredEntry((f"a~{n}",), "only params", "not a parameter") for n in range(8)]
    found = fold_entries(rows)
    assert [row.to_json()["path"] for row in found[:2]] == ["opt/mu/…", "optim.state.…"]
    assert found[0].what == "9 tensors"
    assert found[2:] == rows[-8:]


def test_what_only_params_leaves_out_is_counted_in_the_receipt(tmp_path):
    names = [f"{part}.{n}.weight" for part in ("model", "optim.state") for n in range(9)]
    state = {name: torch.ones(2) for name in names}
    tree = {"model": {}, "optim": {"state": {}}}
    for name, tensor in state.items():
        (tree["model"] if name.startswith("model") else tree["optim"]["state"])[name] = tensor
    torch.save(tree, tmp_path / "a.pt")
    plan = wherry.plan(tmp_path / "a.pt", tmp_path / "out.pt", to="torch-zip", only="params")
    receipt = wherry.convert(tmp_path / "a.pt", tmp_path / "out.pt", to="torch-zip", only="params")
    assert len(plan.to_json()["ignored"]) == 9
    assert receipt.ignored == [{
        "path": "optim/state/optim.state.…", "rule": "only params", "what": "9 tensors",
        "reason": "optimizer: in a node called as an optimizer, next to the parameters; only parameters were requested",
    }]  # fmt: skip


def test_values_for_which_a_layout_has_no_place_are_named(corpus, tmp_path):
    plan = wherry.plan(place("lingua-fsdp2-w2"), tmp_path / "out", to="hf", ignore=("companions",))
    with wherry.open(place("lingua-fsdp2-w2")) as source:
        values = {render(path) for path in source.manifest.values}
    rows = [row.to_json() for row in plan.ignored]
    assert values == {row["path"] for row in rows if row["what"] == "value"} != set()
    assert {"consolidated": "the same weights in one file"}.items() <= named(rows).items()


def test_rewrite_names_and_refuses_as_convert_does(tmp_path):
    items = {name: ocp.args.StandardSave({"w": {"value": np.ones(3)}}) for name in ("params", "ema")}
    with ocp.CheckpointManager(tmp_path / "run", item_names=tuple(items)) as manager:
        manager.save(3, args=ocp.args.Composite(**items))
        manager.wait_until_finished()
    step, words = tmp_path / "run" / "3", ("--as", "unbox", "--no-lineage")
    with pytest.raises(UnrepresentableError, match=r"left out: \.\./ema \(an item with arrays\)"):
        wherry.rewrite(step, tmp_path / "out", as_="unbox")
    assert not (tmp_path / "out").exists()
    done = run("rewrite", step, tmp_path / "out", *words, "--ignore", "others", "--dry-run")
    assert (
        "  ignored ../ema (an item with arrays) by rule items: one item of a step is converted" in done.stdout
    )
    done = run("rewrite", step, tmp_path / "out", *words, "--ignore", "others", "--json")
    assert [row["path"] for row in json.loads(done.stdout)["ignored"]] == ["../ema"]
    done = wherry.rewrite(step / "params", tmp_path / "own", as_="unbox", lineage=False)
    assert [row["reason"] for row in done.receipt.ignored] == [
        "it is not part of the source, which is one item of the step"
    ]


# What a user states of a conversion is used or refused: an option that changes nothing is a usage error.


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
    "quantize": ("fp8", "fp8-block"), "scales": ("a", "b"), "group_size": ("32", "64"),
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
