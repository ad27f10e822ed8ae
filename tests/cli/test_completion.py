"""Completion in real shells: the script that `wherry completion` prints, and what a shell then offers."""

from __future__ import annotations

import os
import pty
import select
import shutil
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

BASH = """
eval "$(wherry completion bash)"
COMP_WORDS=({words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
{partial}
_wherry_completion wherry
printf '%s\\n' "${{COMPREPLY[@]}}"
complete -p wherry
"""


def offered(words, folder, *, new=False):
    """What bash offers for the last word; for a new word if `new`."""
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("bash is not installed")
    partial = "COMP_WORDS+=(''); COMP_CWORD=$((COMP_CWORD + 1))" if new else ""
    done = subprocess.run(
        [bash, "--norc", "-c", BASH.format(words=words, partial=partial)], cwd=folder, env=environment(),
        capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    *found, registration = done.stdout.splitlines()
    assert "-F _wherry_completion" in registration
    return found


@pytest.mark.parametrize(
    ("words", "expected", "absent"),
    [("wherry conv", {"convert"}, {"verify"}),
     ("wherry lineage w", {"why"}, {"show"}),
     ("wherry convert a b --to h", {"huggingface", "hf"}, {"orbax"}),
     ("wherry convert a b --to eq", set(), {"equinox"}),
     ("wherry detect a --format eq", {"equinox"}, set()),
     ("wherry plan a b --to maxtext --family gem", {"gemma", "gemma2", "gemma3"}, {"llama"}),
     ("wherry formats orb", {"orbax"}, {"dcp"}),
     ("wherry layouts lla", {"llama"}, {"gemma"}),
     ("wherry completion f", {"fish"}, {"bash"})],
)  # fmt: skip
def test_bash_completes_commands_options_formats_aliases_and_families(words, expected, absent, tmp_path):
    found = set(offered(words, tmp_path))
    assert expected <= found
    assert not absent & found


def test_bash_completes_options(tmp_path):
    assert {"--to", "--family", "--memory"} <= set(offered("wherry convert --", tmp_path))


@pytest.mark.parametrize("words", ["verify", "convert", "diff a", "lineage why", "plan one"])
def test_bash_completes_files_as_someone_types(words, tmp_path):
    (tmp_path / "checkpoint_1000").mkdir()
    start_of_line = "\x01"
    with typing(tmp_path) as (send, seen):
        send('eval "$(wherry completion bash)"; echo re""ady\n')
        seen("ready")
        send(f"wherry {words} check\t")
        seen("checkpoint_1000")
        send(f"{start_of_line}echo did: \n")
        assert f"did: wherry {words} checkpoint_1000" in seen(f"did: wherry {words} checkpoint_1000")


@contextmanager
def typing(folder):
    """An interactive bash on a terminal of its own: what sends it keys, and what waits until it shows a text."""
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("bash is not installed")
    keys, terminal = pty.openpty()
    process = subprocess.Popen(
        [bash, "--norc", "--noprofile", "-i"], cwd=folder, env=environment() | {"TERM": "dumb", "PS1": "$ "},
        stdin=terminal, stdout=terminal, stderr=terminal, start_new_session=True,
    )  # fmt: skip
    os.close(terminal)
    shown = b""

    def seen(text):
        nonlocal shown
        deadline = time.monotonic() + 120
        while text.encode() not in shown:
            ready, _, _ = select.select([keys], [], [], max(deadline - time.monotonic(), 0))
            assert ready, f"{text!r} was not shown: {shown!r}"
            shown += os.read(keys, 4096)
        found, shown = shown.decode(), b""
        return found

    try:
        yield lambda text: os.write(keys, text.encode()), seen
    finally:
        process.kill()
        process.wait()
        os.close(keys)


def environment():
    """That of this process, with the `wherry` of this interpreter on the path."""
    return {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_the_scripts_of_other_shells_are_valid(shell, tmp_path):
    program = shutil.which(shell)
    if program is None:
        pytest.skip(f"{shell} is not installed")
    script = subprocess.run(
        [sys.executable, "-m", "wherry", "completion", shell], capture_output=True, text=True, check=True
    )
    assert "wherry" in script.stdout
    (tmp_path / "script").write_text(script.stdout)
    subprocess.run([program, "-n", str(tmp_path / "script")], check=True, timeout=60)
