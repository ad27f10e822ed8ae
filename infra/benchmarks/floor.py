"""The floor: copy every byte durably and hash it, as fast as the machine allows, with nothing known of checkpoints.

It does no more than every conversion has to do, and shares no code with wherry: it reads the source through the page
cache into reused memory of huge pages, hashes each block with BLAKE3 while the block is in the processor's cache, and
writes it past the page cache into a preallocated file. More threads run than there are cores, so that the device has
work while blocks are hashed.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from blake3 import blake3

from benchmarks.files import PAGE, aligned_buffer, files_of, open_direct, sync

BLOCK = 8 << 20
_WAITING = 4  # threads that wait for the device, in addition to those that hash


class Copy(NamedTuple):
    """One file that is being copied.

    Attributes:
        reading, writing: descriptors of the source and of the target.
        size: bytes of the source.
        digests: BLAKE3 of each block, in order.
    """

    reading: int
    writing: int
    size: int
    digests: list[bytes]


def copy_and_hash(source: str, target: str) -> Callable[[], None]:
    """Copy a folder durably."""

    def run() -> None:
        copy_folder(Path(source), Path(target))

    return run


def copy_folder(source: Path, target: Path) -> dict[str, str]:
    """Copy a folder durably: name of each file → BLAKE3 over the BLAKE3 digests of its blocks."""
    target.mkdir()
    with ExitStack() as stack:
        copies = {
            path.relative_to(source): _start(path, target / path.relative_to(source), stack)
            for path in sorted(files_of(source))
        }
        _run_lanes([*copies.values()])
        for copy in copies.values():
            os.ftruncate(copy.writing, copy.size)
            os.fdatasync(copy.writing)
    for folder in (target.parent, target, *(entry for entry in target.rglob("*") if entry.is_dir())):
        sync(folder)
    return {str(name): blake3(b"".join(copy.digests)).hexdigest() for name, copy in copies.items()}


def _start(source: Path, target: Path, stack: ExitStack) -> Copy:
    """Open a file and preallocate its copy, in whole pages; what is too much is cut off at the end."""
    target.parent.mkdir(parents=True, exist_ok=True)
    reading = os.open(source, os.O_RDONLY)
    stack.callback(os.close, reading)
    writing, _direct = open_direct(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    stack.callback(os.close, writing)
    size = os.fstat(reading).st_size
    if size:
        os.posix_fallocate(writing, 0, _in_pages(size))
    return Copy(reading, writing, size, [b""] * -(-size // BLOCK))


def _run_lanes(copies: list[Copy]) -> None:
    """Copy every block of every file, as many at a time as there are lanes."""
    cores = len(os.sched_getaffinity(0))
    blocks = ((copy, start) for copy in copies for start in range(0, copy.size, BLOCK))
    taking, hashing = threading.Lock(), threading.Semaphore(cores)

    def lane(_number: int) -> None:
        buffer = aligned_buffer(BLOCK)
        while found := _next(blocks, taking):
            _copy_block(*found, buffer, hashing)

    with ThreadPoolExecutor(cores + _WAITING) as pool:
        for _done in pool.map(lane, range(cores + _WAITING)):
            pass


def _next(blocks: Iterator[tuple[Copy, int]], taking: threading.Lock) -> tuple[Copy, int] | None:
    with taking:
        return next(blocks, None)


def _copy_block(copy: Copy, start: int, buffer: memoryview, hashing: threading.Semaphore) -> None:
    block = buffer[: min(BLOCK, copy.size - start)]
    with hashing:
        _read(copy.reading, block, start)
        copy.digests[start // BLOCK] = blake3(block).digest()
    _write(copy.writing, buffer[: _in_pages(len(block))], start)


def _read(file: int, block: memoryview, start: int) -> None:
    done = 0
    while done < len(block):
        got = os.preadv(file, [block[done:]], start + done)
        if not got:
            raise OSError(f"the file ended at {start + done}")
        done += got


def _write(file: int, block: memoryview, start: int) -> None:
    if (done := os.pwrite(file, block, start)) != len(block):
        raise OSError(f"{done} of {len(block)} bytes were written at {start}")


def _in_pages(size: int) -> int:
    return -(-size // PAGE) * PAGE
