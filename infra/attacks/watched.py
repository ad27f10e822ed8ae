"""Imported last into a process that waits for loads of the native level: from then on, its forks are watched.

What a fork runs or connects to is recorded in a file of its folder for temporary files, where the server looks for it.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from infra.attacks.watch import MARKER, REPORT

_ENDS = (
    "os.system", "os.exec", "os.posix_spawn", "subprocess.Popen", "socket.connect", "pickle.find_class",
    "pty.spawn",
)  # fmt: skip
_parent = os.getpid()


def _hook(event: str, values: tuple[Any, ...]) -> None:
    if os.getpid() == _parent or not (
        event in _ENDS or (event in ("open", "exec") and MARKER in repr(values)[:4000])
    ):
        return
    if REPORT not in repr(values):
        with open(os.path.join(os.environ.get("TMPDIR", "/tmp"), REPORT), "a") as file:
            file.write(f"{event} {values!r}\n"[:500])


sys.addaudithook(_hook)
