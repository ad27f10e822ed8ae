"""What tests of children run in one: it tells of its surroundings, hangs, takes memory, prints without end.

python -m tests.support.child_programs VERB WORD...          (the functions are loaders of the native level too)
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

_FOR_EVER = 3600
_TAKEN = 1 << 30
_HANGING = "import time; time.sleep(3600)"


def surroundings(*_words) -> None:
    """Where this process stands, what it sees, and where it imports from."""
    import wherry

    print(json.dumps({
        "folder": str(Path.cwd()),
        "mode": Path.cwd().stat().st_mode & 0o777,
        "files": os.listdir(),
        "environment": dict(os.environ),
        "wherry": wherry.__file__,
        "path": sys.path,
        "argv": sys.argv[1:],
        "text": sys.stdin.read(),
    }))  # fmt: skip


def hang(place, *_words) -> None:
    """Start a process that hangs, say which ones there are in the file PLACE, and hang."""
    grandchild = subprocess.Popen([sys.executable, "-c", _HANGING])
    file = Path(place)
    file.with_suffix(".part").write_text(f"{os.getpid()} {grandchild.pid}")
    file.with_suffix(".part").rename(file)
    time.sleep(_FOR_EVER)


def ask(place, manner="polite", *_words) -> None:
    """Hang until SIGTERM asks this process to end, which it does, unless it is rude."""

    def end(_signal, _frame) -> None:
        print("got SIGTERM", flush=True)
        if manner == "polite":
            sys.exit(7)

    signal.signal(signal.SIGTERM, end)
    Path(place).with_suffix(".part").write_text(str(os.getpid()))
    Path(place).with_suffix(".part").rename(place)
    while True:
        time.sleep(_FOR_EVER)


def hang_while_loading(path, _specs) -> None:
    """A loader that hangs."""
    hang(f"{path}.pids")


def allocate(*_words) -> None:
    """Let a process of its own take a gigabyte, and hang."""
    subprocess.Popen([sys.executable, "-c", f"taken = b'x' * {_TAKEN}; {_HANGING}"])
    time.sleep(_FOR_EVER)


def chatter(*_words) -> None:
    """Print without end."""
    while True:
        sys.stdout.write("x" * (1 << 20))


def import_nothing(*names) -> None:
    """Say which modules cannot be imported."""
    missing = []
    for name in names:
        try:
            __import__(name)
        except ImportError:
            missing.append(name)
    print(json.dumps(missing))


def wait_for(verb, *words) -> None:
    """Run a child and wait for it: the parent of tests that interrupt one."""
    from wherry.core import child

    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts jobs with SIGINT ignored
    child.run(
        "tests.support.child_programs", [verb, *words], purpose="it", limits=child.Limits(_FOR_EVER, 16 << 30)
    )


def wait_for_held(moment, folder, *words) -> None:
    """As `wait_for`, but stay at a moment, `start` or `end` of the child, from the file FOLDER/held to FOLDER/go."""
    held, go = Path(folder, "held"), Path(folder, "go")
    module, name = {"start": (subprocess, "Popen"), "end": (os, "killpg")}[moment]
    real = getattr(module, name)

    def hold():
        held.touch()
        while not go.exists():
            time.sleep(0.01)

    def slow(*arguments, **options):
        setattr(module, name, real)
        if moment == "end":
            hold()
        done = real(*arguments, **options)
        if moment == "start":
            hold()
        return done

    setattr(module, name, slow)
    wait_for(*words)


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
