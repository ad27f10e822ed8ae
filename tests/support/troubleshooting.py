"""What the tests of docs/troubleshooting.md share: its entries, and running their commands word for word."""

from __future__ import annotations

import ast
import atexit
import re
import shlex
import shutil
from pathlib import Path

import pytest

from tests.support.formats import CORPUS, place
from tests.support.readme import PAGES
from tests.support.warm_command import WarmCommands

WAITING = WarmCommands()
atexit.register(WAITING.close)
SECTION = PAGES["troubleshooting"]
marks = [
    pytest.mark.skipif(not CORPUS.is_dir(), reason="the corpus is not here; set WHERRY_CORPUS to its folder"),
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning"),
]


def entries():
    """Heading → commands."""
    found = {}
    for part in SECTION.split("\n## ")[1:]:
        heading, _, body = part.partition("\n")
        (block,) = re.findall(r"```sh\n(.*?)```", body, re.DOTALL)
        found[heading] = block.splitlines()
    return found


ENTRIES = entries()


def solves(literal):
    """Marks the test of the entry whose heading has this text."""
    (heading,) = [heading for heading in ENTRIES if literal in heading]
    return pytest.mark.parametrize("commands", [ENTRIES[heading]], ids=[literal[:40]])


def tested():
    """Headings of the entries that have a test, in whichever file."""
    files = (Path(__file__).parents[1] / "infra").glob("test_troubleshooting*.py")
    calls = [
        node for file in files for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call)
    ]
    literals = [node.args[0].value for node in calls if ast.unparse(node.func) == "solves"]
    return {heading for heading in ENTRIES if any(literal in heading for literal in literals)}


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def lay(case, target, part=""):
    """A case of the corpus at the path that the page names."""
    source = place(case) / part if part else place(case)
    target.parent.mkdir(parents=True, exist_ok=True)
    (shutil.copytree if source.is_dir() else shutil.copy)(source, target)
    return target


def run(commands, codes=(0,)):
    """Run the page's commands; what they printed."""
    printed = ""
    for command in commands:
        words = shlex.split(command)
        assert words[0] == "wherry"
        done = WAITING(*words[1:])
        assert done.returncode in codes, f"{command}\n{done.stdout}{done.stderr}"
        printed += done.stdout
    return printed


def flat(tree, path=()):
    """Leaves of nested dicts and lists by key path."""
    if isinstance(tree, dict):
        return {
            key: leaf for name, node in tree.items() for key, leaf in flat(node, (*path, str(name))).items()
        }
    if isinstance(tree, list | tuple):
        return {
            key: leaf for at, node in enumerate(tree) for key, leaf in flat(node, (*path, str(at))).items()
        }
    return {path: tree}
