"""Runs one process tree and says what it cost: wall time, CPU time, peak memory.

Memory is sampled from /proc every 10 ms over the process and its descendants. The peak of one process between
two samples is not missed, since the kernel keeps its high-water mark; anonymous memory has no such mark. The
measuring process imports nothing large, so that it disturbs neither the page cache nor the two cores.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from resource import struct_rusage

_INTERVAL = 0.01
_KIB = 1024
_ERROR = re.compile(r"(error|[\w.]*(Error|Exception|Exit)): ")
_FOLDERS = re.compile(r"(?<![\w.])/(?:[^\s/'\"]+/)+")
_LONGEST = 240


class Cost(NamedTuple):
    """What one run cost.

    Attributes:
        wall: seconds from the start of the process to its end; its output is durable then.
        work: seconds of these that the process itself says it spent after its imports; `wall` where it says nothing.
        cpu: user and system seconds of the process tree.
        peak: bytes of resident memory of the tree at its highest, file pages that it maps included.
        anonymous: bytes of these that no file backs, at their highest.
        value: the number that the process itself measured, where that is what its row is about.
        written: bytes of its output.
    """

    wall: float
    work: float
    cpu: float
    peak: int
    anonymous: int
    value: float | None = None
    written: int = 0


class RowFailedError(RuntimeError):
    """The process of a row did not end well; the message is what it said."""

    @property
    def reason(self) -> str:
        """One line for a table: the error named last, or the last words; no folders of this machine."""
        lines = [line.strip() for line in str(self).splitlines() if line.strip()]
        named = [line for line in lines if _ERROR.match(line)]
        return _FOLDERS.sub("", (named or lines)[-1])[:_LONGEST]


def measure(
    command: Sequence[str], environment: Mapping[str, str], cwd: Path, *, speaks: bool = True
) -> Cost:
    """Run a command and measure it.

    Args:
        command: the process.
        environment: its variables.
        cwd: its folder.
        speaks: whether it prints a JSON object with `seconds` last, and perhaps `value`.

    Raises:
        RowFailedError: it failed, or printed no such line.
    """
    with TemporaryFile() as said, TemporaryFile() as complaint:
        started = time.monotonic()
        process = subprocess.Popen(command, stdout=said, stderr=complaint, env=dict(environment), cwd=cwd)
        peak, anonymous, status, usage = _watch(process.pid)
        wall = time.monotonic() - started
        process.returncode = os.waitstatus_to_exitcode(status)
        texts = [_text(said), _text(complaint)]
    if process.returncode:
        raise RowFailedError("\n".join([f"exit code {process.returncode} of {' '.join(command)}", *texts]))
    work, value = _parse_report(texts[0], command) if speaks else (wall, None)
    return Cost(wall, work, usage.ru_utime + usage.ru_stime, peak, anonymous, value)


def _watch(pid: int) -> tuple[int, int, int, struct_rusage]:
    """Sample a process until it ends: peak, anonymous peak, wait status, resource usage of its tree."""
    peak = anonymous = 0
    while True:
        reaped, status, usage = os.wait4(pid, os.WNOHANG)
        if reaped:
            return peak, anonymous, status, usage
        seen = _memory(pid)
        peak, anonymous = max(peak, seen[0]), max(anonymous, seen[1])
        time.sleep(_INTERVAL)


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def _parse_report(said: str, command: Sequence[str]) -> tuple[float, float | None]:
    start = max((found.start() for found in re.finditer(r"^\{", said, re.MULTILINE)), default=0)
    try:
        found = json.loads(said[start:])
        return float(found["seconds"]), found.get("value")
    except (ValueError, KeyError, TypeError) as error:
        raise RowFailedError(f"no seconds in what {' '.join(command)} printed: {said[-500:]!r}") from error


def _memory(pid: int) -> tuple[int, int]:
    """Resident and anonymous bytes of a process tree now; the root counts with its high-water mark."""
    resident = anonymous = highest = 0
    waiting = [pid]
    while waiting:
        process = waiting.pop()
        try:
            fields = _status(process)
            waiting += _children(process)
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended between two looks
        resident += fields.get("VmRSS", 0)
        anonymous += fields.get("RssAnon", 0)
        highest = max(highest, fields.get("VmHWM", 0))
    return max(resident, highest), anonymous


def _status(pid: int) -> dict[str, int]:
    wanted = ("VmRSS", "VmHWM", "RssAnon")
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    pairs = (line.split(":", 1) for line in lines if line.startswith(wanted))
    return {name: int(value.split()[0]) * _KIB for name, value in pairs}


def _children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]
