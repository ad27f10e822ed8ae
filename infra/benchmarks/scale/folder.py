"""A folder as a bucket of the double: for checkpoints that are sparse files, of which plans read the metadata."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class FolderFile:
    """A file of a folder.

    Attributes:
        path: of the file.
        nbytes: its size.
        etag: names its state.
    """

    path: str
    nbytes: int
    etag: str

    def pieces(self, start: int, stop: int, most: int) -> Iterator[memoryview]:
        """The bytes of a range; see GeneratedFile."""
        with open(self.path, "rb") as file:  # noqa: PTH123  there are thousands
            file.seek(start)
            while start < stop:
                piece = file.read(min(most, stop - start))
                yield memoryview(piece)
                start += len(piece)


def folder_files(folder: Path, bucket: str) -> dict[str, FolderFile]:
    """Every file below a folder, by `bucket/key`."""
    found: dict[str, FolderFile] = {}
    for above, _folders, names in os.walk(folder):
        for name in names:
            path = os.path.join(above, name)  # noqa: PTH118  there are thousands
            state = os.stat(path)  # noqa: PTH116
            key = os.path.relpath(path, folder).replace(os.sep, "/")
            found[f"{bucket}/{key}"] = FolderFile(
                path, state.st_size, f'"{state.st_mtime_ns:x}-{state.st_size:x}"'
            )
    return found
