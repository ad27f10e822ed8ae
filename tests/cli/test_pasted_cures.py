"""A cure leads on: every command of one is pasted, and works or leads to another."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess

import pytest

import wherry
from tests.support.command import small, typed
from tests.support.cure_texts import COMMANDS
from tests.support.tiny_models import save_tiny

# What a user puts in the place of a word; `1` is what the error fills in, most often the URI of a checkpoint.
WORDS = {
    "/ckpt": "HOME/one", "1": "HOME/one", "URI": "HOME/converted", "SOURCE": "HOME/converted", "TARGET": "HOME/new",
    "DST": "HOME/new", "DIR": "HOME/new", "FOLDER": "HOME", "ROOT": "HOME", "A": "HOME/one", "B": "HOME/two",
    "COPY": "HOME/converted", "KEY": "HOME/key.pem", "FORMAT": "dcp", "NAME": "pasted", "HASH": "HOME/anchor.json",
}  # fmt: skip
# Commands of which a word means something else, or that need another option.
LINES = {
    "audit --level digest 1": "audit --level digest HOME",
    "commit 1": "commit HOME/finished",
    "commit /job": "commit HOME/finished",
    "work 1": "work HOME/job",
    "work /job": "work HOME/job",
    "register 1 --model 1": "register HOME/one --model pasted",
    "convert 1 TARGET --to huggingface": "convert HOME/llama HOME/new --to huggingface",
    "discover 1": "discover HOME",
    "formats 1": "formats dcp",
    "formats NAME": "formats dcp",
    "init": "init --root HOME --config HOME/new.toml --yes",
    "init --root URI --yes": "init --root HOME --config HOME/new.toml --yes",
    "inspect /ckpt --pickles": "inspect HOME/torch.pt --pickles",
    "ledger rebuild ROOT": "ledger rebuild HOME --ledger sqlite:///HOME/rebuilt.db",
    "lineage show 1": "lineage show HOME/converted",
    "merge 'A*0.5' 'B*0.5' DST --to FORMAT": "merge HOME/llama*0.5 HOME/llama*0.5 HOME/new --to huggingface",
    "nightly": "nightly --dry-run",
    "promote URI --model 1": "promote HOME/converted --model pasted --alias champion",
    "resolve 1": "resolve models:/pasted",
    "clean 1": "clean HOME",
}
# Verb → what was typed before it.
_SPLIT = "split HOME/one HOME/{} --to dcp"
BEFORE = {"work": (_SPLIT.format("job"),), "commit": (_SPLIT.format("finished"), "work HOME/finished")}
# Commands that run until they are stopped, or need a server: their tests are elsewhere.
ELSEWHERE = {
    "lineage serve": "tests/trace", "deploy": "tests/infra/test_deployments.py",
    "ledger deliver openlineage": "tests/ledger",
    "merge BASE ADAPTER DST --to FORMAT": "tests/transform/test_adapter.py",
    "rewrite 1 TARGET --as 1 --format orbax": "tests/formats/orbax/test_orbax_commits.py",
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory, own_home):
    """What a command of a cure needs: checkpoints, a job and a finished one, a key, an anchor and a wherry.toml."""
    folder = tmp_path_factory.mktemp("pasted")
    small(folder / "small.safetensors")
    for name, to in (("one", "dcp"), ("two", "dcp"), ("converted", "orbax"), ("torch.pt", "torch-zip")):
        wherry.convert(folder / "small.safetensors", folder / name, to=to)
    wherry.register(folder / "converted", "pasted")
    save_tiny(folder / "llama", "llama")
    (folder / "wherry.toml").write_text(
        f'links = ["{folder}"]\n[routes.r]\nroot = "{folder}/llama"\nmin_age = 0\n'
        f'targets = [{{ format = "orbax", uri = "{folder}/out/{{name}}" }}]\n'
    )
    key = ["openssl", "ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", str(folder / "key.pem")]
    subprocess.run(key, check=True, capture_output=True)
    return folder


@pytest.fixture
def home(folder, request, monkeypatch, capfd):
    """The folder as the working directory, with what the command works on; what it adds is removed again."""
    before = set(folder.iterdir())
    monkeypatch.chdir(folder)
    line = request.node.callspec.params["line"]
    for command in BEFORE.get(line.split()[0], ()) if " " in line else ():
        code, text = typed(command, folder, capfd)
        assert code == 0, text
    if "HASH" in line:
        (folder / "anchor.json").write_text(typed("ledger anchor", folder, capfd)[1])
    yield folder
    for path in set(folder.iterdir()) - before:
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def filled(line):
    """A command of a cure, with values for its placeholders; of a bare verb that needs some, its help."""
    words = shlex.split(LINES.get(line, line))
    return shlex.join([WORDS.get(word, word) if line not in LINES else word for word in words])


@pytest.mark.parametrize("line", [line for line in COMMANDS if line not in ELSEWHERE])
def test_a_command_of_a_cure_works_when_it_is_pasted(line, home, capfd):
    code, text = typed(filled(line), home, capfd)
    if code == 2 and all(re.fullmatch("[a-z-]+", word) for word in line.split()):
        assert "missing argument" in text or "missing option" in text, text
        code, text = typed(f"{line} --help", home, capfd)
    assert code == 0, f"{filled(line)}\n{text}"
    assert text or line == "clean"


def test_the_tables_name_commands_of_cures():
    assert {*LINES, *ELSEWHERE} <= set(COMMANDS)
