"""README's table "from, to, type this": each command, on a tiny checkpoint as the system itself leaves it."""

from __future__ import annotations

import re
import shlex
import shutil
import warnings

import pytest
from click.testing import CliRunner

import wherry
from tests.support import zero
from tests.support.corpus import place
from tests.support.readme import section
from tests.support.tiny_models import save_tiny
from wherry.cli import cli


def rows():
    """From, to, and the words of the command."""
    cells = re.findall(r"^\| (.+?) \| (.+?) \| `(wherry convert .+?)` \|$", section("Use"), re.MULTILINE)
    return [(source, target, shlex.split(line)) for source, target, line in cells]


def tiny(folder, label="llama"):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return save_tiny(folder, label)


def as_left_by(folder, step, to, label="llama", **options):
    """A step as the system leaves it: neither our sidecar nor the files of Hugging Face."""
    wherry.convert(tiny(folder.parent / "made", label), folder / step, to=to, options=options, lineage=False)
    for path in (*folder.rglob("wherry.json"), *folder.rglob("*config.json")):
        path.unlink()


def maxtext(folder):
    as_left_by(folder, "1000", "maxtext")
    (folder / "1000/items/assets/maxtext_config.yml").rename("llama2-7b.yml")
    shutil.rmtree(folder / "1000/items/assets")


def torch_file(path):
    import torch

    torch.save({"step": 3, "model": {"layer.weight": torch.arange(6.0)}}, path)


SOURCES = {
    "T5X": lambda path: as_left_by(path, "checkpoint_1000", "t5x-orbax", "t5"),
    "Hugging Face": tiny,
    "MaxText": maxtext,
    "Orbax": lambda path: as_left_by(path, "1000", "orbax"),
    "DCP": lambda path: as_left_by(path, "step-1000", "dcp"),
    "torch `.pt`": torch_file,
    "Lingua": lambda path: as_left_by(path, "0000001000", "lingua"),
    "PaxML": lambda path: shutil.copytree(place("made-paxml-v11").parent, path / "checkpoints"),
    "DeepSpeed": lambda path: zero.save(path, stage=3, ranks=2),
}
FORMATS = {
    "Hugging Face": "huggingface",
    "MaxText": "maxtext",
    "safetensors": "safetensors",
    "DCP": "dcp",
    "torch `.pt`": "torch-zip",
    "Lingua": "lingua",
    "vLLM": "vllm-sharded",
}


def test_the_table_names_what_people_ask_for():
    pairs = [(source, target) for source, target, _ in rows()]
    assert len(set(pairs)) == len(pairs) >= 10
    assert {source for source, _ in pairs} == set(SOURCES)
    assert {target for _, target in pairs} == set(FORMATS)


@pytest.mark.parametrize("row", rows(), ids=lambda row: f"{row[0]} to {row[1]}")
def test_the_command_of_a_row(row, tmp_path, monkeypatch):
    for library in ("torch", "transformers", "flax"):
        pytest.importorskip(library)
    monkeypatch.chdir(tmp_path)
    source, target, words = row
    SOURCES[source](tmp_path / words[2])
    done = CliRunner().invoke(cli, words[1:])
    assert done.exit_code == 0, f"{done.output}{done.exception}"
    assert wherry.detect(words[3]).format == FORMATS[target]
    with wherry.open(words[2]) as before, wherry.open(words[3]) as after:
        assert before.manifest.tensors
        assert after.manifest.tensors
