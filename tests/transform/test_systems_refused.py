"""What is refused between systems: foreign trees, contradictions, and what no file states."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import wherry
from tests.support.families import LLAMA as CONFIG
from tests.support.families import llama
from tests.support.formats import CORPUS, either, expected, place
from tests.support.stated import FACTS
from tests.support.tiny_models import MODELS, TARGETS, save_tiny, small_config, tiny_model
from wherry.core.request import LayoutRequest
from wherry.errors import (
    AmbiguousError,
    IncompleteError,
    MismatchError,
    UnrepresentableError,
    UsageError,
    WherryError,
)
from wherry.families import families_of_system, load_family
from wherry.formats.registry import find_format, formats
from wherry.transform.overview import blocks_without_layouts, matrix, without_layouts

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

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
    refused(model, "maxtext", UnrepresentableError, "not one of Qwen", layout=LayoutRequest(family="qwen"))
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


# Systems are not containers: a tree of another system without a layout is refused at every system, by the
# family that its config names; a tree in the system's own form passes.


transformers = pytest.importorskip("transformers")
pytest.importorskip("torch")

SYSTEMS = [
    name for name, row in formats().items() if row.is_written and row.system not in ("", "huggingface")
]
WITHOUT_LAYOUT = [
    "AlbertForMaskedLM", "ApertusForCausalLM", "BartForConditionalGeneration",
    "BitNetForCausalLM", "BloomForCausalLM", "CodeGenForCausalLM", "Cohere2ForCausalLM", "CohereForCausalLM",
    "DebertaV2ForMaskedLM", "Dinov2Model", "DistilBertForMaskedLM", "Dots1ForCausalLM", "ElectraForMaskedLM",
    "Ernie4_5ForCausalLM", "Exaone4ForCausalLM", "GPTJForCausalLM",
    "Glm4ForCausalLM", "GlmForCausalLM", "HeliumForCausalLM",
    "LongT5ForConditionalGeneration", "MambaForCausalLM", "MinistralForCausalLM",
    "MptForCausalLM", "NemotronForCausalLM", "OPTForCausalLM",
    "OlmoForCausalLM", "OlmoeForCausalLM", "PhiForCausalLM",
    "RobertaForMaskedLM", "RwkvForCausalLM",
    "Starcoder2ForCausalLM", "SwitchTransformersForConditionalGeneration", "VaultGemmaForCausalLM",
    "ViTForImageClassification", "WhisperForConditionalGeneration", "XGLMForCausalLM",
]  # fmt: skip


def save(folder, name, **settings):
    """A tiny random model of a class of transformers, as it saves itself."""
    config = small_config(name, settings)
    getattr(transformers, name)(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def llama_of_foreign(tmp_path_factory):
    """A Llama with a layout in MaxText, Lingua and Penzai, and in no other system."""
    return save_tiny(tmp_path_factory.mktemp("llama") / "hf", "llama")


@pytest.fixture(scope="module")
def t5(tmp_path_factory):
    """A T5, which only T5X has layouts for."""
    return save_tiny(tmp_path_factory.mktemp("t5") / "hf", "t5")


def refused_of_foreign(source, target, to, *words, **keywords):
    """The refusal of the plan; it names the families that the target's system has, and a cure that works."""
    with pytest.raises(UnrepresentableError) as caught:
        wherry.plan(source, target, to=to, **keywords)
    for word in words:
        assert re.search(rf"\b{re.escape(word)}(?!\w)", caught.value.what), caught.value.what
    assert "--to orbax" in caught.value.cure
    assert caught.value.uri == str(source)
    assert not target.exists()
    return caught.value


# ---- Hugging Face models without a layout


@pytest.mark.parametrize("name", WITHOUT_LAYOUT)
def test_a_model_without_a_layout_is_refused_by_every_system(name, tmp_path):
    source = save(tmp_path / "hf", name)
    kind = json.loads((source / "config.json").read_text())["model_type"]
    for to in SYSTEMS:
        error = refused_of_foreign(source, tmp_path / "out", to, f"{to} has no layout for {kind} ({name}")
        known = families_of_system(find_format(to).system)
        assert all(re.search(rf"\b{family}\b", error.cure) for family in known)
        assert "--family-file" in error.cure
    options = {"split": "."}
    for to in ("maxtext", "t5x-orbax"):
        refused_of_foreign(source, tmp_path / "out", to, kind, options=options)
        refused_of_foreign(
            source, tmp_path / "out", to, "is no container", kind, layout=LayoutRequest(family="none")
        )
    assert wherry.plan(source, tmp_path / "out", to="orbax").tensors
    assert sorted(os.listdir(tmp_path)) == ["hf"]


@pytest.mark.parametrize("name", ["BertForMaskedLM", "GPT2LMHeadModel"])
def test_a_model_with_layouts_in_few_systems_is_refused_by_others(name, tmp_path):
    source = save(tmp_path / "hf", name)
    kind = json.loads((source / "config.json").read_text())["model_type"]
    for to in SYSTEMS:
        if find_format(to).system not in load_family(kind).systems:
            refused_of_foreign(source, tmp_path / "out", to, f"{to} has no layout for family {kind}")


@pytest.mark.parametrize(
    "to", [to for to in SYSTEMS if find_format(to).system not in ("t5x", "huggingface-flax")]
)
def test_a_known_family_that_the_target_has_no_layouts_for(to, t5, tmp_path):
    refused_of_foreign(t5, tmp_path / "out", to, "no layout for family t5")
    refused_of_foreign(t5, tmp_path / "out", to, "no layout for family t5", layout=LayoutRequest(family="t5"))
    refused_of_foreign(t5, tmp_path / "out", to, "is no container", layout=LayoutRequest(family="none"))


@pytest.mark.parametrize("to", ["t5x-legacy", "t5x-orbax", "paxml"])
def test_llama_to_systems_without_it(to, llama_of_foreign, tmp_path):
    error = refused_of_foreign(llama_of_foreign, tmp_path / "out", to, "no layout for family llama")
    assert f"has layouts for {'t5' if find_format(to).system == 't5x' else 'gpt3'}" in error.cure
    refused_of_foreign(llama_of_foreign, tmp_path / "out", to, layout=LayoutRequest(family="llama"))


@pytest.mark.parametrize("to", SYSTEMS)
def test_family_none_makes_no_checkpoint_of_foreign_names(to, llama_of_foreign, tmp_path):
    error = refused_of_foreign(
        llama_of_foreign,
        tmp_path / "out",
        to,
        "is no container",
        "llama",
        layout=LayoutRequest(family="none"),
    )
    assert "remove --family none" in error.cure


@pytest.mark.parametrize("to", [name for name in SYSTEMS if name not in ("maxtext", "megatron")])
def test_an_adapter_is_no_model(to, tmp_path):
    """MaxText and Megatron-Bridge have layouts for it; see tests/families/test_adapters.py and test_lora.py."""
    folder = tmp_path / "adapter"
    folder.mkdir()
    prefix = "base_model.model.model.layers.0.self_attn.q_proj"
    tensors = {f"{prefix}.lora_{one}.weight": np.ones((4, 4), "f4") for one in "AB"}
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    said = {"peft_type": "LORA", "base_model_name_or_path": "org/base", "r": 4}
    (folder / "adapter_config.json").write_text(json.dumps(said))
    refused_of_foreign(
        folder, tmp_path / "out", to, "the LORA adapter of org/base, which is not a whole model"
    )
    assert wherry.plan(folder, tmp_path / "out", to="orbax").tensors == 2


def test_the_command_ends_with_7_and_leaves_nothing(tmp_path):
    save(tmp_path / "hf", "PhiForCausalLM")
    words = [sys.executable, "-m", "wherry.cli", "convert", "hf", "out", "--to", "maxtext"]
    done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 7
    assert "maxtext has no layout for phi (PhiForCausalLM) (Penzai alone adds" in done.stdout + done.stderr
    assert sorted(os.listdir(tmp_path)) == ["hf"]


def test_models_without_layouts_are_types_of_transformers_that_no_family_has():
    from transformers import CONFIG_MAPPING

    file = Path(wherry.families.__file__).parent / "tables" / "without_layouts.toml"
    rows = tomllib.loads(file.read_text(encoding="utf-8"))
    assert set(rows) == set(without_layouts()) <= set(CONFIG_MAPPING)
    assert "falcon" in subprocess.check_output([sys.executable, "-m", "wherry.cli", "layouts"], text=True)


def test_every_block_of_maxtext_s_table_has_a_family_or_a_reason():
    tables = Path(wherry.families.__file__).parent / "tables"
    models = tomllib.loads((tables / "maxtext_models.toml").read_text(encoding="utf-8"))
    bare = {block for block, rows in models.items() if not any(rows.values())}
    assert set(blocks_without_layouts()) == bare


def test_the_matrix_says_what_families_declare():
    """A cell for each family and system, and no other."""
    (_corner, *columns), *rows = matrix()
    assert columns[-1] == "quantised"
    assert [name for name, *_cells in rows] == list(wherry.families.families())
    for name, *cells in rows:
        known = wherry.families.load_family(name).systems
        held = dict(zip(columns[:-1], cells, strict=False))
        assert {system for system, cell in held.items() if cell != "-"} == set(known)
        for system in known:
            forms = [
                form for kind, form in known[system].forms.items() if kind in ("scan_layers", "layer_stack")
            ]
            chosen = any("true" in form.choices for form in forms)
            assert held[system] == ("scanned, unrolled" if chosen else "unrolled" if forms else "yes")
    by_name = {name: dict(zip(columns, cells, strict=False)) for name, *cells in rows}
    assert by_name["gemma4-small"]["maxtext"] == "unrolled"  # MaxText never scans its layers
    read = {name: cells[-1] for name, *cells in rows}["gpt-oss"]
    assert read == "fp8, mxfp4, pack-quantized, nvfp4-pack-quantized, mxfp4-pack-quantized"


# ---- Containers that hold foreign names


@pytest.mark.parametrize("container", ["orbax", "safetensors", "npz", "torch-zip", "dcp", "flax-msgpack"])
def test_a_container_does_not_hide_foreign_names(container, tmp_path):
    source = save(tmp_path / "hf", "GPT2LMHeadModel")
    there = tmp_path / ("there.npz" if container == "npz" else "there")
    wherry.convert(source, there, to=container, lineage=False, ignore=("companions",))
    for to in ("maxtext", "t5x-legacy", "t5x-orbax", "paxml", "penzai"):
        refused_of_foreign(
            there,
            tmp_path / "out",
            to,
            "no layout for a tree with the names",
            "transformer.h.0.attn.c_attn.bias",
        )


def test_hugging_face_names_in_orbax_take_the_layout_that_the_config_names(llama_of_foreign, tmp_path):
    wherry.convert(llama_of_foreign, tmp_path / "there", to="orbax", lineage=False)
    seen = wherry.detect(tmp_path / "there")
    assert "names of PyTorch modules, as Hugging Face has them" in str(seen.evidence)
    direct = wherry.convert(llama_of_foreign, tmp_path / "direct", to="maxtext", lineage=False)
    around = wherry.convert(tmp_path / "there", tmp_path / "around", to="maxtext", lineage=False)
    assert around.target.weights_digest == direct.target.weights_digest
    back = wherry.convert(tmp_path / "there", tmp_path / "back", to="huggingface", lineage=False)
    assert back.target.weights_digest == back.source.weights_digest
    half = tmp_path / "half"
    wherry.convert(
        tmp_path / "there", half, to="huggingface", layout=LayoutRequest(dtype="bfloat16"), lineage=False
    )
    assert (
        load_file(half / "model.safetensors").keys()
        == load_file(llama_of_foreign / "model.safetensors").keys()
    )


def test_names_alone_do_not_choose_among_families(llama_of_foreign, tmp_path):
    wherry.convert(
        llama_of_foreign, tmp_path / "m.safetensors", to="safetensors", ignore=("companions",), lineage=False
    )
    with pytest.raises(AmbiguousError, match="several families fit") as caught:
        wherry.plan(tmp_path / "m.safetensors", tmp_path / "out", to="maxtext")
    assert "--config" in caught.value.cure
    layout = LayoutRequest(config=str(llama_of_foreign / "config.json"))
    planned = wherry.plan(tmp_path / "m.safetensors", tmp_path / "out", to="maxtext", layout=layout)
    assert planned.manifest.origin["layout"]["family"] == "llama"


def test_a_data_type_without_a_family_is_refused_and_not_dropped(tmp_path):
    source = save(tmp_path / "hf", "PhiForCausalLM")
    for to in ("safetensors", "orbax", "huggingface"):
        with pytest.raises(UnrepresentableError, match=r"layout.* for phi \(PhiForCausalLM\)"):
            wherry.plan(source, tmp_path / "out", to=to, layout=LayoutRequest(dtype="bfloat16"))


# ---- The family is what the config says


def test_the_config_decides_and_not_the_resemblance(llama_of_foreign, tmp_path):
    """The same names and shapes under another model type are another model."""
    (tmp_path / "hf").mkdir()
    shutil.copy(llama_of_foreign / "model.safetensors", tmp_path / "hf")
    config = json.loads((llama_of_foreign / "config.json").read_text())
    said = tmp_path / "hf" / "config.json"
    said.write_text(json.dumps({**config, "model_type": "phi", "architectures": ["PhiForCausalLM"]}))
    refused_of_foreign(tmp_path / "hf", tmp_path / "out", "maxtext", "no layout for phi (PhiForCausalLM)")
    nameless = {name: value for name, value in config.items() if name != "model_type"}
    said.write_text(json.dumps(nameless))
    planned = wherry.plan(tmp_path / "hf", tmp_path / "out", to="maxtext")
    assert planned.manifest.origin["layout"]["family"] == "llama"
    said.write_text(json.dumps({**nameless, "architectures": ["OlmoForCausalLM"]}))
    refused_of_foreign(tmp_path / "hf", tmp_path / "out", "maxtext", "no layout for OlmoForCausalLM")


@pytest.mark.parametrize("label", MODELS)
def test_a_config_as_to_dict_states_it(label, tmp_path):
    """What a saved file leaves out changes nothing, down to the digest of the plan."""
    model = tiny_model(label)
    model.save_pretrained(tmp_path / "hf")
    whole = tmp_path / "whole.json"
    whole.write_text(json.dumps(model.config.to_dict(), default=str))
    assert len(json.loads(whole.read_text())) > len(json.loads((tmp_path / "hf" / "config.json").read_text()))
    systems = TARGETS.get(label.split("-")[0], ("maxtext",))
    to = "t5x-legacy" if "t5" in label else "maxtext" if "maxtext" in systems else systems[0]
    options = {"sliding_window": 0} if label.endswith("-window") else {}  # MaxText's block has no window
    layouts = (LayoutRequest(), LayoutRequest(config=str(whole)))
    plans = [
        wherry.plan(tmp_path / "hf", tmp_path / "out", to=to, options=options, layout=layout)
        for layout in layouts
    ]
    assert plans[0].digest == plans[1].digest
    if to == "maxtext":
        pruned = json.loads(whole.read_text()) | {"pruned_heads": {"0": [1]}}
        whole.write_text(json.dumps(pruned))
        with pytest.raises(UnrepresentableError, match="pruned_heads"):
            wherry.plan(tmp_path / "hf", tmp_path / "out", to=to, options=options, layout=layouts[1])


def test_a_rope_scaling_that_the_target_cannot_hold_is_said(tmp_path):
    scaling = {
        "rope_type": "dynamic",
        "rope_theta": 1e4,
        "factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    save_tiny(tmp_path / "hf", "llama", rope_parameters=scaling)
    with pytest.raises(UnrepresentableError, match=r"Llama 3\.1's rule, not as .*dynamic.* says"):
        wherry.plan(tmp_path / "hf", tmp_path / "out", to="maxtext")


@pytest.mark.parametrize(("name", "value"), [("factor", 2.5), ("attention_factor", 1.5)])
def test_a_yarn_that_maxtext_s_attributes_cannot_state_is_refused(name, value, tmp_path):
    """MaxText's factor is an integer, and that of the attention follows from it or is 1."""
    scaling = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
    save_tiny(tmp_path / "hf", "llama", rope_parameters={**scaling, name: value})
    with pytest.raises(UnrepresentableError, match="rope_scaling"):
        wherry.plan(tmp_path / "hf", tmp_path / "out", to="maxtext")


# ---- Trees in the system's own form

STATE = {"decoder": {"layers_0": {"kernel": np.ones((2, 3), "f4")}}}
OWN = {
    "maxtext": [{"params": {"params": STATE}}, STATE],
    "t5x-legacy": [{"target": STATE, "state": {"step": np.int32(3)}}],
    "t5x-orbax": [{"target": STATE, "state": {"step": np.int32(3)}}],
    "paxml": [{"mdl_vars": {"params": STATE}, "step": np.int32(3)}],
    "penzai": [{"model/block_0/query.weights": np.ones((2, 3), "f4")}],
}


@pytest.mark.parametrize("to", OWN)
def test_a_live_tree_in_the_system_s_form_needs_no_family(to, tmp_path):
    flax = {
        "params": {"Dense_0": {"kernel": np.ones((2, 3), "f4")}},
        "batch_stats": {"mean": np.ones(3, "f4")},
    }
    any_flax = [] if to == "maxtext" else [flax]  # MaxText restores only its own models
    for number, tree in enumerate([*OWN[to], *any_flax]):
        receipt = wherry.export(tree, tmp_path / str(number), to=to, step=1).result(60)
        with wherry.open(tmp_path / str(number)) as checkpoint:
            assert checkpoint.detection.format == to
            assert len(checkpoint.manifest.tensors) == receipt.target.tensors


@pytest.mark.parametrize("to", OWN)
def test_a_live_tree_of_another_form_is_refused(to, tmp_path):
    for owner, (tree, *_others) in OWN.items():
        if find_format(owner).system != find_format(to).system:
            with pytest.raises(UnrepresentableError, match=f"{to} has no layout for a tree with the names"):
                wherry.export(tree, tmp_path / "out", to=to, step=1).result(60)
    tree = {"params": {"conv.weight": np.ones((2, 3), "f4"), "conv.bias": np.ones(3, "f4")}}
    with pytest.raises(UnrepresentableError, match=f"{to} has no layout for a tree with the names"):
        wherry.export(tree, tmp_path / "out", to=to, step=1).result(60)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("t5x-legacy", "t5x-orbax"),
        ("t5x-orbax", "t5x-legacy"),
        ("maxtext", "maxtext"),
        ("paxml", "paxml"),
        ("penzai", "penzai"),
    ],
)
@pytest.mark.parametrize("between", [None, "orbax", "flax-msgpack"])
def test_one_system_s_formats_hold_the_same_trees(source, target, between, tmp_path):
    wherry.export(OWN[source][0], tmp_path / "a", to=source, step=1).result(60)
    begun = tmp_path / "a"
    if between:
        wherry.convert(begun, tmp_path / "b", to=between, lineage=False, ignore=("companions",))
        begun = tmp_path / "b"
    receipt = wherry.convert(begun, tmp_path / "c", to=target, lineage=False)
    assert receipt.target.weights_digest == receipt.source.weights_digest


def test_rules_that_spell_the_system_s_form_are_the_user_s_own_layout(tmp_path):
    source = save(tmp_path / "hf", "PhiForCausalLM")
    rules = {"rename": "{rest*} -> target/{rest*}"}
    receipt = wherry.convert(source, tmp_path / "out", to="t5x-orbax", options=rules, lineage=False)
    assert receipt.target.tensors == receipt.source.tensors
    refused_of_foreign(
        source, tmp_path / "again", "t5x-orbax", "phi", options={"rename": "model.{rest*} -> target/{rest*}"}
    )


def test_a_system_s_checkpoint_does_not_become_a_hugging_face_folder_under_its_own_names(tmp_path):
    wherry.export(OWN["t5x-orbax"][0], tmp_path / "a", to="t5x-orbax", step=1).result(60)
    for options in ({}, {"join": "."}):
        refused_of_foreign(
            tmp_path / "a", tmp_path / "out", "huggingface", "no layout for this tree of t5x", options=options
        )


@pytest.mark.parametrize("to", SYSTEMS)
def test_a_file_without_tensors_is_of_no_family(tmp_path, to):
    save_file({}, tmp_path / "model.safetensors")
    with pytest.raises(UnrepresentableError, match=r"a tree without tensors|missing parameter") as caught:
        wherry.plan(tmp_path, tmp_path / "out", to=to)
    assert caught.value.cure
