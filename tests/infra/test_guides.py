"""The guides by need and the pages of systems: every command of each page, in its order."""

from __future__ import annotations

import json
import re
import shutil
import warnings
from pathlib import Path

import click
import numpy as np
import pytest
from click.testing import CliRunner

import wherry
from tests.support import megatron, torchtitan, universal, zero
from tests.support.corpus import place as place_of_pages
from tests.support.infra import ROOT
from tests.support.lingua import step_folder
from tests.support.readme import PAGES, blocks, commands
from tests.support.tiny_models import save_tiny
from wherry.cli import cli


def t5x(folder):
    save_tiny(folder / "made", "t5")
    wherry.convert(folder / "made", folder / "runs/t5x/small/checkpoint_1000", to="t5x-orbax", lineage=False)
    (folder / "runs/t5x/small/checkpoint_1000/wherry.json").unlink()  # as T5X would have left it


def llama(name):
    return lambda folder: save_tiny(folder / name, "llama")


def lingua(folder):
    llama("hf")(folder)
    step_folder(folder / "lingua" / "0000000010")


def converted(folder):
    llama("hf")(folder)
    wherry.convert(folder / "hf", folder / "model", to="safetensors")


def quantized(folder):
    from tests.support.gguf import model_parts, save_gguf
    from tests.support.gguf_tokenizers import MADE
    from tests.support.quantized import FP8, fp8, save_quantized
    from tests.support.tiny_models import save_tiny

    save_quantized(folder / "fp8", "llama", FP8, fp8(16, 16))
    _label, tokenizer = MADE["llama-bpe"]
    sizes = {"intermediate_size": 64, "vocab_size": len(tokenizer["tokenizer.ggml.tokens"])}
    metadata, tensors = model_parts(save_tiny(folder / "tiny", "llama", **sizes))
    name = "blk.0.ffn_gate.weight"
    blocks_of_32 = np.zeros(tensors[name].size // 32, [("scale", "<f2"), ("codes", "i1", 32)])
    save_gguf(
        folder / "model.gguf",
        {**metadata, **tokenizer},
        {**tensors, name: (8, tensors[name].shape, blocks_of_32.tobytes())},
    )


# Page → what it starts from, and what some commands print.
GUIDES = {
    "t5x-to-huggingface": (t5x, {0: "huggingface", 2: "ok"}),
    "maxtext-and-huggingface": (llama("llama"), {3: "ok"}),
    "lingua-resume": (lingua, {}),
    "promotion": (converted, {2: "model", 3: "converted from"}),
    "many-machines": (llama("hf"), {4: "ok"}),
    "quantized": (quantized, {3: "ok", 12: "ok"}),
}


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WHERRY_HOME", str(tmp_path / "home"))
    for name in ("MLFLOW_TRACKING_URI", "WHERRY_LEDGER", "WHERRY_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.mark.parametrize("page", GUIDES)
def test_the_commands_of_a_guide(page, place):
    pytest.importorskip("torch"), pytest.importorskip("transformers")
    if page == "promotion":
        pytest.importorskip("mlflow")
    prepare, prints = GUIDES[page]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        prepare(place)
    lines = [words for block in blocks(page, "sh") for words in commands(block)]
    if page == "promotion":  # the others are run where servers of MLflow are
        lines = [words for words in lines if words[0] not in ("python", "gunicorn")]
    for number, words in enumerate(lines):
        assert words[0] == "wherry"
        done = CliRunner().invoke(cli, words[1:])
        assert done.exit_code == 0, f"{' '.join(words)}\n{done.output}{done.exception}"
        assert prints.get(number, "") in done.output


def test_the_results_are_what_the_guides_say(place):
    """MaxText's way there and back, and the config that Hugging Face reads."""
    pytest.importorskip("torch"), pytest.importorskip("transformers")
    llama("llama")(place)
    for words in commands(blocks("maxtext-and-huggingface", "sh")[0])[:3]:
        assert CliRunner().invoke(cli, words[1:]).exit_code == 0
    assert json.loads(Path("hf/config.json").read_text())["model_type"] == "llama"
    with wherry.open("llama") as before, wherry.open("hf") as after:
        assert before.manifest.tensors.keys() == after.manifest.tensors.keys()


def test_the_commands_on_buckets_are_understood(monkeypatch):
    understood = []
    monkeypatch.setattr(click.Command, "invoke", lambda _self, context: understood.append(context.info_name))
    lines = commands(blocks("buckets", "sh")[0])
    for words in lines:
        cli.main(words[1:], standalone_mode=False)
    assert [name for name in understood if name in cli.commands] == [words[1] for words in lines]
    assert (ROOT / "docs" / "prices.example.toml").is_file()
    assert "prices.example.toml" in PAGES["buckets"]


def test_the_first_bad_night_is_what_its_page_says(place, caplog):
    """A copy is cut off: every command of the page, before it is copied again and after."""
    from safetensors.numpy import save

    from wherry.nightly.metrics import HELP

    whole = save({"w": np.ones((8, 4), np.float32)})
    Path("wherry.toml").write_text(
        '[routes.all]\nroot = "runs"\nmin_age = 0\n\n[[routes.all.targets]]\nformat = "dcp"\nuri = "out/{run}/{step}"\n'
    )
    bad, good = Path("runs/base/checkpoint-2000"), Path("runs/small/checkpoint-1000")
    for folder, data in ((bad, whole[:-8]), (good, whole)):
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_bytes(data)
    look, repaired = (commands(block) for block in blocks("bad-night", "sh"))
    night = CliRunner().invoke(cli, ["nightly"])
    assert night.exit_code == 0
    message = f"1 converted, 1 damaged: {place / bad}: safetensors file is truncated"
    assert "damaged: 1" in night.output
    assert "Left out" in night.output
    assert message in caplog.text
    for words, code in zip(look, (5, 5, 0, 0), strict=True):
        done = CliRunner().invoke(cli, words[1:])
        assert done.exit_code == code, done.output
        assert "truncated" in done.output or words[1] == "routes"
    (bad / "model.safetensors").write_bytes(whole)
    for words, text in zip(repaired, ("verdict:        ok", "converted: 1"), strict=True):
        done = CliRunner().invoke(cli, words[1:])
        assert (done.exit_code, text in done.output) == (0, True), done.output
    named = set(re.findall(r"\bwherry_[a-z_]+", PAGES["bad-night"]))
    assert named
    assert named <= set(HELP)


# The page of each system: every command, in its order, on checkpoints that are made here.


def tiny(label, name):
    return lambda folder: save_tiny(folder / name, label)


def as_left_by(source, target, to):
    """A checkpoint as the system itself leaves it, without our sidecar."""
    wherry.convert(source, target, to=to, lineage=False)
    (target / "wherry.json").unlink(missing_ok=True)


def t5x_of_pages(folder):
    as_left_by(tiny("t5", "made")(folder), folder / "runs/t5x/small/checkpoint_1000", "t5x-orbax")


def orbax(folder):
    as_left_by(tiny("llama", "made")(folder), folder / "runs/orbax/1000", "orbax")


def paxml(folder):
    shutil.copytree(place_of_pages("made-paxml-v11").parent, folder / "runs" / "pax" / "checkpoints")


def pytorch(folder):
    made = tiny("llama", "made")(folder)
    shutil.copy(made / "config.json", folder)
    as_left_by(made, folder / "runs/fsdp/step-1000", "dcp")


def lingua_of_pages(folder):
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
    "meta": lingua_of_pages,
    "orbax": orbax,
    "paxml": paxml,
    "pytorch": pytorch,
    "t5x": t5x_of_pages,
    "torchtitan": torchtitan_run,
    "vllm": tiny("llama", "hf"),
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
