"""What the rows that are not wherry do, each in a process of its own: `python -m benchmarks.work ROW SOURCE TARGET`.

They are written as a user of these libraries would write them, with one addition: the output is made durable
within the measured time, since wherry's is. The last line printed is `{"seconds": …}`, counted after the imports.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_BLOCK = 8 << 20
_SYNC_EVERY = 64 << 20
_THREADS = 2


def copy_and_hash(source: Path, target: Path) -> Callable[[], None]:
    """The floor: copy every byte durably and hash it, in reused buffers, with nothing known of checkpoints."""

    def run() -> None:
        target.mkdir()
        with ThreadPoolExecutor(_THREADS) as pool:
            for path in sorted(entry for entry in source.rglob("*") if entry.is_file()):
                copy = target / path.relative_to(source)
                copy.parent.mkdir(parents=True, exist_ok=True)
                _copy_file(pool, path, copy)
        _sync_folders(target)

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


def naive_to_orbax(source: Path, target: Path) -> Callable[[], None]:
    """Load every shard with safetensors, save the whole with Orbax."""
    import orbax.checkpoint as ocp
    from safetensors.flax import load_file

    def run() -> None:
        tree = {}
        for shard in sorted(source.glob("*.safetensors")):
            tree |= load_file(shard)
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(target.resolve(), tree)
            checkpointer.wait_until_finished()
        _sync_tree(target)

    return run


def naive_to_safetensors(source: Path, target: Path) -> Callable[[], None]:
    """Restore the whole with Orbax, save it with safetensors."""
    import orbax.checkpoint as ocp
    from safetensors.flax import save_file

    def run() -> None:
        with ocp.StandardCheckpointer() as checkpointer:
            tree = checkpointer.restore(source.resolve())
        save_file(tree, target)
        _sync(target)

    return run


def _sync_tree(folder: Path) -> None:
    for path in _files(folder):
        _sync(path)
    _sync_folders(folder)


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file())


def _sync_folders(folder: Path) -> None:
    for path in (folder.parent, folder, *(entry for entry in folder.rglob("*") if entry.is_dir())):
        _sync(path)


def _sync(path: Path) -> None:
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


ROWS = {
    "copy-and-hash": copy_and_hash,
    "naive-to-orbax": naive_to_orbax,
    "naive-to-safetensors": naive_to_safetensors,
}


def main() -> None:
    name, source, target = sys.argv[1:]
    run = ROWS[name](Path(source), Path(target))
    started = time.monotonic()
    run()
    print(json.dumps({"seconds": time.monotonic() - started}))


if __name__ == "__main__":
    main()
