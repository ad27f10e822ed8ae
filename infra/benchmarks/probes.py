"""The rows that need more than one process: a kill and a resume, a plan that reads no tensor, an audit and a verify."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.files import files_of, size_of
from benchmarks.inputs import make_sparse

_WHERRY = (sys.executable, "-m", "wherry.cli")
_HEAD = 8 << 10  # bytes at the start of a file that detection may look at
_POLL = 0.001


def resume(source: str, target: str, to: str) -> Callable[[], float]:
    """Kill a conversion when it has written half of the bytes, run it again: the part that the second run wrote."""
    command = (*_WHERRY, "convert", source, target, "--to", to, "--json")

    def run() -> float:
        _run_to_half(command, size_of(Path(source)) // 2)
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        receipt = json.loads(done.stdout)
        return (receipt["bytes_written"] - receipt["resumed_bytes"]) / receipt["bytes_written"]

    return run


def _run_to_half(command: tuple[str, ...], half: int) -> None:
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        while process.poll() is None:
            if _count(process.pid, "wchar") >= half:
                process.send_signal(signal.SIGKILL)
                break
            time.sleep(_POLL)
        code = process.wait()
    if code != -signal.SIGKILL:
        raise SystemExit(f"the conversion ended by itself, with exit code {code}, before it had written half")


def plan(source: str, target: str) -> Callable[[], float]:
    """Plan the conversion of a checkpoint whose tensors are holes: the seconds of the whole process.

    Bytes read are counted by the kernel, less those of planning a checkpoint of one tensor, which are the
    interpreter's and the libraries'. What remains may be the metadata, a few times, and the heads of the files.
    """

    def run() -> float:
        with TemporaryDirectory(dir=Path(target).parent) as folder:
            make_sparse(Path(folder) / "one", 1, 1)
            _seconds, base = _measure_plan(f"{folder}/one", target)
        seconds, read = _measure_plan(source, target)
        allowed = 3 * _metadata(Path(source)) + _HEAD * len([*files_of(Path(source))])
        print(f"{read - base} bytes read, {allowed} allowed", file=sys.stderr)
        if read - base > allowed:
            raise SystemExit(
                f"planning read {read - base} bytes, which are more than metadata ({allowed} allowed)"
            )
        return seconds

    return run


def audit(source: str, target: str) -> Callable[[], float]:
    """Read every byte of a checkpoint, as an audit and as `verify` does: the audit's time by that of `verify`.

    Both are whole processes over the same bytes, which a first reading has brought into the page cache: what was
    converted into a home of its own. Without the place the audit would read the source too, which the ledger knows.
    """

    def run() -> float:
        os.environ["WHERRY_HOME"] = f"{target}.home"
        _time_command("convert", source, target, "--to", "dcp")
        _time_command("verify", target, "--level", "digest")
        verified = _time_command("verify", target, "--level", "digest")
        return _time_command("audit", str(Path(target).parent), "--level", "digest") / verified

    return run


def _time_command(*words: str) -> float:
    """Seconds of a command of wherry that has to succeed."""
    started = time.monotonic()
    subprocess.run([*_WHERRY, *words, "--json"], check=True, stdout=subprocess.DEVNULL)
    return time.monotonic() - started


def _measure_plan(source: str, target: str) -> tuple[float, int]:
    """Seconds of `wherry plan` and the bytes that it read; the kernel adds those of a reaped child to its parent's."""
    before, started = _count(os.getpid(), "rchar"), time.monotonic()
    command = (*_WHERRY, "plan", source, target, "--to", "orbax", "--json")
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.monotonic() - started, _count(os.getpid(), "rchar") - before


def _metadata(folder: Path) -> int:
    """Bytes of the JSON files and of the headers of safetensors files."""
    total = 0
    for path in files_of(folder):
        if path.suffix == ".safetensors":
            with path.open("rb") as file:
                total += 8 + int.from_bytes(file.read(8), "little")
        else:
            total += path.stat().st_size
    return total


def _count(pid: int, field: str) -> int:
    """Bytes that a process has read or written by system calls; 0 once it is gone."""
    try:
        lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError, PermissionError):  # it is gone, or waits to be reaped
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{field}:")), 0)
