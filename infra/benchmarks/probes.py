"""The rows that measure one number of ours: a resume, a plan that reads no tensor, many tensors, an audit, a kernel.

The kernel has 1 GB and its axes in every order, and is hashed; it is compared with a plain copy that is hashed. Both go
from one array in memory to another whose pages were touched before, in one thread, and hash the result leaf by leaf:
the row is about transposition alone, and no disk hides it.
"""

from __future__ import annotations

import hashlib
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import permutations
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.files import files_of, size_of
from benchmarks.inputs import make_many, make_sparse

_WHERRY = (sys.executable, "-m", "wherry.cli")
_PLAIN = ("--verify", "none", "--family", "none", "--no-lineage")
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


def many(source: str, target: str) -> Callable[[], float]:
    """Convert small tensors to DCP: microseconds of processors for each, beyond those of a checkpoint of one.

    A million of them is more than any model of today has, so the limits of metadata are raised, as the error advises.
    """

    def run() -> float:
        with TemporaryDirectory(dir=Path(target).parent) as folder:
            make_many(Path(folder) / "one", 1)
            least = _processor_seconds("convert", f"{folder}/one", f"{folder}/out", "--to", "dcp", *_PLAIN)
        os.environ["WHERRY_LIMITS"] = "16"
        seconds = _processor_seconds("convert", source, target, "--to", "dcp", *_PLAIN)
        return (seconds - least) * 1e6 / _count_tensors(Path(source))

    return run


def _count_tensors(folder: Path) -> int:
    count = 0
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        count += len(header.keys() - {"__metadata__"})
    return count


def _processor_seconds(*words: str) -> float:
    """Processor seconds of a command of wherry that has to succeed, and of its children."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    _time_command(*words)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


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


_LEAF = 4 << 20
_ITEM = 2  # bytes of a bfloat16
_NOMINAL = 2_200_000_000
# A scanned attention kernel: embed, layer, head, width of a head. 1.07 GB.
_SHAPE = (8192, 16, 32, 128)


def kernel(size: str) -> Callable[[], float]:
    """The slowest order's time, as a multiple of the copy's; `size` other than 2.2 GB shrinks the kernel alike."""
    import numpy as np

    from wherry.layout.copies import permute

    shape = (max(_SHAPE[0] * int(size) // _NOMINAL, 1), *_SHAPE[1:])
    count = int(np.prod(shape))
    source = memoryview(np.random.default_rng(1).bytes(count * _ITEM))
    target = memoryview(bytearray(b"\1") * (count * _ITEM))
    array = np.frombuffer(source, "u2").reshape(shape)

    def copy() -> None:
        target[:] = source

    def run() -> float:
        floor = _time(copy, target)
        slowest = 0.0
        for order in permutations(range(len(shape))):
            view = array.transpose(order)
            out = np.frombuffer(target, "u2").reshape(view.shape)
            taken = _time(lambda view=view, out=out: permute(view, out), target)
            print(f"{order}: {taken:.2f} s, {taken / floor:.2f} × {floor:.2f} s", file=sys.stderr)
            slowest = max(slowest, taken)
        return slowest / floor

    return run


def _time(fill: Callable[[], None], target: memoryview) -> float:
    started = time.monotonic()
    fill()
    for start in range(0, len(target), _LEAF):
        hashlib.sha256(target[start : start + _LEAF]).digest()
    return time.monotonic() - started
