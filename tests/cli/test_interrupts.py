"""Ctrl-C at any step of any verb is 130 and one message: no traceback, no report of a bug, nothing that goes on.

A step is an event of the interpreter's audit, such as an import, so that a run is repeated exactly: no test waits for a
moment. `tests/support/interrupted.py` runs the steps.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys

import pytest

import wherry
from tests.support.command import small
from tests.support.readme import ROOT
from tests.support.tiny_models import save_tiny
from wherry.cli.errors import interrupt_error
from wherry.core import interrupts

VERBS = [
    "convert HOME/a.safetensors HOME/STEP --to orbax",
    "verify HOME/dcp --level digest",
    "inspect HOME/dcp --stats",
    "ls",
    "diff HOME/dcp HOME/a.safetensors",
    "rewrite HOME/dcp HOME/STEP --as for-torch",
    "merge HOME/a.safetensors*1 HOME/a.safetensors*0 HOME/STEP --to dcp",
    "audit HOME/dcp",
    "register HOME/dcp --model interrupted",
    "plan HOME/model HOME/new --to maxtext",  # numpy is imported by the C code of another module
    "detect HOME/nothing",
]


@pytest.fixture(scope="module")
def home(tmp_path_factory, own_home):
    folder = tmp_path_factory.mktemp("interrupts")
    small(folder / "a.safetensors")
    save_tiny(folder / "model", "llama")
    wherry.convert(folder / "a.safetensors", folder / "dcp", to="dcp")
    return folder


def interrupted(line, home, count):
    """What `tests/support/interrupted.py` prints of a command."""
    words = shlex.split(line.replace("HOME", str(home)))
    program = [sys.executable, "-m", "tests.support.interrupted", str(count), *words]
    done = subprocess.run(program, capture_output=True, text=True, check=True, cwd=ROOT)
    return json.loads(done.stdout)


def require_clean_ends(line, found):
    bad = []
    for step, code, text, _reached in found["rows"]:
        # Under load, a line may say what the command waits for before the error.
        lines = text.strip().splitlines()
        committed = len(lines) == 1 and lines[0].endswith("interrupt again to end without that")
        if code == 0 and committed:  # from the commit on, the first one is only noted
            continue
        ends_well = lines[-2:-1] == ["error: interrupted before completion"] and text.count("error: ") == 1
        if code != 130 or not ends_well or "Traceback" in text:
            bad.append(f"step {step} of {found['steps']}: {code}\n{text[-500:]}")
    assert not bad, f"{line}\n" + "\n".join(bad)


@pytest.mark.parametrize("line", VERBS)
def test_ctrl_c_at_any_step_is_130_and_one_message(line, home):
    found = interrupted(line, home, 40)
    assert len(found["rows"]) >= 36
    require_clean_ends(line, found)


def test_ctrl_c_at_some_steps_of_a_conversion_is_130_and_one_message(home):
    require_clean_ends(VERBS[0], interrupted(VERBS[0], home, 8))
    assert not list(home.glob(".wherry-*lease*"))


def test_what_is_printed_before_the_errors_are_imported_are_their_words():
    assert f"error: {interrupt_error().for_shell()}\n" == interrupts._TEXT


SWALLOWED = """
import signal, sys
from wherry.cli import main
import wherry.cli.format_list as shown

def swallow(rows, **how):
    try:
        signal.raise_signal(signal.SIGINT)
        for _ in range(100): pass
    except:
        print("swallowed")

shown.show_formats = swallow
sys.argv = ["wherry", "formats"]
signal.signal(signal.SIGINT, signal.{handler})
main()
"""


@pytest.mark.parametrize(("handler", "code"), [("default_int_handler", 130), ("SIG_IGN", 0)])
def test_ctrl_c_that_a_library_swallows_ends_with_130(handler, code):
    """A job in the background ignores it, as its shell has set."""
    program = [sys.executable, "-c", SWALLOWED.replace("{handler}", handler)]
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    assert (done.returncode, "swallowed" in done.stdout, "Traceback" in done.stderr) == (
        code,
        code == 130,
        False,
    )
