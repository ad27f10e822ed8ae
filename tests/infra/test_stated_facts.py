"""Every fact and convention that README and `docs/` state is stated here, on a model that the text names.

transformers computes from the source what it computes from the target; MaxText's forward pass is by its definition.
"""

from __future__ import annotations

import re
import shlex
import shutil

import pytest
import yaml
from click.testing import CliRunner

import wherry
from tests.support.oracles import files, huggingface, judge, maxtext
from tests.support.oracles.cases import leaves_of
from tests.support.readme import TEXTS, code, commands
from wherry.cli import cli
from wherry.families import families, load_family

pytest.importorskip("transformers")

_FACTS = {name for family in map(load_family, families()) for name in family.facts}
_CONVENTIONS = {
    name
    for family in map(load_family, families())
    for system in family.systems.values()
    for name in system.conventions
}
STATES = _FACTS | _CONVENTIONS
LLAMA = ["rope_scaling=default", "rope_theta=10000", "norm_eps=1e-6", "activation=silu"]


def statements():
    """Page and `NAME=VALUE`, for each of a command or of running text, and of a Python block's tables."""
    found = set()
    for page, text in TEXTS.items():
        if page.startswith("docs/reference/"):
            continue
        for stated in re.findall(r"--set\s+'?(\w+=[^\s`',;)]+)", text):
            if stated.partition("=")[0] in STATES and not stated.endswith(("…", "VALUE")):
                found.add((page, stated))
        for block in code(text, "python"):
            found |= {
                (page, f"{name}=") for name in re.findall(r"""["'](\w+)["']\s*:""", block) if name in STATES
            }
    return found


def bare_maxtext(label, folder):
    """A checkpoint as MaxText leaves it, without a config."""
    wherry.convert(judge.source(label), folder, to="maxtext", lineage=False)
    (folder / "wherry.json").unlink()
    shutil.rmtree(folder / "items/assets")


def run(*words):
    done = CliRunner().invoke(cli, list(map(str, words)))
    assert done.exit_code == 0, f"{done.output}{done.exception}"


def maxtext_without_config(label, stated, folder):
    """MaxText → Hugging Face, where the statements take the place of the config."""
    bare_maxtext(label, folder / "there")
    rest = [one for one in LLAMA if one.partition("=")[0] not in {text.partition("=")[0] for text in stated}]
    options = [word for one in (*stated, *rest) for word in ("--set", one)]
    run("convert", folder / "there", folder / "out", "--to", "huggingface", "--family", "llama", *options)
    judge.require_equal(huggingface.logits(folder / "out"), judge.wanted(label))


def into_maxtext(source, stated, folder):
    """Hugging Face → MaxText with statements, as MaxText's definition computes it."""
    options = [word for one in stated for word in ("--set", one)]
    run("convert", source, folder / "out", "--to", "maxtext", *options)
    config = yaml.safe_load((folder / "out/items/assets/maxtext_config.yml").read_text())
    leaves = leaves_of(files.arrays("maxtext", folder / "out"), config)
    found = maxtext.logits(leaves, config, huggingface.TOKENS)
    leaves.require_all_taken()
    judge.require_equal(found, judge.wanted("llama-tied" if "tied=false" in stated else "mistral"))


def tied_twice(folder):
    """A tied model whose file holds the output layer too."""
    from safetensors.numpy import load_file, save_file

    shutil.copytree(judge.source("llama-tied"), folder)
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].copy()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def with_window(folder):
    """A Mistral with a window that is longer than what is computed."""
    shutil.copytree(judge.source("mistral"), folder)
    file = folder / "config.json"
    file.write_text(file.read_text().replace('"sliding_window": null', '"sliding_window": 64'))
    assert '"sliding_window": 64' in file.read_text()
    return folder


def half(folder):
    maxtext_without_config("llama", ["rope=half"], folder)


NEIGHBOURS = ["rope=interleaved", "rope_scaling=llama3.1", "rope_theta=500000"]
CASES = {
    ("docs/maxtext-and-huggingface.md", "rope=half"): half,
    ("docs/between-systems.md", "rope=half"): half,
    ("docs/between-systems.md", "rope=interleaved"): lambda folder: maxtext_without_config(
        "llama-3.1", NEIGHBOURS, folder
    ),
    ("docs/between-systems.md", "rope_scaling=default"): lambda folder: maxtext_without_config(
        "llama", ["rope_scaling=default"], folder
    ),
    ("docs/between-systems.md", "tied=false"): lambda folder: into_maxtext(
        tied_twice(folder / "twice"), ["tied=false"], folder
    ),
    ("docs/between-systems.md", "sliding_window=0"): lambda folder: into_maxtext(
        with_window(folder / "window"), ["sliding_window=0"], folder
    ),
}


def test_every_statement_has_a_case():
    assert statements() == set(CASES)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[1]}")
def test_a_statement_of_the_documentation(case, tmp_path):
    CASES[case](tmp_path)


def test_every_command_that_states_one_is_found():
    """The pattern finds what the words of commands state."""
    stated = {
        (page, words[at + 1])
        for page, text in TEXTS.items()
        for block in code(text, "sh")
        for words in commands(block)
        for at, word in enumerate(words[:-1])
        if word == "--set" and words[at + 1].partition("=")[0] in STATES
    }
    assert stated <= statements()
    cells = re.findall(r"`(wherry [^`]*--set [^`]*)`", TEXTS["README.md"])
    assert not {word.partition("=")[0] for line in cells for word in shlex.split(line)} & STATES
