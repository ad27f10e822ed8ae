"""Makes files durable, copies and reads them: what several rows need."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_BLOCK = 8 << 20


def files_of(folder: Path) -> Iterator[Path]:
    """Every file below a folder."""
    return (path for path in folder.rglob("*") if path.is_file())


def size_of(folder: Path) -> int:
    """Bytes of the files below a folder, holes included."""
    return sum(path.stat().st_size for path in files_of(folder))


def read_all(folder: Path) -> None:
    """Read every file once, so that it lies in the page cache."""
    buffer = bytearray(_BLOCK)
    for path in files_of(folder):
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def make_durable(path: Path) -> None:
    """Sync a file, or a folder with everything in it, and the folder above."""
    below = [*path.rglob("*")] if path.is_dir() else []
    for one in (*below, path, path.parent):
        sync(one)


def sync(path: Path) -> None:
    """Sync one file or folder."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
