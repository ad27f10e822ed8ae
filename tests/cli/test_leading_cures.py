"""A cure leads on: pasted as it is printed, it ends the error, or leads to another one; and it is understood.

A table of commands that fail. Of each cure, the command in backquotes is run; options in backquotes, and the first
suggested name, are put into the failing command.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess

import pytest

import wherry
from tests.support.command import small, typed
from tests.support.tiny_models import save_tiny
from wherry import cures

# Command → what its cure is put into it for: the word that the suggestion replaces, or nothing for options.
FAILING = {
    "formats pytroch": "pytroch",
    "resolve small": "small",
    "init": "",
    "convert HOME/llama HOME/new --to maxtxt": "maxtxt",
    "convert HOME/llama HOME/new --to maxtext --family lama": "lama",
    "convert HOME/llama HOME/new --to maxtext --set rop=half": "rop",
    "convert HOME/llama HOME/new --to maxtext --dtype bfloat61": "bfloat61",
    "convert HOME/odd HOME/new --to maxtext": "",
    "convert HOME/nested HOME/new.safetensors --to safetensors": "",
    "sign HOME/nested --key HOME/public.pem": "",
    "verify-signature HOME/nested --key HOME/key.pem": "",
    "promote models:/m --policy HOME/nope.toml": "",
}
UNTRIED = (
    "sign HOME/nested --key HOME/public.pem",
    "promote models:/m --policy HOME/nope.toml",
)  # words, no command


@pytest.fixture(scope="module")
def home(tmp_path_factory, own_home):
    folder = tmp_path_factory.mktemp("leading")
    small(folder / "small.safetensors")
    save_tiny(folder / "llama", "llama")
    save_tiny(folder / "odd", "gpt-oss", num_hidden_layers=3)
    wherry.convert(folder / "llama", folder / "nested", to="maxtext")
    for command in (
        "openssl ecparam -name prime256v1 -genkey -noout -out key.pem",
        "openssl ec -in key.pem -pubout -out public.pem",
    ):
        subprocess.run(shlex.split(command), check=True, capture_output=True, cwd=folder)
    return folder


def pasted(line, word, cure):
    """The commands that a user runs who pastes a cure: one for each command, or the failing one with what it states."""
    commands = re.findall(r"`((?:wherry|openssl) [^`]+)`", cure)
    if commands:
        return [command.replace("URI", "HOME").replace("FOLDER", "HOME") for command in commands]
    options = re.findall(r"`(--[^`]+)`", cure)
    if options:
        return [f"wherry {line} {option}" for option in options]
    meant = re.search(r"did you mean (\S+?)(?: or \S+)?\?", cure)
    return [f"wherry {line.replace(word, meant[1])}"] if meant and word else []


def require_same_in_python(cure):
    """Nothing of an option is lost on the way to keyword arguments."""
    for option in re.findall(r"`(--[a-z][^`]*)`", cure):
        translated = cures.in_python(f"`{option}`")
        values = [word.partition("=")[2] or word for word in shlex.split(option) if not word.startswith("--")]
        assert all(value in translated for value in values), translated
        assert "…" not in translated


@pytest.mark.parametrize(("line", "word"), FAILING.items())
def test_a_pasted_cure_leads_on(line, word, home, monkeypatch, capfd, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdin", open("/dev/null"))  # noqa: SIM115, PTH123  closed with the process
    code, text = typed(line, home, capfd)
    assert code, text
    error, _, cure = text.rpartition("cure: ")
    require_same_in_python(cure)
    commands = pasted(line, word, cure)
    assert commands or line in UNTRIED, cure
    for command in commands:
        if command.startswith("openssl"):
            subprocess.run(shlex.split(command.replace("HOME", str(home))), check=True, capture_output=True)
            continue
        code, after = typed(command.removeprefix("wherry "), home, capfd)
        assert error.splitlines()[-1] not in after, "the same error"
        assert "no such option" not in after, "the cure is not understood"
        shutil.rmtree(home / "new", ignore_errors=True)
