"""Controls: programs that do what no verb may do, in the place of the command line; each must be noticed.

An attack that finds nothing says something only if it would have found something, so every run begins with these.
"""

from __future__ import annotations

import os
import pickle
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from infra.attacks.case import OPEN, OUTSIDE, SECRET, TOUCH, Case

if TYPE_CHECKING:
    from infra.attacks.server import Server

_SECONDS = 3.0  # until a control counts as hung
_VERB = "detect"


def _import() -> None:
    sys.path.insert(0, str(Path.cwd()))
    Path("evil_module.py").write_text("x = 1\n")
    __import__("evil_module")


def _outside() -> Path:
    return Path.cwd().parents[1] / "outside"


def _grow() -> None:
    held = bytearray(400 << 20)
    held[:: 1 << 12] = b"x" * len(held[:: 1 << 12])


def _raise() -> None:
    raise RuntimeError("not of wherry")


def _leak() -> None:
    home = Path.cwd().parent
    for name in (OUTSIDE, "night"):
        (home / name).mkdir()
    (home / "night" / "run.pt").write_bytes(b"x" + SECRET)


# Column → the programs that must count in it, by their names.
CONTROLS: dict[str, dict[str, Callable[[], object]]] = {
    "executed": {
        "unpickle": lambda: pickle.loads(b"cposix\ngetpid\n)R."),
        "run": lambda: os.system(TOUCH),
        "evaluate": lambda: eval(OPEN),
        "import": _import,
        "write outside": lambda: _outside().write_text("x"),
        "remove outside": lambda: _outside().unlink(missing_ok=True),
        "connect": lambda: socket.create_connection(("127.0.0.1", 9), timeout=0.1).close(),
        "leak": _leak,
    },
    "outside": {
        "raise": _raise,
        "bug": lambda: sys.exit(70),
        "bug within": lambda: print("warning: not recorded: this is a bug in wherry 1.0: ValueError: x"),
        "crash": os.abort,
        "say too much": lambda: print(f"error: {'x' * 4000}"),
    },
    "terminal": {
        "title": lambda: print("\x1b]0;forged\x07"),
        "forge": lambda: print("a\nb: forged"),
        "markup": lambda: print("\x1b[31mMARKUP\x1b[0m"),
    },
    "hung": {"wait": lambda: time.sleep(60)},
    "over memory": {"grow": _grow},
}


class UnnoticedError(Exception):
    """The attack would not have noticed a fault."""


def require_noticed(server: Server) -> None:
    """Run every control.

    Raises:
        UnnoticedError: one did not count.
    """
    import wherry.cli

    before = wherry.cli.main
    for fault, controls in CONTROLS.items():
        for name, control in controls.items():
            wherry.cli.main = lambda _words, control=control: control() and None  # inherited by the forks
            try:
                case = Case("control/sound", lambda folder: folder)
                found = list(server.examine(case, [_VERB], seconds=_SECONDS if fault == "hung" else 30.0))
            finally:
                wherry.cli.main = before
            if [fault in run.faults for run in found] != [True]:
                raise UnnoticedError(f"{name} is not in the column {fault}: {found}")
