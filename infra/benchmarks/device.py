"""Measures what the device under a folder does: durable writes, reads past the page cache, and both at once.

Large blocks go past the page cache, from several threads, into and out of a preallocated file: no other way to use a
file is faster. What was read back in the third measurement had been written in the same pass, as a conversion does that
reads back what it writes. Each number is the best of several passes, since a bound must not be slower than the machine.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from benchmarks.files import aligned_buffer, open_direct

Act: TypeAlias = "Callable[[int, Lane, int], None]"  # with a file, a thread's memory and an offset

_LANES = (2, 4, 8)  # threads; what a device needs differs
_PASSES = 2
_BLOCK, _SMALL_BLOCK = 8 << 20, 1 << 20


class Lane(NamedTuple):
    """The memory of one thread: what it writes and where it reads."""

    out: memoryview
    back: memoryview


class Disk(NamedTuple):
    """A file on the device, and how it is used.

    Attributes:
        path: the file.
        size: its bytes, a multiple of `block`.
        block: bytes of one request.
    """

    path: Path
    size: int
    block: int


def device_rates(folder: Path, size: int) -> dict[str, Any]:
    """Bytes per second of `write`, `read` and `write and read back`, and whether they went past the page cache."""
    block = _BLOCK if size >= 8 * _BLOCK else _SMALL_BLOCK
    disk = Disk(folder / "device", -(-size // block) * block, block)
    lanes = [_lane(block) for _number in range(max(_LANES))]
    passes: dict[str, list[float]] = {"write": [], "read": [], "write and read back": []}
    for count in _LANES * _PASSES:
        for name, run in (("write and read back", _write_and_read), ("write", _write), ("read", _read)):
            passes[name].append(disk.size / run(disk, lanes[:count]))
    direct = _is_direct(disk)
    disk.path.unlink()
    return {
        "bytes": disk.size,
        "direct": direct,
        "rates": {name: {"best": max(rates), "least": min(rates)} for name, rates in passes.items()},
    }


def _lane(block: int) -> Lane:
    out = aligned_buffer(block)
    out[:] = os.urandom(block)
    return Lane(out, aligned_buffer(block))


def _write(disk: Disk, lanes: list[Lane]) -> float:
    """Seconds to write the file durably."""

    def act(file: int, lane: Lane, start: int) -> None:
        _whole(os.pwrite(file, lane.out, start), disk)

    return _time(disk, lanes, act, new=True)


def _read(disk: Disk, lanes: list[Lane]) -> float:
    """Seconds to read it."""

    def act(file: int, lane: Lane, start: int) -> None:
        _whole(os.preadv(file, [lane.back], start), disk)

    return _time(disk, lanes, act, new=False)


def _write_and_read(disk: Disk, lanes: list[Lane]) -> float:
    """Seconds to write it durably and to read every block of it back meanwhile."""

    def act(file: int, lane: Lane, start: int) -> None:
        _whole(os.pwrite(file, lane.out, start), disk)
        _whole(os.preadv(file, [lane.back], start), disk)

    return _time(disk, lanes, act, new=True)


def _time(disk: Disk, lanes: list[Lane], act: Act, *, new: bool) -> float:
    if new:
        disk.path.unlink(missing_ok=True)
    file, direct = open_direct(disk.path, os.O_RDWR | os.O_CREAT)
    try:
        if not direct:
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        started = time.monotonic()
        if new:
            os.posix_fallocate(file, 0, disk.size)
        with ThreadPoolExecutor(len(lanes)) as pool:
            lists = [range(at * disk.block, disk.size, len(lanes) * disk.block) for at in range(len(lanes))]
            for _done in pool.map(_run_lane, repeat(act), repeat(file), lanes, lists):
                pass
        os.fdatasync(file)
        return time.monotonic() - started
    finally:
        os.close(file)


def _run_lane(act: Act, file: int, lane: Lane, starts: range) -> None:
    for start in starts:
        act(file, lane, start)


def _is_direct(disk: Disk) -> bool:
    file, direct = open_direct(disk.path, os.O_RDWR)
    os.close(file)
    return direct


def _whole(done: int, disk: Disk) -> None:
    if done != disk.block:
        raise OSError(f"{done} of {disk.block} bytes of {disk.path} were written or read")
