"""The tables of layouts and orientations say what is so."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner

import wherry
from wherry.cli import cli
from wherry.families import families, load_family
from wherry.transform.overview import overview

TABLE = tomllib.loads((Path(wherry.__file__).parent / "transform" / "orientations.toml").read_text())
CONV = re.compile(r"self\.(\w+) = Conv1D\(")


@pytest.fixture(scope="module")
def models():
    transformers = pytest.importorskip("transformers")
    return {
        file: file.read_text() for file in Path(transformers.__file__).parent.glob("models/*/modeling_*.py")
    }


def test_the_known_model_types_are_those_of_transformers():
    auto = pytest.importorskip("transformers.models.auto.configuration_auto")
    assert set(TABLE["known"]) == set(auto.CONFIG_MAPPING_NAMES)


def test_every_conv1d_of_transformers_is_in_the_table(models):
    folders = {"openai": {"openai-gpt"}, "clvp": {"clvp", "clvp_decoder"}}
    found = {file.parent.name: set(CONV.findall(text)) for file, text in models.items() if CONV.search(text)}
    for folder, names in found.items():
        for kind in folders.get(folder, {folder}):
            assert set(TABLE["inputs_first"][kind]) == names
    transposed = {
        file.parent.name for file, text in models.items() if re.search(r"is_transposed=True[,)]", text)
    }
    kinds = {kind for folder in (*found, *transposed) for kind in folders.get(folder, {folder})}
    assert set(TABLE["inputs_first"]) - {"aria_text"} == kinds


# `wherry layouts FAMILY` shows layouts, facts and judges; a family of a user has no judge.


def shown(*words):
    done = CliRunner().invoke(cli, ["layouts", *words])
    assert done.exit_code == 0, done.output
    return done.stdout


def test_the_command_shows_where_each_system_has_a_fact_and_who_judges_it():
    text = shown("mistral")
    assert "fact sliding_window: " in text
    assert re.search(r"^  huggingface +sliding_window", text, re.MULTILINE)
    assert re.search(r"^  maxtext +always 0", text, re.MULTILINE)
    assert re.search(r"^  penzai +own library \(to penzai\); own library \(from penzai\)", text, re.MULTILINE)


def test_the_json_has_all_three():
    found = json.loads(shown("gemma2", "--json"))
    assert set(found["parameters"]["embedding"]) == {"huggingface", "maxtext", "deepmind", "gguf"}
    scale = found["facts"]["query_pre_attn_scalar"]
    of_config = "query_pre_attn_scalar"
    assert scale["systems"] == {
        "huggingface": of_config, "maxtext": "in the weights", "deepmind": of_config, "gguf": of_config,
    }  # fmt: skip
    assert found["judged"] == {
        "maxtext": {"into": "own library, forward pass", "out_of": "forward pass"},
        "deepmind": {"into": "not judged", "out_of": "forward pass"},
        "gguf": {"into": "own library", "out_of": "own library"},
    }


def test_every_fact_that_changes_outputs_has_a_place_in_every_system():
    for name in families():
        facts = overview(load_family(name), own=True)["facts"]
        assert set(facts) == set(load_family(name).facts)
        for fact, row in facts.items():
            assert not row["outputs"] or "not stated" not in row["systems"].values(), (name, fact)


def test_a_family_of_a_user_is_not_judged(tmp_path):
    (tmp_path / "own.toml").write_text('extends = "mistral"\nabout = "a family of the user"\n')
    found = json.loads(shown("--family-file", str(tmp_path / "own.toml"), "--json"))
    assert {text for ways in found["judged"].values() for text in ways.values()} == {"not judged"}
