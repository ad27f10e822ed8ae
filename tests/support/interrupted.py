"""Runs a command of wherry in children of this process, each of which gets SIGINT at one step of it.

    python -m tests.support.interrupted COUNT WORD...

A step is an event of the interpreter's audit: an import, a file that is opened, a connection, an object that is made by
ctypes. Steps are numbered, so a run is repeated exactly, without regard to time; the first child is not interrupted
and counts them. What is printed is JSON: how many steps there are, and for each of COUNT steps that are spread over
the command, its number, the exit code and what the child wrote on standard error. A child that ended before its step,
as a run that finds things already made can, is left out.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tempfile
import threading
from pathlib import Path


def run_child(words: list[str], step: int | None, folder: str) -> tuple[int, str, int]:
    """Run the command in a child; with a step, SIGINT reaches it there.

    Args:
        words: the command without the program; STEP in a word stands for the number of the step.
        step: its number; None for none.
        folder: where the child writes.

    Returns:
        Exit code, or the negative signal that ended it; its standard error; the number of steps, or of that which was
        interrupted.
    """
    files = {name: Path(folder, name) for name in ("out", "err", "steps")}
    for file in files.values():
        file.write_text("")
    child = os.fork()
    if child == 0:
        for number, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(files[name], os.O_WRONLY | os.O_TRUNC), number)
        _run(words, step, files["steps"])
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status), files["err"].read_text(), int(files["steps"].read_text() or 0)


def _run(words: list[str], step: int | None, counted: Path) -> None:
    from wherry.cli import main

    signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
    sys.argv = ["wherry", *(word.replace("STEP", str(step)) for word in words)]
    seen = 0
    note = os.open(counted, os.O_WRONLY | os.O_TRUNC)

    def count(_event: str, _arguments: object) -> None:
        nonlocal seen
        if threading.current_thread() is not threading.main_thread():
            return
        seen += 1
        if seen == step:
            os.pwrite(note, str(seen).encode(), 0)
            signal.raise_signal(signal.SIGINT)
        if step is None:
            os.pwrite(note, str(seen).encode(), 0)

    sys.addaudithook(count)
    main()  # ends the process as the entry point of `wherry` does


def spread(count: int, words: list[str]) -> dict[str, object]:
    """The outcomes of a command that is interrupted at COUNT of its steps."""
    folder = tempfile.mkdtemp()  # no context: a child that ends leaves the frames of its parent, too
    code, text, steps = run_child(words, None, folder)
    chosen = sorted({1 + at * (steps - 1) // max(count - 1, 1) for at in range(count)})
    rows = [row for step in chosen for row in [(step, *run_child(words, step, folder))] if row[3] == step]
    shutil.rmtree(folder)
    return {"steps": steps, "code": code, "text": text, "rows": rows}


if __name__ == "__main__":
    print(json.dumps(spread(int(sys.argv[1]), sys.argv[2:])))
