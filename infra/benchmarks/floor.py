"""The floor: copy every byte durably and hash it, in reused buffers, with nothing known of checkpoints."""

from __future__ import annotations

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.files import files_of, sync

if TYPE_CHECKING:
    from collections.abc import Callable

_BLOCK = 8 << 20
_SYNC_EVERY = 64 << 20
_THREADS = 2


def copy_and_hash(source: str, target: str) -> Callable[[], None]:
    """Copy a folder."""

    def run() -> None:
        folder = Path(target)
        folder.mkdir()
        with ThreadPoolExecutor(_THREADS) as pool:
            for path in sorted(files_of(Path(source))):
                copy = folder / path.relative_to(source)
                copy.parent.mkdir(parents=True, exist_ok=True)
                _copy_file(pool, path, copy)
        for path in (folder.parent, folder, *(entry for entry in folder.rglob("*") if entry.is_dir())):
            sync(path)

    return run


def _copy_file(pool: ThreadPoolExecutor, source: Path, target: Path) -> None:
    size = source.stat().st_size
    reading = os.open(source, os.O_RDONLY)
    writing = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        if size:
            os.posix_fallocate(writing, 0, size)
        lanes = [pool.submit(_copy_lane, reading, writing, size, lane) for lane in range(_THREADS)]
        for lane in lanes:
            lane.result()
        os.fdatasync(writing)
    finally:
        os.close(reading)
        os.close(writing)


def _copy_lane(reading: int, writing: int, size: int, lane: int) -> list[str]:
    buffer, digests = memoryview(bytearray(_BLOCK)), []
    for start in range(lane * _BLOCK, size, _THREADS * _BLOCK):
        block = buffer[: min(_BLOCK, size - start)]
        _read_whole(reading, block, start)
        digests.append(hashlib.sha256(block).hexdigest())
        os.pwrite(writing, block, start)
        if lane == 0 and start // _SYNC_EVERY != (start + _THREADS * _BLOCK) // _SYNC_EVERY:
            os.fdatasync(writing)
    return digests


def _read_whole(file: int, block: memoryview, start: int) -> None:
    done = 0
    while done < len(block):
        got = os.preadv(file, [block[done:]], start + done)
        if not got:
            raise OSError(f"the file ended at {start + done}")
        done += got
