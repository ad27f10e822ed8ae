"""Controls: programs that do what no verb may do, in the place of the command line; each must be noticed.

An attack that finds nothing says something only if it would have found something, so every run begins with these.
"""

from __future__ import annotations

import os
import pickle
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from attacks.case import MARKER, OUTSIDE, SECRET, Case

if TYPE_CHECKING:
    from attacks.server import Server

_SECONDS = 3.0  # until a control counts as hung
_VERB = "detect"


def _unpickle(_words: list[str]) -> None:
    pickle.loads(b"cposix\ngetpid\n)R.")


def _run(_words: list[str]) -> None:
    os.system(f"touch {MARKER}")


def _evaluate(_words: list[str]) -> None:
    eval(f"open({MARKER!r}, 'w')")


def _import(_words: list[str]) -> None:
    sys.path.insert(0, str(Path.cwd()))
    Path("evil_module.py").write_text("x = 1\n")
    __import__("evil_module")


def _write_outside(_words: list[str]) -> None:
    (Path.cwd().parents[1] / "outside").write_text("x")


def _remove_outside(_words: list[str]) -> None:
    (Path.cwd().parents[1] / "outside").unlink(missing_ok=True)


def _connect(_words: list[str]) -> None:
    import socket

    socket.create_connection(("127.0.0.1", 9), timeout=0.1).close()


def _wait(_words: list[str]) -> None:
    time.sleep(60)


def _grow(_words: list[str]) -> None:
    held = bytearray(400 << 20)
    held[:: 1 << 12] = b"x" * len(held[:: 1 << 12])


def _raise(_words: list[str]) -> None:
    raise RuntimeError("not of wherry")


def _bug(_words: list[str]) -> None:
    sys.exit(70)


def _bug_within(_words: list[str]) -> None:
    print("warning: not recorded: this is a bug in wherry 1.0: ValueError: x")


def _crash(_words: list[str]) -> None:
    os.abort()


def _title(_words: list[str]) -> None:
    print("\x1b]0;forged\x07")


def _forge(_words: list[str]) -> None:
    print("a\nb: forged")


def _say_too_much(_words: list[str]) -> None:
    print(f"error: {'x' * 4000}")


def _leak(_words: list[str]) -> None:
    home = Path.cwd().parent
    for name in (OUTSIDE, "night"):
        (home / name).mkdir()
    (home / "night" / "run.pt").write_bytes(b"x" + SECRET)


def _obey_markup(_words: list[str]) -> None:
    print("\x1b[31mMARKUP\x1b[0m")


# Program → the column in which it must count.
CONTROLS: dict[Callable[[list[str]], None], str] = {
    **dict.fromkeys((_unpickle, _run, _evaluate, _import), "executed"),
    **dict.fromkeys((_write_outside, _remove_outside, _connect, _leak), "executed"),
    **dict.fromkeys((_raise, _bug, _bug_within, _crash, _say_too_much), "outside"),
    **dict.fromkeys((_title, _forge, _obey_markup), "terminal"),
    _wait: "hung", _grow: "over memory",
}  # fmt: skip


class UnnoticedError(Exception):
    """The attack would not have noticed a fault."""


def require_noticed(server: Server) -> None:
    """Run every control.

    Raises:
        UnnoticedError: one did not count.
    """
    import wherry.cli

    before = wherry.cli.main
    for control, fault in CONTROLS.items():
        wherry.cli.main = control  # type: ignore[assignment]  inherited by the forks
        try:
            case = Case("control/sound", lambda folder: folder)
            found = list(server.examine(case, [_VERB], seconds=_SECONDS if fault == "hung" else 30.0))
        finally:
            wherry.cli.main = before
        if [fault in run.faults for run in found] != [True]:
            raise UnnoticedError(f"{control.__name__} is not in the column {fault}: {found}")
