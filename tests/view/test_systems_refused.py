"""What is wrong with a conversion between systems is said before any data moves: which parameter, and the cure; then
nothing lies at the target."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import wherry
from tests.support.families import LLAMA as CONFIG
from tests.support.families import llama
from tests.support.formats import CORPUS, either, expected, place
from tests.support.stated import FACTS
from wherry.core.request import LayoutRequest
from wherry.errors import (
    AmbiguousError,
    IncompleteError,
    MismatchError,
    UnrepresentableError,
    UsageError,
    WherryError,
)

needs_corpus = pytest.mark.skipif(
    not CORPUS.is_dir(), reason="the corpus is not here; set WHERRY_CORPUS to its folder"
)
WEIGHTS, SAID = "model.safetensors", "config.json"


@pytest.fixture
def model(tmp_path):
    """A Hugging Face Llama."""
    begun, _family, config = llama()
    (tmp_path / "hf").mkdir()
    tensors = {path[0]: array for path, array in begun.tensors.items()}
    save_file(tensors, tmp_path / "hf" / WEIGHTS, metadata={"format": "pt"})
    (tmp_path / "hf" / SAID).write_text(json.dumps(config))
    return tmp_path / "hf"


def spoil(model, *, config=None, tensors=None, drop=()):
    """Change what lies in the folder."""
    arrays = {**load_file(model / WEIGHTS), **(tensors or {})}
    save_file({name: array for name, array in arrays.items() if name not in drop}, model / WEIGHTS)
    (model / SAID).write_text(json.dumps({**CONFIG, **(config or {})}))


def refused(source, to, kind, *words, **keywords):
    """The error, from the plan and from the conversion; neither leaves a file next to the source."""
    target = source.parent / "out"
    before = sorted(os.listdir(source.parent))
    with pytest.raises(kind) as planned:
        wherry.plan(source, target, to=to, **keywords)
    with pytest.raises(kind) as caught:
        wherry.convert(source, target, to=to, lineage=False, **keywords)
    assert str(planned.value) == str(caught.value)
    said = caught.value.for_shell()
    assert all(word in said for word in words), said
    assert caught.value.cure
    assert sorted(os.listdir(source.parent)) == before
    return caught.value


LAST = "model.layers.2."
KEY = "model.layers.1.self_attn.k_proj.weight"
SPOILT = {
    "a wrong number of layers": ({"config": {"num_hidden_layers": 4}}, IncompleteError, ["layer", "num_hidden_layers"]),
    "a wrong number of heads": ({"config": {"num_key_value_heads": 4}}, MismatchError, ["k_proj"]),
    "a wrong width": ({"config": {"hidden_size": 16}}, MismatchError, ["embed", "hidden_size"]),
    "another model": ({"config": {"hidden_act": "gelu"}}, UnrepresentableError, ["hidden_act", "'gelu'"]),
    "an unknown attribute": ({"config": {"logit_cap": 30.0}}, UnrepresentableError, ["logit_cap"]),
    "a missing layer": ({"drop": [f"model.layers.1.{name}" for name in (
        "input_layernorm.weight", "post_attention_layernorm.weight", "self_attn.q_proj.weight",
        "self_attn.k_proj.weight", "self_attn.v_proj.weight", "self_attn.o_proj.weight", "mlp.gate_proj.weight",
        "mlp.up_proj.weight", "mlp.down_proj.weight")]}, IncompleteError, ["layer", "1"]),
    "a missing tensor": ({"drop": [KEY]}, IncompleteError, ["index 1", "self_attn.k_proj.weight"]),
    "an extra tensor": ({"tensors": {f"{LAST}self_attn.k_norm.weight": np.ones(8, "f4")}}, UnrepresentableError,
                        ["k_norm"]),
    "a shape that contradicts": ({"tensors": {KEY: np.ones((16, 11), "f4")}}, MismatchError, [KEY, "11", "12"]),
    "a transposed matrix": ({"tensors": {KEY: np.ones((12, 16), "f4")}}, MismatchError, [KEY]),
}  # fmt: skip


@pytest.mark.parametrize("what", SPOILT)
@pytest.mark.parametrize("to", ["maxtext", "lingua", "penzai"])
def test_a_source_that_contradicts_itself(what, to, model):
    change, kind, words = SPOILT[what]
    if (what, to) == ("another model", "penzai"):
        words = ["no activation gelu"]
    spoil(model, **change)
    refused(model, to, kind, *words)


def test_requests_that_cannot_be_fulfilled(model, tmp_path):
    refused(
        model,
        "maxtext",
        UsageError,
        "unknown option 'scan_layer' for format maxtext",
        "scan_layers",
        options={"scan_layer": "true"},
    )
    refused(model, "maxtext", UsageError, "scan_layers=maybe", options={"scan_layers": "maybe"})
    refused(
        model, "maxtext", UsageError, "unknown family 'lama'", "llama", layout=LayoutRequest(family="lama")
    )
    refused(model, "maxtext", UnrepresentableError, "not mistral", layout=LayoutRequest(family="mistral"))
    refused(
        model,
        "t5x-legacy",
        UnrepresentableError,
        "no layout for family llama",
        "t5",
        layout=LayoutRequest(family="llama"),
    )
    refused(
        model,
        "maxtext",
        WherryError,
        "absent.json",
        layout=LayoutRequest(config=str(tmp_path / "absent.json")),
    )
    refused(
        model,
        "maxtext",
        WherryError,
        "absent.toml",
        layout=LayoutRequest(family_file=str(tmp_path / "absent.toml")),
    )
    refused(model, "maxtext", UsageError, "int3", layout=LayoutRequest(dtype="int3"))


@needs_corpus
def test_a_maxtext_checkpoint_does_not_say_how_its_rotary_positions_lie(tmp_path):
    source = tmp_path / "0"
    shutil.copytree(place("maxtext-llama31-l3-scan").parent, source)
    refused(
        source,
        "huggingface",
        AmbiguousError,
        "several families fit this checkpoint: llama, mistral",
        "--family llama",
    )
    layout = LayoutRequest(family="llama")
    refused(source, "huggingface", UsageError, "rotary positions", "--set rope=half (Llama 2", layout=layout)
    made = {}
    for rope, scaling in (("half", "default"), ("interleaved", "llama3.1")):
        options = {**FACTS["llama", "maxtext"], "rope_scaling": scaling}  # which decides how the pairs lie
        wherry.convert(
            source, tmp_path / rope, to="huggingface", layout=layout, options=options, lineage=False
        )
        with wherry.open(tmp_path / rope) as checkpoint:
            made[rope] = checkpoint.read(KEY)
    assert made["half"].tobytes() != made["interleaved"].tobytes()
    np.testing.assert_array_equal(np.sort(made["half"], axis=0), np.sort(made["interleaved"], axis=0))


@needs_corpus
@pytest.mark.parametrize(
    ("case", "layout", "kind", "words"),
    [
        (
            "penzai-llama-unroll-plain",
            LayoutRequest(),
            AmbiguousError,
            ["several families fit this checkpoint: llama, mistral", "--family llama"],
        ),
        (
            "penzai-llama-unroll-params-tuple",
            LayoutRequest(family="llama"),
            UnrepresentableError,
            ["0/value/data_array"],
        ),
        (
            "maxtext-gemma2-l4-scan",
            LayoutRequest(),
            UsageError,
            ["no config states", "--set final_softcap=VALUE", "--set sliding_window=VALUE", "--config FILE"],
        ),
        ("torch-zip-fair-llama", LayoutRequest(family="llama"), AmbiguousError, ["group", "--config"]),
    ],
)
def test_what_no_file_states_the_user_must_state(case, layout, kind, words, tmp_path):
    source = tmp_path / place(case).name
    (shutil.copytree if place(case).is_dir() else shutil.copy)(place(case), source)
    refused(source, "huggingface", kind, *words, layout=layout)


# ---- maxtext#879: 449 GB of 1,800


def sizes(case):
    return {
        file.relative_to(place(case)): file.stat().st_size
        for file in place(case).rglob("*")
        if file.is_file()
    }


@pytest.mark.parametrize(
    ("case", "words"),
    either(
        ("defect-maxtext-one-of-4-hosts", ["1 of 4 hosts", "108 of 433 kB present", "51 of 159 chunks"]),
        ("defect-paxml-one-of-4-hosts", ["1 of 4 hosts", "159 of 630 kB present", "57 of 123 chunks"]),
        ("made-paxml-one-of-4-hosts", ["1 of 4 hosts", "35.68 of 134 kB present", "57 of 135 chunks"]),
    ),
)
@pytest.mark.parametrize("options", [{}, {"scan_layers": "false"}])
def test_a_quarter_of_a_checkpoint_is_refused_in_words(case, words, options, tmp_path):
    """Where each host wrote to a disk of its own, the copy of one disk is no checkpoint, whatever the options are."""
    shutil.copytree(place(case), tmp_path / "0")
    refused(tmp_path / "0", "maxtext", IncompleteError, *words, "own disk", options=options)


@pytest.mark.parametrize(
    ("part", "whole"),
    either(
        ("defect-maxtext-one-of-4-hosts", "maxtext-llama31-l3-scan-zarr2-noocdbt"),
        ("defect-paxml-one-of-4-hosts", None),
        ("made-paxml-one-of-4-hosts", "made-paxml-v11"),
    ),
)
def test_the_folders_of_all_hosts_together_become_what_the_run_asks_for(part, whole, tmp_path):
    """Each host's folder holds files of its own; copied into one they are the checkpoint, in either form."""
    whole = whole or expected(part)["derived_from"]
    shutil.copytree(place(part), tmp_path / "0" / "items" if place(part).name == "items" else tmp_path / "0")
    merged = tmp_path / "0" / "items" if place(part).name == "items" else tmp_path / "0"
    for name in sorted(sizes(whole).keys() - sizes(part).keys()):
        (merged / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(place(whole) / name, merged / name)
    wherry.convert(merged, tmp_path / "out", to="maxtext", options={"scan_layers": "false"}, lineage=False)
    assert wherry.verify(tmp_path / "out", level="roundtrip", against=place(whole)).ok
    assert "layers are unscanned" in str(wherry.detect(tmp_path / "out").evidence)


# ---- The command line


def cli(*words, cwd):
    done = subprocess.run(
        [sys.executable, "-m", "wherry.cli", *words], capture_output=True, text=True, check=False, cwd=cwd
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("change", "code", "word"),
    [
        ({"config": {"hidden_size": 16}}, 9, "hidden_size"),
        ({"config": {"logit_cap": 30.0}}, 7, "logit_cap"),
        ({"drop": [KEY]}, 5, "self_attn.k_proj.weight"),
    ],
)
def test_exit_codes(change, code, word, model):
    spoil(model, **change)
    status, said = cli("convert", "hf", "out", "--to", "maxtext", cwd=model.parent)
    assert (status, word in said, "cure" in said.lower()) == (code, True, True), said
    assert sorted(os.listdir(model.parent)) == ["hf"]


def test_unknown_options_on_the_command_line(model):
    status, said = cli("plan", "hf", "out", "--to", "maxtext", "--set", "scan_layer=true", cwd=model.parent)
    assert status == 2
    assert "scan_layer" in said


def test_a_family_of_the_user_s_own(model, tmp_path):
    """Declared in a file: converted, proved and taken back with it, refused by name without it."""
    spoil(
        model,
        tensors={"output.weight": load_file(model / WEIGHTS)["lm_head.weight"]},
        drop=["lm_head.weight"],
    )
    declared = tmp_path / "own.toml"
    declared.write_text(
        'extends = "llama"\nname = "own"\nabout = "of a user"\n'
        '[systems.huggingface.layouts]\nhead = ["output.weight", "vocab embed"]\n'
    )
    refused(model, "maxtext", UnrepresentableError, "output.weight", "--family-file")
    layout = LayoutRequest(family_file=str(declared))
    wherry.convert(model, tmp_path / "there", to="maxtext", layout=layout, lineage=False)
    prove = {"level": "roundtrip", "against": model}
    with pytest.raises(UsageError, match="family 'own' was declared in a family file"):
        wherry.verify(tmp_path / "there", **prove)
    assert wherry.verify(tmp_path / "there", **prove, family_file=str(declared)).ok
    refused(tmp_path / "there", "huggingface", UsageError, "family 'own'", "--family-file")
    wherry.convert(tmp_path / "there", tmp_path / "tree", to="orbax", lineage=False)
    wherry.convert(tmp_path / "there", tmp_path / "back", to="huggingface", layout=layout, lineage=False)
    assert load_file(tmp_path / "back" / WEIGHTS).keys() == load_file(model / WEIGHTS).keys()
