"""Scratch: local files that hold bytes on their way, opened once for many parts."""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING

from wherry.errors import storage_errors
from wherry.storage.open_file import opened_regular

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from pathlib import Path


@contextmanager
def writing(path: Path) -> Generator[Callable[[memoryview, int], None]]:
    """What writes bytes at an offset of a file, which is made, for its user alone, where it is not there.

    Raises:
        StorageError: the storage failed.
    """
    flags = os.O_WRONLY | os.O_CREAT
    with storage_errors(str(path)), opened_regular(str(path), flags=flags, mode=0o600) as file:

        def write(data: memoryview, offset: int) -> None:
            while data:
                done = os.pwrite(file, data, offset)
                data, offset = data[done:], offset + done

        yield write


@contextmanager
def reading(path: Path) -> Generator[Callable[[int, memoryview], None]]:
    """What fills a buffer from an offset of a file of ours, which has as many bytes as are asked for.

    Raises:
        StorageError: the storage failed.
    """
    with storage_errors(str(path)), opened_regular(str(path)) as file:

        def read(offset: int, buffer: memoryview) -> None:
            while buffer:
                count = os.preadv(file, [buffer], offset)
                if not count:
                    raise AssertionError(f"{path} ends at {offset}")
                offset, buffer = offset + count, buffer[count:]

        yield read
