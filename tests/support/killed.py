"""A program: a conversion that kills itself at the N-th call of any function that changes the file system.

`python -m tests.support.killed SOURCE TARGET TO N` prints how many calls there were; with N = 0 it lives.
"""

from __future__ import annotations

import os
import signal
import sys

import wherry.core.threads
import wherry.mover.output
from wherry.converter.convert import convert
from wherry.target import staging as stagings

WATCHED = (
    (os, ("fsync", "fdatasync", "pwrite", "mkdir", "rename", "link", "unlink")),
    (stagings, ("rename_without_replacing", "sync_folder")),
)
calls = 0


def deadly(function, fatal_call):
    def wrapper(*arguments, **options):
        global calls  # noqa: PLW0603
        calls += 1
        if calls == fatal_call:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments, **options)

    return wrapper


def main(source, target, to, fatal_call) -> None:
    for module, names in WATCHED:
        for name in names:
            setattr(module, name, deadly(getattr(module, name), int(fatal_call)))
    wherry.core.threads.worker_count = lambda: 1  # one thread and no clock: every run makes the same calls
    wherry.mover.output._GROUP_SECONDS, wherry.mover.output._GROUP_BYTES = 1e9, 3 << 20
    convert(source, target, to=to, lineage=False)
    print(calls)


if __name__ == "__main__":
    main(*sys.argv[1:])
