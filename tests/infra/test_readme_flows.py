"""The pages behind README's doors: the commands for trainers, platform engineers and auditors are run word for word.

What would need a server of its own is parsed in `test_readme_doors.py`.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

import wherry
from tests.support.readme import AUDITOR, CONTAINERS, ROOT, SERVERS, SEVERAL, TRAINER, TRIAL, blocks, commands
from tests.support.restore import nested
from wherry.cli import main
from wherry.ledger.check import check_chain
from wherry.ledger.record import open_ledger


def run_wherry(words):
    """What a command printed; it must end with 0."""
    done = CliRunner().invoke(click.Command("run", callback=lambda: main(words)), [])
    assert done.exit_code == 0, f"{' '.join(words)}\n{done.output}"
    return done.stdout


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A folder with `ckpt/maxtext`, the live parameters in it, and the model of transformers that they are."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    jax = pytest.importorskip("jax")
    folder = tmp_path_factory.mktemp("trainer")
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=False,
    ))  # fmt: skip
    model.save_pretrained(folder / "hf")
    wherry.convert(folder / "hf", folder / "ckpt/maxtext", to="maxtext", lineage=False)
    shutil.copy(folder / "ckpt/maxtext/items/assets/maxtext_config.yml", folder / "ckpt/maxtext.yml")
    params = jax.tree.map(jax.numpy.asarray, nested(folder / "ckpt/maxtext")["params"])
    return folder, {"params": params}, model


def test_the_calls_of_trainers(llama):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    folder, state, model = llama
    code = blocks("trainers", "python")[0].replace('"/ckpt/', f'"{folder}/ckpt/')
    empty = transformers.LlamaForCausalLM(model.config)
    names = {"state": state, "loss": 1.5, "model": empty}
    exec(compile(code, "docs/trainers.md", "exec"), names)
    assert names["handle"].result().target.format == "orbax"
    assert names["exported"].result(60).target.format == "huggingface"
    assert names["store"].best("loss") == 1000
    loaded = transformers.LlamaForCausalLM.from_pretrained(folder / "ckpt/hf/1000")
    for one in (loaded, names["model"]):
        assert all(torch.equal(value, model.state_dict()[name]) for name, value in one.state_dict().items())
    jax = pytest.importorskip("jax")
    same = jax.tree.map(lambda a, b: bool((a == b).all()), names["state"], state)
    assert all(jax.tree.leaves(same))


@contextmanager
def stand_in():
    """A stand-in for a Prefect server, which keeps what was posted."""
    posted = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            posted.extend(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_):
            """Quiet."""

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/api", posted
    finally:
        server.shutdown()
        server.server_close()


def test_both_ways_to_emit(tmp_path):
    (block,) = TRAINER
    shutil.copy(ROOT / "wherry" / "core" / "emit.py", tmp_path)
    with stand_in() as (url, posted):
        for words in commands(block):
            program = [sys.executable, *([] if words[0] == "python" else ["-m", "wherry.cli"])]
            done = subprocess.run(
                [*program, *words[1:]], cwd=tmp_path, env=os.environ | {"PREFECT_API_URL": url},
                capture_output=True, text=True, check=False,
            )  # fmt: skip
            assert done.returncode == 0, done.stderr
    assert [event["resource"]["uri"] for event in posted] == ["/ckpt/run/1000"] * 2
    assert {event["event"] for event in posted} == {"wherry.checkpoint.committed"}
    assert posted[0]["resource"]["step"] == "1000"


# ---- for platform engineers and auditors: one folder, in the order of their pages


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A T5X run, the configuration and the policy of the pages, and an older champion."""
    pytest.importorskip("mlflow")
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("site")
    torch.manual_seed(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("WHERRY_HOME", str(folder / "home"))
        for name in ("MLFLOW_TRACKING_URI", "WHERRY_LEDGER", "WHERRY_CONFIG"):
            patch.delenv(name, raising=False)
        transformers.T5ForConditionalGeneration(transformers.T5Config(
            vocab_size=64, d_model=16, d_kv=4, d_ff=32, num_layers=2, num_decoder_layers=2, num_heads=4,
            feed_forward_proj="gated-gelu", tie_word_embeddings=True,
        )).save_pretrained("hf")  # fmt: skip
        wherry.convert("hf", "models/older", to="safetensors")
        wherry.register("models/older", "small", alias="candidate")
        wherry.promote("models:/small@candidate")
        wherry.convert("hf", "runs/t5x/small/checkpoint_1000", to="t5x-orbax", lineage=False)
        Path("runs/t5x/small/checkpoint_1000/wherry.json").unlink()  # as T5X would have left it
        Path("wherry.toml").write_text(blocks("platform", "toml")[0])
        Path("policy.toml").write_text(blocks("audit", "toml")[0])
        yield folder, patch


@pytest.fixture
def here(site, monkeypatch):
    folder, _ = site
    monkeypatch.chdir(folder)
    monkeypatch.setenv("WHERRY_HOME", str(folder / "home"))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return folder


def carried_out(block):
    """Each command of wherry's, run; what it printed, by its words."""
    printed = {}
    for words in commands(block):
        assert words[0] == "wherry", words
        *plain, out = words if ">" in words else [*words, None]
        text = run_wherry([word for word in plain[1:] if word != ">"])
        if out:
            Path(out).write_text(text)
        printed[" ".join(words[1:])] = text
    return printed


def test_the_trial_and_the_questions(here):
    """One test, because each command stands on those before it."""
    printed = carried_out(TRIAL)
    assert "0 problems" in printed["routes check"]
    assert "takes it" in printed["routes explain runs/t5x/small/checkpoint_1000"]
    assert "wherry_conversions_total" in Path("wherry.prom").read_text()
    assert Path("models/small/1000/huggingface/model.safetensors").is_file()
    answers = carried_out(AUDITOR[0])
    assert "converted from" in answers["lineage why models:/small@candidate"]
    assert "derived checkpoints: 1" in answers["lineage impact runs/t5x/small/checkpoint_1000"]
    assert "<html" in Path("lineage.html").read_text()
    assert json.loads(Path("anchor.json").read_text())["seq"] > 0
    assert answers["resolve models:/small@champion"].strip() == str(here / "models/small/1000/huggingface")
    assert Path("copy/model.safetensors").is_file()
    done = subprocess.run([sys.executable, "-I", "evidence.zip"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert run_wherry(["resolve", "models:/small@champion"]).strip() == str(here / "models/older")
    with open_ledger("sqlite:///rebuilt.db") as rebuilt:
        assert not check_chain(rebuilt).altered
    levels(here)


def levels(folder):
    """What is said of levels, of the same checkpoint, and the signature of it."""
    first_day, block, _serving = blocks("proof", "sh")  # tests/prove/test_serve.py runs the last one
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(
            "WHERRY_LEDGER", f"sqlite:///{folder / 'unused.db'}"
        )  # which has not recorded it as a source
        read, again = carried_out(first_day).values()
    assert read.startswith("read")
    assert again.startswith("ok")
    printed = carried_out(block)
    assert all(text.startswith("ok") for text in printed.values()), printed
    for words in commands(AUDITOR[1]):
        if words[0] == "wherry":
            run_wherry(words[1:])
            continue
        program = (
            words if shutil.which(words[0]) else [str(Path(sys.executable).parent / words[0]), *words[1:]]
        )
        if not shutil.which(program[0]):
            pytest.skip(f"{words[0]} is not installed")
        done = subprocess.run(program, cwd=folder, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def test_the_ledgers_url_and_the_preflight(monkeypatch):
    for words in commands(SERVERS + SEVERAL):
        if words[0] == "export":
            for pair in words[1:]:
                monkeypatch.setenv(*pair.split("=", 1))
    (words,) = [words for words in commands(CONTAINERS) if words[1] == "preflight"]
    assert "are shared with" in run_wherry(words[1:])
    monkeypatch.delenv("WHERRY_LEDGER")
    with pytest.raises(AssertionError, match=r"not shared with the workers of .*: ledger"):
        run_wherry(words[1:])
