"""The page of each system: every command, in its order, on checkpoints that are made here."""

from __future__ import annotations

import shutil
import warnings

import pytest
from click.testing import CliRunner

import wherry
from tests.support import megatron, torchtitan, universal, zero
from tests.support.corpus import place
from tests.support.lingua import step_folder
from tests.support.readme import PAGES, blocks, commands
from tests.support.tiny_models import save_tiny
from wherry.cli import cli


def tiny(label, name):
    return lambda folder: save_tiny(folder / name, label)


def as_left_by(source, target, to):
    """A checkpoint as the system itself leaves it, without our sidecar."""
    wherry.convert(source, target, to=to, lineage=False)
    (target / "wherry.json").unlink(missing_ok=True)


def t5x(folder):
    as_left_by(tiny("t5", "made")(folder), folder / "runs/t5x/small/checkpoint_1000", "t5x-orbax")


def orbax(folder):
    as_left_by(tiny("llama", "made")(folder), folder / "runs/orbax/1000", "orbax")


def paxml(folder):
    shutil.copytree(place("made-paxml-v11").parent, folder / "runs" / "pax" / "checkpoints")


def pytorch(folder):
    made = tiny("llama", "made")(folder)
    shutil.copy(made / "config.json", folder)
    as_left_by(made, folder / "runs/fsdp/step-1000", "dcp")


def lingua(folder):
    tiny("llama", "hf")(folder)
    step_folder(folder / "lingua" / "0000000010")


def flax_and_penzai(folder):
    from flax.training import checkpoints

    tiny("llama", "hf")(folder)
    checkpoints.save_checkpoint(str(folder), {"params": {"w": zero.parameters()["a.weight"]}}, step=1000)


def deepspeed(folder):
    zero.save(folder / "runs" / "zero", stage=3, ranks=2)
    universal.save(folder / "runs" / "universal", number=True)


def torchtitan_run(folder):
    tiny("llama", "hf")(folder)
    torchtitan.step(folder / "hf", folder / "run" / "checkpoint", 1000)
    (folder / "run" / "model.json").rename(folder / "model.json")


def megatron_runs(folder):
    tiny("llama", "llama")(folder)
    megatron.save(folder / "runs" / "iter_0000010")
    megatron.save_ranks(folder / "runs" / "old" / "iter_0000010", tensor=2, pipeline=2)


SOURCES = {
    "deepspeed": deepspeed,
    "flax-and-penzai": flax_and_penzai,
    "huggingface": tiny("llama", "hf"),
    "huggingface-flax": tiny("t5", "t5"),
    "maxtext": tiny("llama", "hf"),
    "megatron": megatron_runs,
    "meta": lingua,
    "orbax": orbax,
    "paxml": paxml,
    "pytorch": pytorch,
    "t5x": t5x,
    "torchtitan": torchtitan_run,
}


def test_every_page_is_run():
    assert {f"systems/{name}" for name in SOURCES} == {
        page for page in PAGES if page.startswith("systems/") and not page.endswith("/README")
    }


@pytest.mark.parametrize("page", SOURCES)
def test_the_commands_of_a_page(page, tmp_path, monkeypatch):
    pytest.importorskip("torch"), pytest.importorskip("transformers"), pytest.importorskip("flax")
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        SOURCES[page](tmp_path)
    (block,) = blocks(f"systems/{page}", "sh")
    for words in commands(block):
        assert words[0] == "wherry"
        done = CliRunner().invoke(cli, words[1:])
        assert done.exit_code == 0, f"{' '.join(words)}\n{done.output}{done.exception}"
