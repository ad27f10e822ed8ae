"""The page about looking into checkpoints: every command and the snippet, on checkpoints that are made here."""

from __future__ import annotations

import json
import shutil

import pytest
from click.testing import CliRunner
from safetensors.numpy import load_file, save_file

import wherry
from tests.support.readme import blocks, commands
from tests.support.tiny_models import save_tiny
from wherry.cli import cli

LINES = [line for block in blocks("look", "sh") for line in commands(block)]
DIFFERENT = 9


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A model, the same in another system, and one with another norm and an attribute more."""
    folder = tmp_path_factory.mktemp("look")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WHERRY_LEDGER", f"sqlite:///{folder / 'ledger.db'}")
        save_tiny(folder / "llama", "llama")
        shutil.copytree(folder / "llama", folder / "finetuned")
        arrays = load_file(folder / "finetuned" / "model.safetensors")
        arrays["model.norm.weight"] += 0.5
        save_file(arrays, folder / "finetuned" / "model.safetensors", metadata={"format": "pt"})
        wherry.convert(folder / "llama", folder / "scanned", to="maxtext", options={"scan_layers": True})
        yield folder


EXPECTED = {
    "inspect llama --tree": (0, "embed_tokens"),
    "inspect llama --stats": (0, "infinities"),
    "diff llama finetuned": (DIFFERENT, "model.norm.weight   values"),
    "diff scanned llama": (0, "B is compared in the layout of maxtext"),
    "diff llama finetuned --no-values": (0, "no differences in the metadata"),
    "ls --family llama": (0, "scanned"),
    "du --by format": (0, "in 2 checkpoints"),
}


@pytest.mark.parametrize("words", LINES, ids=" ".join)
def test_a_command_does_what_its_line_says(words, place, monkeypatch):
    monkeypatch.chdir(place)
    line = " ".join(words[1:])
    code, text = max(
        (item for item in EXPECTED.items() if line.startswith(item[0])), key=lambda item: len(item[0])
    )[1]
    found = CliRunner().invoke(cli, words[1:])
    assert (found.exit_code, text in found.output) == (code, True), found.output


def test_the_snippet_runs(place, monkeypatch):
    monkeypatch.chdir(place)
    (snippet,) = blocks("look", "python")
    names = {}
    exec(compile(snippet, "docs/look.md", "exec"), names)
    assert json.dumps(names["comparison"].to_json())
    assert names["statistics"]
