"""What one verb does with one path: exit code, memory above the start, processor time; each in a fork of its own."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import resource
import select
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

VERBS: dict[str, tuple[str, ...]] = {
    "detect": ("detect",),
    "inspect": ("inspect",),
    "discover": ("discover",),
    "verify": ("verify", "--level", "present"),
    "audit": ("audit",),
}
SECONDS = 120.0
MEMORY = 9 << 30


@dataclass(frozen=True, slots=True)
class Run:
    """The outcome of one run.

    Attributes:
        verb: the verb.
        code: its exit code; negative for a signal, 124 for a timeout.
        megabytes: peak memory above the start.
        seconds: processor time.
        said: its last line of text.
    """

    verb: str
    code: int
    megabytes: float
    seconds: float
    said: str


def runs(verb: str, path: str, *, seconds: float = SECONDS, memory: int = MEMORY) -> Run:
    """Run a verb in a forked child, in which wherry is imported already."""
    import wherry.cli  # noqa: F401

    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        with os.fdopen(writing, "w") as pipe:
            pipe.write(json.dumps(asdict(_child(verb, path, memory))))
            pipe.flush()
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        report = pipe.read() if select.select([pipe], [], [], seconds)[0] else None
    if report is None:
        os.kill(child, 9)
    _pid, status = os.waitpid(child, 0)
    if report:
        return Run(**json.loads(report))
    return Run(verb, 124 if report is None else -os.waitstatus_to_exitcode(status), 0, 0, "no report")


def _child(verb: str, path: str, memory: int) -> Run:
    from wherry.cli import main

    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    said, failed = io.StringIO(), io.StringIO()
    _reset_peak()
    before, began = _memory("VmRSS"), time.process_time()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(failed):
        try:
            code = main([*VERBS[verb], path]) or 0
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else 1
        except BaseException as error:  # noqa: BLE001
            code, said = 99, io.StringIO(f"{type(error).__name__}: {error}")
    spent = time.process_time() - began
    text = failed.getvalue() or said.getvalue()
    lines = [line for line in text.splitlines() if line.strip()]
    return Run(
        verb, int(code), (_memory("VmHWM") - before) / 1024, round(spent, 2), lines[0][:200] if lines else ""
    )


def _reset_peak() -> None:
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def _memory(field: str) -> int:
    """A field of this process's status, in kB."""
    with open("/proc/self/status") as file:
        return int(next(line for line in file if line.startswith(field)).split()[1])


def warm(path: str) -> None:
    """Import what a run needs, so that imports do not count."""
    import wherry

    with contextlib.suppress(Exception):
        wherry.detect(path)


def main(words: Sequence[str] | None = None) -> int:
    """Run verbs over a path, and print a row for each."""
    parser = argparse.ArgumentParser()
    parser.add_argument("path")
    parser.add_argument("verbs", nargs="*")
    given = parser.parse_args(words)
    for verb in given.verbs or VERBS:
        run: Any = runs(verb, given.path)
        print(f"{verb:9} {run.code:4} {run.megabytes:8.0f} MB {run.seconds:7.2f} s  {run.said}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
