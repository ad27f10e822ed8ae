"""Several fork servers side by side, each with its part of the cases and its own loaders of the native level."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from attacks.case import Run
from attacks.server import UnmadeError

if TYPE_CHECKING:
    from attacks.case import Case
    from attacks.server import Server

_PAUSE = 0.2


def examine_cases(
    server: Server, cases: Sequence[Case], names: Sequence[str], jobs: int, scratch: Path
) -> Iterator[Run]:
    """Run verbs over cases in so many processes; rows as they come.

    Raises:
        RuntimeError: a process ended before its cases did.
    """
    files = [Path(tempfile.mkstemp(dir=scratch, suffix=".rows")[1]) for _ in range(jobs)]
    children = [_start_process(server, cases[number::jobs], names, file) for number, file in enumerate(files)]
    try:
        yield from _follow_files(files, children)
    finally:
        for child in children:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.killpg(child, signal.SIGKILL)
                os.waitpid(child, 0)


def _start_process(server: Server, cases: Sequence[Case], names: Sequence[str], file: Path) -> int:
    child = os.fork()
    if child:
        return child
    os.setsid()
    try:
        with _loading(server, names) as ready, file.open("w") as rows:
            for case in cases:
                with contextlib.suppress(UnmadeError):  # its trace is printed, and the table lacks its runs
                    for run in ready.examine(case, names):
                        rows.write(json.dumps(run.to_json()) + "\n")
                rows.flush()
    except BaseException:  # noqa: BLE001
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


@contextlib.contextmanager
def _loading(server: Server, names: Sequence[str]) -> Iterator[Server]:
    """The server, with loaders if the names include the native level."""
    if "verify native" not in names:
        yield server
        return
    from attacks.loaders import WatchedLoaders

    loaders = WatchedLoaders(tempfile.mkdtemp(dir=server.scratch))
    for kind in ("jax", "torch"):
        loaders[kind]  # started before the first fork, which inherits it
    try:
        yield replace(server, native=loaders.run)
    finally:
        for one in loaders.values():
            one.close()


def _follow_files(files: Sequence[Path], children: Sequence[int]) -> Iterator[Run]:
    """The rows of all files, until all processes have ended."""
    left = set(children)
    with contextlib.ExitStack() as stack:
        readers = [stack.enter_context(file.open()) for file in files]
        held = [""] * len(files)
        while True:
            ended = not left
            for number, reader in enumerate(readers):
                *rows, held[number] = (held[number] + reader.read()).split("\n")
                for row in map(json.loads, rows):
                    yield Run(**{**row, "executed": tuple(row["executed"])})
            if ended:
                return
            left -= {child for child in left if _has_ended(child)}
            time.sleep(_PAUSE)


def _has_ended(child: int) -> bool:
    found, status = os.waitpid(child, os.WNOHANG)
    if found and os.waitstatus_to_exitcode(status):
        print(f"a process of the attack ended with {os.waitstatus_to_exitcode(status)}", file=sys.stderr)
        raise RuntimeError("a process of the attack ended before its cases did")
    return bool(found)
